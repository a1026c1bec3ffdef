"""Promises of strategies.py."""

import pytest

from kvstore.kvcache.models.named import find_model
from kvstore.lab.pressure.strategies import STRATEGIES, AdmissionStrategy, LowerTier, PreemptionStrategy, QuantisedTimes
from kvstore.protocol.errors import InvalidArgument
from kvstore.scheduler.estimators.analytic import GPUS, AnalyticModel, find_gpu

PLAIN = AnalyticModel(find_model("llama3-8b"), find_gpu("L4"))


def test_strategies_differ_in_behaviour() -> None:
    assert [strategy.name for strategy in STRATEGIES] == ["reject", "queue", "evict", "recompute", "offload", "queue+recompute"]
    assert len({(strategy.newcomers, strategy.displaced) for strategy in STRATEGIES}) == 6
    for strategy in STRATEGIES:
        # A strategy that displaces needs a preemption strategy; one that rejects reserves space and needs none.
        assert strategy.newcomers is not AdmissionStrategy.DISPLACE or strategy.displaced is not PreemptionStrategy.NONE
        assert strategy.newcomers is not AdmissionStrategy.REJECTED or strategy.displaced is PreemptionStrategy.NONE


@pytest.mark.parametrize(("capacity_bytes", "bytes_per_s"), [(-1, 1.0), (1, 0.0), (1, float("nan"))])
def test_a_tier_that_cannot_be_is_refused(capacity_bytes: int, bytes_per_s: float) -> None:
    with pytest.raises(InvalidArgument, match="the tier NVMe must have a capacity of 0 or more and a bandwidth above 0"):
        LowerTier(name="NVMe", capacity_bytes=capacity_bytes, bytes_per_s=bytes_per_s)


def test_half_the_bytes_take_half_the_time_that_the_cache_takes() -> None:
    half = QuantisedTimes(PLAIN, 0.5)
    weights_s = PLAIN.tbt_s(8, 0)
    assert half.tbt_s(8, 40_000) - weights_s == pytest.approx((PLAIN.tbt_s(8, 40_000) - weights_s) / 2)
    assert half.tbt_s(8, 0) == weights_s


def test_prefill_takes_as_long_as_before() -> None:
    assert QuantisedTimes(PLAIN, 0.25).prefill_s(5000, 1000) == PLAIN.prefill_s(5000, 1000)


@pytest.mark.parametrize("name", GPUS)
def test_quantised_times_still_bound_by_attention_reads(name: str) -> None:
    """Without that a quantised cache would not be faster in proportion."""
    gpu, model = GPUS[name], find_model("llama3-70b")
    times = AnalyticModel(model, gpu, gpus=16)
    context = 100_000
    attention = next(
        part for part in times.operations(new_tokens=0, prefix_tokens=0, batch=8, context_tokens=context) if "decode" in part.name
    )
    assert attention.seconds > attention.flops / (16 * gpu.flops_per_s * 0.5) * 8
