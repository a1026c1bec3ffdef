"""The pool of one event loop against a real daemon."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.config import ClientSettings
from kvstore.protocol.errors import Closed, TooManyConnections
from kvstore.protocol.master_messages import Nodes
from kvstore.protocol.session_messages import Hello, Ok
from kvstore.rpc.address import Address
from kvstore.rpc.client.async_connection_pool import AsyncPool
from kvstore.rpc.deadline import Deadline
from tests.rpc.daemon_child import Daemon, running

Started = tuple[Daemon, Address, Address]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Started]:
    with running(tmp_path) as started:
        yield started


def with_pool(scenario: Callable[[AsyncPool], Coroutine[Any, Any, None]], *, connect_timeout_s: float = 60) -> None:
    async def main() -> None:
        pool = AsyncPool(Hello(1), ClientSettings(max_channels=2, idle_ttl_s=60, connect_timeout_s=connect_timeout_s, busy_poll_us=0))
        try:
            await scenario(pool)
        finally:
            pool.close()

    asyncio.run(main())


def test_a_channel_is_opened_once_and_reused(daemon: Started) -> None:
    async def scenario(pool: AsyncPool) -> None:
        for expected in (False, True):
            with await pool.take(daemon[1], Deadline(5)) as loan:
                assert loan.reused is expected
                assert await loan.channel.call(Nodes(), Ok, Deadline(5)) == Ok()
        assert pool.counts(daemon[1]) == (0, 1)

    with_pool(scenario)


def test_a_cancelled_waiter_is_forgotten(daemon: Started) -> None:
    async def scenario(pool: AsyncPool) -> None:
        loans = [await pool.take(daemon[2], Deadline(5)) for _ in range(2)]
        waiting = asyncio.create_task(pool.take(daemon[2], Deadline(5)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        for loan in loans:
            loan.release()
        assert pool.counts(daemon[2]) == (0, 2)

    with_pool(scenario)


def test_waiters_hear_that_the_pool_was_closed(daemon: Started) -> None:
    async def scenario(pool: AsyncPool) -> None:
        loans = [await pool.take(daemon[2], Deadline(5)) for _ in range(2)]
        waiting = [asyncio.create_task(pool.take(daemon[2], Deadline(5))) for _ in range(2)]
        await asyncio.sleep(0)
        pool.close()
        pool.close()
        for task in waiting:
            with pytest.raises(Closed):
                await task
        for loan in loans:
            loan.release()
            assert not loan.channel.is_open

    with_pool(scenario)


@pytest.mark.promise("resources-exhausted")
def test_no_task_starves_behind_others(daemon: Started) -> None:
    """More tasks than channels, each of which takes a channel again right after it has given one back."""

    async def scenario(pool: AsyncPool) -> None:
        tasks_count, times = 12, 5
        done = [0] * tasks_count

        async def run(number: int) -> None:
            while min(done) < times:
                with await pool.take(daemon[2], Deadline(30)) as loan:
                    await loan.channel.call(Nodes(), Ok, Deadline(30))
                done[number] += 1

        await asyncio.gather(*map(run, range(tasks_count)))
        assert min(done) >= times

    with_pool(scenario)


def test_connect_survives_a_busy_event_loop(daemon: Started) -> None:
    """The daemon answers, and the loop looks at its answer after the connect's timeout."""

    async def scenario(pool: AsyncPool) -> None:
        waiting = asyncio.create_task(pool.take(daemon[1], Deadline(60)))
        for _ in range(3):
            await asyncio.sleep(0)
            time.sleep(0.3)  # noqa: ASYNC251  (the program computes)
        (await waiting).release()

    with_pool(scenario, connect_timeout_s=0.2)


def test_a_peer_that_takes_no_more_connections_is_shared(daemon: Started) -> None:
    async def scenario(pool: AsyncPool) -> None:
        loan = await pool.take(daemon[2], Deadline(20))
        daemon[0].refusal = TooManyConnections("its only connection is in use")
        waiting = asyncio.create_task(pool.take(daemon[2], Deadline(60)))
        while not pool._state.waiting(daemon[2]):
            await asyncio.sleep(0.001)
        loan.release()
        (await waiting).release()
        with pytest.raises(TooManyConnections):
            await pool.take(daemon[1], Deadline(20))

    with_pool(scenario)
