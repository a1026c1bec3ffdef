"""Promises of async_driver.py that need no daemon; with daemons: test_aio.py."""

import asyncio
import threading
from typing import Any

import pytest

from kvstore.client.async_driver import AsyncDriver
from kvstore.client.config import ClientSettings
from kvstore.client.effects import Aside, Later, Operation, Sleep, Take, Together, Work
from kvstore.client.operations import Operations
from kvstore.protocol.errors import Unavailable
from kvstore.rpc.address import parse_address
from kvstore.rpc.deadline import Deadline

NOBODY = "unix:/no/such/master.sock"


@pytest.fixture
def operations() -> Operations:
    return Operations(ClientSettings(master=NOBODY))


def work(result: Any) -> Operation[Any]:
    return (yield Work(lambda: result, 1))


def test_an_operation_has_the_results_of_its_effects_and_what_they_raise(operations: Operations) -> None:
    later = threading.Event()

    def operation() -> Operation[list[Any]]:
        yield Sleep(0.0)
        yield Later(later.set)
        both = yield Together([work(2), work(3)])
        try:
            yield Take(parse_address(NOBODY), Deadline(10))
        except Unavailable:
            return [(yield from work(1)), *both]
        raise AssertionError

    async def scenario() -> None:
        driver = AsyncDriver(operations)
        assert await driver.run(operation()) == [1, 2, 3]
        await driver.close()

    asyncio.run(scenario())
    assert later.wait(60)


def test_a_cancelled_operation_is_closed(operations: Operations) -> None:
    ended: list[str] = []

    def operation() -> Operation[None]:
        try:
            yield Sleep(3600.0)
        finally:
            ended.append("closed")

    async def scenario() -> None:
        driver = AsyncDriver(operations)
        task = asyncio.create_task(driver.run(operation()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert ended == ["closed"]
        await driver.close()

    asyncio.run(scenario())


def test_what_is_done_aside_ends_with_the_client(operations: Operations) -> None:
    """And what was done by then leaves nothing."""

    async def scenario() -> None:
        driver = AsyncDriver(operations)

        def aside(seconds: float) -> Operation[None]:
            yield Sleep(seconds)

        await driver._do(Aside(aside(0.0)))
        [short] = driver._aside
        await short
        await asyncio.sleep(0)
        assert not driver._aside
        await driver._do(Aside(aside(3600.0)))
        [long] = driver._aside
        await driver.close()
        await asyncio.wait([long], timeout=60)
        assert long.cancelled()

    asyncio.run(scenario())
