"""What jobs there are, what becomes of them, and whether the store is asked: all that carrying them out is decided by. Sans-I/O.

The threads of `Crew` take jobs from here and report their outcome; `JobWaker` tells them what to do. Not thread-safe: they hold a lock.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Final, Protocol

from kvstore.client.jobs.circuit_breaker import CircuitBreaker, CircuitState
from kvstore.client.jobs.client_calls import UNREACHABLE, Ask, JobOutcome
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import Job, JobKind, JobQueue
from kvstore.client.jobs.stats import JobCounters, JobStats
from kvstore.protocol.errors import Closed, KVStoreError, Unavailable

BREAKER_FAILURES: Final = 1
"""Calls in a row that end with Unavailable or DeadlineExceeded before all are answered without asking the store: each has waited for
its deadline, and so has an engine's step."""

NEVER_NS: Final = 1 << 62
AT_ONCE: Final = -1
"""Before any deadline."""


class JobWaker(Protocol):
    """Those who carry jobs out."""

    def work(self, side: "JobSide") -> None:
        """A job waits there, or a probe is due some time."""

    def clerk(self, due_ns: int) -> None:
        """A job is due then that waits; or, AT_ONCE, somebody is to be told of his job's end."""

    def ended(self) -> None:
        """A job is over."""


class JobSide:
    """Lookups and loads, or stores: what waits, and whether the store is asked."""

    def __init__(self, lane: JobQueue, breaker: CircuitBreaker, workers: int) -> None:
        self.lane = lane
        self.breaker = breaker
        self.workers = workers
        """How many jobs may run at once."""
        self.probe: Ask | None = None
        """The question that finds out whether the store is back; None: the next job does."""

    def begin_probe(self, has_stopped: bool) -> bool:
        return self.probe is not None and not has_stopped and self.breaker.begin_probe()

    def until_probe_s(self, now_ns: int) -> float | None:
        """How long a worker without a job may sleep."""
        if self.probe is None or self.breaker.state is not CircuitState.OPEN:
            return None
        return max(0.0, (self.breaker.probe_at_ns - now_ns) / 1e9)


