"""Conformance of eviction policies, as test classes to inherit. Needs the `dev` extra (pytest, hypothesis).

    class TestMine(PolicyConformance):
        policy = Mine
        naive = NaiveMine                                # of which the victims are the same

    TestMineAgainstNaive = against_naive(Mine, NaiveMine)

The oracle of a policy is a naive one: a list and a scan, no limit on the keys it looks at.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.testing.tier_machine import MACHINE_SETTINGS
from kvstore.tiers.policies.interface import MAX_SCAN, EvictionPolicy

KEYS = st.integers(0, 7)


class NaivePolicy(ABC):
    """Reference implementation of a policy's decisions. Called only with known keys."""

    @abstractmethod
    def insert(self, key: int) -> None:
        """A key that is not present."""

    @abstractmethod
    def touch(self, key: int) -> None:
        """A key that is present."""

    @abstractmethod
    def remove(self, key: int) -> None:
        """A key that is present."""

    @abstractmethod
    def victim(self, refused: frozenset[int] = frozenset()) -> int | None: ...


class PolicyConformance:
    """Conformance of any policy."""

    policy: Callable[[], EvictionPolicy[int]]
    naive: Callable[[], NaivePolicy] | None = None

    def make_policy(self) -> EvictionPolicy[int]:
        return type(self).policy()

    def filled(self, count: int, max_scan: int = MAX_SCAN) -> EvictionPolicy[int]:
        policy = self.make_policy()
        policy.max_scan = max_scan
        for key in range(count):
            policy.insert(key)
        policy.check_integrity()
        return policy

    def test_no_graph_of_parents_keeps_a_key_from_eviction(self) -> None:
        """Any parents are accepted: cycles, forests, keys that are their own parent, parents inserted later or never."""
        for seed in range(200):
            generator = random.Random(seed)
            policy, stored = self.make_policy(), set[int]()
            count = generator.randint(2, 12)
            parents = {key: generator.choice([None, *range(count + 1)]) for key in range(count)}
            for key in generator.choices(range(count), k=3 * count):
                if key in stored and generator.random() < 0.5:
                    policy.remove(key)
                    stored.remove(key)
                else:
                    policy.insert(key, parents[key])
                    stored.add(key)
                policy.check_integrity()
            evicted = policy.take_victims(count, lambda _key: True, lambda _key: True)
            assert sorted(evicted) == sorted(stored), f"seed {seed}"

    def test_an_empty_policy_has_no_victim(self) -> None:
        policy = self.make_policy()
        assert len(policy) == 0
        assert policy.victim() is None
        policy.check_integrity()

    def test_a_key_is_in_from_insert_to_remove(self) -> None:
        policy = self.make_policy()
        assert 1 not in policy
        policy.insert(1)
        assert 1 in policy
        policy.remove(1)
        assert 1 not in policy
        assert policy.victim() is None

    def test_a_key_inserted_twice_is_there_once(self) -> None:
        policy = self.filled(3)
        policy.insert(1)
        assert len(policy) == 3
        policy.check_integrity()
        policy.remove(1)
        assert 1 not in policy
        assert len(policy) == 2

    def test_absent_keys_are_ignored(self) -> None:
        policy = self.filled(2)
        policy.touch(7)
        policy.remove(7)
        policy.check_integrity()
        assert len(policy) == 2
        assert 7 not in policy

    def test_hints_of_any_key_are_accepted(self) -> None:
        """Policies may ignore them."""
        policy = self.filled(12)
        for key in range(20):
            policy.set_priority(key, key * 5)
            policy.expect_reuse(key, 0.1 * 4**key)
            policy.check_integrity()
        evicted = policy.take_victims(20, lambda _key: True, lambda _key: True)
        assert sorted(evicted) == list(range(12))

    def test_a_victim_stays_until_it_is_removed(self) -> None:
        policy = self.filled(3)
        victim = policy.victim()
        assert victim is not None
        assert victim in policy
        assert policy.victim() == victim

    def test_evicting_all_takes_each_key_once(self) -> None:
        policy = self.filled(50)
        for key in range(0, 50, 3):
            policy.touch(key)
        evicted = []
        while (victim := policy.victim()) is not None:
            evicted.append(victim)
            policy.remove(victim)
            policy.check_integrity()
        assert sorted(evicted) == list(range(50))

    def test_keys_that_left_come_back_as_any_other(self) -> None:
        policy = self.filled(20)
        for _ in range(3):
            evicted = []
            while (victim := policy.victim()) is not None:
                evicted.append(victim)
                policy.remove(victim)
            assert sorted(evicted) == list(range(20))
            for key in range(20):
                policy.insert(key)
                policy.check_integrity()
            assert len(policy) == 20

    def test_a_batch_makes_all_of_its_room_before_it_comes(self) -> None:
        policy = self.filled(30)
        present = set(range(30))
        for start in range(30, 300, 15):
            for _ in range(15):
                victim = policy.victim()
                assert victim is not None
                policy.remove(victim)
                present.remove(victim)
            for key in range(start, start + 15):
                policy.insert(key, key - 1)
            present.update(range(start, start + 15))
            policy.check_integrity()
            assert len(policy) == 30
            assert all(key in policy for key in present)

    def test_refused_keys_are_passed_over_and_stay(self) -> None:
        policy = self.filled(4)
        assert policy.victim(lambda key: key == 2) == 2
        assert len(policy) == 4

    def test_no_key_is_the_victim_when_all_are_refused(self) -> None:
        policy = self.filled(4)
        policy.touch(0)
        assert policy.victim(lambda key: False) is None
        policy.check_integrity()

    def test_no_more_than_max_scan_keys_are_asked(self) -> None:
        policy = self.filled(100, max_scan=10)
        asked: list[int] = []

        def refuse(key: int) -> bool:
            asked.append(key)
            return False

        assert policy.victim(refuse) is None
        assert len(asked) == 10

    def test_popular_keys_alone_do_not_use_up_the_scan(self) -> None:
        policy = self.filled(100, max_scan=10)
        for key in range(100):
            policy.touch(key)
        assert policy.victim() is not None

    def test_next_victims_begin_with_the_victim(self) -> None:
        """Also while the first ones are refused, without a repetition, and at most max_scan of them."""
        policy = self.filled(100, max_scan=40)
        for key in range(0, 100, 3):
            policy.touch(key)
        for refused in (frozenset[int](), frozenset(range(0, 100, 2))):
            victim = policy.victim(lambda key, refused=refused: key not in refused)  # type: ignore[misc]
            found = policy.next_victims(20, lambda key, refused=refused: key not in refused)  # type: ignore[misc]
            assert found[0] == victim
            assert len(set(found)) == len(found) <= 20
            assert not refused.intersection(found)
        assert policy.next_victims(20, lambda key: False) == []
        assert self.make_policy().next_victims(20) == []

    def test_next_victims_change_no_later_decision(self) -> None:
        plain, looked_at = (evictions_of_a_trace(self.make_policy(), seed=2, accesses=3000, capacity=64, look=look) for look in (0, 16))
        assert len(plain) > 300
        assert plain == looked_at

    def test_a_trace_evicts_the_same_keys_as_the_naive_policy(self) -> None:
        naive = type(self).naive
        if naive is not None:
            evicted = evictions_of_a_trace(self.make_policy(), seed=1, accesses=5000, capacity=64)
            assert len(evicted) > 500
            assert evicted == evictions_of_a_trace(naive(), seed=1, accesses=5000, capacity=64)


