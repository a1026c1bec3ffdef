"""Promises of pools.py."""

from kvstore.scheduler.admission import PoolLoad
from kvstore.scheduler.simulator.job import Pools
from tests.scheduler.simulator.parts import job


def test_jobs_are_counted_where_they_are() -> None:
    pools = Pools(decode_instances=3)
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
