"""LFU evicts as a table of counts does that is scanned for its minimum."""

from kvstore.testing.policy_conformance import NaivePolicy, PolicyConformance, PolicyMachine, evictions_of_a_trace
from kvstore.testing.tier_machine import MACHINE_SETTINGS
from kvstore.tiers.policies.interface import MAX_SCAN, EvictionPolicy
from kvstore.tiers.policies.lfu import LFU


class NaiveLFU(NaivePolicy):
    """For each key how often it was used, and when for the last time."""

    def __init__(self) -> None:
        self.uses: dict[int, tuple[int, int]] = {}
        self.clock = 0

    def insert(self, key: int) -> None:
        self.clock += 1
        self.uses[key] = (1, self.clock)

    def touch(self, key: int) -> None:
        self.clock += 1
        self.uses[key] = (self.uses[key][0] + 1, self.clock)

    def remove(self, key: int) -> None:
        del self.uses[key]

    def victim(self, refused: frozenset[int] = frozenset()) -> int | None:
        return min(self.uses.keys() - refused, key=lambda key: self.uses[key], default=None)


class TestLFU(PolicyConformance):
    def make_policy(self, max_scan: int = MAX_SCAN) -> EvictionPolicy[int]:
        return LFU(max_scan=max_scan)


class LFUAgainstNaive(PolicyMachine):
    def make_policy(self) -> EvictionPolicy[int]:
        return LFU()

    def make_naive(self) -> NaivePolicy:
        return NaiveLFU()


TestLFUAgainstNaive = LFUAgainstNaive.TestCase
TestLFUAgainstNaive.settings = MACHINE_SETTINGS


def test_a_key_that_comes_back_starts_anew() -> None:
    policy: LFU[str] = LFU()
    for key in "aab":
        policy.insert(key)
    policy.remove("a")
    policy.insert("a")
    policy.touch("b")
    assert policy.victim() == "a"


def test_a_trace_evicts_the_same_keys_as_the_naive_policy() -> None:
    policy: LFU[int] = LFU()
    evicted = evictions_of_a_trace(policy, seed=1, accesses=5000, capacity=64)
    assert len(evicted) > 500
    assert evicted == evictions_of_a_trace(NaiveLFU(), seed=1, accesses=5000, capacity=64)
