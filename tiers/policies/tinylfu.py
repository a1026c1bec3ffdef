"""W-TinyLFU: a small LRU window of new keys, and a main part that admits a key only if it was used more often than the
victim.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from itertools import chain, islice
from typing import Final

from kvstore.tiers.policies.interface import EvictionPolicy, K, ObservedCapacity

MAX_COUNT: Final = 15
"""Largest count: with a sample of ten uses per key, more does not discriminate."""

COLUMNS_PER_KEY: Final = 4
"""Minimum; at most twice that. Removed keys count until they are halved away, so they are several times the present
ones.
"""

MIN_COLUMNS: Final = 64

SAMPLE_PER_COLUMN: Final = 3
"""Uses per column after which all counts are halved: 12 to 24 per key. The paper has about ten."""

_MASK: Final = (1 << 64) - 1

_MIX: Final = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: spreads adjacent hashes, such as those of integers."""

_HALVED: Final = bytes(count >> 1 for count in range(256))

WINDOW_SHARE: Final = 0.01
"""Fraction of the capacity; at least one key."""

PROTECTED_SHARE: Final = 0.8
"""Fraction of the main part, for keys used since they entered it."""


class FrequencySketch:
    """Count-min sketch of four rows with conservative update. Estimates use counts since the halvings, up to MAX_COUNT;
    too high only for keys that share all four counters.

    `fit` grows it without losing counts: in a row twice as wide a key's column is the old one or one width further.
    `bytes` keys hash differently in each process, so collisions vary. Source: Cormode, Muthukrishnan, An improved data
    stream summary, 2005; Einziger, Friedman, Manes, TinyLFU, ACM TOS 2017 (without its doorkeeper).
    """

    def __init__(self) -> None:
        self._rows = [bytearray(MIN_COLUMNS) for _ in range(4)]
        self._last_column = MIN_COLUMNS - 1
        self._until_halving = SAMPLE_PER_COLUMN * MIN_COLUMNS

    def fit(self, keys: int) -> None:
        """Provide at least COLUMNS_PER_KEY columns per key. O(1) amortised."""
        while self._last_column < COLUMNS_PER_KEY * keys - 1:
            self._until_halving += SAMPLE_PER_COLUMN * (self._last_column + 1)
            self._rows = [row + row for row in self._rows]
            self._last_column = 2 * self._last_column + 1

    def add(self, key: Hashable) -> None:
        """Count a use of the key."""
        mixed = (hash(key) * _MIX) & _MASK
        last, (first_row, second_row, third_row, fourth_row) = self._last_column, self._rows
        step = mixed >> 32 | 1
        first, second = mixed & last, (mixed + step) & last
        third, fourth = (mixed + 2 * step) & last, (mixed + 3 * step) & last
        count = min(first_row[first], second_row[second], third_row[third], fourth_row[fourth])
        if count == MAX_COUNT:
            return
        if first_row[first] == count:
            first_row[first] += 1
        if second_row[second] == count:
            second_row[second] += 1
        if third_row[third] == count:
            third_row[third] += 1
        if fourth_row[fourth] == count:
            fourth_row[fourth] += 1
        self._until_halving -= 1
        if not self._until_halving:
            self._halve()

    def estimate(self, key: Hashable) -> int:
        """Return the recent uses, 0 to MAX_COUNT."""
        mixed = (hash(key) * _MIX) & _MASK
        last, (first_row, second_row, third_row, fourth_row) = self._last_column, self._rows
        step = mixed >> 32 | 1
        return min(
            first_row[mixed & last],
            second_row[(mixed + step) & last],
            third_row[(mixed + 2 * step) & last],
            fourth_row[(mixed + 3 * step) & last],
        )

    def _halve(self) -> None:
        self._rows = [row.translate(_HALVED) for row in self._rows]
        self._until_halving = SAMPLE_PER_COLUMN * (self._last_column + 1) // 2

    def check_integrity(self) -> None:
        """Assert the limits. For tests; O(columns)."""
        assert {len(row) for row in self._rows} == {self._last_column + 1}
        assert max(map(max, self._rows)) <= MAX_COUNT
        assert self._until_halving > 0


class WTinyLFU(EvictionPolicy[K]):
    """An LRU window, and a segmented LRU of probation and protected keys. Every operation is O(1), a victim amortised
    over inserts.

    A batch requests all victims before its inserts, so keys missing to the capacity count as the window's. While the
    tier fills, all keys are in the window. Source: Einziger, Friedman, Manes, TinyLFU: A highly efficient cache
    admission policy, ACM TOS 2017.
    """

    name = "tinylfu"

    def __init__(self) -> None:
        self._window: OrderedDict[K, None] = OrderedDict()
        self._probation: OrderedDict[K, None] = OrderedDict()
        self._protected: OrderedDict[K, None] = OrderedDict()
        self._uses = FrequencySketch()
        self._capacity = ObservedCapacity()
        self._window_capacity = self._main_capacity = 0

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
        rival, refusals = self._first(chain(self._probation, self._protected), evictable, self.max_scan)
        # Main exceeds its share because a candidate has just won: return the same rival until it is removed.
        if rival is not None and (surplus <= 0 or room < 0):
            return rival
        candidate, _ = self._first(self._window, evictable, self.max_scan - refusals)
        if candidate is None or rival is None:
            return rival if candidate is None else candidate
        if self._uses.estimate(candidate) <= self._uses.estimate(rival):
            return candidate
        del self._window[candidate]
        self._probation[candidate] = None
        return rival

    def next_victims(self, count: int, evictable: Callable[[K], bool] = lambda key: True) -> list[K]:
        present = len(self)
        capacity = max(self._capacity.keys, present)
        window_capacity, main_capacity = _shares(capacity)
        surplus = len(self._window) + capacity - present - window_capacity + 1
        room = main_capacity - present + len(self._window)
        moving = max(0, min(surplus, room, len(self._window)))
        main = chain(self._probation, islice(self._window, moving), self._protected)
        first, refusals = self._first(main, evictable, self.max_scan)
        if first is None or (surplus > 0 and room >= 0):
            candidate, _ = self._first(islice(self._window, moving, None), evictable, self.max_scan - refusals)
            if candidate is not None and (first is None or self._uses.estimate(candidate) <= self._uses.estimate(first)):
                first = candidate
        if first is None:
            return []
        others = islice(chain(self._probation, self._window, self._protected), self.max_scan)
        return [first, *islice((key for key in others if key != first and evictable(key)), count - 1)]

    def _first(self, keys: Iterable[K], evictable: Callable[[K], bool], max_scan: int) -> tuple[K | None, int]:
        """Return the first evictable key and the number of keys refused before it, at most `max_scan`."""
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
            self._window_capacity, self._main_capacity = _shares(capacity)
        return capacity

    def __len__(self) -> int:
        return len(self._window) + len(self._probation) + len(self._protected)

    def __contains__(self, key: K) -> bool:
        return key in self._window or key in self._probation or key in self._protected

    def check_integrity(self) -> None:
        everywhere = [*self._window, *self._probation, *self._protected]
        assert len(set(everywhere)) == len(everywhere)
        self._uses.check_integrity()


def _shares(capacity: int) -> tuple[int, int]:
    """Return the capacities of the window and of the main part."""
    window = max(1, int(WINDOW_SHARE * capacity))
    return window, capacity - window
