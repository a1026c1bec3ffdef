"""Promises of capacity.py: the worked figures of "The KV cache", section 22.4, and what must hold for any model."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstore.kvcache.codecs.schemes import CacheScheme
from kvstore.kvcache.models.named import MODELS, find_model
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.lab.pressure.capacity import hbm_capacity, sequences_in, tier_capacities, tokens_in
from kvstore.protocol.errors import ConfigError, InvalidArgument

GB = 10**9
LLAMA3_70B = CacheSpec.named("llama3-70b")


def test_llama3_70b_on_two_h100_as_the_chapter_reckons() -> None:
    """Weights 70 GB a GPU, 2 GB of the rest, 8 GB for KV cache at 160 KB a token: about 50,000 tokens, 10 users of 5,000."""
    found = hbm_capacity(LLAMA3_70B, weight_bytes=140 * GB, hbm_bytes=80 * GB, tp=2)
    assert (found.gpus, found.weight_bytes, found.reserve_bytes, found.kv_bytes) == (2, 70 * GB, 2 * GB, 8 * GB)
    assert found.kv_bytes_per_token == 160 * 1024
    assert found.tokens == 8 * GB // (160 * 1024) == 48_828
    assert found.tokens == pytest.approx(50_000, rel=0.03)
    assert found.tokens / 5000 == pytest.approx(10, rel=0.03)
    assert found.sequences(5000) == 9  # and 4,000 tokens beside them: 10 with a KB of 1,000 bytes


def test_capacity_refuses_unfit_model_with_gpu_count() -> None:
    with pytest.raises(ConfigError, match=r"llama3-70b has 140\.0 GB of weights: 1 x 80\.0 GB less 2\.0 GB each leave no space") as caught:
        hbm_capacity(LLAMA3_70B, weight_bytes=140 * GB, hbm_bytes=80 * GB)
    assert "use at least 2 such GPUs (tp x pp)" in str(caught.value)
    with pytest.raises(ConfigError, match="at least 3 such GPUs"):  # 78 GB of room each, all of it weights
        hbm_capacity(LLAMA3_70B, weight_bytes=156 * GB, hbm_bytes=80 * GB, tp=2)
    with pytest.raises(ConfigError, match=r"the model has 78\.0 GB of weights.* at least 2 such"):
        hbm_capacity(CacheSpec(layers=2, kv_heads=2, head_dim=8), weight_bytes=78 * GB - 1, hbm_bytes=80 * GB)


@given(st.sampled_from(sorted(MODELS)), st.integers(1, 400), st.integers(0, 20))
def test_the_number_named_is_the_least(name: str, hbm_gb: int, reserve_gb: int) -> None:
    assume(hbm_gb > reserve_gb)
    spec, weight_bytes = CacheSpec.named(name), find_model(name).weight_bytes
    least = next(n for n in range(1, 10_000) if fits(spec, weight_bytes, hbm_gb * GB, reserve_gb * GB, n))
    if least > 1:
        with pytest.raises(ConfigError, match=f"at least {least} such GPUs"):
            hbm_capacity(spec, weight_bytes=weight_bytes, hbm_bytes=hbm_gb * GB, reserve_bytes=reserve_gb * GB)


def fits(spec: CacheSpec, weight_bytes: int, hbm_bytes: int, reserve_bytes: int, gpus: int) -> bool:
    """With a share of the weights and of one token's cache; a GPU more or less for the token makes no difference to these models."""
    return hbm_bytes - reserve_bytes - weight_bytes / gpus > 0


def test_a_reserve_of_all_memory_is_refused_for_what_it_is() -> None:
    with pytest.raises(ConfigError, match=r"the reserve of 90\.0 GB takes all of a GPU.s 80\.0 GB"):
        hbm_capacity(LLAMA3_70B, weight_bytes=1, hbm_bytes=80 * GB, reserve_bytes=90 * GB)


