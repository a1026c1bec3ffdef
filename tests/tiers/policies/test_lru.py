"""LRU evicts as a list does that moves each key read to its end."""

from kvstore.testing.policy_conformance import NaivePolicy, PolicyConformance, against_naive
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
    policy = LRU
    naive = NaiveLRU


TestLRUAgainstNaive = against_naive(LRU, NaiveLRU)
