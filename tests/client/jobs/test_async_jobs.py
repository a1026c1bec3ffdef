"""Promises of async_jobs.py and async_crew.py, on a real cluster. A barrier before a call keeps a task busy for as long as a test needs."""

import asyncio
import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kvstore.client.jobs.async_jobs import AsyncJobs
from kvstore.client.jobs.circuit_breaker import State
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import AsyncJob, Kind
from kvstore.client.jobs.stats import KindStats
from kvstore.protocol.errors import Cancelled, Closed, Forked, Unavailable
from kvstore.protocol.settings import Size
from tests.client.jobs.async_faulty import AsyncBarrier, AsyncFaultyClient, raises
from tests.forks import told_by_child

NAMES = iter(range(1 << 30))
NOT_SOON = 600.0
SETTINGS = JobSettings(
    read_workers=1, queue_bytes=Size(1000), lookup_deadline_s=60, load_deadline_s=60, store_deadline_s=60, probe_interval_s=NOT_SOON
)
AWAY = Unavailable("away")


class Scene:
    def __init__(self, client: AsyncFaultyClient, jobs: AsyncJobs) -> None:
        self.client = client
        self.jobs = jobs

    def barrier(self) -> AsyncBarrier:
        """Before the next call."""
        barrier = AsyncBarrier()
        self.client.faults.append(barrier)
        return barrier


@contextlib.asynccontextmanager
async def scene(address: str, settings: JobSettings = SETTINGS, **more: Any) -> AsyncIterator[Scene]:
    client = AsyncFaultyClient(address)
    async with client, AsyncJobs(client, settings, **more) as jobs:
        yield Scene(client, jobs)


def on_loop(play: Callable[[Scene], Awaitable[None]], address: str, settings: JobSettings = SETTINGS, **more: Any) -> None:
    async def all_of_it() -> None:
        async with asyncio.timeout(120), scene(address, settings, **more) as made:
            await play(made)

    asyncio.run(all_of_it())


def fresh_keys(count: int) -> list[bytes]:
    return [b"async jobs %d" % next(NAMES) for _ in range(count)]


async def over(job: AsyncJob) -> AsyncJob:
    assert await job.wait(60)
    return job


async def until(is_true: Callable[[], bool]) -> None:
    """The timeout of the scene is the deadline."""
    while not is_true():
        await asyncio.sleep(0.001)


def test_what_is_stored_can_be_looked_up_and_loaded(address: str) -> None:
    async def play(at: Scene) -> None:
        keys, values = fresh_keys(3), [b"a" * 10, b"b" * 20, b"c" * 30]
        store = await over(at.jobs.store(keys, values, namespace="n", parents=[None, *keys[:2]], ack="cluster"))
        assert store.results == [True] * 3
        asked = [*keys, *fresh_keys(1)]
        assert (await over(at.jobs.lookup(asked))).results == [True] * 3 + [False]
        assert (await over(at.jobs.lookup_prefix(asked))).leading == 3
        assert await at.jobs.match_prefix(asked) == 3
        assert await at.jobs.exists(asked) == [True] * 3 + [False]
        buffers = [bytearray(30) for _ in asked]
        load = await over(at.jobs.load(asked, buffers))
        assert load.results == [10, 20, 30, None]
        assert [bytes(buffer).rstrip(b"\0") for buffer in buffers[:3]] == values
        kinds = at.jobs.stats().kinds
        assert kinds[Kind.STORE] == KindStats(jobs=1, keys=3, succeeded=3, moved_bytes=60)
        assert kinds[Kind.LOAD] == KindStats(jobs=1, keys=4, succeeded=3, missed=1, moved_bytes=60)
        assert kinds[Kind.LOOKUP] == kinds[Kind.PREFIX] == KindStats(jobs=2, keys=8, succeeded=6, missed=2)

    on_loop(play, address)


def test_who_is_cancelled_while_he_cancels_is_when_nothing_runs_any_more(address: str) -> None:
    async def play(at: Scene) -> None:
        barrier = at.barrier()
        running = at.jobs.store(fresh_keys(1), [b"x"], request="r")
        await barrier.is_reached.wait()
        cancelling = asyncio.ensure_future(at.jobs.cancel("r"))
        for _ in range(3):
            await asyncio.sleep(0)
            cancelling.cancel()
        assert not running.is_over
        assert not cancelling.done()
        barrier.open()
        with pytest.raises(asyncio.CancelledError):
            await cancelling
        assert running.is_over

    on_loop(play, address)


def test_close_cancels_what_waits_and_tells_of_everything(address: str) -> None:
    async def play(at: Scene) -> None:
        barrier, told = at.barrier(), list[AsyncJob]()
        running = at.jobs.store(fresh_keys(1), [b"x"], on_done=told.append)
        await barrier.is_reached.wait()
        waiting = at.jobs.store(fresh_keys(1), [b"y"], on_done=told.append)
        closing = asyncio.ensure_future(at.jobs.close(drain_s=0.01))
        assert isinstance((await over(waiting)).error, Cancelled)
        assert not closing.done()
        barrier.open()
        await closing
        assert running.results == [True]
        assert sorted(map(id, told)) == sorted(map(id, [running, waiting]))
        after, calls = asyncio.Queue[AsyncJob](), len(at.client.calls)
        late = at.jobs.lookup(fresh_keys(1), on_done=after.put_nowait)
        assert await after.get() is late
        assert isinstance(late.error, Closed)
        assert await at.jobs.match_prefix(fresh_keys(1)) == 0
        assert len(at.client.calls) == calls
        await at.jobs.close()

    on_loop(play, address)


