"""Jobs over an AsyncClient: an engine on an event loop submits lookups, loads and stores, goes on, and is told what became of each key."""

import time
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType

from kvstore.client.aio import AsyncClient
from kvstore.client.forks import Process
from kvstore.client.holds import Hold, require_hold
from kvstore.client.jobs.any_jobs import AnyJobs, forked
from kvstore.client.jobs.async_crew import AsyncCrew
from kvstore.client.jobs.calls import AsyncCalls
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import AsyncJob, Kind


class AsyncJobs(AnyJobs[AsyncJob]):
    """`Jobs`' twin for asyncio, of one event loop: the same jobs, deadlines, bounds and breakers. Close it before its client.

    `lookup`, `lookup_prefix`, `load` and `store` return at once, with a job to `await job.wait()` for; tasks carry it out, at most
    `read_workers` of lookups and loads and `write_workers` of stores at once. `on_done(job)` is called on the loop.
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
