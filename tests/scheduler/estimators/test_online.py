"""An estimator that learns follows the latest samples, and keeps what it knew while they teach nothing."""

import random

import pytest

from kvstore.scheduler.estimators.online import REFIT_SAMPLES, WINDOW_SAMPLES, OnlineDecode, OnlinePrefill
from kvstore.scheduler.estimators.regression import DecodeSample, PrefillSample


class Guess:
    def prefill_s(self, input_tokens: int, prefix_tokens: int) -> float:
        return 77.0

    def tbt_s(self, batch: int, context_tokens: int) -> float:
        return 88.0


def prefills(count: int, *, factor: float = 1.0, seed: int = 1) -> list[PrefillSample]:
    """A thousand tokens take `factor` seconds."""
    rng = random.Random(seed)
    return [PrefillSample(n := rng.randrange(100, 9000), p := rng.randrange(n), factor * (n - p) / 1000) for _ in range(count)]


def test_before_anything_was_learnt_the_first_guess_holds() -> None:
    online = OnlinePrefill(Guess())
    for sample in prefills(REFIT_SAMPLES - 1):
        online.add(sample)
    assert online.prefill_s(1000, 0) == 77
    assert online.report is None


def test_after_enough_samples_they_are_believed() -> None:
    online = OnlinePrefill(Guess())
    for sample in prefills(REFIT_SAMPLES):
        online.add(sample)
    assert online.prefill_s(5000, 2000) == pytest.approx(3)
    assert online.report is not None
    assert online.report.samples == REFIT_SAMPLES


def test_online_fit_follows_a_slower_machine() -> None:
    online = OnlinePrefill(Guess())
    for sample in prefills(REFIT_SAMPLES) + prefills(WINDOW_SAMPLES, factor=2, seed=2):
        online.add(sample)
    assert online.prefill_s(5000, 2000) == pytest.approx(6)


def test_online_fit_survives_equal_prompts() -> None:
    online = OnlinePrefill(Guess())
    for sample in prefills(REFIT_SAMPLES) + [PrefillSample(1000, 0, 1.0)] * 2 * WINDOW_SAMPLES:
        online.add(sample)
    assert online.prefill_s(5000, 2000) == pytest.approx(3)


def test_decode_is_learnt_as_well() -> None:
    online, rng = OnlineDecode(Guess()), random.Random(3)
    assert online.tbt_s(4, 4000) == 88
    assert online.report is None
    for _ in range(REFIT_SAMPLES):
        batch, context = rng.randrange(1, 30), rng.randrange(100, 90_000)
        online.add(DecodeSample(batch, context, 0.02 + batch * 1e-3 + context * 1e-6))
    assert online.tbt_s(4, 4000) == pytest.approx(0.028)
    assert online.report is not None
