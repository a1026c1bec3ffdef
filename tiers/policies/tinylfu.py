"""W-TinyLFU: a small window of newcomers, and a main part that a key enters only if it was used more often lately than who must leave."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Final

from kvstore.tiers.policies.frequency_sketch import FrequencySketch
from kvstore.tiers.policies.interface import MAX_SCAN, EvictionPolicy, K
from kvstore.tiers.policies.observed_capacity import ObservedCapacity

WINDOW_SHARE: Final = 0.01
"""Of the capacity; at least one key."""
PROTECTED_SHARE: Final = 0.8
"""Of the main part, for keys used since they came to it."""


class WTinyLFU(EvictionPolicy[K]):
    """An LRU window, and a segmented LRU of probation and protected keys. Every operation is O(1), a victim amortised over inserts.

    A batch asks for all its victims before any newcomer comes: keys short of the capacity count as the window's. While the
    tier fills, all keys are in the window. Source: Einziger, Friedman, Manes, TinyLFU: A highly efficient cache admission policy, ACM TOS
    2017.
    """

    name = "tinylfu"

    def __init__(self, *, max_scan: int = MAX_SCAN) -> None:
        self._window: OrderedDict[K, None] = OrderedDict()
        self._probation: OrderedDict[K, None] = OrderedDict()
        self._protected: OrderedDict[K, None] = OrderedDict()
        self._uses = FrequencySketch()
        self._capacity = ObservedCapacity()
        self._window_capacity = self._main_capacity = 0
        self._max_scan = max_scan

    def insert(self, key: K, parent: K | None = None) -> None:
        if key in self:
            self.touch(key)
            return
        self._window[key] = None
        self._uses.fit(len(self))
        self._uses.add(key)

    def touch(self, key: K) -> None:
        if key in self._protected:
            self._protected.move_to_end(key)
        elif key in self._probation:
            del self._probation[key]
            self._protected[key] = None
            if len(self._protected) > PROTECTED_SHARE * self._main_capacity:
                self._probation[self._protected.popitem(last=False)[0]] = None
        elif key in self._window:
            self._window.move_to_end(key)
        else:
            return
        self._uses.add(key)

    def remove(self, key: K) -> None:
        for segment in (self._window, self._probation, self._protected):
            if key in segment:
                del segment[key]

    def victim(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        count = len(self)
        missing = self._observe(count) - count
        surplus = len(self._window) + missing - self._window_capacity + 1
        room = self._main_capacity - count + len(self._window)
        for _ in range(min(surplus, room, len(self._window))):
            self._probation[self._window.popitem(last=False)[0]] = None
        rival, refusals = self._first(chain(self._probation, self._protected), evictable, self._max_scan)
        # With main beyond its share a candidate has just won: the rival it won against is named again until it leaves.
        if rival is not None and (surplus <= 0 or room < 0):
            return rival
        candidate, _ = self._first(self._window, evictable, self._max_scan - refusals)
        if candidate is None or rival is None:
            return rival if candidate is None else candidate
        if self._uses.estimate(candidate) <= self._uses.estimate(rival):
            return candidate
        del self._window[candidate]
        self._probation[candidate] = None
        return rival

    def _first(self, keys: Iterable[K], evictable: Callable[[K], bool], max_scan: int) -> tuple[K | None, int]:
        """The first key that may leave, and how many were refused before it: `max_scan` at most."""
        refusals = 0
        for key in keys:
            if refusals == max_scan:
                break
            if evictable(key):
                return key, refusals
            refusals += 1
        return None, refusals

    def _observe(self, count: int) -> int:
        capacity = self._capacity.observe(count)
        if self._window_capacity + self._main_capacity != capacity:
            self._window_capacity = max(1, int(WINDOW_SHARE * capacity))
            self._main_capacity = capacity - self._window_capacity
        return capacity

    def __len__(self) -> int:
        return len(self._window) + len(self._probation) + len(self._protected)

    def __contains__(self, key: K) -> bool:
        return key in self._window or key in self._probation or key in self._protected

    def check_integrity(self) -> None:
        everywhere = [*self._window, *self._probation, *self._protected]
        assert len(set(everywhere)) == len(everywhere)
        self._uses.check_integrity()
