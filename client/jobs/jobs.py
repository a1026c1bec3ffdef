"""Jobs over a client: an engine submits lookups, loads and stores, goes on, and is told what became of each key. See Jobs."""

import time
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType

from kvstore.client.forks import Process
from kvstore.client.holds import Hold, require_hold
from kvstore.client.jobs.any_jobs import AnyJobs, forked
from kvstore.client.jobs.calls import Calls
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.crew import Crew
from kvstore.client.jobs.job import Job, Kind
from kvstore.client.sync import Client


class Jobs(AnyJobs[Job]):
    """Lookups, loads and stores that somebody else carries out. A context manager; threads may share it. Close it before its client.

    `lookup`, `lookup_prefix`, `load` and `store` return at once with a Job, which is over by its deadline (a copy under way then is
    finished first). Nothing here raises an error of the store, nor of a malformed argument: it is the result of the keys that it concerns,
    and what an engine makes of it is a miss. A job's end is told once: by `on_done(job)`, called in a thread of this object's, or, for jobs
    without one, by the next `finished()`, where they are kept until it is called.

    Memory that a load fills or a store reads is used until the job is over; `cancel` and `close` return once nothing uses it, whatever
    a signal handler raises meanwhile. Stores are bounded in bytes, jobs in number: what is over that is refused with Full, key by key,
    the last ones first. When the store cannot be reached (`breaker_failures` calls in a row) all that waits or comes is answered with
    Unavailable at once, until one call in the background has found it again: for lookups and loads the question that failed, for
    stores the next one that is submitted once `probe_interval_s` has passed. What nodes of this host show in shared memory is found
    and loaded all the same: that asks nobody.

    In a forked child all is answered with Forked, and `close` does nothing.
    """

    _kind_of_job = Job

    def __init__(self, client: Client, settings: JobSettings | None = None, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Asks nobody. Raises ConfigError: the system does not give its threads, `read_workers`, `write_workers` and one."""
        chosen = settings or JobSettings()
        self._calls = Calls(client, batch_bytes=int(chosen.batch_bytes), clock_ns=clock_ns)
        self._crew = Crew(self._calls, chosen, clock_ns)
        super().__init__(self._crew, chosen, clock_ns)

    def match_prefix(
        self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None, budget_s: float | None = None
    ) -> int:
        """How many of the blocks, from the first on without a gap, can be read now; 0 if the store does not say so in `deadline_s`
        (default: `lookup_deadline_s`), and at once where it could not be reached lately. Carried out in the caller's thread.
        `budget_s`: see `load`. `hold`: they stay in its name, see `Client.match_prefix`; not those found while the store cannot be
        reached."""
        return self._ask_now(Kind.PREFIX, keys, hold, deadline_s, budget_s).leading

    def exists(
        self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None, budget_s: float | None = None
    ) -> list[bool]:
        """Which of the blocks can be read now; none, as `match_prefix`."""
        return self._ask_now(Kind.LOOKUP, keys, hold, deadline_s, budget_s).succeeded

    def release(self, hold: Hold) -> None:
        """End a hold, as `Client.release`. Waits for nobody."""
        if self._process == Process.number:
            self._calls.release(hold)

    def _ask_now(self, kind: Kind, keys: Sequence[bytes], hold: Hold | None, deadline_s: float | None, budget_s: float | None) -> Job:
        job = self._job(kind, None, keys, deadline_s, budget_s=budget_s)
        require_hold(hold)
        job.hold = hold
        if self._process != Process.number:
            job.fail(0, len(keys), forked())
            return job
        self._crew.ask_now(job)
        return job

    def cancel(self, request: Hashable) -> int:
        """End the jobs of a request: how many were not over. Those that wait end now; those under way when the call in which they are
        does, by its deadline, and are waited for. They are told as all others are."""
        return self._crew.cancel(request) if self._process == Process.number else 0

    def close(self, *, drain_s: float = 0.0) -> None:
        """Take no more jobs (they are answered with Closed), let those submitted be carried out for up to `drain_s`, and cancel the
        rest. All have been told, and nothing uses their memory, on return. What a signal handler raises ends the draining early, and is
        raised at the end. Not from `on_done`. A second close is a no-op."""
        if self._process == Process.number:
            self._crew.close(drain_s)

    def __enter__(self) -> "Jobs":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
