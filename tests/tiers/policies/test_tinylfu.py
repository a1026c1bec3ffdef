"""W-TinyLFU evicts as three plain lists and a table of counts do."""

from collections import Counter

from kvstore.testing.policy_conformance import NaivePolicy, PolicyConformance, against_naive
from kvstore.tiers.policies.interface import ObservedCapacity
from kvstore.tiers.policies.tinylfu import MAX_COUNT, WTinyLFU


class NaiveTinyLFU(NaivePolicy):
    """Lists from the oldest to the newest. Counts never age: a run is too short for it."""

    def __init__(self) -> None:
        self.window: list[int] = []
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.uses: Counter[int] = Counter()
        self.capacity = ObservedCapacity()

    def sizes(self) -> tuple[int, int]:
        window = max(1, int(0.01 * self.capacity.keys)) if self.capacity.keys else 0
        return window, self.capacity.keys - window

    def count(self, key: int) -> None:
        self.uses[key] = min(MAX_COUNT, self.uses[key] + 1)

    def insert(self, key: int) -> None:
        self.window.append(key)
        self.count(key)

    def touch(self, key: int) -> None:
        self.count(key)
        if key in self.window:
            self.window.remove(key)
            self.window.append(key)
            return
        (self.probation if key in self.probation else self.protected).remove(key)
        self.protected.append(key)
        if len(self.protected) > 0.8 * self.sizes()[1]:
            self.probation.append(self.protected.pop(0))

    def remove(self, key: int) -> None:
        for segment in (self.window, self.probation, self.protected):
            if key in segment:
                segment.remove(key)

    def victim(self, refused: frozenset[int] = frozenset()) -> int | None:
        count = len(self.window + self.probation + self.protected)
        newcomers = self.capacity.observe(count) - count
        window_size, main_size = self.sizes()
        is_window_full = len(self.window) + newcomers >= window_size
        was_main_over = len(self.probation + self.protected) > main_size
        while self.window and len(self.window) + newcomers >= window_size and len(self.probation + self.protected) < main_size:
            self.probation.append(self.window.pop(0))
        rival = next((key for key in self.probation + self.protected if key not in refused), None)
        candidate = next((key for key in self.window if key not in refused), None)
        if rival is None or (candidate is not None and is_window_full and not was_main_over and self.uses[candidate] <= self.uses[rival]):
            return candidate
        if candidate is not None and is_window_full and not was_main_over:
            self.window.remove(candidate)
            self.probation.append(candidate)
        return rival


class TestWTinyLFU(PolicyConformance):
    policy = WTinyLFU


TestWTinyLFUAgainstNaive = against_naive(WTinyLFU, NaiveTinyLFU)


def full(count: int) -> WTinyLFU[int]:
    """Keys from 0 up, after a victim was asked for: the capacity is known, and all but the window's share is in main."""
    policy: WTinyLFU[int] = WTinyLFU()
    for key in range(count):
        policy.insert(key)
    policy.victim()
    return policy


def replace_one(policy: WTinyLFU[int], newcomer: int) -> int:
    victim = policy.victim()
    assert victim is not None
    policy.remove(victim)
    policy.insert(newcomer)
    policy.check_integrity()
    return victim


def test_tinylfu_admits_a_key_used_more_often_than_the_victim() -> None:
    policy = full(100)
    replace_one(policy, 100)
    policy.touch(100)
    assert policy.victim() == 0
    assert policy.victim() == 0, "until it leaves, though the newcomer is in main by now"
    assert replace_one(policy, 101) == 0
    assert replace_one(policy, 102) == 101


def test_keys_used_in_main_are_protected_up_to_their_share() -> None:
    policy = full(100)
    for key in range(90):
        policy.touch(key)
    assert len(policy._protected) == 79
    policy.check_integrity()
    assert policy.victim(lambda key: key not in range(90, 100)) == 0, "the first one protected is the first one to lose it"


def test_a_window_in_use_leaves_main_to_give_way_and_the_reverse() -> None:
    policy = full(100)
    assert policy.victim(lambda key: key != 99) == 0
    assert policy.victim(lambda key: key == 99) == 99
