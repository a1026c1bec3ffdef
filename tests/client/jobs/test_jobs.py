"""Promises of jobs.py, on a real cluster. A barrier before a call keeps a worker busy for as long as a test needs it to be."""

import dataclasses
import queue
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from kvstore.client.holds import new_hold
from kvstore.client.jobs.circuit_breaker import CircuitState
from kvstore.client.jobs.config import JobSettings
from kvstore.client.jobs.job import Job, JobKind
from kvstore.client.jobs.jobs import Jobs
from kvstore.client.jobs.stats import KindStats
from kvstore.protocol.errors import (
    Cancelled,
    Closed,
    ConfigError,
    DeadlineExceeded,
    Full,
    InvalidArgument,
    Unavailable,
)
from kvstore.protocol.settings import Size
from kvstore.testing.transfer.awaited import eventually
from tests.client.jobs.faulty import Barrier, FaultyClient, raises
from tests.forks import told_by_child
from tests.no_threads import no_more_threads

NAMES = iter(range(1 << 30))
NOT_SOON = 600.0
SETTINGS = JobSettings(
    read_workers=1, queue_bytes=Size(1000), lookup_deadline_s=60, load_deadline_s=60, store_deadline_s=60, probe_interval_s=NOT_SOON
)
NOT_RUNNING = Unavailable("unreachable")


def fresh_keys(count: int) -> list[bytes]:
    return [b"jobs %d" % next(NAMES) for _ in range(count)]


@pytest.fixture
def jobs(client: FaultyClient) -> Iterator[Jobs]:
    with Jobs(client, SETTINGS) as jobs:
        yield jobs


@pytest.fixture
def barrier(client: FaultyClient) -> Iterator[Barrier]:
    """Before the next call."""
    barrier = Barrier()
    client.faults.append(barrier)
    yield barrier
    barrier.open()


def over(job: Job) -> Job:
    assert job.wait(60)
    return job


def test_what_is_stored_can_be_looked_up_and_loaded(jobs: Jobs) -> None:
    keys, values = fresh_keys(3), [b"a" * 10, b"b" * 20, b"c" * 30]
    store = over(jobs.store(keys, values, namespace="n", parents=[None, *keys[:2]], ack="cluster"))
    assert store.results == [True] * 3
    asked = [*keys, *fresh_keys(1)]
    assert over(jobs.lookup(asked)).results == [True] * 3 + [False]
    assert over(jobs.lookup_prefix(asked)).leading == 3
    assert jobs.match_prefix(asked) == 3
    assert jobs.exists(asked) == [True] * 3 + [False]
    buffers = [bytearray(30) for _ in asked]
    load = over(jobs.load(asked, buffers))
    assert load.results == [10, 20, 30, None]
    assert [bytes(buffer).rstrip(b"\0") for buffer in buffers[:3]] == values
    kinds = jobs.stats().kinds
    assert kinds[JobKind.STORE] == KindStats(jobs=1, keys=3, succeeded=3, moved_bytes=60)
    assert kinds[JobKind.LOAD] == KindStats(jobs=1, keys=4, succeeded=3, missed=1, moved_bytes=60)
    assert kinds[JobKind.LOOKUP] == kinds[JobKind.PREFIX] == KindStats(jobs=2, keys=8, succeeded=6, missed=2)


def test_load_now_is_over_on_return(jobs: Jobs, client: FaultyClient) -> None:
    [there, store_unavailable] = keys = fresh_keys(2)
    over(jobs.store([there], [b"a" * 10]))
    buffers = [bytearray(10) for _ in keys]
    assert jobs.load_now(keys, buffers).results == [10, None]
    assert bytes(buffers[0]) == b"a" * 10
    eventually(lambda: client.exists_here([there]) == [True], "the block to be shown")
    client.faults.append(raises(NOT_RUNNING))
    assert jobs.load_now([store_unavailable], buffers[1:]).results == [NOT_RUNNING]
    found, refused = jobs.load_now(keys, buffers).results
    assert found == 10
    assert isinstance(refused, Unavailable)
    assert isinstance(jobs.load_now([store_unavailable], buffers[1:]).error, Unavailable)
    assert jobs.stats().reads.opened == 1
    assert isinstance(jobs.load_now(keys, buffers[:1]).error, InvalidArgument)
    assert jobs.stats().kinds[JobKind.LOAD].jobs == 5


