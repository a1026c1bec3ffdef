"""Who carries out jobs: workers for lookups and loads, workers for stores, and a clerk. All state of Jobs is here, under one lock.

The clerk tells of jobs that ended in their caller's thread, and ends those whose deadline passes while all workers wait for a store
that does not answer. Nobody holds the lock while he calls a client or an `on_done`.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Final

from kvstore.client.jobs.breaker import Breaker, State
from kvstore.client.jobs.calls import UNREACHABLE, Ask, Calls, Outcome
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import Job, Kind
from kvstore.client.jobs.lane import Lane
from kvstore.client.jobs.stats import JobStats, Tally
from kvstore.protocol.errors import Closed, KVStoreError, Unavailable
from kvstore.transfer.memory.shield import Shield

log = logging.getLogger("kvstore.client")

NEVER_NS: Final = 1 << 62


class Crew:
    """Thread-safe. What a signal handler raises comes out of its methods when they are through."""

    def __init__(self, calls: Calls, settings: JobSettings, clock_ns: Callable[[], int]) -> None:
        """Threads begin with the first job."""
        self._calls = calls
        self._settings = settings
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._reads = self._side(settings.read_workers, None)
        self._writes = self._side(settings.write_workers, int(settings.queue_bytes))
        self._live: dict[Hashable, set[Job]] = {}
        """Jobs that wait or run, by request."""
        self._finished: list[Job] = []
        self._untold: deque[Job] = deque()
        """Jobs that ended in a caller's thread, and whose `on_done` is to be called in the clerk's."""
        self._clerk_wakes = threading.Condition(self._lock)
        self._clerk_until_ns = 0
        self._job_ended = threading.Condition(self._lock)
        self._tally = Tally()
        self._threads: list[threading.Thread] = []
        self._has_clerk = False
        self._is_closing = False
        self._has_stopped = False

    def _side(self, workers: int, max_bytes: int | None) -> "_Side":
        chosen = self._settings
        breaker = Breaker(failures=chosen.breaker_failures, probe_interval_s=chosen.probe_interval_s, clock_ns=self._clock_ns)
        return _Side(Lane(max_jobs=chosen.queue_jobs, max_bytes=max_bytes), breaker, threading.Condition(self._lock), workers)

    # --- callers' threads ---

    def ask_now(self, job: Job) -> None:
        """Carry out a lookup here."""
        side = self._reads
        with Shield(), self._lock:
            refusal, epoch = self._refusal(side), side.breaker.epoch
        if refusal is not None:
            job.fail(0, len(job.keys), refusal)
        outcome = self._calls.carry_out(job) if refusal is None else None
        if isinstance(job.error, UNREACHABLE):
            job.answer_here(self._calls.here(job))
        with Shield(), self._lock:
            if outcome is not None:
                self._report(side, job, epoch, outcome)
            self._tally.ended(job, is_skipped=refusal is not None)

    def submit(self, job: Job) -> None:
        """Have it carried out, or end it at once."""
        side = self._side_of(job)
        may_be_here = side is self._reads and side.breaker.state is not State.CLOSED
        here = self._calls.here(job) if may_be_here else [False]
        with Shield(), self._lock:
            flaw = job.flaw()
            is_trial = side is self._writes and not self._is_closing and flaw is None and side.breaker.begin_probe()
            refusal = flaw or (None if is_trial else self._refusal(side))
            is_away = isinstance(refusal, Unavailable)
            job.is_here = is_away and job.kind is Kind.LOAD and all(here)
            if refusal is not None and not job.is_here:
                job.fail(0, len(job.keys), refusal)
                if is_away and job.kind is not Kind.LOAD:
                    job.answer_here(here)
                self._end_here([job], is_skipped=flaw is None)
            elif not self._queue(side, job) and is_trial:
                side.breaker.abandoned(side.breaker.epoch)

    def has(self, request: Hashable) -> bool:
        return request in self._live

    def take_finished(self) -> list[Job]:
        with Shield(), self._lock:
            finished, self._finished = self._finished, []
        return finished

    def cancel(self, request: Hashable) -> int:
        with Shield():
            with self._lock:
                jobs = list(self._live.get(request, ()))
                self._cancel(jobs)
            for job in jobs:
                job.wait()
        return len(jobs)

    def stats(self) -> JobStats:
        with Shield(), self._lock:
            lanes = (self._reads.lane, self._writes.lane)
            return JobStats(
                self._tally.snapshot(),
                waiting=sum(len(lane.waiting) for lane in lanes),
                running=sum(len(lane.running) for lane in lanes),
                held_bytes=self._writes.lane.held_bytes,
                reads=self._reads.breaker.stats(),
                writes=self._writes.breaker.stats(),
            )

    def close(self, drain_s: float) -> None:
        with Shield() as shield:
            shield.cancels(self._notify_closer)
            with self._lock:
                self._is_closing = True
                until_ns = self._clock_ns() + int(drain_s * 1e9)
                while self._live and shield.raised is None and (left_ns := until_ns - self._clock_ns()) > 0:
                    self._job_ended.wait(left_ns / 1e9)
                self._cancel([job for jobs in self._live.values() for job in jobs])
                self._has_stopped = True
                for condition in (self._reads.wakes, self._writes.wakes, self._clerk_wakes):
                    condition.notify_all()
                threads, self._threads = self._threads, []
            for thread in threads:
                thread.join()

    def _notify_closer(self) -> None:
        with self._lock:
            self._job_ended.notify_all()

    # --- with the lock ---

    def _side_of(self, job: Job) -> "_Side":
        return self._writes if job.kind is Kind.STORE else self._reads

    def _refusal(self, side: "_Side") -> KVStoreError | None:
        """Why no job is taken now."""
        if self._is_closing:
            return Closed("these jobs were closed")
        return None if side.breaker.admits() else _away()

    def _queue(self, side: "_Side", job: Job) -> bool:
        """Have it wait for a worker; False if there is no room, and it is over."""
        if not side.lane.add(job):
            self._end_here([job])
            return False
        self._live.setdefault(job.request, set()).add(job)
        self._begin_threads(side)
        side.wakes.notify()
        if job.deadline_ns < self._clerk_until_ns:
            self._clerk_wakes.notify()
        return True

    def _begin_threads(self, side: "_Side | None" = None) -> None:
        """The clerk and, of a side that has work, the workers, unless they are there."""
        if not self._has_clerk:
            self._has_clerk = True
            self._begin_thread("kvstore-jobs-clerk", self._clerk)
        if side is not None and not side.is_staffed:
            side.is_staffed = True
            for _ in range(side.workers):
                self._begin_thread("kvstore-jobs-worker", lambda: self._worker(side))

    def _begin_thread(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _cancel(self, jobs: Iterable[Job]) -> None:
        """Those that wait end here, those under way soon."""
        for job in jobs:
            job.is_cancelled = True
            if self._side_of(job).lane.remove(job):
                self._end_waiting(job)

    def _end_waiting(self, job: Job) -> None:
        """It has left its lane, and was not carried out."""
        side = self._side_of(job)
        error = job.reason_to_stop(self._clock_ns()) or _away()
        job.fail(0, job.admitted, error)
        side.breaker.abandoned(side.breaker.epoch)
        self._end_here([job])

    def _end_here(self, jobs: Iterable[Job], *, is_skipped: bool = False) -> None:
        """They are over, in a thread that must not call `on_done`."""
        for job in jobs:
            self._end(job, is_skipped=is_skipped)
            if job.on_done is not None:
                self._untold.append(job)
                self._begin_threads()
                self._clerk_wakes.notify()

    def _end(self, job: Job, *, is_skipped: bool = False) -> None:
        self._tally.ended(job, is_skipped=is_skipped)
        of_request = self._live.get(job.request)
        if of_request is not None:
            of_request.discard(job)
            if not of_request:
                del self._live[job.request]
        if job.on_done is None:
            self._finished.append(job)
        job.end()
        self._job_ended.notify_all()

    def _report(self, side: "_Side", job: Job, epoch: int, outcome: Outcome) -> None:
        """Have the breaker know how a job went; if that opens it, nobody waits for the store any more."""
        breaker = side.breaker
        if outcome is Outcome.ANSWERED:
            breaker.succeeded(epoch)
        elif outcome is Outcome.UNKNOWN:
            breaker.abandoned(epoch)
        else:
            was_closed = breaker.state is State.CLOSED
            breaker.failed(epoch)
            if was_closed and breaker.state is State.OPEN:
                self._leave_alone(side, job)

    def _leave_alone(self, side: "_Side", job: Job) -> None:
        """The store cannot be reached, as `job` found out: nobody waits for it any more, but who asks whether it is back."""
        waiting = list(side.lane.waiting)
        for other in waiting:
            side.lane.remove(other)
            other.fail(0, other.admitted, _away())
        self._end_here(waiting, is_skipped=True)
        if side is self._reads and not self._is_closing:
            side.probe = self._calls.probe(job)
            self._begin_threads(side)
            side.wakes.notify()

    # --- threads of its own ---

    def _worker(self, side: "_Side") -> None:
        while True:
            with self._lock:
                while (job := side.lane.take()) is None and not side.begin_probe(self._has_stopped):
                    if self._has_stopped:
                        return
                    side.wakes.wait(side.until_probe_s(self._clock_ns()))
                epoch = side.breaker.epoch
            if job is None:
                self._make_probe(side, epoch)
                continue
            outcome = self._calls.carry_out(job)
            with self._lock:
                side.lane.ended(job)
                if not job.is_here:
                    self._report(side, job, epoch, outcome)
                self._end(job)
            _tell(job)

    def _make_probe(self, side: "_Side", epoch: int) -> None:
        probe = side.probe
        assert probe is not None
        answer = self._calls.ask(lambda: probe(self._settings.probe_deadline_s))
        with self._lock:
            if isinstance(answer, UNREACHABLE):
                side.breaker.failed(epoch)
            else:
                side.breaker.succeeded(epoch)

    def _clerk(self) -> None:
        while True:
            with self._lock:
                while not self._untold and not self._end_overdue():
                    if self._has_stopped:
                        self._has_clerk = False
                        return
                    jobs = [job for side in (self._reads, self._writes) for job in side.lane.waiting]
                    self._clerk_until_ns = min((job.deadline_ns for job in jobs), default=NEVER_NS)
                    left_s = (self._clerk_until_ns - self._clock_ns()) / 1e9
                    self._clerk_wakes.wait(None if self._clerk_until_ns == NEVER_NS else max(0.0, left_s))
                untold = list(self._untold)
                self._untold.clear()
            for job in untold:
                _tell(job)

    def _end_overdue(self) -> bool:
        """End jobs whose deadline passed while they waited; False if there are none."""
        overdue = [job for side in (self._reads, self._writes) for job in side.lane.overdue(self._clock_ns())]
        for job in overdue:
            self._end_waiting(job)
        return bool(overdue)


class _Side:
    """Lookups and loads, or stores: what waits, whether the store is asked, and who works."""

    def __init__(self, lane: Lane, breaker: Breaker, wakes: threading.Condition, workers: int) -> None:
        self.lane = lane
        self.breaker = breaker
        self.wakes = wakes
        """Notified when there is work."""
        self.workers = workers
        self.is_staffed = False
        self.probe: Ask | None = None
        """The question that finds out whether the store is back; None: the next job does."""

    def begin_probe(self, has_stopped: bool) -> bool:
        return self.probe is not None and not has_stopped and self.breaker.begin_probe()

    def until_probe_s(self, now_ns: int) -> float | None:
        """How long a worker without a job may sleep."""
        if self.probe is None or self.breaker.state is not State.OPEN:
            return None
        return max(0.0, (self.breaker.probe_at_ns - now_ns) / 1e9)


def _away() -> Unavailable:
    return Unavailable("the store could not be reached lately, and has not been found again")


def _tell(job: Job) -> None:
    if job.on_done is None:
        return
    try:
        job.on_done(job)
    except Exception:
        log.exception("on_done of a %s failed", job.kind.value)
