"""Promises of job_table.py, without threads, tasks or a client: what a test says happens in the order in which it says so."""

import pytest

from kvstore.client.jobs.circuit_breaker import CircuitState
from kvstore.client.jobs.client_calls import JobOutcome
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import Job, JobKind
from kvstore.client.jobs.job_table import NEVER_NS, JobSide, JobTable
from kvstore.protocol.errors import Cancelled, DeadlineExceeded, Unavailable
from kvstore.protocol.settings import Size
from tests.client.jobs.clock import Clock
from tests.client.jobs.made import job

SETTINGS = JobSettings(queue_bytes=Size(100), queue_jobs=2, probe_interval_s=10.0)


class Scene:
    """Notes what the board says."""

    def __init__(self, settings: JobSettings = SETTINGS) -> None:
        self.clock = Clock()
        self.said: list[object] = []
        self.table = JobTable(settings, self.clock, self, lambda job: lambda deadline_s: job)

    def wake_worker(self, side: JobSide) -> None:
        self.said.append("writes" if side is self.table.writes else "reads")

    def wake_reaper(self, due_ns: int) -> None:
        self.said.append(due_ns)

    def job_ended(self) -> None:
        self.said.append("ended")

    def submit(self, made: Job, *here: bool) -> Job:
        self.table.submit(made, [*here] or [False])
        return made

    def run(self, side: JobSide, outcome: JobOutcome) -> Job:
        """Carry out the next job of a side."""
        taken = side.queue.take()
        assert isinstance(taken, Job)
        if outcome is JobOutcome.UNREACHABLE:
            taken.fail(0, len(taken.keys), Unavailable("unreachable"))
        else:
            taken.answer(0, [True] * len(taken.keys), ())
        self.table.finish(side, taken, side.breaker.epoch, outcome)
        return taken


def state(side: JobSide) -> CircuitState:
    return side.breaker.state


@pytest.fixture
def at() -> Scene:
    return Scene()


def test_a_job_waits_is_carried_out_and_is_told_of(at: Scene) -> None:
    made = at.submit(job(deadline_ns=77))
    assert at.said == ["writes", 77]
    assert at.table.live == {"request": {made}}
    assert (at.table.stats().waiting, at.table.next_deadline_ns()) == (1, 77)
    assert at.run(at.table.writes, JobOutcome.ANSWERED) is made
    assert (made.is_over, at.table.live, at.table.next_deadline_ns()) == (True, {}, NEVER_NS)
    assert at.said[2:] == ["ended"]
    assert (at.table.take_finished(), at.table.take_finished()) == ([made], [])


def test_jobs_end_at_their_deadline_and_when_they_are_cancelled(at: Scene) -> None:
    late, waiting, running = (
        job(JobKind.LOOKUP, deadline_ns=at.clock() + due, request=name) for due, name in ((1, "l"), (9, "w"), (9, "r"))
    )
    at.submit(running)
    assert at.table.reads.queue.take() is running
    at.submit(late), at.submit(waiting)
    assert not at.table.end_overdue()
    at.clock.now_ns += 2
    assert at.table.end_overdue()
    assert isinstance(late.error, DeadlineExceeded)
    assert at.table.cancel("w") == [waiting]
    assert isinstance(waiting.error, Cancelled)
    at.table.cancel_all()
    assert (running.is_cancelled, running.is_over) == (True, False)


def test_the_first_failure_ends_what_waits_and_asks_for_a_probe(at: Scene) -> None:
    at.submit(job(JobKind.LOAD))
    waiting = at.submit(job(JobKind.LOOKUP))
    failed = at.run(at.table.reads, JobOutcome.UNREACHABLE)
    assert isinstance(waiting.error, Unavailable)
    assert at.said[-2:] == ["reads", "ended"]
    side = at.table.reads
    assert (side.breaker.state, side.until_probe_s(at.clock())) == (CircuitState.OPEN, 10.0)
    assert not side.begin_probe(False)
    assert at.table.needs_local_check(waiting)
    assert isinstance(at.submit(job(JobKind.LOOKUP), True, False, True).results[1], Unavailable)
    here = at.submit(job(JobKind.LOAD), True, True, True)
    assert not here.is_over, "all of it is on this host"
    assert at.run(side, JobOutcome.UNREACHABLE) is here
    partly = at.submit(job(JobKind.LOAD), True, False, True)
    assert (partly.is_over, partly.left_out) == (False, frozenset({1}))
    assert isinstance(partly.results[1], Unavailable)
    assert at.run(side, JobOutcome.ANSWERED) is partly
    assert isinstance(at.submit(job(JobKind.LOAD), False, False, False).error, Unavailable), "none of it is"
    assert state(side) is CircuitState.OPEN, "what is here says nothing of the store"
    at.clock.advance(10)
    assert side.begin_probe(False)
    assert side.until_probe_s(at.clock()) is None
    assert side.probe is not None
    assert side.probe(1.0) is failed
    at.table.finish_probe(side, side.breaker.epoch, Unavailable("still"))
    assert state(side) is CircuitState.OPEN
    at.clock.advance(10)
    assert side.begin_probe(False)
    at.table.finish_probe(side, side.breaker.epoch, 3)
    assert state(side) is CircuitState.CLOSED