def test_a_lookup_may_hold_what_it_finds(jobs: Jobs, client: FaultyClient) -> None:
    keys, hold = fresh_keys(4), new_hold(60)
    over(jobs.store(keys, [b"x"] * 4, ack="cluster"))
    over(jobs.lookup(keys[:1], hold=hold))
    over(jobs.lookup_prefix(keys[1:2], hold=hold))
    assert (jobs.match_prefix(keys[2:3], hold=hold), jobs.exists(keys[3:], hold=hold)) == (1, [True])
    assert client.remove(keys) == 0
    jobs.release(hold)
    eventually(lambda: client.remove(keys) == 4, "the node to know that the hold is over")
    client.close()
    jobs.release(new_hold(1))


def test_each_end_is_delivered_once(jobs: Jobs, client: FaultyClient, barrier: Barrier) -> None:
    told: queue.SimpleQueue[tuple[Job, int]] = queue.SimpleQueue()
    first = jobs.lookup(fresh_keys(1), on_done=lambda job: told.put((job, threading.get_ident())))
    second = jobs.lookup(fresh_keys(1), request="second")
    assert (jobs.finished(), jobs.poll("second"), first.is_over) == ([], False, False)
    barrier.open()
    job, thread = told.get(timeout=60)
    assert job is first
    assert thread != threading.get_ident()
    over(second)
    assert jobs.finished() == [second]
    assert jobs.finished() == []
    assert jobs.poll("second")
    assert jobs.poll("never there")
    assert told.empty()


def test_jobs_refuse_a_request_that_is_not_hashable(jobs: Jobs) -> None:
    """Before a worker has the job: the worker would end with it."""
    for submit in (partial(jobs.lookup, [b"key"]), partial(jobs.store, [b"key"], [b"value"])):
        with pytest.raises(InvalidArgument, match="request is hashable"):
            submit(request=["request", "1"])
    assert over(jobs.lookup(fresh_keys(1))).results == [False]


def test_store_refuses_keys_over_the_queue_limit(jobs: Jobs, client: FaultyClient, barrier: Barrier) -> None:
    running = jobs.store(fresh_keys(1), [b"x" * 600])
    assert barrier.is_reached.acquire(timeout=60)
    keys = fresh_keys(3)
    waiting = jobs.store(keys, [b"y" * 150] * 3)
    told: queue.SimpleQueue[Job] = queue.SimpleQueue()
    dropped = jobs.store(fresh_keys(1), [b"z" * 101], on_done=told.put)
    assert told.get(timeout=60) is dropped
    assert dropped.is_over
    assert isinstance(dropped.error, Full)
    stats = jobs.stats()
    assert (stats.waiting, stats.running, stats.held_bytes) == (1, 1, 900)
    assert stats.kinds[JobKind.STORE] == KindStats(jobs=1, keys=1, refused=1)
    barrier.open()
    assert over(running).succeeded == [True]
    assert over(waiting).succeeded == [True, True, False]
    assert isinstance(waiting.error, Full)
    assert client.exists_batch(keys, deadline_s=60) == [True, True, False]
    assert jobs.stats().kinds[JobKind.STORE] == KindStats(jobs=3, keys=5, succeeded=3, refused=2, moved_bytes=900)
    assert jobs.stats().held_bytes == 0


def test_waiting_job_ends_at_its_deadline_with_stuck_workers(jobs: Jobs, barrier: Barrier) -> None:
    stuck = jobs.lookup(fresh_keys(1))
    later = jobs.lookup(fresh_keys(1), deadline_s=50)
    told: queue.SimpleQueue[Job] = queue.SimpleQueue()
    sooner = jobs.lookup(fresh_keys(1), deadline_s=0.001, on_done=told.put)
    assert told.get(timeout=60) is sooner
    assert isinstance(sooner.error, DeadlineExceeded)
    assert not later.is_over
    barrier.open()
    over(stuck)
    over(later)
    assert jobs.stats().kinds[JobKind.LOOKUP].expired == 1
    assert jobs.stats().reads.failures == 0


