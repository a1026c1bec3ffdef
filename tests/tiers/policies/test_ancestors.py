"""Promises of ancestors.py: the link that would close a cycle is found, and every other one is kept."""

from kvstore.tiers.policies.prefix_tree import closes_cycle, has_cycle

CHAIN = {1: 0, 2: 1, 3: 2}
"""Child to parent; 0 is absent."""


def test_a_key_below_its_own_descendant_closes_a_cycle() -> None:
    assert closes_cycle(0, 3, CHAIN.get, 10)
    assert not closes_cycle(4, 3, CHAIN.get, 10)
    assert not closes_cycle(0, 9, CHAIN.get, 10)


def test_too_long_a_chain_is_refused_as_if_it_closed_one() -> None:
    assert closes_cycle(4, 3, CHAIN.get, 3)
    assert not closes_cycle(4, 1, CHAIN.get, 3)


def test_a_cycle_is_found_from_each_of_its_keys_and_from_no_other() -> None:
    ring = {1: 2, 2: 3, 3: 1, 4: 1, 5: None}
    assert [has_cycle(key, ring.get) for key in (1, 2, 3, 4, 5)] == [True, True, True, False, False]
