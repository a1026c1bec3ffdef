"""Promises of gaps.py."""

from hypothesis import given
from hypothesis import strategies as st

from kvstore.scheduler.simulator.decode import Gaps

SHARES = (0.5, 0.9, 0.99, 1.0)


def naive(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all are not above."""
    ordered = sorted(values)
    return next(value for number, value in enumerate(ordered, 1) if number >= share * len(ordered))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1))
def test_weights_count_as_repetitions(found: list[tuple[int, int]]) -> None:
    gaps = Gaps()
    for gap_s, count in found:
        gaps.add(gap_s, count)
    values = [float(gap_s) for gap_s, count in found for _ in range(count)]
    assert gaps.count == len(values)
    if values:
        assert gaps.mean_s == sum(values) / len(values)
        assert gaps.percentiles_s(SHARES) == [naive(values, share) for share in SHARES]
        assert gaps.points() == [(value, sum(each <= value for each in values) / len(values)) for value in sorted(set(values))]


def test_none_have_no_length() -> None:
    gaps = Gaps()
    gaps.add(1.0, 0)
    assert (gaps.count, gaps.mean_s, gaps.percentiles_s(SHARES), gaps.points()) == (0, 0.0, [0.0] * 4, [])
