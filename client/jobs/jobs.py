"""Jobs over a Client, and the threads that carry them out: workers for lookups and loads, workers for stores, and a clerk.

What the threads do is decided by the board. All are there before there is a job: one that was refused for want of a thread would be carried
out all the same by whichever there is. The clerk tells of jobs that ended in their caller's thread, and ends those whose deadline passes
while all workers wait for a store that does not answer. Nobody holds the lock while he calls a client or an `on_done`.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from kvstore.client.core.arguments import check_list, check_seconds
from kvstore.client.core.forks import ForkGeneration
from kvstore.client.holds import Hold, require_hold
from kvstore.client.jobs.client_calls import UNREACHABLE, Calls, sizes_of
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import Job, JobKind, OnDone
from kvstore.client.jobs.job_table import NEVER_NS, JobSide, JobTable
from kvstore.client.jobs.stats import JobStats
from kvstore.client.sync import Client
from kvstore.protocol.errors import Forked
from kvstore.rpc.thread_pools import start_error
from kvstore.transfer.memory.signal_safety import Shield


class JobExecutor:
    """Thread-safe. What a signal handler raises comes out of its methods when they are through."""

    def __init__(self, calls: Calls, settings: JobSettings, clock_ns: Callable[[], int]) -> None:
        """Its threads are there then. Raises ConfigError: the system does not give them."""
        self._calls = calls
        self._settings = settings
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._board = JobTable(settings, clock_ns, self, calls.probe)
        self._worker_wakes = {side: threading.Condition(self._lock) for side in (self._board.reads, self._board.writes)}
        """Notified when there is work."""
        self._clerk_wakes = threading.Condition(self._lock)
        self._clerk_until_ns = 0
        self._job_ended = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._has_clerk = False
        self._has_stopped = False
        try:
            with Shield(), self._lock:
                self._begin_all()
        except BaseException:
            self.close(0.0)
            raise

    # --- callers' threads ---

    def ask_now(self, job: Job) -> None:
        """Carry out a lookup here."""
        board, side = self._board, self._board.reads
        with Shield(), self._lock:
            refusal, epoch = board.refusal(side), side.breaker.epoch
        if refusal is not None:
            job.fail(0, len(job.keys), refusal)
        outcome = self._calls.carry_out(job) if refusal is None else None
        if isinstance(job.error, UNREACHABLE):
            job.answer_here(self._calls.here(job))
        with Shield(), self._lock:
            board.asked(job, epoch, outcome)

    def load_now(self, job: Job) -> None:
        """Carry out a load here."""
        board, side = self._board, self._board.reads
        here = self._calls.here(job) if board.may_be_here(job) else [False]
        with Shield(), self._lock:
            is_admitted, epoch = board.begin_load(job, here), side.breaker.epoch
        outcome = self._calls.carry_out(job) if is_admitted else None
        with Shield(), self._lock:
            board.asked(job, epoch, outcome)

    def submit(self, job: Job) -> None:
        """Have it carried out, or end it at once."""
        self._calls.note_trace(job)
        here = self._calls.here(job) if self._board.may_be_here(job) else [False]
        with Shield(), self._lock:
            self._board.submit(job, here)

    def has(self, request: Hashable) -> bool:
        return request in self._board.live

    def take_finished(self) -> list[Job]:
        with Shield(), self._lock:
            return self._board.take_finished()

    def cancel(self, request: Hashable) -> int:
        with Shield():
            with self._lock:
                jobs = self._board.cancel(request)
            for job in jobs:
                job.wait()
        return len(jobs)

    def stats(self) -> JobStats:
        with Shield(), self._lock:
            return self._board.stats()

    def close(self, drain_s: float) -> None:
        with Shield() as shield:
            shield.cancels(self._notify_closer)
            with self._lock:
                self._board.is_closing = True
                until_ns = self._clock_ns() + int(drain_s * 1e9)
                while self._board.live and shield.raised is None and (left_ns := until_ns - self._clock_ns()) > 0:
                    self._job_ended.wait(left_ns / 1e9)
                self._board.cancel_all()
                self._has_stopped = True
                for condition in (*self._worker_wakes.values(), self._clerk_wakes):
                    condition.notify_all()
                threads, self._threads = self._threads, []
            for thread in threads:
                thread.join()

    def _notify_closer(self) -> None:
        with self._lock:
            self._job_ended.notify_all()

    # --- what the board says, with the lock ---

    def work(self, side: JobSide) -> None:
        self._worker_wakes[side].notify()

    def clerk(self, due_ns: int) -> None:
        if not self._has_clerk:  # after `close`; where no thread is to be had, it is told with the next one
            with contextlib.suppress(RuntimeError, MemoryError):
                self._begin_clerk()
        elif due_ns < self._clerk_until_ns:
            self._clerk_wakes.notify()

    def ended(self) -> None:
        self._job_ended.notify_all()

    # --- threads of its own ---

    def _begin_all(self) -> None:
        sides = list(self._worker_wakes)
        try:
            self._begin_clerk()
            for side in sides:
                for _ in range(side.workers):
                    self._begin_thread("kvstore-jobs-worker", partial(self._worker, side))
        except (RuntimeError, MemoryError) as error:
            raise start_error(1 + sum(side.workers for side in sides), "kvstore-jobs", error) from error

    def _begin_clerk(self) -> None:
        self._begin_thread("kvstore-jobs-clerk", self._clerk)
        self._has_clerk = True

    def _begin_thread(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _worker(self, side: JobSide) -> None:
        while True:
            with self._lock:
                while (job := side.lane.take()) is None and not side.begin_probe(self._has_stopped):
                    if self._has_stopped:
                        return
                    self._worker_wakes[side].wait(side.until_probe_s(self._clock_ns()))
                epoch = side.breaker.epoch
            if job is None:
                self._make_probe(side, epoch)
                continue
            outcome = self._calls.carry_out(job)
            with self._lock:
                self._board.carried_out(side, job, epoch, outcome)
            job.tell()

    def _make_probe(self, side: JobSide, epoch: int) -> None:
        probe = side.probe
        assert probe is not None
        answer = self._calls.ask(lambda: probe(self._settings.probe_deadline_s))
        with self._lock:
            self._board.probed(side, epoch, answer)

    def _clerk(self) -> None:
        while True:
            with self._lock:
                while not self._board.has_untold and not self._board.end_overdue():
                    if self._has_stopped:
                        self._has_clerk = False
                        return
                    self._clerk_until_ns = self._board.next_deadline_ns()
                    left_s = (self._clerk_until_ns - self._clock_ns()) / 1e9
                    self._clerk_wakes.wait(None if self._clerk_until_ns == NEVER_NS else max(0.0, left_s))
                untold = self._board.take_untold()
            for job in untold:
                job.tell()


class Jobs:
    """Lookups, loads and stores that somebody else carries out. A context manager; threads may share it. Close it before its client.

    `lookup`, `lookup_prefix`, `load` and `store` return at once with a Job, which is over by its deadline (a copy under way then is
    finished first). Nothing here raises an error of the store, nor of a malformed argument: it is the result of the keys that it concerns,
    and what an engine makes of it is a miss. A job's end is told once: by `on_done(job)`, called in a thread of this object's, or, for jobs
    without one, by the next `finished()`, where they are kept until it is called.

    Memory that a load fills or a store reads is used until the job is over; `cancel` and `close` return once nothing uses it, whatever
    a signal handler raises meanwhile. Stores are bounded in bytes, jobs in number: what is over that is refused with Full, key by key,
    the last ones first.

    When the store cannot be reached (a call ends with Unavailable or DeadlineExceeded) all that waits or comes is answered with Unavailable
    at once, until one call in the background has found it again: for lookups and loads the question that failed, for stores the next one
    that is submitted a second later. What nodes of this host show in shared memory is found and loaded all the same: that asks nobody.

    In a forked child all is answered with Forked, and `close` does nothing.
    """

    def __init__(self, client: Client, settings: JobSettings | None = None, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Asks nobody. Raises ConfigError: the system does not give its threads, four."""
        chosen = settings or JobSettings()
        self._calls = Calls(client, batch_bytes=int(chosen.batch_bytes), clock_ns=clock_ns)
        self._crew = JobExecutor(self._calls, chosen, clock_ns)
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
        """Find out which of the blocks can be read. They stay in the name of `hold`, if it is given: see
        `Client.match_prefix`."""
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
        """Find out how many of the blocks can be read, from the first on without a gap: the job's `leading`. `hold`: see `lookup`."""
        job = self._job(JobKind.PREFIX, request, keys, deadline_s, on_done)
        require_hold(hold)
        job.hold = hold
        return self._submit(job)

    def load(
        self,
        keys: Sequence[bytes],
        buffers: Any,
        *,
        request: Hashable = None,
        deadline_s: float | None = None,
        budget_s: float | None = None,
        on_done: OnDone | None = None,
    ) -> Job:
        """Read values into buffers, as `Client.get_each_into`. The content of a buffer is undefined unless its key succeeded. While the
        store cannot be reached, blocks that lie on this host are read, and the others are Unavailable at once. Where `deadline_s` is
        what others have left of `budget_s`, a store that is silent for the last of that does not count as one that cannot be reached."""
        return self._submit(self._load_job(keys, buffers, request, deadline_s, budget_s, on_done))

    def _load_job(
        self,
        keys: Sequence[bytes],
        buffers: Any,
        request: Hashable,
        deadline_s: float | None,
        budget_s: float | None,
        on_done: OnDone | None,
    ) -> Job:
        job = self._job(JobKind.LOAD, request, keys, deadline_s, on_done, budget_s)
        check_list(buffers, "buffers")
        job.values, job.sizes = buffers, sizes_of(buffers)
        return job

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
        job = self._job(JobKind.STORE, request, keys, deadline_s, on_done)
        check_list(values, "values")
        if parents is not None:
            check_list(parents, "parents")
        job.namespace, job.parents, job.ack = namespace, parents, ack
        job.values, job.sizes = values, sizes_of(values)
        return self._submit(job)

    def poll(self, request: Hashable) -> bool:
        """Are all jobs of the request over? True, too, of one that has none."""
        return not self._crew.has(request)

    def finished(self) -> list[Job]:
        """Those without `on_done` that have ended since the last call, in the order of their ends."""
        return self._crew.take_finished() if self._process == ForkGeneration.number else []

    def stats(self) -> JobStats:
        """What has been done so far. Asks nobody. Raises Forked."""
        if self._process != ForkGeneration.number:
            raise forked()
        return self._crew.stats()

    def match_prefix(
        self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None, budget_s: float | None = None
    ) -> int:
        """How many of the blocks, from the first on without a gap, can be read now; 0 if the store does not say so in `deadline_s`
        (default: `lookup_deadline_s`), and at once where it could not be reached lately. Carried out in the caller's thread.
        `budget_s`: see `load`. `hold`: they stay in its name, see `Client.match_prefix`; not those found while the store cannot be
        reached."""
        return self._ask_now(JobKind.PREFIX, keys, hold, deadline_s, budget_s).leading

    def exists(
        self, keys: Sequence[bytes], *, hold: Hold | None = None, deadline_s: float | None = None, budget_s: float | None = None
    ) -> list[bool]:
        """Which of the blocks can be read now; none, as `match_prefix`."""
        return self._ask_now(JobKind.LOOKUP, keys, hold, deadline_s, budget_s).succeeded

    def load_now(self, keys: Sequence[bytes], buffers: Any, *, deadline_s: float | None = None, budget_s: float | None = None) -> Job:
        """As `load`, carried out in the caller's thread: for an engine that has threads of its own. The job is over on return, and is not
        waited for by `close`, nor ended by `cancel`."""
        job = self._load_job(keys, buffers, None, deadline_s, budget_s, None)
        if self._process != ForkGeneration.number:
            job.fail(0, len(keys), forked())
            return job
        self._crew.load_now(job)
        return job

    def release(self, hold: Hold) -> None:
        """End a hold, as `Client.release`. Waits for nobody."""
        if self._process == ForkGeneration.number:
            self._calls.release(hold)

    def cancel(self, request: Hashable) -> int:
        """End the jobs of a request: how many were not over. Those that wait end now; those under way when the call in which they are
        does, by its deadline, and are waited for. They are told as all others are."""
        return self._crew.cancel(request) if self._process == ForkGeneration.number else 0

    def close(self, *, drain_s: float = 0.0) -> None:
        """Take no more jobs (they are answered with Closed), let those submitted be carried out for up to `drain_s`, and cancel the
        rest. All have been told, and nothing uses their memory, on return. What a signal handler raises ends the draining early, and is
        raised at the end. Not from `on_done`. A second close is a no-op."""
        if self._process == ForkGeneration.number:
            self._crew.close(drain_s)

    def __enter__(self) -> "Jobs":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _ask_now(self, kind: JobKind, keys: Sequence[bytes], hold: Hold | None, deadline_s: float | None, budget_s: float | None) -> Job:
        job = self._job(kind, None, keys, deadline_s, budget_s=budget_s)
        require_hold(hold)
        job.hold = hold
        if self._process != ForkGeneration.number:
            job.fail(0, len(keys), forked())
            return job
        self._crew.ask_now(job)
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
            self._crew.submit(job)
        return job


def forked() -> Forked:
    return Forked("these jobs are those of the process that this one was forked from: make some here")
