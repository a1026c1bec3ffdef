"""The fit is that of least squares where those are not negative, and of the most samples where some are wrong."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.estimators.regression import fit

ROWS = [(1.0, float(n), float(n * n)) for n in range(1, 40)]


def times(*coefficients: float) -> list[float]:
    return [sum(c * f for c, f in zip(coefficients, row, strict=True)) for row in ROWS]


@pytest.mark.no_cover
@given(st.tuples(*[st.integers(0, 50)] * 3).filter(any))
def test_what_is_a_sum_of_the_features_is_found_again(coefficients: tuple[int, int, int]) -> None:
    found, report = fit(ROWS, times(*coefficients))
    assert times(*found) == pytest.approx(times(*coefficients), rel=1e-6)
    assert min(found) >= 0
    assert report.samples == len(ROWS)


def test_r_squared_is_one_for_a_perfect_fit_and_zero_for_a_constant() -> None:
    assert fit(ROWS, times(1, 2, 3))[1].r_squared == pytest.approx(1)
    assert fit(ROWS, [5.0] * len(ROWS))[1].r_squared == 0


def test_a_coefficient_that_wants_to_be_negative_is_zero_and_the_others_are_the_best_without_it() -> None:
    measured = [100 - row[1] for row in ROWS]
    found, _ = fit(ROWS, measured)
    assert found[1] == found[2] == 0
    assert found[0] == pytest.approx(80, rel=0.05)


def test_noise_of_ten_percent_moves_the_fit_by_a_few() -> None:
    rng = random.Random(4)
    found, report = fit(ROWS * 5, [t * rng.uniform(0.9, 1.1) for t in times(5, 2, 1) * 5])
    assert times(*found) == pytest.approx(times(5, 2, 1), rel=0.03)
    assert 0.03 < report.median_relative_error < 0.07


@pytest.mark.parametrize("factors", [(10.0,), (0.1,), (0.1, 10.0)])
def test_a_tenth_of_the_samples_may_be_wrong_by_ten(factors: tuple[float, ...]) -> None:
    rng = random.Random(5)
    measured = [t * (rng.choice(factors) if i % 10 == 3 else rng.uniform(0.95, 1.05)) for i, t in enumerate(times(5, 2, 1) * 5)]
    found, report = fit(ROWS * 5, measured)
    assert times(*found) == pytest.approx(times(5, 2, 1), rel=0.08)
    assert report.median_relative_error < 0.05


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="11 samples are too few to fit: it takes 12"):
        fit(ROWS[:11], times(1, 1, 1)[:11])
    with pytest.raises(InvalidArgument, match="0 samples are too few"):
        fit([], [])


@pytest.mark.parametrize("rows", [[(1.0, 5.0, 25.0)] * 20, [(1.0, 0.0, float(n)) for n in range(20)], [(1.0, n, 2 * n) for n in range(20)]])
def test_samples_that_do_not_tell_the_features_apart_are_refused(rows: list[tuple[float, float, float]]) -> None:
    with pytest.raises(InvalidArgument, match="too much alike"):
        fit(rows, np.arange(1.0, 21.0).tolist())
