"""Promises of states.py: what is said of many keys at once is what each of them has."""

from kvstore.tiers.policies.interface import DictStates


def test_many_keys_have_the_state_that_they_are_given() -> None:
    states = DictStates[str, int]()
    assert states.are_new({"a", "b"})
    states.set_all(["a", "b"], 7)
    states["c"] = 8
    assert list(states.found(["c", "x", "a"])) == [8, None, 7]
    assert states.are_new({"x"})
    assert not states.are_new({"x", "a"})


def test_a_scan_ends_after_so_many_keys() -> None:
    states = DictStates[str, int]()
    states.set_all(["a", "b", "c"], 7)
    assert list(states.scan(2)) == [("a", 7), ("b", 7)]
