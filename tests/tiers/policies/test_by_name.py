"""Policies are found by the names that the configuration uses."""

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.tiers.policies.by_name import POLICIES, make_policy


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_each_name_makes_an_empty_policy_of_that_name(name: str) -> None:
    policy = make_policy(name)
    assert policy.name == name
    assert len(policy) == 0
    assert make_policy(name) is not policy


def test_the_clock_is_the_callers() -> None:
    asked: list[None] = []

    def clock() -> float:
        asked.append(None)
        return 7.0

    policy = make_policy("prefix", clock=clock)
    policy.insert(1)
    assert asked


def test_an_unknown_name_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match="'fifo': choose default, arc, gdsf, leaf_lru, lfu, lhd, lru, prefix, s3fifo, sieve, tinylfu"):
        make_policy("fifo")
