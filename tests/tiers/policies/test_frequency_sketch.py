"""The sketch counts as a table of counts does, until keys share counters; it forgets by halves."""

import random
from collections import Counter

import pytest

from kvstore.tiers.policies.tinylfu import COLUMNS_PER_KEY, MAX_COUNT, MIN_COLUMNS, SAMPLE_PER_COLUMN, FrequencySketch


def test_it_counts_each_use_of_a_key_and_nothing_of_others() -> None:
    sketch = FrequencySketch()
    for key, uses in ((11, 3), (12, 1), ((1, 2), 5)):
        for _ in range(uses):
            sketch.add(key)
    assert [sketch.estimate(key) for key in (11, 12, (1, 2), 13)] == [3, 1, 5, 0]
    sketch.check_integrity()


def test_counts_stop_at_their_limit() -> None:
    sketch = FrequencySketch()
    for _ in range(MAX_COUNT + 5):
        sketch.add("a")
    assert sketch.estimate("a") == MAX_COUNT
    sketch.check_integrity()


def test_estimates_are_never_too_low_and_seldom_too_high() -> None:
    chance = random.Random(3)
    sketch = FrequencySketch()
    sketch.fit(500)
    uses = Counter(int(chance.paretovariate(1.0)) % 500 for _ in range(3000))
    for key in uses.elements():
        sketch.add(key)
    exact = {key: min(MAX_COUNT, count) for key, count in uses.items()}
    assert all(sketch.estimate(key) >= count for key, count in exact.items())
    assert sum(sketch.estimate(key) != count for key, count in exact.items()) <= len(exact) // 50


def test_all_counts_are_halved_after_a_sample_and_then_after_half_of_one() -> None:
    sketch = FrequencySketch()
    often = 10**7  # a number, not a text: those collide with others in some processes
    for _ in range(9):
        sketch.add(often)
    sample = SAMPLE_PER_COLUMN * MIN_COLUMNS
    fillers = iter(range(10**6))
    for _ in range(sample - 10):
        sketch.add(next(fillers))
    assert sketch.estimate(often) == 9
    sketch.add(often)
    assert sketch.estimate(often) == 5
    for _ in range(sample // 2):
        sketch.add(next(fillers))
    assert sketch.estimate(often) <= 5


def test_it_grows_with_the_keys_and_keeps_its_counts() -> None:
    sketch = FrequencySketch()
    for key in range(20):
        for _ in range(key % 7):
            sketch.add(key)
    sketch.fit(MIN_COLUMNS // COLUMNS_PER_KEY)
    assert len(sketch._rows[0]) == MIN_COLUMNS
    for keys in (MIN_COLUMNS // COLUMNS_PER_KEY + 1, 1000):
        sketch.fit(keys)
        sketch.check_integrity()
        assert len(sketch._rows[0]) >= COLUMNS_PER_KEY * keys
    assert [sketch.estimate(key) for key in range(20)] == [key % 7 for key in range(20)]


def test_its_check_finds_rows_that_differ() -> None:
    sketch = FrequencySketch()
    sketch._rows[2] = bytearray(1)
    with pytest.raises(AssertionError):
        sketch.check_integrity()
