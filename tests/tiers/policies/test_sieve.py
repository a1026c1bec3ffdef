"""SIEVE evicts as the pseudo-code of its paper does over a plain list."""

from random import Random

from kvstore.testing.policy_conformance import NaivePolicy, PolicyConformance, against_naive
from kvstore.tiers.policies.interface import MAX_POPULAR
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


def used(count: int, share: float) -> Sieve[int]:
    """A policy whose hand is in the middle, with a share of its keys used."""
    chance, policy = Random(3), Sieve[int]()
    for key in range(count):
        policy.insert(key)
    for key in range(count):
        if key < count // 2 or chance.random() < share:
            policy.touch(key)
    policy.remove(policy.victim() or 0)
    return policy


def test_next_victims_are_those_evicted_in_turn() -> None:
    """Through both rounds."""
    policy = used(60, 0.6)
    found = policy.next_victims(59)
    assert found == policy.take_victims(59, lambda key: True, lambda key: True)
    assert len(found) == 59


def test_next_victims_end_in_a_long_run_of_used_keys() -> None:
    """Used keys come after all others, so they are no guess for what follows the run; better than nothing alone."""
    policy, last = Sieve[int](), 10 * MAX_POPULAR
    for key in range(last + 1):
        policy.insert(key)
        if key not in (0, last):
            policy.touch(key)
    assert policy.next_victims(2) == [0]
    assert policy.next_victims(10) == [0, last, *range(1, 9)]
    policy.remove(0)
    assert policy.next_victims(1) == [1]
    assert policy.victim() == last
