"""SIEVE evicts as the pseudo-code of its paper does over a plain list."""

from kvstore.testing.policy_conformance import NaivePolicy, PolicyConformance, PolicyMachine, evictions_of_a_trace
from kvstore.testing.tier_machine import MACHINE_SETTINGS
from kvstore.tiers.policies.interface import MAX_SCAN, EvictionPolicy
from kvstore.tiers.policies.sieve import Sieve


class NaiveSieve(NaivePolicy):
    """`keys` from the oldest to the newest; `hand` is the key under the hand, None before the oldest."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.visited: set[int] = set()
        self.hand: int | None = None

    def insert(self, key: int) -> None:
        self.keys.append(key)

    def touch(self, key: int) -> None:
        self.visited.add(key)

    def remove(self, key: int) -> None:
        if self.hand == key:
            self.hand = self.after(key)
        self.keys.remove(key)
        self.visited.discard(key)

    def after(self, key: int) -> int | None:
        place = self.keys.index(key) + 1
        return self.keys[place] if place < len(self.keys) else None

    def victim(self, refused: frozenset[int] = frozenset()) -> int | None:
        for _ in range(2 * len(self.keys)):
            key = self.keys[0] if self.hand is None else self.hand
            if key not in self.visited and key not in refused:
                self.hand = key
                return key
            self.visited.discard(key)
            self.hand = self.after(key)
        return None


class TestSieve(PolicyConformance):
    def make_policy(self, max_scan: int = MAX_SCAN) -> EvictionPolicy[int]:
        return Sieve(max_scan=max_scan)


class SieveAgainstNaive(PolicyMachine):
    def make_policy(self) -> EvictionPolicy[int]:
        return Sieve()

    def make_naive(self) -> NaivePolicy:
        return NaiveSieve()


TestSieveAgainstNaive = SieveAgainstNaive.TestCase
TestSieveAgainstNaive.settings = MACHINE_SETTINGS


def test_a_key_read_since_the_hand_passed_stays_for_another_round() -> None:
    policy: Sieve[str] = Sieve()
    for key in "abc":
        policy.insert(key)
    policy.touch("a")
    assert policy.victim() == "b"
    policy.remove("b")
    assert policy.victim() == "c"
    policy.remove("c")
    assert policy.victim() == "a"


def test_the_hand_goes_on_where_it_was() -> None:
    policy: Sieve[str] = Sieve()
    for key in "abcd":
        policy.insert(key)
    policy.touch("a")
    assert policy.victim() == "b"
    policy.remove("b")
    policy.insert("e")
    assert policy.victim() == "c"


def test_a_trace_evicts_the_same_keys_as_the_naive_policy() -> None:
    policy: Sieve[int] = Sieve()
    evicted = evictions_of_a_trace(policy, seed=1, accesses=5000, capacity=64)
    assert len(evicted) > 500
    assert evicted == evictions_of_a_trace(NaiveSieve(), seed=1, accesses=5000, capacity=64)
