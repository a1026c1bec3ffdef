"""Jobs over an AsyncClient, and the tasks that carry them out on one event loop: one a job, as many at once as there would be threads, and
one that keeps time.

What the tasks do is decided by the board. All of it happens on the loop: there is no lock.

Tasks may be cancelled: a loop that ends cancels all its tasks. Then the job of such a task is over, as if its caller had cancelled it,
once nothing touches its memory any more. With the last task of a side the jobs that wait there are over, too. Where the loop goes on, the
next job has new tasks.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from types import TracebackType
from typing import Any

from kvstore.client.aio import AsyncClient
from kvstore.client.core.forks import Process
from kvstore.client.holds import Hold, require_hold
from kvstore.client.jobs.base_jobs import AnyJobs, forked
from kvstore.client.jobs.client_calls import UNREACHABLE, AsyncCalls, Outcome
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import AsyncJob, BaseJob, Kind
from kvstore.client.jobs.job_table import NEVER_NS, Board, Side
from kvstore.client.jobs.stats import JobStats
from kvstore.protocol.errors import Cancelled


class AsyncCrew:
    """Of one event loop. `on_done` is called on it, never before the call has returned that made its job or ended it."""

    def __init__(self, calls: AsyncCalls, settings: JobSettings, clock_ns: Callable[[], int]) -> None:
        """Tasks begin with the first job."""
        self._calls = calls
        self._settings = settings
        self._clock_ns = clock_ns
        self._board = Board(settings, clock_ns, self, calls.probe)
        self._busy: dict[Side, set[asyncio.Task[None]]] = {self._board.reads: set(), self._board.writes: set()}
        """Tasks that are at a side's jobs or probes."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Task[None] | None = None
        self._timer_wakes = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._has_stopped = False
        self._is_struck = False
        """Jobs that end just now have their ends told by who ends them."""

    async def ask_now(self, job: BaseJob) -> None:
        """Carry out a lookup in the caller's task."""
        board, side = self._board, self._board.reads
        refusal, epoch = board.refusal(side), side.breaker.epoch
        self._mind_time()
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
        self._mind_time()

    def has(self, request: Hashable) -> bool:
        return request in self._board.live

    def take_finished(self) -> list[BaseJob]:
        return self._board.take_finished()

    def stats(self) -> JobStats:
        return self._board.stats()

    async def cancel(self, request: Hashable) -> int:
        jobs = self._board.cancel(request)
        await _through(lambda: _all_over(jobs))
        return len(jobs)

    async def close(self, drain_s: float) -> None:
        self._board.is_closing = True
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, drain_s)):
                    await self._until_idle()
        finally:
            jobs = self._board.cancel_all()
            self._has_stopped = True
            self._timer_wakes.set()
            await _through(lambda: _all_over(jobs))
            await _through(self._tasks_over)

    async def _until_idle(self) -> None:
        while self._board.live:
            self._has_ended.clear()
            await self._has_ended.wait()

    async def _tasks_over(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    # --- what the board says ---

    def work(self, side: Side) -> None:
        if len(self._busy[side]) < side.workers:
            self._busy[side].add(self._begin(self._worker(side)))

    def clerk(self, due_ns: int) -> None:
        if self._timer is None and not self._is_struck:
            self._timer = self._begin(self._keep_time())
        self._timer_wakes.set()

    def ended(self) -> None:
        self._has_ended.set()

    def _mind_time(self) -> None:
        """The task that waits until the store is to be probed may have been cancelled."""
        if self._timer is None and not self._has_stopped:
            self._have_it_probed(self._board.reads)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        """One that was cancelled may not even have begun."""
        self._tasks.discard(task)
        for busy in self._busy.values():
            busy.discard(task)
        if task is self._timer:
            self._timer = None
        if task.cancelled():
            self._is_struck = True
            for side, busy in self._busy.items():
                if not busy:
                    self._board.cancel_waiting(side)
            self._is_struck = False
            for job in self._board.take_untold():
                job.tell()
            self._timer_wakes.set()  # a probe that was cancelled is due anew

    # --- tasks of its own ---

    async def _worker(self, side: Side) -> None:
        """Ends when nothing is to be done; a probe that is due later has a task that waits for it."""
        this = asyncio.current_task()
        assert this is not None
        try:
            while (job := side.lane.take()) is not None or side.begin_probe(self._has_stopped):
                epoch = side.breaker.epoch
                if job is None:
                    await self._make_probe(side, epoch)
                    continue
                outcome = Outcome.UNKNOWN
                try:
                    outcome = await self._calls.carry_out(job)
                except BaseException:
                    job.is_cancelled = True
                    job.fail(job.answered, job.admitted, Cancelled(f"the task of this {job.kind.value} was cancelled"))
                    raise
                finally:
                    self._board.carried_out(side, job, epoch, outcome)
                    job.tell()
        finally:
            self._busy[side].discard(this)
        self._have_it_probed(side)

    def _have_it_probed(self, side: Side) -> None:
        """If the store is away, once that is due."""
        if side.until_probe_s(self._clock_ns()) is not None:
            self.clerk(side.breaker.probe_at_ns)

    async def _make_probe(self, side: Side, epoch: int) -> None:
        probe = side.probe
        assert probe is not None
        try:
            answer = await self._calls.ask(lambda: probe(self._settings.probe_deadline_s))
        except BaseException:
            side.breaker.abandoned(epoch)
            raise
        self._board.probed(side, epoch, answer)

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
                async with asyncio.timeout(self._until_due_s()):  # wait_for of Python 3.11 swallows a cancellation now and then
                    await self._timer_wakes.wait()

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


async def _through(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Await it to its end, whoever is cancelled meanwhile; he is when it is over. It is begun anew where its own task is cancelled."""
    caller = asyncio.current_task()
    assert caller is not None
    cancels, is_cancelled = caller.cancelling(), False
    while True:
        task = asyncio.ensure_future(work())
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError:
                is_cancelled = caller.cancelling() > cancels
        if not task.cancelled():
            break
    if is_cancelled:
        raise asyncio.CancelledError


class AsyncJobs(AnyJobs[AsyncJob]):
    """`Jobs`' twin for asyncio, of one event loop: the same jobs, deadlines, bounds and breakers. Close it before its client.

    `lookup`, `lookup_prefix`, `load` and `store` return at once, with a job to `await job.wait()` for; tasks carry it out, at most
    two of lookups and loads and one of stores at once. `on_done(job)` is called on the loop.
    Whoever is cancelled in `cancel` or `close` is when nothing uses the callers' memory any more.
    """

    _kind_of_job = AsyncJob

    def __init__(
        self, client: AsyncClient, settings: JobSettings | None = None, *, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Asks nobody; its tasks begin with the first job."""
        chosen = settings or JobSettings()
        self._calls = AsyncCalls(client, batch_bytes=int(chosen.batch_bytes), clock_ns=clock_ns)
        self._crew = AsyncCrew(self._calls, chosen, clock_ns)
        super().__init__(self._crew, chosen, clock_ns)

    async def match_prefix(
        self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None, budget_s: float | None = None
    ) -> int:
        """As `Jobs.match_prefix`."""
        return (await self._ask_now(Kind.PREFIX, keys, hold, deadline_s, budget_s)).leading

    async def exists(
        self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None, budget_s: float | None = None
    ) -> list[bool]:
        """As `Jobs.exists`."""
        return (await self._ask_now(Kind.LOOKUP, keys, hold, deadline_s, budget_s)).succeeded

    async def release(self, hold: Hold) -> None:
        """As `Jobs.release`."""
        if self._process == Process.number:
            await self._calls.release(hold)

    async def _ask_now(
        self, kind: Kind, keys: Sequence[bytes], hold: Hold | None, deadline_s: float | None, budget_s: float | None
    ) -> AsyncJob:
        job = self._job(kind, None, keys, deadline_s, budget_s=budget_s)
        require_hold(hold)
        job.hold = hold
        if self._process != Process.number:
            job.fail(0, len(keys), forked())
        else:
            await self._crew.ask_now(job)
        return job

    async def cancel(self, request: Hashable) -> int:
        """As `Jobs.cancel`."""
        return await self._crew.cancel(request) if self._process == Process.number else 0

    async def close(self, *, drain_s: float = 0.0) -> None:
        """As `Jobs.close`."""
        if self._process == Process.number:
            await self._crew.close(drain_s)

    async def __aenter__(self) -> "AsyncJobs":
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
