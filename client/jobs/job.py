"""Job: a batch of keys to look up, load or store, with a result per key. Job queue: first in, first out, bounded in
jobs and bytes."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import accumulate
from typing import Any

from kvstore.client.holds import Hold
from kvstore.protocol.errors import Cancelled, DeadlineExceeded, Full, InvalidArgument, KVStoreError
from kvstore.protocol.retention import Retention
from kvstore.protocol.settings import format_size

Result = bool | int | KVStoreError | None
"""Result of one key. Lookup: whether it is present. Load: size in bytes, None for a miss. Store: True if stored, False
if present already. Any: the error."""
OnDone = Callable[[Any], object]
"""Called with the job."""

log = logging.getLogger("kvstore.client")


class JobKind(Enum):
    """Operation of a job."""

    LOOKUP = "lookup"
    """Find the keys that are present."""
    PREFIX = "prefix"
    """Count the leading keys that are present; the rest count as absent."""
    LOAD = "load"
    STORE = "store"


class Job:
    """One submitted batch. Created by `Jobs`. Results are readable by any thread, and buffers are the caller's again,
    once `is_over`."""

    def __init__(
        self, kind: JobKind, request: Hashable, keys: Sequence[bytes], *, deadline_ns: int, budget_s: float, on_done: OnDone | None = None
    ) -> None:
        self.kind = kind
        self.request = request
        """The caller's id for a group of jobs, usually an engine's request id."""
        self.keys = keys
        self.values: Any = ()
        """Buffers to read or fill while the job runs; () afterwards.
        - Job.sizes"""
        self.sizes: Sequence[int] = ()
        """Bytes of each value or buffer."""
        self.namespace: Any = ""
        self.parents: Sequence[bytes | None] | None = None
        self.ack: str | None = None
        self.retention: Retention | None = None
        """Hint of a load or store."""
        self.hold: Hold | None = None
        """Hold of a lookup.
        - Job.deadline_ns"""
        self.deadline_ns = deadline_ns
        """When it is to be over."""
        self.budget_s = budget_s
        """Time from submission to deadline; for a part of a longer operation, the whole operation's time."""
        self.on_done = on_done
        self.admitted = len(keys)
        """Number of leading keys that are run; the others were refused."""
        self.answered = 0
        """Number of leading keys that have results."""
        self.results: list[Result] = [None] * len(keys)
        self.is_over = False
        self.is_here = False
        """Of a load: some of its blocks are local, so it runs for these although the store is unreachable."""
        self.left_out: frozenset[int] = frozenset()
        """Indexes of admitted keys that are not run and have results already."""
        self.trace: Any = None
        """Trace context of the submitter, if the client traces."""
        self.is_cancelled = False
        """Cancellation was requested; the job is over once its buffers are unused."""
        self._waiting: list[Callable[[], object]] = []
        """Callbacks of waiters, called when the job is over."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the admitted values."""
        return sum(self.sizes[: self.admitted])

    @property
    def error(self) -> KVStoreError | None:
        """The first error among the results; None if each key has an answer."""
        return next((result for result in self.results if isinstance(result, KVStoreError)), None)

    @property
    def succeeded(self) -> list[bool]:
        """Per key: present (LOOKUP, PREFIX), read into its buffer (LOAD), or in the store (STORE). A failure counts as
        a miss."""
        if self.kind in (JobKind.LOOKUP, JobKind.PREFIX):
            return [result is True for result in self.results]
        return [isinstance(result, int) for result in self.results]

    @property
    def leading(self) -> int:
        """Number of leading keys that succeeded."""
        succeeded = self.succeeded
        return succeeded.index(False) if False in succeeded else len(succeeded)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the job is over, up to `timeout_s`: whether it is over. A signal handler's exception ends the
        wait, not the job."""
        if not self.is_over:
            waiting = threading.Lock()
            waiting.acquire()
            self._waiting.append(waiting.release)  # `end` sets is_over before it reads this list
            if not self.is_over:
                waiting.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
            self._waiting.remove(waiting.release)
        return self.is_over

    # --- for JobTable and Calls ---

    def argument_error(self) -> InvalidArgument | None:
        """Why the job cannot be run at all."""
        if self.kind in (JobKind.LOAD, JobKind.STORE) and len(self.sizes) != len(self.keys):
            return InvalidArgument(f"{len(self.sizes)} values or buffers for {len(self.keys)} keys")
        if self.parents is not None and len(self.parents) != len(self.keys):
            return InvalidArgument(f"{len(self.parents)} parents for {len(self.keys)} keys")
        return None

    def refuse(self, first: int, error: KVStoreError) -> None:
        """Run only the keys before `first`; the others get `error`."""
        self.admitted = min(self.admitted, first)
        self.fail(first, len(self.keys), error)

    def leave_out(self, indexes: Iterable[int]) -> None:
        """Skip these keys, which keep their results."""
        self.left_out = frozenset(indexes)

    def answer(self, start: int, results: Sequence[Result], ending: tuple[type[KVStoreError], ...]) -> KVStoreError | None:
        """Set the results from key `start` on: the first error of a class in `ending`, after which the job stops."""
        self.answered = start + len(results)
        self.results[start : self.answered] = results
        return next((result for result in results if isinstance(result, ending)), None)

    def mark_local(self, here: Sequence[bool]) -> None:
        """Of a failed lookup: mark keys that are present locally. Of a prefix only leading ones count."""
        count = here.index(False) if self.kind is JobKind.PREFIX and False in here else len(here)
        for index, is_there in enumerate(here[:count]):
            if is_there:
                self.results[index] = True

    def fail(self, start: int, stop: int, error: KVStoreError) -> None:
        self.results[start:stop] = [error] * (stop - start)

    def reason_to_stop(self, now_ns: int) -> KVStoreError | None:
        """Error for the remaining keys, if the job was cancelled or its deadline has passed."""
        if self.is_cancelled:
            return Cancelled(f"the {self.kind.value} was cancelled")
        if now_ns >= self.deadline_ns:
            return DeadlineExceeded(f"the {self.kind.value} was not carried out before its deadline")
        return None

    def end(self) -> None:
        """Mark the job as over and return its buffers to the caller. Called once, by a thread that no signal handler
        interrupts."""
        self.values = ()
        self.is_over = True
        for wake in list(self._waiting):
            wake()

    def call_on_done(self) -> None:
        """Call `on_done`, if set. An exception of it is logged."""
        if self.on_done is None:
            return
        try:
            self.on_done(self)
        except Exception:
            log.exception("on_done of a %s failed", self.kind.value)


class JobQueue:
    """Bounded FIFO of jobs, with those that run. Not thread-safe."""

    def __init__(self, *, max_jobs: int, max_bytes: int | None) -> None:
        """`max_bytes` bounds the values of waiting and running jobs; None: they use only their caller's memory."""
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self.waiting: deque[Job] = deque()
        self.running: set[Job] = set()
        self.held_bytes = 0
        """Bytes of the values of all jobs here."""

    def add(self, job: Job) -> bool:
        """Enqueue the job with the leading keys that fit; the others are refused with Full. False if none fits."""
        if len(self.waiting) >= self._max_jobs:
            job.refuse(0, Full(f"the job queue is full: {len(self.waiting)} jobs wait (setting queue_jobs)"))
            return False
        if self._max_bytes is not None:
            free_bytes = self._max_bytes - self.held_bytes
            fitting = _fitting(job.sizes, free_bytes)
            if fitting < len(job.keys):
                refusal = Full(
                    f"{format_size(self.held_bytes)} wait to be stored, which leaves no space for "
                    f"{format_size(sum(job.sizes[fitting:]))} more (queue_bytes)"
                )
                job.refuse(fitting, refusal)
        if not job.admitted:
            return False
        self.held_bytes += job.held_bytes
        self.waiting.append(job)
        return True

    def take(self) -> Job | None:
        """The next job, now running."""
        if not self.waiting:
            return None
        job = self.waiting.popleft()
        self.running.add(job)
        return job

    def remove(self, job: Job) -> bool:
        """Remove a waiting job; False if it does not wait."""
        if job not in self.waiting:
            return False
        self.waiting.remove(job)
        self.held_bytes -= job.held_bytes
        return True

    def ended(self, job: Job) -> None:
        """Remove a job that ran."""
        self.running.remove(job)
        self.held_bytes -= job.held_bytes

    def overdue(self, now_ns: int) -> list[Job]:
        """Remove the waiting jobs whose deadline has passed."""
        late = [job for job in self.waiting if job.deadline_ns <= now_ns]
        for job in late:
            self.remove(job)
        return late

    def jobs(self) -> Iterator[Job]:
        yield from self.waiting
        yield from self.running

    def check_integrity(self) -> None:
        """Assert that `held_bytes` is the sum over all jobs. For tests."""
        assert self.held_bytes == sum(job.held_bytes for job in self.jobs())


def _fitting(sizes: Sequence[int], free_bytes: int) -> int:
    """Number of leading values that fit into `free_bytes`."""
    return next((index for index, total in enumerate(accumulate(sizes)) if total > free_bytes), len(sizes))
