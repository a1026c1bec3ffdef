"""Break-even of fetching a prefix against computing it, by Mooncake's formula from four figures of a model. Not an
estimator.

Source: Qin et al., Mooncake, FAST 2025, section 2 (flops(n) and the inequality); a = 4 and b = 22 are its figures for
Llama 3 70B.
"""

from typing import Final

from kvstore.kvcache.models.facts import ModelFacts
from kvstore.protocol.errors import ConfigError

ATTENTION_FLOPS: Final = 4
"""a: two products with every key, without masking, two operations per multiply-accumulate."""
MATRIX_FLOPS: Final = 22
"""b: of all matrices of a layer, in units of hidden^2."""


def break_even(prefix_tokens: int, model: ModelFacts) -> float:
    """Bandwidth over compute, B / G in bytes per operation, above which fetching a prefix beats computing it: 2 d s /
    (gqa (a p d + b d^2)).

    It is the prefix's bytes over its operations, so it holds at any speed. The prefill of n tokens takes l (a n^2 d + b
    n d^2) operations; in attention d is the width of all query heads.

    Raises:
        ConfigError: the model has experts, latent attention or a sliding window, which the formula does not cover.
    """
    return model.kv_bytes_per_token / _flops_per_token(prefix_tokens, model)


def _flops_per_token(prompt_tokens: int, model: ModelFacts) -> float:
    if model.specials:
        raise ConfigError(f"{model.name} has {' and '.join(model.specials)}, which Mooncake's inequality does not cover: use a dense model")
    attention = ATTENTION_FLOPS * prompt_tokens * model.heads * model.head_dim
    return float(model.layers * (attention + MATRIX_FLOPS * model.hidden**2))