class JobTable:
    """See the module."""

    def __init__(self, settings: JobSettings, clock_ns: Callable[[], int], wakes: JobWaker, make_probe: Callable[[Job], Ask]) -> None:
        """`make_probe`: of a job that could not reach the store, the question that finds out whether it is back."""
        self._settings = settings
        self._clock_ns = clock_ns
        self._wakes = wakes
        self._make_probe = make_probe
        self.reads = self._side(settings.read_workers, None)
        self.writes = self._side(settings.write_workers, int(settings.queue_bytes))
        self.live: dict[Hashable, set[Job]] = {}
        """Jobs that wait or run, by request."""
        self.is_closing = False
        self._finished: list[Job] = []
        self._untold: deque[Job] = deque()
        """Jobs that ended where their `on_done` must not be called."""
        self._tally = JobCounters()

    def _side(self, workers: int, max_bytes: int | None) -> JobSide:
        chosen = self._settings
        breaker = CircuitBreaker(failures=BREAKER_FAILURES, probe_interval_s=chosen.probe_interval_s, clock_ns=self._clock_ns)
        return JobSide(JobQueue(max_jobs=chosen.queue_jobs, max_bytes=max_bytes), breaker, workers)

    # --- from those who ask ---

    def refusal(self, side: JobSide) -> KVStoreError | None:
        """Why no job is taken now."""
        if self.is_closing:
            return Closed("these jobs were closed")
        return None if side.breaker.admits() else away()

    def may_be_here(self, job: Job) -> bool:
        """Whether it makes a difference now if its blocks are on this host."""
        side = self._side_of(job)
        return side is self.reads and side.breaker.state is not CircuitState.CLOSED

    def submit(self, job: Job, here: list[bool]) -> None:
        """Have it carried out, or end it at once. `here`: which of its blocks are on this host, if that makes a difference."""
        side = self._side_of(job)
        flaw = job.flaw()
        is_trial = side is self.writes and not self.is_closing and flaw is None and side.breaker.begin_probe()
        refusal = flaw or (None if is_trial else self.refusal(side))
        if not self._is_admitted(job, here, refusal):
            if isinstance(refusal, Unavailable) and job.kind is not JobKind.LOAD:
                job.answer_here(here)
            self._end_here([job], is_skipped=flaw is None)
            return
        if not self._queue(side, job) and is_trial:
            side.breaker.abandoned(side.breaker.epoch)

    def begin_load(self, job: Job, here: list[bool]) -> bool:
        """Whether a load that its caller carries out is to be; else it has all its results."""
        return self._is_admitted(job, here, job.flaw() or self.refusal(self.reads))

    def _is_admitted(self, job: Job, here: list[bool], refusal: KVStoreError | None) -> bool:
        """Whether it is to be carried out. Of a load that is refused because the store is away what lies on this host is read."""
        if refusal is None:
            return True
        job.is_here = isinstance(refusal, Unavailable) and job.kind is JobKind.LOAD and any(here)
        job.fail(0, len(job.keys), refusal)
        if job.is_here:
            job.leave_out([at for at, is_there in enumerate(here) if not is_there])
        return job.is_here

    def asked(self, job: Job, epoch: int, outcome: JobOutcome | None) -> None:
        """A job that its caller carried out is over; None: it was refused in that epoch."""
        if outcome is not None and not job.is_here:
            self._report(self.reads, job, epoch, outcome)
        self._tally.ended(job, is_skipped=outcome is None)

    def take_finished(self) -> list[Job]:
        finished, self._finished = self._finished, []
        return finished

    def cancel(self, request: Hashable) -> list[Job]:
        """Those of a request: what waits ends now, what runs soon."""
        jobs = list(self.live.get(request, ()))
        self._cancel(jobs)
        return jobs

    def cancel_all(self) -> None:
        self._cancel([job for of_request in self.live.values() for job in of_request])

    def stats(self) -> JobStats:
        lanes = (self.reads.lane, self.writes.lane)
        return JobStats(
            self._tally.snapshot(),
            waiting=sum(len(lane.waiting) for lane in lanes),
            running=sum(len(lane.running) for lane in lanes),
            held_bytes=self.writes.lane.held_bytes,
            reads=self.reads.breaker.stats(),
            writes=self.writes.breaker.stats(),
        )

    # --- from those who carry out ---

    def carried_out(self, side: JobSide, job: Job, epoch: int, outcome: JobOutcome) -> None:
        """A job that was taken from its lane in `epoch` is over; whoever carried it out tells of it."""
        side.lane.ended(job)
        if not job.is_here:
            self._report(side, job, epoch, outcome)
        self._end(job)

    def probed(self, side: JobSide, epoch: int, answer: object) -> None:
        """A probe begun in `epoch` has ended with that answer, or error."""
        if isinstance(answer, UNREACHABLE):
            side.breaker.failed(epoch)
        else:
            side.breaker.succeeded(epoch)

    def end_overdue(self) -> bool:
        """End jobs whose deadline passed while they waited; False if there are none."""
        overdue = [job for side in (self.reads, self.writes) for job in side.lane.overdue(self._clock_ns())]
        for job in overdue:
            self._end_waiting(job)
        return bool(overdue)

    def next_deadline_ns(self) -> int:
        """Of the jobs that wait, the first; NEVER_NS if there are none."""
        jobs = [job for side in (self.reads, self.writes) for job in side.lane.waiting]
        return min((job.deadline_ns for job in jobs), default=NEVER_NS)

    @property
    def has_untold(self) -> bool:
        return bool(self._untold)

    def take_untold(self) -> list[Job]:
        """Those whose `on_done` is to be called now."""
        untold = list(self._untold)
        self._untold.clear()
        return untold

    # --- in here ---

    def _side_of(self, job: Job) -> JobSide:
        return self.writes if job.kind is JobKind.STORE else self.reads

    def _queue(self, side: JobSide, job: Job) -> bool:
        """Have it wait for a worker; False if there is no room, and it is over."""
        if not side.lane.add(job):
            self._end_here([job])
            return False
        self.live.setdefault(job.request, set()).add(job)
        self._wakes.work(side)
        self._wakes.clerk(job.deadline_ns)
        return True

    def _cancel(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.is_cancelled = True
            if self._side_of(job).lane.remove(job):
                self._end_waiting(job)

    def _end_waiting(self, job: Job) -> None:
        """It has left its lane, and was not carried out."""
        side = self._side_of(job)
        error = job.reason_to_stop(self._clock_ns()) or away()
        job.fail(0, job.admitted, error)
        if side is self.writes:  # what waits there while the store is away is the trial; lookups and loads have a probe, which is no job
            side.breaker.abandoned(side.breaker.epoch)
        self._end_here([job])

    def _end_here(self, jobs: Iterable[Job], *, is_skipped: bool = False) -> None:
        """They are over, where `on_done` must not be called."""
        for job in jobs:
            self._end(job, is_skipped=is_skipped)
            if job.on_done is not None:
                self._untold.append(job)
                self._wakes.clerk(AT_ONCE)

    def _end(self, job: Job, *, is_skipped: bool = False) -> None:
        self._tally.ended(job, is_skipped=is_skipped)
        of_request = self.live.get(job.request)
        if of_request is not None:
            of_request.discard(job)
            if not of_request:
                del self.live[job.request]
        if job.on_done is None:
            self._finished.append(job)
        job.end()
        self._wakes.ended()

    def _report(self, side: JobSide, job: Job, epoch: int, outcome: JobOutcome) -> None:
        """Have the breaker know how a job went; if that opens it, nobody waits for the store any more."""
        breaker = side.breaker
        if outcome is JobOutcome.ANSWERED:
            breaker.succeeded(epoch)
        elif outcome is JobOutcome.UNKNOWN:
            breaker.abandoned(epoch)
        else:
            was_closed = breaker.state is CircuitState.CLOSED
            breaker.failed(epoch)
            if was_closed and breaker.state is CircuitState.OPEN:
                self._leave_alone(side, job)

    def _leave_alone(self, side: JobSide, job: Job) -> None:
        """The store cannot be reached, as `job` found out: nobody waits for it any more, but who asks whether it is back."""
        waiting = list(side.lane.waiting)
        for other in waiting:
            side.lane.remove(other)
            other.fail(0, other.admitted, away())
        self._end_here(waiting, is_skipped=True)
        if side is self.reads and not self.is_closing:
            side.probe = self._make_probe(job)
            self._wakes.work(side)


def away() -> Unavailable:
    return Unavailable("the store could not be reached lately, and has not been found again")
