"""How often keys were used lately, roughly and in 16 to 32 bytes a key: a count-min sketch whose counts are halved now and then."""

from collections.abc import Hashable
from typing import Final

MAX_COUNT: Final = 15
"""Counts stop here: with a sample of ten uses a key, more says nothing about which of two keys is the better."""
COLUMNS_PER_KEY: Final = 4
"""At least; twice that at most. Keys that left count until they are halved away, so there are several times as many as present ones."""
MIN_COLUMNS: Final = 64
SAMPLE_PER_COLUMN: Final = 3
"""Uses after which all counts are halved, for each column: 12 to 24 a key. The paper has ten or so."""
_MASK: Final = (1 << 64) - 1
_MIX: Final = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: spreads hashes that are near each other, as those of numbers are."""
_HALVED: Final = bytes(count >> 1 for count in range(256))


class FrequencySketch:
    """Four rows of counters; only the lowest of a key's four are counted up. An estimate is never below the number of uses counted since
    the halvings let it, up to MAX_COUNT, and above it only for keys that share all their counters.

    It grows with `fit` and keeps its counts: a key's column in a row twice as wide is the old one or the one a width further.
    `bytes` keys hash differently in each process, so which keys collide does too.
    Source: Cormode, Muthukrishnan, An improved data stream summary, 2005; Einziger, Friedman, Manes, TinyLFU, ACM TOS 2017 (without
    its doorkeeper).
    """

    def __init__(self) -> None:
        self._rows = [bytearray(MIN_COLUMNS) for _ in range(4)]
        self._last_column = MIN_COLUMNS - 1
        self._until_halving = SAMPLE_PER_COLUMN * MIN_COLUMNS

    def fit(self, keys: int) -> None:
        """At least COLUMNS_PER_KEY columns for each of so many keys. O(1) amortised while keys come one by one."""
        while self._last_column < COLUMNS_PER_KEY * keys - 1:
            self._until_halving += SAMPLE_PER_COLUMN * (self._last_column + 1)
            self._rows = [row + row for row in self._rows]
            self._last_column = 2 * self._last_column + 1

    def add(self, key: Hashable) -> None:
        """The key was used."""
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
        """Uses lately, 0 to MAX_COUNT."""
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
