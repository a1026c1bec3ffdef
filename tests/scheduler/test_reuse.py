"""Mooncake's inequality gives the bandwidths that its paper names."""

import pytest

from kvstore.kvcache.models.named import find_model
from kvstore.protocol.errors import ConfigError
from kvstore.scheduler.estimators.gpus import find_gpu
from kvstore.scheduler.reuse import break_even, flops, reuse_pays

LLAMA = find_model("llama3-70b")


def test_flops_are_quadratic_in_attention_and_linear_in_matrices() -> None:
    assert flops(1000, LLAMA) == 80 * (4 * 1000**2 * 8192 + 22 * 1000 * 8192**2)


def test_break_even_is_the_prefixs_bytes_over_its_operations() -> None:
    assert break_even(5000, LLAMA) == pytest.approx(5000 * LLAMA.kv_bytes_per_token / flops(5000, LLAMA))


@pytest.mark.parametrize(("gpu", "gigabytes_per_s"), [("A800-80G", 6), ("H800", 19)])
def test_what_a_prefix_of_8192_tokens_takes_on_eight_gpus_is_what_the_paper_says(gpu: str, gigabytes_per_s: float) -> None:
    assert break_even(8192, LLAMA) * 8 * find_gpu(gpu).flops_per_s / 1e9 == pytest.approx(gigabytes_per_s, rel=0.03)


def test_reuse_pays_above_the_break_even_only() -> None:
    limit = break_even(8192, LLAMA)
    assert reuse_pays(8192, LLAMA, bytes_per_s=limit * 1.001e15, flops_per_s=1e15)
    assert not reuse_pays(8192, LLAMA, bytes_per_s=limit * 0.999e15, flops_per_s=1e15)


def test_a_longer_prefix_pays_on_a_slower_network() -> None:
    assert break_even(32768, LLAMA) < break_even(1024, LLAMA)


def test_attention_is_as_wide_as_all_query_heads_whatever_the_hidden_size() -> None:
    qwen = find_model("qwen3-32b")
    assert flops(1000, qwen) == 64 * (4 * 1000**2 * 64 * 128 + 22 * 1000 * 5120**2)
    assert break_even(1000, qwen) == pytest.approx(1000 * qwen.kv_bytes_per_token / flops(1000, qwen))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("deepseek-v3", "latent attention and a mixture of experts"),
        ("mixtral-8x7b", "a mixture of experts"),
        ("gemma-3-27b", "a sliding window"),
    ],
)
def test_a_model_that_the_formula_does_not_describe_is_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} has {why}, which Mooncake's inequality does not describe"):
        break_even(1000, find_model(name))
