"""Tests of metrics.py that a master's own tests do not hold: what it counts never falls while partitions come and go."""

from collections import Counter

from kvstore.master.metrics import LifetimeCounters


def test_sums_of_what_is_owned_and_was_never_fall() -> None:
    ever = LifetimeCounters()
    first, second = Counter({"keys": 10}), {"keys": 5, "misses": 1}
    assert ever.of([first, second]) == {"keys": 15, "misses": 1}
    second["keys"] += 2  # after it was counted last
    assert ever.of([first]) == {"keys": 17, "misses": 1}
    assert ever.of([]) == {"keys": 17, "misses": 1}
    first["keys"] += 1  # of an ownership that is over
    again = {"keys": 0}
    assert ever.of([again]) == {"keys": 17, "misses": 1}
    again["keys"] = 3
    assert ever.of(iter([again])) == ever.of([again]) == {"keys": 20, "misses": 1}
