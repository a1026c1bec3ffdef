"""One job: a batch of keys to look up, load or store, and what became of each of them.

Jobs wait for a worker in a queue: first come, first served, bounded in number and in bytes.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from enum import Enum
from itertools import accumulate
from typing import Any

from kvstore.client.holds import Hold
from kvstore.protocol.errors import Cancelled, DeadlineExceeded, Full, InvalidArgument, KVStoreError
from kvstore.protocol.settings import format_size

Result = bool | int | KVStoreError | None
"""Of one key. Of a lookup: is it there? Of a load: the value's size in bytes, None for a miss. Of a store: True if it was stored, False
if it was there already. Of each: the error that kept it from that."""
OnDone = Callable[[Any], object]
"""Called with the job."""

log = logging.getLogger("kvstore.client")


class JobKind(Enum):
    """What a job does."""

    LOOKUP = "lookup"
    """Which of the keys are there."""
    PREFIX = "prefix"
    """How many are there, from the first on: the rest is said not to be."""
    LOAD = "load"
    STORE = "store"


class Job:
    """Made by Jobs. Any thread may read the results once `is_over`; the caller may use the buffers from then on."""

    def __init__(
        self, kind: JobKind, request: Hashable, keys: Sequence[bytes], *, deadline_ns: int, budget_s: float, on_done: OnDone | None = None
    ) -> None:
        self.kind = kind
        self.request = request
        """Whose it is: the caller's name for it, as a rule an engine's request id."""
        self.keys = keys
        self.values: Any = ()
        """The memory to read or fill, for as long as the job is not over; then ()."""
        self.sizes: Sequence[int] = ()
        """Bytes of each value or buffer."""
        self.namespace: Any = ""
        self.parents: Sequence[bytes | None] | None = None
        self.ack: str | None = None
        self.hold: Hold | None = None
        """Of a lookup: in whose name it keeps what it finds."""
        self.deadline_ns = deadline_ns
        """When it is to be over."""
        self.budget_s = budget_s
        """From its submission to its deadline; of a part of something longer, all the time that this has."""
        self.on_done = on_done
        self.admitted = len(keys)
        """How many of the keys, from the first on, are carried out; the others were refused."""
        self.answered = 0
        """How many have been, from the first on."""
        self.results: list[Result] = [None] * len(keys)
        self.is_over = False
        self.is_here = False
        """Of a load: blocks of it lie on this host, so that it is carried out for these though the store cannot be reached."""
        self.left_out: frozenset[int] = frozenset()
        """Places of keys before `admitted` that are not carried out and have their results already."""
        self.trace: Any = None
        """What its caller was within when it was submitted, where the client traces: its calls are parts of that."""
        self.is_cancelled = False
        """The caller wants no more of it; it is over once nothing touches its memory any more."""
        self._waiting: list[Callable[[], object]] = []
        """To be called when it is over."""

    @property
    def held_bytes(self) -> int:
        """Of values, those admitted."""
        return sum(self.sizes[: self.admitted])

    @property
    def error(self) -> KVStoreError | None:
        """The first of its errors; None if each key has an answer."""
        return next((result for result in self.results if isinstance(result, KVStoreError)), None)

    @property
    def succeeded(self) -> list[bool]:
        """For each key: it is there (LOOKUP, PREFIX), its value is in its buffer (LOAD), the store has it (STORE). A failure is a miss."""
        if self.kind in (JobKind.LOOKUP, JobKind.PREFIX):
            return [result is True for result in self.results]
        return [isinstance(result, int) for result in self.results]

    @property
    def leading(self) -> int:
        """How many keys succeeded, from the first on without a gap."""
        succeeded = self.succeeded
        return succeeded.index(False) if False in succeeded else len(succeeded)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it is over, or the time is; whether it is over. What a signal handler raises ends the wait, not the job."""
        if not self.is_over:
            waiting = threading.Lock()
            waiting.acquire()
            self._waiting.append(waiting.release)  # whoever ends the job marks it before he looks at this list
            if not self.is_over:
                waiting.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
            self._waiting.remove(waiting.release)
        return self.is_over

    # --- for those who carry it out ---

    def flaw(self) -> InvalidArgument | None:
        """Why it cannot be carried out at all."""
        if self.kind in (JobKind.LOAD, JobKind.STORE) and len(self.sizes) != len(self.keys):
            return InvalidArgument(f"{len(self.sizes)} values or buffers for {len(self.keys)} keys")
        if self.parents is not None and len(self.parents) != len(self.keys):
            return InvalidArgument(f"{len(self.parents)} parents for {len(self.keys)} keys")
        return None

    def refuse(self, first: int, error: KVStoreError) -> None:
        """Carry out only the keys before `first`."""
        self.admitted = min(self.admitted, first)
        self.fail(first, len(self.keys), error)

    def leave_out(self, places: Iterable[int]) -> None:
        """Carry out the others only: these keep the results that they have."""
        self.left_out = frozenset(places)

    def answer(self, start: int, results: Sequence[Result], ending: tuple[type[KVStoreError], ...]) -> KVStoreError | None:
        """Of the keys from `start` on, the first that had none. The first error among them, of those that are `ending`: there is no use in
        going on."""
        self.answered = start + len(results)
        self.results[start : self.answered] = results
        return next((result for result in results if isinstance(result, ending)), None)

    def answer_here(self, here: Sequence[bool]) -> None:
        """Of a lookup that failed: these keys are there all the same. Of a prefix only the leading ones count."""
        count = here.index(False) if self.kind is JobKind.PREFIX and False in here else len(here)
        for index, is_there in enumerate(here[:count]):
            if is_there:
                self.results[index] = True

    def fail(self, start: int, stop: int, error: KVStoreError) -> None:
        self.results[start:stop] = [error] * (stop - start)

    def reason_to_stop(self, now_ns: int) -> KVStoreError | None:
        """Why what is left of it is not to be carried out any more."""
        if self.is_cancelled:
            return Cancelled(f"the {self.kind.value} was cancelled")
        if now_ns >= self.deadline_ns:
            return DeadlineExceeded(f"the {self.kind.value} was not carried out before its deadline")
        return None

    def end(self) -> None:
        """It is over, and its memory the caller's again. Once, by a thread that no signal handler strikes."""
        self.values = ()
        self.is_over = True
        for wake in list(self._waiting):
            wake()

    def tell(self) -> None:
        """Call its `on_done`, if it has one. Raises nothing: what that raises is logged."""
        if self.on_done is None:
            return
        try:
            self.on_done(self)
        except Exception:
            log.exception("on_done of a %s failed", self.kind.value)


