"""LFU evicts as a table of counts does that is scanned for its minimum."""

from kvstore.testing.policy_conformance import NaivePolicy, PolicyConformance, against_naive
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
    policy = LFU
    naive = NaiveLFU


TestLFUAgainstNaive = against_naive(LFU, NaiveLFU)
