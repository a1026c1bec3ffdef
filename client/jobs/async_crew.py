"""Tasks that carry out jobs, on one event loop: one a job, as many at once as there would be threads, and one that keeps time.

What they do is decided by the board, as what threads do is (crew.py). All of it happens on the loop: there is no lock.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import Any

from kvstore.client.jobs.board import NEVER_NS, Board, Side
from kvstore.client.jobs.calls import UNREACHABLE, AsyncCalls
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import AsyncJob, BaseJob
from kvstore.client.jobs.stats import JobStats


class AsyncCrew:
    """Of one event loop. `on_done` is called on it, never before the call has returned that made its job or ended it."""

    def __init__(self, calls: AsyncCalls, settings: JobSettings, clock_ns: Callable[[], int]) -> None:
        """Tasks begin with the first job."""
        self._calls = calls
        self._settings = settings
        self._clock_ns = clock_ns
        self._board = Board(settings, clock_ns, self, calls.probe)
        self._busy = {self._board.reads: 0, self._board.writes: 0}
        """Tasks that are at a side's jobs or probes."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Task[None] | None = None
        self._timer_wakes = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._has_stopped = False

    async def ask_now(self, job: BaseJob) -> None:
        """Carry out a lookup in the caller's task."""
        board, side = self._board, self._board.reads
        refusal, epoch = board.refusal(side), side.breaker.epoch
        if refusal is not None:
            job.fail(0, len(job.keys), refusal)
        outcome = await self._calls.carry_out(job) if refusal is None else None
        if isinstance(job.error, UNREACHABLE):
            job.answer_here(self._calls.here(job))
        board.asked(job, epoch, outcome)

    def submit(self, job: BaseJob) -> None:
        """Have it carried out, or end it."""
        self._calls.note_trace(job)
        self._board.submit(job, self._calls.here(job) if self._board.may_be_here(job) else [False])

    def has(self, request: Hashable) -> bool:
        return request in self._board.live

    def take_finished(self) -> list[BaseJob]:
        return self._board.take_finished()

    def stats(self) -> JobStats:
        return self._board.stats()

    async def cancel(self, request: Hashable) -> int:
        jobs = self._board.cancel(request)
        await _through(_all_over(jobs))
        return len(jobs)

    async def close(self, drain_s: float) -> None:
        self._board.is_closing = True
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._until_idle(), max(0.0, drain_s))
        finally:
            jobs = self._board.cancel_all()
            self._has_stopped = True
            self._timer_wakes.set()
            await _through(_all_over(jobs))
            await _through(self._tasks_over())

    async def _until_idle(self) -> None:
        while self._board.live:
            self._has_ended.clear()
            await self._has_ended.wait()

    async def _tasks_over(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    # --- what the board says ---

    def work(self, side: Side) -> None:
        if self._busy[side] < side.workers:
            self._busy[side] += 1
            self._begin(self._worker(side))

    def clerk(self, due_ns: int) -> None:
        if self._timer is None:
            self._timer = self._begin(self._keep_time())
        self._timer_wakes.set()

    def ended(self) -> None:
        self._has_ended.set()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- tasks of its own ---

    async def _worker(self, side: Side) -> None:
        """Ends when nothing is to be done; a probe that is due later has a task that waits for it."""
        try:
            while (job := side.lane.take()) is not None or side.begin_probe(self._has_stopped):
                epoch = side.breaker.epoch
                if job is None:
                    await self._make_probe(side, epoch)
                    continue
                outcome = await self._calls.carry_out(job)
                self._board.carried_out(side, job, epoch, outcome)
                job.tell()
        finally:
            self._busy[side] -= 1
        if side.until_probe_s(self._clock_ns()) is not None:
            self.clerk(side.breaker.probe_at_ns)

    async def _make_probe(self, side: Side, epoch: int) -> None:
        probe = side.probe
        assert probe is not None
        self._board.probed(side, epoch, await self._calls.ask(lambda: probe(self._settings.probe_deadline_s)))

    async def _keep_time(self) -> None:
        """Tells of jobs that ended where they were made, ends those that are overdue, begins probes that are due."""
        while True:
            self._timer_wakes.clear()
            self._board.end_overdue()
            for job in self._board.take_untold():
                job.tell()
            if self._has_stopped and not self._board.has_untold:
                self._timer = None
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._timer_wakes.wait(), self._until_due_s())

    def _until_due_s(self) -> float | None:
        """How long nothing is due; a probe that is gets its task."""
        due_ns, now_ns = self._board.next_deadline_ns(), self._clock_ns()
        left_s = [] if due_ns == NEVER_NS else [(due_ns - now_ns) / 1e9]
        side = self._board.reads  # stores are probed by the next one that is submitted
        until_probe_s = None if self._has_stopped else side.until_probe_s(now_ns)
        if until_probe_s is not None and until_probe_s <= 0:
            self.work(side)
        elif until_probe_s is not None:
            left_s.append(until_probe_s)
        return max(0.0, min(left_s)) if left_s else None


async def _all_over(jobs: Iterable[BaseJob]) -> None:
    for job in jobs:
        assert isinstance(job, AsyncJob)
        await job.wait()


async def _through(work: Coroutine[Any, Any, None]) -> None:
    """Await it to its end, whoever is cancelled meanwhile; he is when it is over."""
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