def test_timeout_of_a_leftover_budget_keeps_the_breaker_closed(jobs: Jobs, client: FaultyClient) -> None:
    client.faults += [raises(DeadlineExceeded("late"))] * 4
    keys = fresh_keys(1)
    assert jobs.match_prefix(keys, deadline_s=20, budget_s=60) == 0
    assert jobs.exists(keys, deadline_s=20, budget_s=60) == [False]
    assert over(jobs.load(keys, [bytearray(1)], deadline_s=20, budget_s=60)).error is not None
    assert jobs.stats().reads.state is CircuitState.CLOSED
    assert jobs.match_prefix(keys, deadline_s=20) == 0
    assert jobs.stats().reads.state is CircuitState.OPEN


def test_cancel_ends_what_waits_and_waits_for_what_runs(jobs: Jobs, client: FaultyClient, barrier: Barrier) -> None:
    keys = fresh_keys(2)
    running = jobs.store(keys[:1], [b"x"], request="r")
    assert barrier.is_reached.acquire(timeout=60)
    waiting = jobs.store(keys[1:], [b"y"], request="r")
    other = jobs.store(fresh_keys(1), [b"z"], request="other")
    counts: list[int] = []
    cancelling = threading.Thread(target=lambda: counts.append(jobs.cancel("r")))
    cancelling.start()
    assert isinstance(over(waiting).error, Cancelled)
    assert not running.is_over
    assert cancelling.is_alive()
    barrier.open()
    cancelling.join(60)
    assert counts == [2]
    assert running.is_over
    assert running.results == [True]
    assert over(other).results == [True]
    assert jobs.cancel("r") == 0
    assert {job.request for job in jobs.finished()} == {"r", "other"}


def test_close_cancels_what_waits_and_tells_of_everything(client: FaultyClient, barrier: Barrier) -> None:
    jobs = Jobs(client, SETTINGS)
    told: list[Job] = []
    running = jobs.store(fresh_keys(1), [b"x"], on_done=told.append)
    assert barrier.is_reached.acquire(timeout=60)
    waiting = jobs.store(fresh_keys(1), [b"y"], on_done=told.append)
    closing = threading.Thread(target=jobs.close)
    closing.start()
    assert isinstance(over(waiting).error, Cancelled)
    assert closing.is_alive()
    barrier.open()
    closing.join(60)
    assert running.results == [True]
    assert sorted(map(id, told)) == sorted(map(id, [running, waiting]))
    jobs.close()


def test_close_may_let_what_was_submitted_be_carried_out_first(client: FaultyClient) -> None:
    jobs = Jobs(client, SETTINGS)
    submitted = [jobs.store(fresh_keys(1), [b"x"]) for _ in range(20)]
    jobs.close(drain_s=60)
    assert [job.results for job in submitted] == [[True]] * 20


def test_after_close_all_is_answered_with_closed_and_told(client: FaultyClient) -> None:
    jobs = Jobs(client, SETTINGS)
    jobs.close()
    told: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for _ in range(3):
        job = jobs.lookup(fresh_keys(1), on_done=told.put)
        assert isinstance(job.error, Closed)
        assert told.get(timeout=60) is job
    assert isinstance(jobs.store(fresh_keys(1), [b"x"]).error, Closed)
    assert jobs.match_prefix(fresh_keys(1)) == 0
    assert client.calls == []


@pytest.mark.promise("interrupts-safe")
def test_jobs_run_without_new_threads(jobs: Jobs, client: FaultyClient, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = fresh_keys(1)
    client.put_batch(keys, [b"value"])
    buffer = bytearray(5)
    with monkeypatch.context() as patch:
        no_more_threads(patch)
        load = jobs.load(keys, [buffer])
        store = jobs.store(fresh_keys(1), [b"x"])
    assert (over(load).results, bytes(buffer), over(store).results) == ([5], b"value", [True])


@pytest.mark.parametrize("given", [0, 1, 2])
def test_missing_threads_raise_and_none_is_left(client: FaultyClient, monkeypatch: pytest.MonkeyPatch, given: int) -> None:
    before = set(threading.enumerate())
    no_more_threads(monkeypatch, after=given)
    with pytest.raises(ConfigError, match=r"cannot start 3 threads \(kvstore-jobs\): can't start new thread"):
        Jobs(client, SETTINGS)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("kvstore-jobs")]


