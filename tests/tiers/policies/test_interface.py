"""The interface of eviction policies: what holds of every policy that the configuration can name."""

import inspect

import pytest

from kvstore.tiers.policies.by_name import POLICIES, make_policy
from kvstore.tiers.policies.interface import MAX_SCAN, EvictionPolicy


def test_the_interface_alone_is_no_policy() -> None:
    with pytest.raises(TypeError, match="abstract"):
        EvictionPolicy()  # type: ignore[abstract]


@pytest.mark.no_cover
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_policy_looks_at_no_more_than_max_scan_keys_by_default(name: str) -> None:
    policy = make_policy(name)
    for key in range(MAX_SCAN + 1):
        policy.insert(key)
    asked: set[int] = set()

    def refuse(key: int) -> bool:
        asked.add(key)
        return False

    assert policy.victim(refuse) is None
    assert len(asked) == MAX_SCAN


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_victim_may_be_any_key_unless_the_caller_says(name: str) -> None:
    default = inspect.signature(EvictionPolicy.victim).parameters["evictable"].default
    assert default("any key") is True
    policy = make_policy(name)
    policy.insert("only")
    assert policy.victim() == "only"


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_is_remembered_can_be_forgotten(name: str) -> None:
    policy = make_policy(name)
    policy.insert_all(["a", "b", "c"])
    for key in "abc":
        policy.remove(key)
    remembered = policy.remembered
    assert remembered in (0, 3)
    policy.forget(2)
    assert policy.remembered == max(0, remembered - 2)
    policy.forget(2)
    assert policy.remembered == 0
    policy.check_integrity()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_many_victims_are_those_that_would_leave_one_after_the_other(name: str) -> None:
    policy, other = make_policy(name), make_policy(name)
    for each in (policy, other):
        each.insert_all([f"k{number}" for number in range(9)])
        each.insert_all(["p", "q", "r"], [None, "p", "q"])
        each.touch("k2")
    one_by_one = []
    for _ in range(12):
        victim = other.victim(lambda key: key != "k3")
        if victim is None:
            break
        other.remove(victim)
        one_by_one.append(victim)
    assert len(one_by_one) == 11
    stops = one_by_one[7]
    taken = policy.take_victims(20, lambda key: key != "k3", lambda key: key != stops)
    assert taken == one_by_one[:7]
    assert stops in policy
    assert policy.take_victims(2, lambda key: key != "k3", lambda key: True) == one_by_one[7:9]
    assert policy.take_victims(20, lambda key: key != "k3", lambda key: True) == one_by_one[9:]
    assert policy.take_victims(1, lambda key: False, lambda key: True) == []
    policy.check_integrity()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_batch_is_inserted_as_its_keys_one_after_the_other(name: str) -> None:
    policy = make_policy(name)
    policy.insert_all(["a", "b", "c"], [None, "a", "b"])
    policy.insert_all(["d", "e", "f", "b"])
    assert len(policy) == 6
    assert all(key in policy for key in "abcdef")
    policy.check_integrity()
