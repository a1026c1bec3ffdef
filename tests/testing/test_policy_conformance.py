"""The suite passes the plainest policy there can be, first in, first out, and fails one that forgets."""

from collections.abc import Callable

from kvstore.testing.policy_conformance import NaivePolicy, PolicyConformance, PolicyMachine
from kvstore.testing.tier_machine import MACHINE_SETTINGS
from kvstore.tiers.policies.interface import MAX_SCAN, EvictionPolicy


class Fifo(EvictionPolicy[int]):
    name = "fifo"

    def __init__(self, max_scan: int = MAX_SCAN) -> None:
        self.keys: list[int] = []
        self.max_scan = max_scan

    def insert(self, key: int, parent: int | None = None) -> None:
        if key not in self.keys:
            self.keys.append(key)

    def touch(self, key: int) -> None:
        pass

    def remove(self, key: int) -> None:
        if key in self.keys:
            self.keys.remove(key)

    def victim(self, evictable: Callable[[int], bool] = lambda key: True) -> int | None:
        return next((key for key in self.keys[: self.max_scan] if evictable(key)), None)

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def check_integrity(self) -> None:
        assert len(set(self.keys)) == len(self.keys)


class NaiveFifo(NaivePolicy):
    def __init__(self) -> None:
        self.keys: dict[int, None] = {}

    def insert(self, key: int) -> None:
        self.keys[key] = None

    def touch(self, key: int) -> None:
        pass

    def remove(self, key: int) -> None:
        del self.keys[key]

    def victim(self, refused: frozenset[int] = frozenset()) -> int | None:
        return next((key for key in self.keys if key not in refused), None)


class TestFifo(PolicyConformance):
    def make_policy(self, max_scan: int = MAX_SCAN) -> EvictionPolicy[int]:
        return Fifo(max_scan)


class FifoAgainstNaive(PolicyMachine):
    def make_policy(self) -> EvictionPolicy[int]:
        return Fifo()

    def make_naive(self) -> NaivePolicy:
        return NaiveFifo()


TestFifoAgainstNaive = FifoAgainstNaive.TestCase
TestFifoAgainstNaive.settings = MACHINE_SETTINGS