@pytest.mark.parametrize("error", [Unavailable("unreachable"), DeadlineExceeded("late")])
def test_once_the_store_cannot_be_reached_nobody_waits_for_it(jobs: Jobs, client: FaultyClient, barrier: Barrier, error: Exception) -> None:
    client.faults.append(raises(error))
    keys = fresh_keys(2)
    told: queue.SimpleQueue[Job] = queue.SimpleQueue()
    first = jobs.lookup(keys)
    assert barrier.is_reached.acquire(timeout=60)
    second = jobs.lookup(keys)
    waiting = [jobs.load(keys, [bytearray(1), bytearray(1)], on_done=told.put) for _ in range(2)]
    barrier.open()
    over(first)
    assert over(second).results == [error] * 2
    assert {id(told.get(timeout=60)) for _ in waiting} == set(map(id, waiting))
    assert all(isinstance(result, Unavailable) for job in waiting for result in job.results)
    asked = len(client.calls)
    assert jobs.match_prefix(keys) == 0
    assert jobs.exists(keys) == [False, False]
    assert isinstance(jobs.lookup(keys).error, Unavailable)
    assert len(client.calls) == asked
    stats = jobs.stats()
    assert (stats.reads.state, stats.reads.opened, stats.reads.skipped) == (CircuitState.OPEN, 1, 3)
    assert (stats.kinds[JobKind.LOAD].skipped, stats.kinds[JobKind.PREFIX].skipped) == (4, 2)
    assert stats.writes.state is CircuitState.CLOSED


def test_the_store_is_found_again_by_a_probe_in_the_background(client: FaultyClient) -> None:
    with Jobs(client, dataclasses.replace(SETTINGS, probe_interval_s=0.01)) as jobs:
        client.faults += [raises(NOT_RUNNING), raises(NOT_RUNNING), raises(NOT_RUNNING)]
        [key] = keys = fresh_keys(1)
        client.put(key, b"value")
        assert jobs.match_prefix(keys) == 0
        while jobs.stats().reads.state is not CircuitState.CLOSED:
            pass
        assert jobs.match_prefix(keys) == 1
        reads = jobs.stats().reads
        assert (reads.opened, reads.probes, reads.failures) == (1, 3, 3)
        assert [name for name, _ in client.calls] == ["match"] * 5


def test_stores_are_skipped_until_one_probes_the_store(client: FaultyClient) -> None:
    clock_ns = [10**12]
    with Jobs(client, SETTINGS, clock_ns=lambda: clock_ns[0]) as jobs:
        client.faults += [raises(NOT_RUNNING), raises(NOT_RUNNING)]
        assert over(jobs.store(fresh_keys(1), [b"x"])).error is NOT_RUNNING
        dropped = jobs.store(fresh_keys(1), [b"x"])
        assert dropped.is_over
        assert isinstance(dropped.error, Unavailable)
        clock_ns[0] += int(NOT_SOON * 1e9)
        assert over(jobs.store(fresh_keys(1), [b"x"])).error is NOT_RUNNING
        assert jobs.store(fresh_keys(1), [b"x"]).is_over
        clock_ns[0] += int(NOT_SOON * 1e9)
        assert over(jobs.store(fresh_keys(1), [b"x"])).results == [True]
        assert over(jobs.store(fresh_keys(1), [b"x"])).results == [True]
        stats = jobs.stats()
        assert (stats.writes.opened, stats.writes.probes, stats.writes.skipped) == (1, 2, 2)
        assert stats.kinds[JobKind.STORE] == KindStats(jobs=6, keys=6, succeeded=2, skipped=2, unreachable=2, moved_bytes=2)
        assert jobs.match_prefix(fresh_keys(1)) == 0
        assert stats.reads.state is CircuitState.CLOSED


def test_a_forked_child_is_told_so_and_may_close(jobs: Jobs) -> None:
    over(jobs.lookup(fresh_keys(1)))
    jobs.finished()
    assert told_by_child(lambda: type(jobs.lookup([b"a"]).error).__name__) == "Forked"
    assert told_by_child(lambda: jobs.lookup([b"a"]).wait()) == "True"
    assert told_by_child(lambda: jobs.match_prefix([b"a"])) == "0"
    assert told_by_child(lambda: (jobs.finished(), jobs.cancel("r"), jobs.poll("r"))) == "([], 0, True)"
    assert told_by_child(jobs.stats) == "Forked"
    assert told_by_child(jobs.close) == "None"
    assert over(jobs.lookup(fresh_keys(1))).results == [False]
