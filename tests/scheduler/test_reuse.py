"""Mooncake's inequality gives the bandwidths that its paper names."""

import pytest

from kvstore.kvcache.models.named import find_model
from kvstore.protocol.errors import ConfigError
from kvstore.scheduler.estimators.analytic import find_gpu
from kvstore.scheduler.reuse import break_even

LLAMA = find_model("llama3-70b")


def test_break_even_is_the_prefixs_bytes_over_its_operations() -> None:
    operations = 80 * (4 * 1000**2 * 8192 + 22 * 1000 * 8192**2)
    assert break_even(1000, LLAMA) == pytest.approx(1000 * LLAMA.kv_bytes_per_token / operations)


@pytest.mark.parametrize(("gpu", "gigabytes_per_s"), [("A800-80G", 6), ("H800", 19)])
def test_break_even_matches_the_paper(gpu: str, gigabytes_per_s: float) -> None:
    assert break_even(8192, LLAMA) * 8 * find_gpu(gpu).flops_per_s / 1e9 == pytest.approx(gigabytes_per_s, rel=0.03)


def test_a_model_that_the_formula_does_not_describe_is_refused() -> None:
    with pytest.raises(ConfigError, match="latent attention and a mixture of experts, which Mooncake's inequality does not"):
        break_even(1000, find_model("deepseek-v3"))
