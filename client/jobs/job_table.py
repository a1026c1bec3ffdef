"""State of all jobs and of the circuit breakers, and the decisions about them. Sans-I/O.

The threads of `JobExecutor` take jobs from here and report their outcome; the table wakes them through `JobWaker`. Not
thread-safe: callers hold the executor's lock.
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
"""Consecutive failures that open the breaker. Each has waited for its deadline, and so has an engine's step."""

NEVER_NS: Final = 1 << 62
AT_ONCE: Final = -1
"""Due time before any deadline."""


class JobWaker(Protocol):
    """Wake-ups of the executor's threads."""

    def wake_worker(self, side: "JobSide") -> None:
        """A job waits on that side, or a probe will be due."""

    def wake_reaper(self, due_ns: int) -> None:
        """A waiting job's deadline is `due_ns`; AT_ONCE: an `on_done` call is due."""

    def job_ended(self) -> None:
        """A job is over."""


class JobSide:
    """Queue and circuit breaker of reads (lookups and loads) or of writes (stores)."""

    def __init__(self, queue: JobQueue, breaker: CircuitBreaker, workers: int) -> None:
        self.queue = queue
        self.breaker = breaker
        self.workers = workers
        """Number of worker threads."""
        self.probe: Ask | None = None
        """Request that tests whether the store is back; None: the next job does."""

    def begin_probe(self, is_stopped: bool) -> bool:
        return self.probe is not None and not is_stopped and self.breaker.begin_probe()

    def until_probe_s(self, now_ns: int) -> float | None:
        """Longest sleep of an idle worker; None: until notified."""
        if self.probe is None or self.breaker.state is not CircuitState.OPEN:
            return None
        return max(0.0, (self.breaker.probe_at_ns - now_ns) / 1e9)


