"""SIEVE evicts as the pseudo-code of its paper does over a plain list."""

from kvstore.testing.policy_conformance import NaivePolicy, PolicyConformance, against_naive
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
        index = self.keys.index(key) + 1
        return self.keys[index] if index < len(self.keys) else None

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
    policy = Sieve
    naive = NaiveSieve


TestSieveAgainstNaive = against_naive(Sieve, NaiveSieve)
