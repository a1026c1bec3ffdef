"""Jobs over a client: an engine submits lookups, loads and stores, goes on, and is told what became of each key. See Jobs."""

import time
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any

from kvstore.client.forks import Process
from kvstore.client.jobs.calls import Calls, sizes_of
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.crew import Crew
from kvstore.client.jobs.job import Job, Kind, OnDone
from kvstore.client.jobs.stats import JobStats
from kvstore.client.sync import Client
from kvstore.protocol.errors import Forked


class Jobs:
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

    def __init__(self, client: Client, settings: JobSettings | None = None, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Asks nobody; its threads begin with the first job."""
        self.settings = chosen = settings or JobSettings()
        self._clock_ns = clock_ns
        self._crew = Crew(Calls(client, batch_bytes=int(chosen.batch_bytes), clock_ns=clock_ns), chosen, clock_ns)
        self._process = Process.number

    # --- calls that are answered at once ---

    def match_prefix(self, keys: Sequence[bytes], *, deadline_s: float | None = None) -> int:
        """How many of the blocks, from the first on without a gap, can be read now; 0 if the store does not say so in `deadline_s`
        (default: `lookup_deadline_s`), and at once where it could not be reached lately. Carried out in the caller's thread."""
        return self._ask_now(Kind.PREFIX, keys, deadline_s).leading

    def exists(self, keys: Sequence[bytes], *, deadline_s: float | None = None) -> list[bool]:
        """Which of the blocks can be read now; none, as `match_prefix`."""
        return self._ask_now(Kind.LOOKUP, keys, deadline_s).succeeded

    def _ask_now(self, kind: Kind, keys: Sequence[bytes], deadline_s: float | None) -> Job:
        job = self._job(kind, None, keys, deadline_s, self.settings.lookup_deadline_s)
        if self._process != Process.number:
            job.fail(0, len(keys), _forked())
            return job
        self._crew.ask_now(job)
        return job

    # --- calls that somebody else carries out ---

    def lookup(
        self, keys: Sequence[bytes], *, request: Hashable = None, deadline_s: float | None = None, on_done: OnDone | None = None
    ) -> Job:
        """Find out which of the blocks can be read."""
        return self._submit(self._job(Kind.LOOKUP, request, keys, deadline_s, self.settings.lookup_deadline_s, on_done))

    def lookup_prefix(
        self, keys: Sequence[bytes], *, request: Hashable = None, deadline_s: float | None = None, on_done: OnDone | None = None
    ) -> Job:
        """Find out how many of the blocks can be read, from the first on without a gap: the job's `leading`."""
        return self._submit(self._job(Kind.PREFIX, request, keys, deadline_s, self.settings.lookup_deadline_s, on_done))

    def load(
        self,
        keys: Sequence[bytes],
        buffers: Any,
        *,
        request: Hashable = None,
        deadline_s: float | None = None,
        on_done: OnDone | None = None,
    ) -> Job:
        """Read values into buffers, as `Client.get_each_into`. The content of a buffer is undefined unless its key succeeded."""
        job = self._job(Kind.LOAD, request, keys, deadline_s, self.settings.load_deadline_s, on_done)
        job.values, job.sizes = buffers, sizes_of(buffers)
        return self._submit(job)

    def store(
        self,
        keys: Sequence[bytes],
        values: Any,
        *,
        namespace: Any = "",
        parents: Sequence[bytes | None] | None = None,
        ack: str | None = None,
        request: Hashable = None,
        deadline_s: float | None = None,
        on_done: OnDone | None = None,
    ) -> Job:
        """Store values, as `Client.put_batch_from`: write-behind. They are not copied, and must not change until the job is over."""
        job = self._job(Kind.STORE, request, keys, deadline_s, self.settings.store_deadline_s, on_done)
        job.namespace, job.parents, job.ack = namespace, parents, ack
        job.values, job.sizes = values, sizes_of(values)
        return self._submit(job)

    def poll(self, request: Hashable) -> bool:
        """Are all jobs of the request over? True, too, of one that has none."""
        return not self._crew.has(request)

    def finished(self) -> list[Job]:
        """Those without `on_done` that have ended since the last call, in the order of their ends."""
        return self._crew.take_finished() if self._process == Process.number else []

    def cancel(self, request: Hashable) -> int:
        """End the jobs of a request: how many were not over. Those that wait end now; those under way when the call in which they are
        does, by its deadline, and are waited for. They are told as all others are."""
        return self._crew.cancel(request) if self._process == Process.number else 0

    def stats(self) -> JobStats:
        """What has been done so far. Asks nobody. Raises Forked."""
        if self._process != Process.number:
            raise _forked()
        return self._crew.stats()

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

    def _job(
        self,
        kind: Kind,
        request: Hashable,
        keys: Sequence[bytes],
        deadline_s: float | None,
        default_s: float,
        on_done: OnDone | None = None,
    ) -> Job:
        chosen_s = default_s if deadline_s is None else deadline_s
        return Job(kind, request, keys, deadline_ns=self._clock_ns() + int(chosen_s * 1e9), deadline_s=chosen_s, on_done=on_done)

    def _submit(self, job: Job) -> Job:
        if self._process != Process.number:
            job.fail(0, len(job.keys), _forked())
            job.end()
        else:
            self._crew.submit(job)
        return job


def _forked() -> Forked:
    return Forked("these jobs are those of the process that this one was forked from: make some here")
