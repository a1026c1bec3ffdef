"""Threads that carry out jobs: workers for lookups and loads, workers for stores, and a clerk. What they do is decided by the board. All
are there before there is a job: one that was refused for want of a thread would be carried out all the same by whichever there is.

The clerk tells of jobs that ended in their caller's thread, and ends those whose deadline passes while all workers wait for a store
that does not answer. Nobody holds the lock while he calls a client or an `on_done`.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable
from functools import partial

from kvstore.client.jobs.board import NEVER_NS, Board, Side
from kvstore.client.jobs.calls import UNREACHABLE, Calls
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import BaseJob, Job
from kvstore.client.jobs.stats import JobStats
from kvstore.rpc.workers import not_given
from kvstore.transfer.memory.signal_safety import Shield


class Crew:
    """Thread-safe. What a signal handler raises comes out of its methods when they are through."""

    def __init__(self, calls: Calls, settings: JobSettings, clock_ns: Callable[[], int]) -> None:
        """Its threads are there then. Raises ConfigError: the system does not give them."""
        self._calls = calls
        self._settings = settings
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._board = Board(settings, clock_ns, self, calls.probe)
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

    def ask_now(self, job: BaseJob) -> None:
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

    def submit(self, job: BaseJob) -> None:
        """Have it carried out, or end it at once."""
        self._calls.note_trace(job)
        here = self._calls.here(job) if self._board.may_be_here(job) else [False]
        with Shield(), self._lock:
            self._board.submit(job, here)

    def has(self, request: Hashable) -> bool:
        return request in self._board.live

    def take_finished(self) -> list[BaseJob]:
        with Shield(), self._lock:
            return self._board.take_finished()

    def cancel(self, request: Hashable) -> int:
        with Shield():
            with self._lock:
                jobs = self._board.cancel(request)
            for job in jobs:
                assert isinstance(job, Job)
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

    def work(self, side: Side) -> None:
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
            raise not_given(1 + sum(side.workers for side in sides), "kvstore-jobs", error) from error

    def _begin_clerk(self) -> None:
        self._begin_thread("kvstore-jobs-clerk", self._clerk)
        self._has_clerk = True

    def _begin_thread(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _worker(self, side: Side) -> None:
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

    def _make_probe(self, side: Side, epoch: int) -> None:
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
