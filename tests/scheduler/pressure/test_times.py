"""Promises of times.py."""

import pytest

from kvstore.kvcache.models.named import find_model
from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.estimators.analytic import GPUS, AnalyticModel, find_gpu
from kvstore.scheduler.pressure.strategies import QuantisedTimes

PLAIN = AnalyticModel(find_model("llama3-8b"), find_gpu("L4"))


def test_half_the_bytes_take_half_the_time_that_the_cache_takes() -> None:
    half = QuantisedTimes(PLAIN, 0.5)
    weights_s = PLAIN.tbt_s(8, 0)
    assert half.tbt_s(8, 40_000) - weights_s == pytest.approx((PLAIN.tbt_s(8, 40_000) - weights_s) / 2)
    assert half.tbt_s(8, 0) == weights_s


def test_prefill_takes_as_long_as_before() -> None:
    assert QuantisedTimes(PLAIN, 0.25).prefill_s(5000, 1000) == PLAIN.prefill_s(5000, 1000)


@pytest.mark.parametrize("name", GPUS)
def test_reading_still_bounds_attention_at_two_bits_with_8_query_heads_a_kv_head(name: str) -> None:
    """Without that a quantised cache would not be faster in proportion."""
    gpu, model = GPUS[name], find_model("llama3-70b")
    times = AnalyticModel(model, gpu, gpus=16)
    context = 100_000
    attention = next(
        part for part in times.operations(new_tokens=0, prefix_tokens=0, batch=8, context_tokens=context) if "decode" in part.name
    )
    assert attention.seconds > attention.flops / (16 * gpu.flops_per_s * 0.5) * 8


@pytest.mark.parametrize("share", [0.0, -1.0, float("inf"), float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(InvalidArgument, match="share is"):
        QuantisedTimes(PLAIN, share)