class JobTable:
    """All jobs of one `Jobs` object, in two queues with a circuit breaker each."""

    def __init__(self, settings: JobSettings, clock_ns: Callable[[], int], waker: JobWaker, make_probe: Callable[[Job], Ask]) -> None:
        """`make_probe` returns, for a job that could not reach the store, the request that tests whether it is back."""
        self._settings = settings
        self._clock_ns = clock_ns
        self._waker = waker
        self._make_probe = make_probe
        self.reads = self._side(settings.read_workers, None)
        self.writes = self._side(settings.write_workers, int(settings.queue_bytes))
        self.live: dict[Hashable, set[Job]] = {}
        """Waiting and running jobs by request."""
        self.is_closing = False
        self._finished: list[Job] = []
        self._undelivered: deque[Job] = deque()
        """Jobs that ended where `on_done` must not be called."""
        self._counters = JobCounters()

    def _side(self, workers: int, max_bytes: int | None) -> JobSide:
        chosen = self._settings
        breaker = CircuitBreaker(failures=BREAKER_FAILURES, probe_interval_s=chosen.probe_interval_s, clock_ns=self._clock_ns)
        return JobSide(JobQueue(max_jobs=chosen.queue_jobs, max_bytes=max_bytes), breaker, workers)

    # --- called by submitters ---

    def refusal(self, side: JobSide) -> KVStoreError | None:
        """Why no job is admitted now; None if one is."""
        if self.is_closing:
            return Closed("these jobs were closed")
        return None if side.breaker.admits() else store_unavailable()

    def needs_local_check(self, job: Job) -> bool:
        """Return whether the caller must check which of the job's blocks are local."""
        side = self._side_of(job)
        return side is self.reads and side.breaker.state is not CircuitState.CLOSED

    def submit(self, job: Job, here: list[bool]) -> None:
        """Enqueue the job, or end it at once. `here`: which of its blocks are local, if `needs_local_check`."""
        side = self._side_of(job)
        argument_error = job.argument_error()
        is_probe = side is self.writes and not self.is_closing and argument_error is None and side.breaker.begin_probe()
        refusal = argument_error or (None if is_probe else self.refusal(side))
        if not self._is_admitted(job, here, refusal):
            if isinstance(refusal, Unavailable) and job.kind is not JobKind.LOAD:
                job.mark_local(here)
            self._end_here([job], is_skipped=argument_error is None)
            return
        if not self._queue(side, job) and is_probe:
            side.breaker.abandoned(side.breaker.epoch)

    def begin_load(self, job: Job, here: list[bool]) -> bool:
        """Return whether a load in the caller's thread is admitted; otherwise it has all its results."""
        return self._is_admitted(job, here, job.argument_error() or self.refusal(self.reads))

    def _is_admitted(self, job: Job, here: list[bool], refusal: KVStoreError | None) -> bool:
        """Return whether the job may run. While the store is unreachable, a load is admitted for its local blocks."""
        if refusal is None:
            return True
        job.is_here = isinstance(refusal, Unavailable) and job.kind is JobKind.LOAD and any(here)
        job.fail(0, len(job.keys), refusal)
        if job.is_here:
            job.leave_out([at for at, is_there in enumerate(here) if not is_there])
        return job.is_here

    def finish_inline(self, job: Job, epoch: int, outcome: JobOutcome | None) -> None:
        """Report a job that ran in its caller's thread. `outcome` None: it was refused in `epoch`."""
        if outcome is not None and not job.is_here:
            self._report(self.reads, job, epoch, outcome)
        self._counters.ended(job, is_skipped=outcome is None)

    def take_finished(self) -> list[Job]:
        finished, self._finished = self._finished, []
        return finished

    def cancel(self, request: Hashable) -> list[Job]:
        """Cancel the jobs of a request: waiting ones end now, running ones soon."""
        jobs = list(self.live.get(request, ()))
        self._cancel(jobs)
        return jobs

    def cancel_all(self) -> None:
        self._cancel([job for of_request in self.live.values() for job in of_request])

    def stats(self) -> JobStats:
        queues = (self.reads.queue, self.writes.queue)
        return JobStats(
            self._counters.snapshot(),
            waiting=sum(len(queue.waiting) for queue in queues),
            running=sum(len(queue.running) for queue in queues),
            held_bytes=self.writes.queue.held_bytes,
            reads=self.reads.breaker.stats(),
            writes=self.writes.breaker.stats(),
        )

    # --- called by the executor's threads ---

    def finish(self, side: JobSide, job: Job, epoch: int, outcome: JobOutcome) -> None:
        """Report a job that was taken from its queue in `epoch`. The worker calls `on_done`."""
        side.queue.ended(job)
        if not job.is_here:
            self._report(side, job, epoch, outcome)
        self._end(job)

    def finish_probe(self, side: JobSide, epoch: int, answer: object) -> None:
        """Report the answer or error of a probe begun in `epoch`."""
        if isinstance(answer, UNREACHABLE):
            side.breaker.failed(epoch)
        else:
            side.breaker.succeeded(epoch)

    def end_overdue(self) -> bool:
        """End waiting jobs whose deadline has passed; False if there are none."""
        overdue = [job for side in (self.reads, self.writes) for job in side.queue.overdue(self._clock_ns())]
        for job in overdue:
            self._end_waiting(job)
        return bool(overdue)

    def next_deadline_ns(self) -> int:
        """First deadline among waiting jobs; NEVER_NS if none wait."""
        jobs = [job for side in (self.reads, self.writes) for job in side.queue.waiting]
        return min((job.deadline_ns for job in jobs), default=NEVER_NS)

    @property
    def has_undelivered(self) -> bool:
        return bool(self._undelivered)

    def take_undelivered(self) -> list[Job]:
        """Drain the jobs whose `on_done` is due."""
        undelivered = list(self._undelivered)
        self._undelivered.clear()
        return undelivered

    # --- internals ---

    def _side_of(self, job: Job) -> JobSide:
        return self.writes if job.kind is JobKind.STORE else self.reads

    def _queue(self, side: JobSide, job: Job) -> bool:
        """Enqueue the job; False if the queue is full, and the job is over."""
        if not side.queue.add(job):
            self._end_here([job])
            return False
        self.live.setdefault(job.request, set()).add(job)
        self._waker.wake_worker(side)
        self._waker.wake_reaper(job.deadline_ns)
        return True

    def _cancel(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.is_cancelled = True
            if self._side_of(job).queue.remove(job):
                self._end_waiting(job)

    def _end_waiting(self, job: Job) -> None:
        """End a job that left its queue without running."""
        side = self._side_of(job)
        error = job.reason_to_stop(self._clock_ns()) or store_unavailable()
        job.fail(0, job.admitted, error)
        if side is self.writes:  # while the store is unreachable, a waiting store is the probe; reads have a separate probe
            side.breaker.abandoned(side.breaker.epoch)
        self._end_here([job])

    def _end_here(self, jobs: Iterable[Job], *, is_skipped: bool = False) -> None:
        """End jobs where `on_done` must not be called; the reaper calls it."""
        for job in jobs:
            self._end(job, is_skipped=is_skipped)
            if job.on_done is not None:
                self._undelivered.append(job)
                self._waker.wake_reaper(AT_ONCE)

    def _end(self, job: Job, *, is_skipped: bool = False) -> None:
        self._counters.ended(job, is_skipped=is_skipped)
        of_request = self.live.get(job.request)
        if of_request is not None:
            of_request.discard(job)
            if not of_request:
                del self.live[job.request]
        if job.on_done is None:
            self._finished.append(job)
        job.end()
        self._waker.job_ended()

    def _report(self, side: JobSide, job: Job, epoch: int, outcome: JobOutcome) -> None:
        """Report a job's outcome to the breaker; if that opens it, fail the waiting jobs."""
        breaker = side.breaker
        if outcome is JobOutcome.ANSWERED:
            breaker.succeeded(epoch)
        elif outcome is JobOutcome.UNKNOWN:
            breaker.abandoned(epoch)
        else:
            was_closed = breaker.state is CircuitState.CLOSED
            breaker.failed(epoch)
            if was_closed and breaker.state is CircuitState.OPEN:
                self._fail_waiting(side, job)

    def _fail_waiting(self, side: JobSide, job: Job) -> None:
        """Fail all jobs that wait, because `job` could not reach the store, and set up the probe."""
        waiting = list(side.queue.waiting)
        for other in waiting:
            side.queue.remove(other)
            other.fail(0, other.admitted, store_unavailable())
        self._end_here(waiting, is_skipped=True)
        if side is self.reads and not self.is_closing:
            side.probe = self._make_probe(job)
            self._waker.wake_worker(side)


def store_unavailable() -> Unavailable:
    return Unavailable("the store could not be reached by an earlier call; calls are skipped until a probe succeeds")
