"""Promises of job.py."""

from kvstore.lab.simulator.job import EventQueue, InstancePools
from kvstore.scheduler.admission import PoolLoad
from tests.lab.simulator.parts import job


def test_job_events_run_in_order_of_time_then_insertion() -> None:
    events, seen = EventQueue(), list[tuple[float, str]]()
    for at_s, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        events.at(at_s, lambda name=name: seen.append((events.now_s, name)))  # type: ignore[misc]
    events.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]


def test_what_is_cancelled_does_not_happen_and_takes_no_time() -> None:
    events, seen = EventQueue(), list[int]()
    late = events.at(9.0, lambda: seen.append(9))
    events.at(1.0, lambda: seen.append(1))
    late.cancel()
    late.cancel()
    events.run()
    assert seen == [1]
    assert events.now_s == 1.0


def test_what_a_request_waited_for_is_told_apart() -> None:
    found = job(tokens=100, output=5)
    found.queued_s, found.ready_s = 1.0, 6.0
    found.begin_prefill(head_s=4.0, now_s=6.0)
    assert (found.queue_s, found.fetch_s) == (3.0, 2.0)
    # First in its queue from the beginning.
    found.begin_prefill(head_s=0.0, now_s=6.0)
    assert (found.queue_s, found.fetch_s) == (0.0, 5.0)
    # The blocks were there before it was the first.
    found.begin_prefill(head_s=8.0, now_s=9.0)
    assert (found.queue_s, found.fetch_s) == (8.0, 0.0)
    assert found.cache_tokens == 105


def test_jobs_are_counted_where_they_are() -> None:
    pools = InstancePools(decode_instances=3)
    assert pools.load(1.0) == PoolLoad(1.0, 3, [], [], 0.0, 0.0)
    one, two, three = (job(number, tokens=100 * (number + 1), output=5) for number in range(3))
    pools.taken(one, prefill_end_s=5.0)
    pools.taken(two, prefill_end_s=4.0)
    pools.taken(three, prefill_end_s=6.0)
    assert pools.load(2.0) == PoolLoad(2.0, 3, [], [4.0, 5.0, 6.0], 0.0, 0.0)
    pools.prefilled(two)
    pools.decoded(two, now_s=4.5)
    pools.prefilled(one)
    pools.decoded(one, now_s=5.5)
    assert pools.load(6.0) == PoolLoad(6.0, 3, [4.5, 5.5], [6.0], 0.0, 150.0)
    pools.prefilled(three)
    pools.ended(two, now_s=14.5)
    assert pools.load(15.0) == PoolLoad(15.0, 3, [5.5], [], 10.0, 100.0)
