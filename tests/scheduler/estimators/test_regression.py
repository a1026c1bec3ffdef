"""Fits are those of least squares where those are not negative, and of the most samples where some are wrong."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kvcache.models.named import find_model
from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.estimators.analytic import AnalyticModel, find_gpu
from kvstore.scheduler.estimators.regression import DecodeRegression, DecodeSample, PrefillRegression, PrefillSample, fit

ROWS = [(1.0, float(n), float(n * n)) for n in range(1, 40)]
ANALYTIC = AnalyticModel(find_model("llama2-70b"), find_gpu("A800-80G"), gpus=8)
PROMPTS = [(500, 0), (2000, 1000), (8000, 0), (8000, 6000), (30_000, 0), (30_000, 20_000), (100_000, 0), (100_000, 60_000)]
BATCHES = [(1, 1000), (4, 60_000), (16, 100_000), (64, 400_000)]


def times(*coefficients: float) -> list[float]:
    return [sum(c * f for c, f in zip(coefficients, row, strict=True)) for row in ROWS]


@given(st.tuples(*[st.integers(0, 50)] * 3).filter(any))
def test_what_is_a_sum_of_the_features_is_found_again(coefficients: tuple[int, int, int]) -> None:
    found, report = fit(ROWS, times(*coefficients))
    assert times(*found) == pytest.approx(times(*coefficients), rel=1e-6)
    assert min(found) >= 0
    assert report.samples == len(ROWS)


def test_r_squared_of_perfect_and_constant_fits() -> None:
    assert fit(ROWS, times(1, 2, 3))[1].r_squared == pytest.approx(1)
    assert fit(ROWS, [5.0] * len(ROWS))[1].r_squared == 0


def test_fit_clamps_negative_coefficients_to_zero() -> None:
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
    with pytest.raises(InvalidArgument, match="11 samples are too few to fit: at least 12 are needed"):
        fit(ROWS[:11], times(1, 1, 1)[:11])
    with pytest.raises(InvalidArgument, match="0 samples are too few"):
        fit([], [])


@pytest.mark.parametrize("rows", [[(1.0, 5.0, 25.0)] * 20, [(1.0, 0.0, float(n)) for n in range(20)], [(1.0, n, 2 * n) for n in range(20)]])
def test_samples_that_do_not_tell_the_features_apart_are_refused(rows: list[tuple[float, float, float]]) -> None:
    with pytest.raises(InvalidArgument, match="too similar to fit"):
        fit(rows, np.arange(1.0, 21.0).tolist())


def prefills(*, noise: float = 0.0, count: int = 300) -> list[PrefillSample]:
    rng, samples = random.Random(1), []
    for _ in range(count):
        tokens = round(200 * 600 ** rng.random())  # 200 to 120,000, as many in each octave
        prefix = rng.choice((0, rng.randrange(tokens // 2 + 1)))
        samples.append(PrefillSample(tokens, prefix, ANALYTIC.prefill_s(tokens, prefix) * rng.uniform(1 - noise, 1 + noise)))
    return samples


def steps(*, noise: float = 0.0, count: int = 300) -> list[DecodeSample]:
    rng, samples = random.Random(2), []
    for _ in range(count):
        batch = rng.randrange(1, 65)
        context = sum(rng.randrange(100, 16_000) for _ in range(batch))
        samples.append(DecodeSample(batch, context, ANALYTIC.tbt_s(batch, context) * rng.uniform(1 - noise, 1 + noise)))
    return samples


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.03), (0.1, 0.06)])
def test_prefill_times_are_fitted_back(noise: float, within: float) -> None:
    fitted = PrefillRegression.fitted(prefills(noise=noise))
    for prompt in PROMPTS:
        assert fitted.prefill_s(*prompt) == pytest.approx(ANALYTIC.prefill_s(*prompt), rel=within), prompt
    assert fitted.report.r_squared > 0.98


@pytest.mark.parametrize(("noise", "within"), [(0.0, 0.02), (0.1, 0.04)])
def test_times_between_tokens_are_fitted_back(noise: float, within: float) -> None:
    fitted = DecodeRegression.fitted(steps(noise=noise))
    for batch in BATCHES:
        assert fitted.tbt_s(*batch) == pytest.approx(ANALYTIC.tbt_s(*batch), rel=within), batch


def test_outliers_move_the_fit_by_some_percent_only() -> None:
    wrong = [
        PrefillSample(s.input_tokens, s.prefix_tokens, s.duration_s * (10 if i % 10 == 0 else 1))
        for i, s in enumerate(prefills(noise=0.05))
    ]
    fitted = PrefillRegression.fitted(wrong)
    for prompt in PROMPTS:
        assert fitted.prefill_s(*prompt) == pytest.approx(ANALYTIC.prefill_s(*prompt), rel=0.12), prompt


def test_too_few_or_equal_samples_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="too few"):
        PrefillRegression.fitted(prefills(count=5))
    with pytest.raises(InvalidArgument, match="too similar to fit"):
        PrefillRegression.fitted([PrefillSample(1000, 0, 0.1)] * 50)
    with pytest.raises(InvalidArgument, match="too similar to fit"):
        DecodeRegression.fitted(DecodeSample(n, 1000 * n, 0.1) for n in range(1, 50))


@pytest.mark.parametrize(
    ("tokens", "prefix", "duration_s"),
    [(10, 10, 1), (10, -1, 1), (1 << 32, 0, 1), (10, 0, 0), (10, 0, 9e-7), (10, 0, 1.1e6), (10, 0, float("inf")), (10, 0, float("nan"))],
)
def test_a_prefill_that_cannot_have_been_is_no_sample(tokens: int, prefix: int, duration_s: float) -> None:
    with pytest.raises(InvalidArgument, match="cannot have"):
        PrefillSample(tokens, prefix, duration_s)


@pytest.mark.parametrize(
    ("batch", "context", "duration_s"), [(0, 10, 1), (11, 10, 1), (1, 10, -1), (1, 1 + (1 << 53), 1), (1 << 32, 1 << 53, 1)]
)
def test_a_step_that_cannot_have_been_is_no_sample(batch: int, context: int, duration_s: float) -> None:
    with pytest.raises(InvalidArgument, match="cannot have"):
        DecodeSample(batch, context, duration_s)
