"""Policies are found by the names that the configuration uses."""

import pytest

from kvstore.protocol.errors import ConfigError
from kvstore.tiers.policies import POLICIES, make_policy


def test_the_policies_are_lru_lfu_and_sieve() -> None:
    assert set(POLICIES) == {"lru", "lfu", "sieve"}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_each_name_makes_an_empty_policy_of_that_name(name: str) -> None:
    policy = make_policy(name)
    assert policy.name == name
    assert len(policy) == 0
    assert make_policy(name) is not policy


def test_an_unknown_name_is_answered_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match="'fifo': choose lfu, lru, sieve"):
        make_policy("fifo")
