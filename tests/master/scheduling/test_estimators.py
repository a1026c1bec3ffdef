"""Tests of estimators.py."""

import pytest

from kvstore.kvcache.models.named import find_model
from kvstore.master.scheduling.estimators import MAX_SAMPLES, LinearGuess, LiveEstimators, Samples
from kvstore.scheduler.estimators.analytic import AnalyticModel, find_gpu
from kvstore.scheduler.estimators.online import REFIT_SAMPLES, WINDOW_SAMPLES
from kvstore.scheduler.estimators.regression import DecodeSample, PrefillSample
from tests.master.blocks import S


def test_nothing_known_is_a_linear_guess() -> None:
    live, guess = LiveEstimators(None), LinearGuess()
    assert live.prefill_s(20_000, 10_000) == guess.prefill_s(20_000, 10_000) == 1.0
    assert live.tbt_s(4, 40_000) == guess.tbt_s(4, 40_000) == pytest.approx(0.021)
    assert live.words == "prefill: a linear guess; decode: a linear guess"


def test_a_model_and_a_gpu_are_a_better_start() -> None:
    model = AnalyticModel(find_model("llama2-70b"), find_gpu("A800"), gpus=8)
    live = LiveEstimators(model)
    assert live.prefill_s(8000, 1000) == model.prefill_s(8000, 1000)
    assert live.tbt_s(4, 4000) == model.tbt_s(4, 4000)
    assert " on 8 x A800" in live.words


def test_what_is_measured_takes_the_place_of_the_start() -> None:
    live = LiveEstimators(None)
    live.learn(Samples([PrefillSample(100 * n, 50, 0.1 + n / 10) for n in range(1, REFIT_SAMPLES + 1)], []), 0)
    assert live.prefill_s(1000, 50) == pytest.approx(1.1, rel=0.05)
    assert live.tbt_s(1, 0) == LinearGuess().tbt_s(1, 0)
    live.learn(Samples([], [DecodeSample(n, 100 * n * (1 + n % 3), 0.05 + n / 1000) for n in range(1, REFIT_SAMPLES + 1)]), 0)
    assert live.tbt_s(10, 2000) == pytest.approx(0.06, rel=0.05)
    assert live.words.startswith(f"prefill: fitted to {REFIT_SAMPLES} samples, half of them within ")


def test_latest_samples_are_learned_within_the_rate() -> None:
    live = LiveEstimators(None)
    flood = Samples([PrefillSample(100 * n, 50, n) for n in range(1, MAX_SAMPLES + 1)], [])
    live.learn(flood, 0)
    assert live.prefill_s(1000, 50) == pytest.approx(10.0, rel=0.05)
    slower = Samples([PrefillSample(100 * n, 50, 2 * n) for n in range(1, MAX_SAMPLES + 1)], [])
    for _ in range(10):
        live.learn(slower, 0)
    assert live.prefill_s(1000, 50) == pytest.approx(10.0, rel=0.05), "the second is used up"
    for second in range(1, 40):
        live.learn(slower, second * S)
    assert live.prefill_s(25_600, 50) == pytest.approx(512.0, rel=0.05)
    assert f"fitted to {WINDOW_SAMPLES} samples" in live.words


def test_transfer_time_converts_blocks_to_bytes() -> None:
    live = LiveEstimators(None)
    seen = live.for_dispatcher()
    live.block_bytes = 1000
    assert seen.transfer.transfer_s(4 * seen.block_bytes, backlog_bytes=6000, bytes_per_s=1000.0) == 10.0
    live.block_bytes = 10
    assert seen.transfer.transfer_s(4 * seen.block_bytes, backlog_bytes=0, bytes_per_s=1000.0) == 0.04