def test_close_waits_for_a_probe_that_is_under_way(address: str) -> None:
    async def play(at: Scene) -> None:
        at.client.faults.append(raises(AWAY))
        barrier = at.barrier()
        assert await at.jobs.match_prefix(fresh_keys(1)) == 0
        await barrier.is_reached.wait()
        closing = asyncio.ensure_future(at.jobs.close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        barrier.open()
        await closing
        assert at.jobs.stats().reads.state is State.CLOSED

    on_loop(play, address, dataclasses.replace(SETTINGS, probe_interval_s=0.01))


def test_an_on_done_may_submit_the_next_job(address: str) -> None:
    async def play(at: Scene) -> None:
        told = asyncio.Queue[AsyncJob]()

        def go_on(job: AsyncJob) -> None:
            told.put_nowait(job)
            if told.qsize() < 5:
                at.jobs.store(fresh_keys(1), [b"too large" * 1000], on_done=go_on)

        at.jobs.store(fresh_keys(1), [b"too large" * 1000], on_done=go_on)
        await until(lambda: told.qsize() == 5)

    on_loop(play, address)


def cancel_all_others() -> None:
    """As a loop that ends does."""
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


def test_somebody_cancels_every_task_and_no_job_waits_for_what_is_gone(address: str) -> None:
    async def play(at: Scene) -> None:
        barrier, told = at.barrier(), list[AsyncJob]()
        running = at.jobs.store(fresh_keys(1), [b"x"], on_done=told.append)
        await barrier.is_reached.wait()
        waiting = at.jobs.store(fresh_keys(1), [b"y"], on_done=told.append)
        cancel_all_others()
        for job in (await over(running), await over(waiting)):
            assert isinstance(job.error, Cancelled)
            assert not job.values
        assert sorted(map(id, told)) == sorted(map(id, [running, waiting]))
        stored = at.jobs.store(fresh_keys(1), [b"z"])
        cancel_all_others()
        assert isinstance((await over(stored)).error, Cancelled), "its task had not even begun"
        assert (await over(at.jobs.store(fresh_keys(1), [b"z"]))).results == [True], "later jobs have new tasks"
        assert await asyncio.wait_for(at.jobs.cancel("r"), 60) == 0
        await asyncio.wait_for(at.jobs.close(), 60)

    on_loop(play, address)


def test_close_that_waits_is_not_cancelled_with_what_it_waits_for(address: str) -> None:
    async def play(at: Scene) -> None:
        barrier = at.barrier()
        running = at.jobs.store(fresh_keys(1), [b"x"])
        await barrier.is_reached.wait()
        closing = asyncio.ensure_future(at.jobs.close(drain_s=60))
        await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task(), closing}:
            task.cancel()
        await asyncio.wait_for(closing, 60)
        assert isinstance(running.error, Cancelled)

    on_loop(play, address)


ENDS = """
import asyncio, sys
from kvstore.client.aio import AsyncClient
from kvstore.client.jobs.async_jobs import AsyncJobs
from kvstore.client.jobs.config import JobSettings

async def main(turns):
    client = AsyncClient(sys.argv[1])
    jobs = AsyncJobs(client, JobSettings(write_workers=1))
    reached = asyncio.Event()

    async def hang(*_, **__):
        reached.set()
        await asyncio.sleep(600)

    client.put_batch_from = hang
    jobs.store([b"a"], [b"x"])
    await reached.wait()
    jobs.store([b"b"], [b"x"])
    await asyncio.sleep(0.01)
    jobs.store([b"c"], [b"x"])
    for _ in range(turns):
        await asyncio.sleep(0)

for turns in range(5):
    asyncio.run(main(turns))
print("ended")
"""


def test_a_loop_that_ends_does_so_whatever_the_jobs_do_just_then(address: str) -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS, address], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.stdout, ended.stderr) == ("ended\n", "")


def test_a_probe_that_somebody_cancels_is_made_anew(address: str) -> None:
    async def play(at: Scene) -> None:
        at.client.faults.append(raises(AWAY))
        barrier = at.barrier()
        assert await at.jobs.match_prefix(fresh_keys(1)) == 0
        await barrier.is_reached.wait()
        cancel_all_others()
        await until(lambda: at.jobs.stats().reads.state is State.OPEN)
        await until(lambda: len(asyncio.all_tasks()) == 1)
        assert await at.jobs.match_prefix(fresh_keys(1)) == 0
        await until(lambda: at.jobs.stats().reads.state is State.CLOSED)

    on_loop(play, address, dataclasses.replace(SETTINGS, probe_interval_s=0.01))


def test_close_is_through_though_somebody_cancels_what_it_waits_with(address: str) -> None:
    async def play(at: Scene) -> None:
        barrier = at.barrier()
        running = at.jobs.store(fresh_keys(1), [b"x"])
        await barrier.is_reached.wait()
        [worker] = [task for task in asyncio.all_tasks() if "_worker" in repr(task)]
        closing = asyncio.ensure_future(at.jobs.close())
        for _ in range(3):
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task(), closing, worker}:
            task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not closing.done()
        barrier.open()
        await asyncio.wait_for(closing, 60)
        assert running.is_over

    on_loop(play, address)


def test_in_a_forked_child_all_is_answered_with_forked(address: str) -> None:
    async def play(at: Scene) -> None:
        jobs = at.jobs

        def told() -> str:
            async def in_the_child() -> str:
                loaded = jobs.load(fresh_keys(1), [bytearray(1)])
                asked = await jobs.match_prefix(fresh_keys(1))
                ended = await jobs.cancel(None), jobs.finished()
                await jobs.close()
                with pytest.raises(Forked):
                    jobs.stats()
                return f"{type(loaded.error).__name__} {asked} {ended}"

            asyncio.events._set_running_loop(None)
            return asyncio.new_event_loop().run_until_complete(in_the_child())

        assert told_by_child(told) == "Forked 0 (0, [])"

    on_loop(play, address)
