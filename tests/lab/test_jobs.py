"""Promises of jobs.py: each job's row is what its replay counted."""

import pytest

from kvstore.lab.home_pool import HomePoolOptions
from kvstore.lab.jobs import HintJob, HintRow, HomePoolJob, HomePoolRow, PolicyJob, PolicyRow, PoolJob, PoolRow, TierJob, TierRow
from kvstore.lab.pools import Routing
from tests.lab.prompts import requests

TALK = requests([[1, 2], [1, 2, 3], [4], [1, 2, 3, 5]])


def test_a_policy_at_a_capacity() -> None:
    assert PolicyJob("lru", 3).run(TALK) == PolicyRow("lru", 3, 0.2, 2, 10)


def test_a_policy_over_two_tiers() -> None:
    assert TierJob("lru", 2, 20).run(TALK) == TierRow("lru", 2, 20, 0.5, 1, 4, 10, 4, 1, 0)


@pytest.mark.parametrize(("routing", "local", "gain"), [(Routing.ROUND_ROBIN, 0.3, 5 / 3), (Routing.CACHE_AWARE, 0.5, 1.0)])
def test_a_pool_against_local_caches(routing: Routing, local: float, gain: float) -> None:
    row = PoolJob("lru", routing, 2, 9).run(TALK)
    assert row == PoolRow("lru", routing.value, 2, 9, 0.5, local, pytest.approx(gain), 10)  # type: ignore[arg-type]


def test_a_pool_with_home_copies_against_one_node() -> None:
    options = HomePoolOptions((1.0, 0.0))
    assert HomePoolJob("lru", 9, 0, options).run(TALK) == HomePoolRow("lru", (1.0, 0.0), 9, 0, False, True, 0.5, 0.5, 1.0, 0.0, 10)


def test_hints_against_none_and_belady() -> None:
    row = HintJob("prefix", 3, 1.0).run(TALK)
    assert (row.policy, row.capacity_blocks, row.share) == ("prefix", 3, 1.0)
    assert row.unhinted == PolicyJob("prefix", 3).run(TALK).prefix_hit_ratio
    assert (row.true_hints, row.belady) == (0.4, 0.5), "only Belady's bypasses the cache"
    assert row.gain == (row.true_hints - row.unhinted) / (row.belady - row.unhinted)
    assert HintJob("prefix", 9, 1.0).run(requests([[1], [2]])) == HintRow("prefix", 9, 1.0, 0, 0, 0, 0, 0, None)
