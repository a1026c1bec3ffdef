"""Leaf-first LRU evicts as a table of parents and times does that is scanned."""

from hypothesis import strategies as st
from hypothesis.stateful import rule

from kvstore.testing.policy_conformance import KEYS, NaivePolicy, PolicyConformance, PolicyMachine
from kvstore.testing.tier_machine import MACHINE_SETTINGS
from kvstore.tiers.policies.interface import EvictionPolicy
from kvstore.tiers.policies.leaf_lru import LeafLRU


class NaiveLeafLRU(NaivePolicy):
    def __init__(self) -> None:
        self.used: dict[int, int] = {}
        self.parents: dict[int, int | None] = {}
        self.clock = 0

    def insert(self, key: int) -> None:
        self.parents[key] = None
        self.touch(key)

    def touch(self, key: int) -> None:
        self.clock += 1
        self.used[key] = self.clock

    def remove(self, key: int) -> None:
        del self.used[key], self.parents[key]

    def victim(self, refused: frozenset[int] = frozenset()) -> int | None:
        leaves = self.used.keys() - set(self.parents.values())
        return min(leaves - refused, key=self.used.__getitem__, default=None)


class TestLeafLRU(PolicyConformance):
    policy = LeafLRU
    naive = NaiveLeafLRU


class LeafLRUAgainstNaive(PolicyMachine):
    """The parent of a key is always the same lower one, as hashing makes it."""

    def make_policy(self) -> EvictionPolicy[int]:
        return LeafLRU()

    def make_naive(self) -> NaivePolicy:
        return NaiveLeafLRU()

    @rule(key=KEYS)
    def insert_behind_its_parent(self, key: int) -> None:
        parent = None if key == 0 else key // 2
        self.policy.insert(key, parent)
        assert isinstance(self.naive, NaiveLeafLRU)
        (self.naive.touch if key in self.present else self.naive.insert)(key)
        self.naive.parents[key] = parent if key not in self.present else self.naive.parents[key]
        self.present.add(key)

    @rule(first=st.integers(4, 7))
    def read_a_prompt(self, first: int) -> None:
        for key in (first // 4, first // 2, first):
            self.touch(key)


TestLeafLRUAgainstNaive = LeafLRUAgainstNaive.TestCase
TestLeafLRUAgainstNaive.settings = MACHINE_SETTINGS


def inserted(prompts: list[str]) -> LeafLRU[str]:
    """A key is a prompt up to a block; each prompt's blocks in their order."""
    policy: LeafLRU[str] = LeafLRU()
    for prompt in prompts:
        for end in range(1, len(prompt) + 1):
            policy.insert(prompt[:end], prompt[: end - 1] or None)
    policy.check_integrity()
    return policy


def evictions(policy: LeafLRU[str]) -> list[str]:
    evicted = []
    while (victim := policy.victim()) is not None:
        policy.remove(victim)
        policy.check_integrity()
        evicted.append(victim)
    return evicted


def test_prompts_shrink_from_their_ends() -> None:
    assert evictions(inserted(["abc", "xyz"])) == ["abc", "ab", "a", "xyz", "xy", "x"]


def test_a_touch_of_any_block_counts_when_it_becomes_a_leaf() -> None:
    policy = inserted(["ab", "xy"])
    policy.touch("a")
    assert evictions(policy) == ["ab", "xy", "x", "a"]


def test_a_parent_that_comes_back_is_no_leaf() -> None:
    policy = inserted(["ab"])
    policy.remove("a")
    assert policy.victim() == "ab"
    policy.insert("a")
    policy.check_integrity()
    assert evictions(policy) == ["ab", "a"]


def test_keys_in_a_cycle_of_parents_are_evicted_like_others() -> None:
    policy: LeafLRU[str] = LeafLRU()
    policy.insert("a", "b")
    policy.insert("b", "a")
    policy.insert("own", "own")
    policy.insert("leaf")
    assert evictions(policy) == ["a", "b", "own", "leaf"]
