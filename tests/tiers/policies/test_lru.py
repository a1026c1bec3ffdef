"""LRU evicts as a list does that moves each key read to its end."""

from kvstore.testing.policy_conformance import NaivePolicy, PolicyConformance, PolicyMachine, evictions_of_a_trace
from kvstore.testing.tier_machine import MACHINE_SETTINGS
from kvstore.tiers.policies.interface import MAX_SCAN, EvictionPolicy
from kvstore.tiers.policies.lru import LRU


class NaiveLRU(NaivePolicy):
    def __init__(self) -> None:
        self.keys: list[int] = []

    def insert(self, key: int) -> None:
        self.keys.append(key)

    def touch(self, key: int) -> None:
        self.keys.remove(key)
        self.keys.append(key)

    def remove(self, key: int) -> None:
        self.keys.remove(key)

    def victim(self, refused: frozenset[int] = frozenset()) -> int | None:
        return next((key for key in self.keys if key not in refused), None)


class TestLRU(PolicyConformance):
    def make_policy(self, max_scan: int = MAX_SCAN) -> EvictionPolicy[int]:
        return LRU(max_scan=max_scan)


class LRUAgainstNaive(PolicyMachine):
    def make_policy(self) -> EvictionPolicy[int]:
        return LRU()

    def make_naive(self) -> NaivePolicy:
        return NaiveLRU()


TestLRUAgainstNaive = LRUAgainstNaive.TestCase
TestLRUAgainstNaive.settings = MACHINE_SETTINGS


def test_a_trace_evicts_the_same_keys_as_the_naive_policy() -> None:
    policy: LRU[int] = LRU()
    evicted = evictions_of_a_trace(policy, seed=1, accesses=5000, capacity=64)
    assert len(evicted) > 500
    assert evicted == evictions_of_a_trace(NaiveLRU(), seed=1, accesses=5000, capacity=64)