def test_capacity_divides_and_replicates_kv_heads() -> None:
    weights = {"weight_bytes": 140 * GB, "hbm_bytes": 80 * GB}
    eight = hbm_capacity(LLAMA3_70B, tp=8, **weights)
    sixteen = hbm_capacity(LLAMA3_70B, tp=16, **weights)
    assert eight.kv_bytes_per_token == sixteen.kv_bytes_per_token == LLAMA3_70B.bytes_per_token / 8
    staged = hbm_capacity(LLAMA3_70B, tp=4, pp=3, **weights)
    assert staged.kv_bytes_per_token == LLAMA3_70B.bytes_per_token / 4 * 27 / 80  # 27 layers on the first stage
    assert staged.gpus == 12
    latent = CacheSpec.named("deepseek-v3")
    assert hbm_capacity(latent, tp=8, weight_bytes=0, hbm_bytes=80 * GB).kv_bytes_per_token == latent.bytes_per_token


def test_quantised_to_four_bits_three_to_four_times_as_much_fits() -> None:
    plain = hbm_capacity(LLAMA3_70B, weight_bytes=140 * GB, hbm_bytes=80 * GB, tp=2)
    spec = CacheSpec.named("llama3-70b", scheme=CacheScheme.parse("int4/64"), block_tokens=64)
    small = hbm_capacity(spec, weight_bytes=140 * GB, hbm_bytes=80 * GB, tp=2)
    assert small.tokens / plain.tokens == pytest.approx(16 / 4.5, rel=1e-3)


def test_of_windowed_layers_long_sequences_keep_the_window_only() -> None:
    """Mistral 7B v0.1 keeps 4,096 tokens of any sequence."""
    found = hbm_capacity(CacheSpec.named("mistral-7b-v0.1"), weight_bytes=15 * GB, hbm_bytes=80 * GB)
    assert found.sequences(4096) == found.sequences(100_000) == found.tokens // 4096


def test_tiers_add_up_and_are_compared_with_hbm() -> None:
    hbm = hbm_capacity(LLAMA3_70B, weight_bytes=140 * GB, hbm_bytes=80 * GB, tp=2)
    tiers = tier_capacities(hbm, {"DRAM": 160 * GB, "NVMe": 1600 * GB}, 5000)
    assert [tier.name for tier in tiers] == ["HBM", "DRAM", "NVMe"]
    assert [tier.size_bytes for tier in tiers] == [16 * GB, 160 * GB, 1600 * GB]
    assert [tier.factor for tier in tiers] == [1, 11, 111]
    assert (tiers[0].tokens, tiers[0].sequences) == (hbm.tokens, hbm.sequences(5000))
    assert tiers[1].tokens == 160 * GB // 327_680
    assert tiers[2].total_sequences == sum(tier.sequences for tier in tiers)
    assert tiers[2].total_tokens == sum(tier.tokens for tier in tiers)
    assert tiers[2].total_bytes == 1776 * GB


@given(st.sampled_from(sorted(MODELS)), st.integers(0, 10**14), st.integers(1, 10**6))
def test_what_fits_fits_and_one_more_does_not(name: str, size_bytes: int, context_tokens: int) -> None:
    spec = CacheSpec.named(name)
    tokens, sequences = tokens_in(spec, size_bytes), sequences_in(spec, size_bytes, context_tokens)
    assert tokens * spec.bytes_per_token <= size_bytes < (tokens + 1) * spec.bytes_per_token
    assert sequences * spec.sequence_bytes(context_tokens) <= size_bytes < (sequences + 1) * spec.sequence_bytes(context_tokens)


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="tp is 3"):
        hbm_capacity(LLAMA3_70B, weight_bytes=1, hbm_bytes=80 * GB, tp=3)
    for pp in (0, 81):
        with pytest.raises(InvalidArgument, match=f"pp is {pp}: it must be from 1 to the 80 layers"):
            hbm_capacity(LLAMA3_70B, weight_bytes=1, hbm_bytes=80 * GB, pp=pp)
