"""`Jobs`, the public interface of background jobs, and `JobExecutor`, the threads that run them.

Workers run lookups and loads, and stores. A reaper thread calls `on_done` of jobs that ended in their caller's thread,
and ends jobs whose deadline passes while all workers wait for an unresponsive store. `JobTable` decides; the lock is
never held during a client call or an `on_done`.

All threads start before the first job: a job that is refused for want of a thread would still be run by any other
worker.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from kvstore.client.core.arguments import check_hashable, check_list, check_seconds
from kvstore.client.core.forks import ForkGeneration
from kvstore.client.holds import Hold, require_hold
from kvstore.client.jobs.client_calls import UNREACHABLE, Calls, sizes_of
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import Job, JobKind, OnDone
from kvstore.client.jobs.job_table import NEVER_NS, JobSide, JobTable
from kvstore.client.jobs.stats import JobStats
from kvstore.client.retention import check_retention
from kvstore.client.sync import Client
from kvstore.protocol.errors import Forked
from kvstore.protocol.retention import Retention
from kvstore.rpc.thread_pools import start_error
from kvstore.transfer.memory.signal_safety import Shield


class JobExecutor:
    """Thread pool of `Jobs`. Thread-safe. Exceptions of signal handlers are raised when a method has finished."""

    def __init__(self, calls: Calls, settings: JobSettings, clock_ns: Callable[[], int]) -> None:
        """Start all threads. Raises ConfigError if the system has none."""
        self._calls = calls
        self._settings = settings
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._table = JobTable(settings, clock_ns, self, calls.probe)
        self._worker_conditions = {side: threading.Condition(self._lock) for side in (self._table.reads, self._table.writes)}
        """Notified when there is work."""
        self._reaper_condition = threading.Condition(self._lock)
        self._reaper_until_ns = 0
        self._job_ended = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._has_reaper = False
        self._is_stopped = False
        try:
            with Shield(), self._lock:
                self._begin_all()
        except BaseException:
            self.close(0.0)
            raise

    # --- callers' threads ---

    def lookup_now(self, job: Job) -> None:
        """Run a lookup in the caller's thread."""
        table, side = self._table, self._table.reads
        with Shield(), self._lock:
            refusal, epoch = table.refusal(side), side.breaker.epoch
        if refusal is not None:
            job.fail(0, len(job.keys), refusal)
        outcome = self._calls.carry_out(job) if refusal is None else None
        if isinstance(job.error, UNREACHABLE):
            job.mark_local(self._calls.here(job))
        with Shield(), self._lock:
            table.finish_inline(job, epoch, outcome)

    def load_now(self, job: Job) -> None:
        """Run a load in the caller's thread."""
        table, side = self._table, self._table.reads
        here = self._calls.here(job) if table.needs_local_check(job) else [False]
        with Shield(), self._lock:
            is_admitted, epoch = table.begin_load(job, here), side.breaker.epoch
        outcome = self._calls.carry_out(job) if is_admitted else None
        with Shield(), self._lock:
            table.finish_inline(job, epoch, outcome)

    def submit(self, job: Job) -> None:
        """Enqueue the job, or end it at once."""
        self._calls.note_trace(job)
        here = self._calls.here(job) if self._table.needs_local_check(job) else [False]
        with Shield(), self._lock:
            self._table.submit(job, here)

    def has(self, request: Hashable) -> bool:
        return request in self._table.live

    def take_finished(self) -> list[Job]:
        with Shield(), self._lock:
            return self._table.take_finished()

    def cancel(self, request: Hashable) -> int:
        with Shield():
            with self._lock:
                jobs = self._table.cancel(request)
            for job in jobs:
                job.wait()
        return len(jobs)

    def stats(self) -> JobStats:
        with Shield(), self._lock:
            return self._table.stats()

    def close(self, drain_s: float) -> None:
        with Shield() as shield:
            shield.cancels(self._notify_closer)
            with self._lock:
                self._table.is_closing = True
                until_ns = self._clock_ns() + int(drain_s * 1e9)
                while self._table.live and shield.raised is None and (left_ns := until_ns - self._clock_ns()) > 0:
                    self._job_ended.wait(left_ns / 1e9)
                self._table.cancel_all()
                self._is_stopped = True
                for condition in (*self._worker_conditions.values(), self._reaper_condition):
                    condition.notify_all()
                threads, self._threads = self._threads, []
            for thread in threads:
                thread.join()

    def _notify_closer(self) -> None:
        with self._lock:
            self._job_ended.notify_all()

    # --- JobWaker: called by the table, with the lock held ---

    def wake_worker(self, side: JobSide) -> None:
        self._worker_conditions[side].notify()

    def wake_reaper(self, due_ns: int) -> None:
        if not self._has_reaper:  # after `close`; without a thread, the next job's reaper delivers it
            with contextlib.suppress(RuntimeError, MemoryError):
                self._begin_reaper()
        elif due_ns < self._reaper_until_ns:
            self._reaper_condition.notify()

    def job_ended(self) -> None:
        self._job_ended.notify_all()

    # --- threads ---

    def _begin_all(self) -> None:
        sides = list(self._worker_conditions)
        try:
            self._begin_reaper()
            for side in sides:
                for _ in range(side.workers):
                    self._begin_thread("kvstore-jobs-worker", partial(self._worker, side))
        except (RuntimeError, MemoryError) as error:
            raise start_error(1 + sum(side.workers for side in sides), "kvstore-jobs", error) from error

    def _begin_reaper(self) -> None:
        self._begin_thread("kvstore-jobs-reaper", self._reap)
        self._has_reaper = True

    def _begin_thread(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _worker(self, side: JobSide) -> None:
        while True:
            with self._lock:
                while (job := side.queue.take()) is None and not side.begin_probe(self._is_stopped):
                    if self._is_stopped:
                        return
                    self._worker_conditions[side].wait(side.until_probe_s(self._clock_ns()))
                epoch = side.breaker.epoch
            if job is None:
                self._make_probe(side, epoch)
                continue
            outcome = self._calls.carry_out(job)
            with self._lock:
                self._table.finish(side, job, epoch, outcome)
            job.call_on_done()

    def _make_probe(self, side: JobSide, epoch: int) -> None:
        probe = side.probe
        assert probe is not None
        answer = self._calls.ask(lambda: probe(self._settings.probe_deadline_s))
        with self._lock:
            self._table.finish_probe(side, epoch, answer)

    def _reap(self) -> None:
        while True:
            with self._lock:
                while not self._table.has_undelivered and not self._table.end_overdue():
                    if self._is_stopped:
                        self._has_reaper = False
                        return
                    self._reaper_until_ns = self._table.next_deadline_ns()
                    left_s = (self._reaper_until_ns - self._clock_ns()) / 1e9
                    self._reaper_condition.wait(None if self._reaper_until_ns == NEVER_NS else max(0.0, left_s))
                undelivered = self._table.take_undelivered()
            for job in undelivered:
                job.call_on_done()


class Jobs:
    """Lookups, loads and stores in the background. A context manager; thread-safe. Close it before its client.

    `lookup`, `lookup_prefix`, `load` and `store` return a Job at once. It is over by its deadline, after the copy in
    progress. They raise no error of the store or of a malformed argument: the error is the result of the keys it
    concerns, and engines treat it as a miss. The end of a job is delivered once: by `on_done(job)`, called in a thread
    of this object, or, without `on_done`, by the next `finished()`.

    A load's or store's memory is in use until the job is over. `cancel` and `close` return once nothing uses it, even
    if a signal handler raises. Stores are bounded in bytes, jobs in number: keys beyond the bound, the last ones first,
    are refused with Full.

    After a call ends with Unavailable or DeadlineExceeded, the circuit breaker opens: waiting and new jobs fail with
    Unavailable at once. A call in the background tests whether the store is back: for lookups and loads the request
    that failed, for stores the next one submitted a second later. Blocks in the shared memory of local nodes are found
    and loaded meanwhile.

    In a forked child every job fails with Forked, and `close` does nothing.
    """

    def __init__(self, client: Client, settings: JobSettings | None = None, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Sends nothing. Raises ConfigError if the system does not provide its threads (four by default)."""
        chosen = settings or JobSettings()
        self._calls = Calls(client, batch_bytes=int(chosen.batch_bytes), clock_ns=clock_ns)
        self._executor = JobExecutor(self._calls, chosen, clock_ns)
        self.settings = chosen
        self._clock_ns = clock_ns
        self._process = ForkGeneration.number
        self._default_s = {
            JobKind.LOOKUP: chosen.lookup_deadline_s,
            JobKind.PREFIX: chosen.lookup_deadline_s,
            JobKind.LOAD: chosen.load_deadline_s,
            JobKind.STORE: chosen.store_deadline_s,
        }

    def lookup(
        self,
        keys: Sequence[bytes],
        *,
        request: Hashable = None,
        hold: Hold | None = None,
        deadline_s: float | None = None,
        on_done: OnDone | None = None,
    ) -> Job:
        """Find out which blocks are readable; `hold` keeps them, see `Client.match_prefix`."""
        job = self._job(JobKind.LOOKUP, request, keys, deadline_s, on_done)
        require_hold(hold)
        job.hold = hold
        return self._submit(job)

    def lookup_prefix(
        self,
        keys: Sequence[bytes],
        *,
        request: Hashable = None,
        hold: Hold | None = None,
        deadline_s: float | None = None,
        on_done: OnDone | None = None,
    ) -> Job:
        """Find out how many leading blocks are readable: the job's `leading`. `hold`: see `lookup`."""
        job = self._job(JobKind.PREFIX, request, keys, deadline_s, on_done)
        require_hold(hold)
        job.hold = hold
        return self._submit(job)

    def load(
        self,
        keys: Sequence[bytes],
        buffers: Any,
        *,
        retention: Retention | None = None,
        request: Hashable = None,
        deadline_s: float | None = None,
        budget_s: float | None = None,
        on_done: OnDone | None = None,
    ) -> Job:
        """Read values into buffers, as `Client.get_each_into`. A buffer's content is undefined unless its key
        succeeded.

        While the store is unreachable, local blocks are read and the others fail with Unavailable at once. Pass
        `budget_s` if `deadline_s` is only what is left of a longer operation: a timeout near its end does not count as
        an unreachable store.
        """
        return self._submit(self._load_job(keys, buffers, request, deadline_s, budget_s, on_done, retention))

    def _load_job(
        self,
        keys: Sequence[bytes],
        buffers: Any,
        request: Hashable,
        deadline_s: float | None,
        budget_s: float | None,
        on_done: OnDone | None,
        retention: Retention | None,
    ) -> Job:
        job = self._job(JobKind.LOAD, request, keys, deadline_s, on_done, budget_s)
        check_list(buffers, "buffers")
        check_retention(retention)
        job.values, job.sizes, job.retention = buffers, sizes_of(buffers), retention
        return job

    def store(
        self,
        keys: Sequence[bytes],
        values: Any,
        *,
        namespace: Any = "",
        parents: Sequence[bytes | None] | None = None,
        ack: str | None = None,
        retention: Retention | None = None,
        request: Hashable = None,
        deadline_s: float | None = None,
        on_done: OnDone | None = None,
    ) -> Job:
        """Store values in the background, as `Client.put_batch_from`. Values are not copied and must not change until
        the job is over."""
        job = self._job(JobKind.STORE, request, keys, deadline_s, on_done)
        check_list(values, "values")
        if parents is not None:
            check_list(parents, "parents")
        check_retention(retention)
        job.namespace, job.parents, job.ack, job.retention = namespace, parents, ack, retention
        job.values, job.sizes = values, sizes_of(values)
        return self._submit(job)

    def poll(self, request: Hashable) -> bool:
        """Return whether all jobs of the request are over; True for an unknown request."""
        return not self._executor.has(request)

    def finished(self) -> list[Job]:
        """Jobs without `on_done` that ended since the last call, in order of their ends."""
        return self._executor.take_finished() if self._process == ForkGeneration.number else []

    def stats(self) -> JobStats:
        """Counters and current state. Sends nothing. Raises Forked."""
        if self._process != ForkGeneration.number:
            raise forked()
        return self._executor.stats()

    def match_prefix(
        self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None, budget_s: float | None = None
    ) -> int:
        """Number of leading blocks that are readable now. Runs in the caller's thread.

        Returns 0 if the store does not answer within `deadline_s` (default: `lookup_deadline_s`), and at once while the
        breaker is open. `budget_s`: see `load`. `hold` keeps the blocks, see `Client.match_prefix`; not those found
        while the store is unreachable.
        """
        return self._lookup_now(JobKind.PREFIX, keys, hold, deadline_s, budget_s).leading

    def exists(
        self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None, budget_s: float | None = None
    ) -> list[bool]:
        """Return which blocks are readable now; none if the store does not answer, as `match_prefix`."""
        return self._lookup_now(JobKind.LOOKUP, keys, hold, deadline_s, budget_s).succeeded

    def load_now(
        self,
        keys: Sequence[bytes],
        buffers: Any,
        *,
        retention: Retention | None = None,
        deadline_s: float | None = None,
        budget_s: float | None = None,
    ) -> Job:
        """As `load`, in the caller's thread, for an engine with threads of its own. The job is over on return; `close`
        and `cancel` ignore it."""
        job = self._load_job(keys, buffers, None, deadline_s, budget_s, None, retention)
        if self._process != ForkGeneration.number:
            job.fail(0, len(keys), forked())
            return job
        self._executor.load_now(job)
        return job

    def release(self, hold: Hold) -> None:
        """End a hold, as `Client.release`. Does not block."""
        if self._process == ForkGeneration.number:
            self._calls.release(hold)

    def cancel(self, request: Hashable) -> int:
        """Cancel the jobs of a request and wait for them: how many were not over. Waiting jobs end now, running ones
        after their current call. Their ends are delivered as usual."""
        return self._executor.cancel(request) if self._process == ForkGeneration.number else 0

    def close(self, *, drain_s: float = 0.0) -> None:
        """Refuse new jobs with Closed, run the submitted ones for up to `drain_s`, and cancel the rest.

        On return all ends are delivered and no buffer is in use. A signal handler's exception cuts the draining short
        and is raised at the end. Not to be called from `on_done`. A second close is a no-op.
        """
        if self._process == ForkGeneration.number:
            self._executor.close(drain_s)

    def __enter__(self) -> "Jobs":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _lookup_now(self, kind: JobKind, keys: Sequence[bytes], hold: Hold | None, deadline_s: float | None, budget_s: float | None) -> Job:
        job = self._job(kind, None, keys, deadline_s, budget_s=budget_s)
        require_hold(hold)
        job.hold = hold
        if self._process != ForkGeneration.number:
            job.fail(0, len(keys), forked())
            return job
        self._executor.lookup_now(job)
        return job

    def _job(
        self,
        kind: JobKind,
        request: Hashable,
        keys: Sequence[bytes],
        deadline_s: float | None,
        on_done: OnDone | None = None,
        budget_s: float | None = None,
    ) -> Job:
        check_list(keys, "keys")
        check_hashable(request, "request")
        for name, seconds in (("deadline_s", deadline_s), ("budget_s", budget_s)):
            check_seconds(seconds, name)
        chosen_s = self._default_s[kind] if deadline_s is None else deadline_s
        deadline_ns = self._clock_ns() + int(chosen_s * 1e9)
        whole_s = chosen_s if budget_s is None else budget_s
        return Job(kind, request, keys, deadline_ns=deadline_ns, budget_s=whole_s, on_done=on_done)

    def _submit(self, job: Job) -> Job:
        if self._process != ForkGeneration.number:
            job.fail(0, len(job.keys), forked())
            job.end()
        else:
            self._executor.submit(job)
        return job


def forked() -> Forked:
    return Forked("this Jobs object belongs to the parent process: create one in the child")