class PolicyMachine(RuleBasedStateMachine):
    """Any schedule of operations finds the victims that the naive policy finds."""

    def make_policy(self) -> EvictionPolicy[int]:
        raise NotImplementedError

    def make_naive(self) -> NaivePolicy:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.make_policy()
        self.naive = self.make_naive()
        self.present: set[int] = set()

    @rule(key=KEYS)
    def insert(self, key: int) -> None:
        self.policy.insert(key)
        (self.naive.touch if key in self.present else self.naive.insert)(key)
        self.present.add(key)

    @rule(key=KEYS)
    def touch(self, key: int) -> None:
        self.policy.touch(key)
        if key in self.present:
            self.naive.touch(key)

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        self.policy.remove(key)
        if key in self.present:
            self.naive.remove(key)
            self.present.remove(key)

    @rule(refused=st.frozensets(KEYS, max_size=3), take=st.booleans())
    def evict(self, refused: frozenset[int], take: bool) -> None:
        victim = self.policy.victim(lambda key: key not in refused)
        assert victim == self.naive.victim(refused)
        if victim is not None and take:
            self.remove(victim)

    @invariant()
    def the_same_keys_are_present(self) -> None:
        self.policy.check_integrity()
        assert len(self.policy) == len(self.present)
        assert all((key in self.policy) == (key in self.present) for key in range(8))


def against_naive(policy: Callable[[], EvictionPolicy[int]], naive: Callable[[], NaivePolicy]) -> Any:
    """Return the test case of a PolicyMachine of these two."""

    class Machine(PolicyMachine):
        def make_policy(self) -> EvictionPolicy[int]:
            return policy()

        def make_naive(self) -> NaivePolicy:
            return naive()

    Machine.TestCase.settings = MACHINE_SETTINGS
    return Machine.TestCase


def evictions_of_a_trace(policy: EvictionPolicy[int] | NaivePolicy, *, seed: int, accesses: int, capacity: int, look: int = 0) -> list[int]:
    """The keys that a cache of `capacity` keys evicts, in order, while skewed random keys are read through it. Before each
    access the next `look` victims are asked for, some of them refused."""
    chance = random.Random(seed)
    present: set[int] = set()
    evicted = []
    for _ in range(accesses):
        key = int(chance.paretovariate(0.5)) % (capacity * 10)
        if look and isinstance(policy, EvictionPolicy):
            policy.next_victims(look, lambda other: other % 3 > 0)
        if key in present:
            policy.touch(key)
            continue
        if len(present) == capacity:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim)
            present.remove(victim)
            evicted.append(victim)
        policy.insert(key)
        present.add(key)
    return evicted
