"""Promises of async_driver.py that need no daemon; with daemons: test_aio.py."""

import asyncio

import pytest

from kvstore.client.async_driver import AsyncDriver
from kvstore.client.config import ClientSettings
from kvstore.client.core.effects import Operation, SleepEffect, SpawnEffect
from kvstore.client.operations import Operations

NOBODY = "unix:/no/such/master.sock"


@pytest.fixture
def operations() -> Operations:
    return Operations(ClientSettings(master=NOBODY))


def test_a_cancelled_operation_is_closed(operations: Operations) -> None:
    ended: list[str] = []

    def operation() -> Operation[None]:
        try:
            yield SleepEffect(3600.0)
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
            yield SleepEffect(seconds)

        await driver._do(SpawnEffect(aside(0.0)))
        [short] = driver._background
        await short
        await asyncio.sleep(0)
        assert not driver._background
        await driver._do(SpawnEffect(aside(3600.0)))
        [long] = driver._background
        await driver.close()
        await asyncio.wait([long], timeout=60)
        assert long.cancelled()

    asyncio.run(scenario())
