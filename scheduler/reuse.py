"""Whether a prefix is cheaper to fetch than to compute, as Mooncake reasons: a formula of four figures of the model. No estimator.

Source: Qin et al., Mooncake, FAST 2025, section 2 (flops(n) and the inequality); a = 4 and b = 22 are its figures for Llama 3 70B.
"""

from typing import Final

from kvstore.kvcache.models.facts import ModelFacts
from kvstore.protocol.errors import ConfigError

ATTENTION_FLOPS: Final = 4
"""a: two products with every key, none of them masked out, two operations a multiply-accumulate."""
MATRIX_FLOPS: Final = 22
"""b: of all matrices of a layer, in units of hidden^2."""


def break_even(prefix_tokens: int, model: ModelFacts) -> float:
    """Bytes a second over operations a second, B / G, above which fetching a prefix beats computing it: 2 d s / (gqa (a p d + b d^2)).

    It is the prefix's bytes over its operations, so it holds for any speed of either. The operations of the prefill of n tokens are
    l (a n^2 d + b n d^2); in attention d is the width of all query heads.

    Raises:
        ConfigError: the model has experts, latent attention or a sliding window, which the formula does not describe.
    """
    return model.kv_bytes_per_token / _flops_per_token(prefix_tokens, model)


def _flops_per_token(prompt_tokens: int, model: ModelFacts) -> float:
    if model.specials:
        raise ConfigError(
            f"{model.name} has {' and '.join(model.specials)}, which Mooncake's inequality does not describe: take a dense model"
        )
    attention = ATTENTION_FLOPS * prompt_tokens * model.heads * model.head_dim
    return float(model.layers * (attention + MATRIX_FLOPS * model.hidden**2))
