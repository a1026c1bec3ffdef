"""The suite passes the plainest policy there can be, first in, first out, and fails one that forgets."""

from collections.abc import Callable

import pytest

from kvstore.tiers.machine_conformance import MACHINE_SETTINGS
from kvstore.tiers.policies.conformance import NaivePolicy, PolicyConformance, PolicyMachine, evictions_of_a_trace
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


class ForgetfulFifo(Fifo):
    """A victim is gone before it is removed."""

    def victim(self, evictable: Callable[[int], bool] = lambda key: True) -> int | None:
        key = super().victim(evictable)
        self.remove(-1 if key is None else key)
        return key


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


class ForgetfulSuite(PolicyConformance):
    def make_policy(self, max_scan: int = MAX_SCAN) -> EvictionPolicy[int]:
        return ForgetfulFifo(max_scan)


def test_a_policy_that_forgets_its_victim_fails() -> None:
    with pytest.raises(AssertionError):
        ForgetfulSuite().test_a_victim_stays_until_it_is_removed()
    with pytest.raises(AssertionError):
        ForgetfulSuite().test_refused_keys_are_passed_over_and_stay()


def test_a_trace_is_the_same_for_every_policy_and_every_run() -> None:
    first = evictions_of_a_trace(Fifo(), seed=3, accesses=2000, capacity=16)
    assert first == evictions_of_a_trace(NaiveFifo(), seed=3, accesses=2000, capacity=16)
    assert first != evictions_of_a_trace(Fifo(), seed=4, accesses=2000, capacity=16)


class SayingNothing(PolicyMachine):
    def __init__(self) -> None:
        """The base's constructor asks for both."""


def test_a_policys_tests_must_say_how_to_make_it_and_its_oracle() -> None:
    with pytest.raises(NotImplementedError):
        PolicyConformance().make_policy()
    with pytest.raises(NotImplementedError):
        SayingNothing().make_policy()
    with pytest.raises(NotImplementedError):
        SayingNothing().make_naive()