class JobQueue:
    """Not thread-safe."""

    def __init__(self, *, max_jobs: int, max_bytes: int | None) -> None:
        """`max_bytes` bounds the values of jobs that wait or run; None: they hold no memory but their caller's."""
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self.waiting: deque[Job] = deque()
        self.running: set[Job] = set()
        self.held_bytes = 0
        """Of the values of all of them."""

    def add(self, job: Job) -> bool:
        """Let it wait, with as many of its keys, from the first on, as there is room for; the others are refused with Full. False if
        those are all."""
        if len(self.waiting) >= self._max_jobs:
            job.refuse(0, Full(f"{len(self.waiting)} jobs wait already (setting queue_jobs)"))
            return False
        if self._max_bytes is not None:
            room_bytes = self._max_bytes - self.held_bytes
            fitting = _fitting(job.sizes, room_bytes)
            if fitting < len(job.keys):
                refusal = Full(
                    f"{format_size(self.held_bytes)} wait to be stored: there is no room for "
                    f"{format_size(sum(job.sizes[fitting:]))} more (queue_bytes)"
                )
                job.refuse(fitting, refusal)
        if not job.admitted:
            return False
        self.held_bytes += job.held_bytes
        self.waiting.append(job)
        return True

    def take(self) -> Job | None:
        """The next job, under way from now on."""
        if not self.waiting:
            return None
        job = self.waiting.popleft()
        self.running.add(job)
        return job

    def remove(self, job: Job) -> bool:
        """It is not to be carried out; False if it does not wait any more."""
        if job not in self.waiting:
            return False
        self.waiting.remove(job)
        self.held_bytes -= job.held_bytes
        return True

    def ended(self, job: Job) -> None:
        """A job that was taken is over."""
        self.running.remove(job)
        self.held_bytes -= job.held_bytes

    def overdue(self, now_ns: int) -> list[Job]:
        """Those whose deadline has passed while they waited; they wait no more."""
        late = [job for job in self.waiting if job.deadline_ns <= now_ns]
        for job in late:
            self.remove(job)
        return late

    def jobs(self) -> Iterator[Job]:
        yield from self.waiting
        yield from self.running

    def check_integrity(self) -> None:
        """What the bounds are held against is what there is."""
        assert self.held_bytes == sum(job.held_bytes for job in self.jobs())


def _fitting(sizes: Sequence[int], room_bytes: int) -> int:
    """How many of the values, from the first on, fit."""
    return next((index for index, total in enumerate(accumulate(sizes)) if total > room_bytes), len(sizes))
