"""Capacity model: weights, reserve and KV cache in GPU memory, and the capacity of lower tiers. Sizes only, no times.

A GPU's memory holds its share of the weights, a reserve for activations and the runtime, and KV cache in the rest. Tensor parallelism
divides KV heads among GPUs, and replicates them if there are more GPUs; pipeline parallelism divides layers. The GPU with the largest share
limits the capacity. Lower tiers hold a cache once, regardless of the parallelism.

Source: chapter "The KV cache", section 22.4 (weights, 2 GB of activations and overhead, KV cache; example of Llama 3 70B on two H100).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.kvcache.models.spec import CacheSpec
from kvstore.protocol.errors import ConfigError, InvalidArgument

DEFAULT_RESERVE_BYTES: Final = 2 * 10**9
"""Per GPU, for activations and the framework."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HbmCapacity:
    """HBM capacity of the GPUs that hold one copy of a model. Unless noted, figures are per GPU, of the one that is full first."""

    spec: CacheSpec
    tp: int
    pp: int
    hbm_bytes: int
    weight_bytes: int
    reserve_bytes: int
    share: float
    """Share of a sequence's cache on this GPU: its layers and heads over the model's."""

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    @property
    def kv_bytes(self) -> int:
        """Memory for KV cache."""
        return self.hbm_bytes - self.weight_bytes - self.reserve_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        return self.share * self.spec.bytes_per_token

    @property
    def cache_bytes(self) -> int:
        """KV cache that all GPUs hold together, replicated heads counted once."""
        return int(self.kv_bytes / self.share)

    @property
    def tokens(self) -> int:
        """Tokens that fit."""
        return tokens_in(self.spec, self.cache_bytes)

    def sequences(self, context_tokens: int) -> int:
        """Return how many sequences of `context_tokens` fit."""
        return sequences_in(self.spec, self.cache_bytes, context_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCapacity:
    """Capacity of one tier, and cumulated (`total_`) with all tiers above."""

    name: str
    size_bytes: int
    tokens: int
    sequences: int
    """Of the given context length."""
    total_bytes: int
    total_tokens: int
    total_sequences: int
    factor: float
    """`total_bytes` over the capacity of HBM."""


def hbm_capacity(
    spec: CacheSpec, *, weight_bytes: int, hbm_bytes: int, tp: int = 1, pp: int = 1, reserve_bytes: int = DEFAULT_RESERVE_BYTES
) -> HbmCapacity:
    """Return the capacity of `tp` x `pp` GPUs with `hbm_bytes` each; `weight_bytes` of the whole model are divided evenly.

    Raises:
        InvalidArgument: heads or layers cannot be divided by `tp` or `pp`.
        ConfigError: weights and reserve leave no space for a token; the message has the least number of GPUs.
    """
    share = _largest_share(spec, tp, pp)
    own_weight_bytes = -(-weight_bytes // (tp * pp))
    found = HbmCapacity(
        spec=spec, tp=tp, pp=pp, hbm_bytes=hbm_bytes, weight_bytes=own_weight_bytes, reserve_bytes=reserve_bytes, share=share
    )
    if found.kv_bytes < found.kv_bytes_per_token:
        raise ConfigError(_too_small(spec, weight_bytes, hbm_bytes, reserve_bytes, tp * pp))
    return found


def tier_capacities(hbm: HbmCapacity, sizes_bytes: Mapping[str, int], context_tokens: int) -> list[TierCapacity]:
    """Return the capacities of HBM and of the tiers of `sizes_bytes` (name -> size, fastest first)."""
    found = []
    total_bytes = total_tokens = total_sequences = 0
    for name, size_bytes in {"HBM": hbm.cache_bytes, **sizes_bytes}.items():
        tokens, sequences = tokens_in(hbm.spec, size_bytes), sequences_in(hbm.spec, size_bytes, context_tokens)
        total_bytes, total_tokens, total_sequences = total_bytes + size_bytes, total_tokens + tokens, total_sequences + sequences
        found.append(
            TierCapacity(
                name=name,
                size_bytes=size_bytes,
                tokens=tokens,
                sequences=sequences,
                total_bytes=total_bytes,
                total_tokens=total_tokens,
                total_sequences=total_sequences,
                factor=total_bytes / hbm.cache_bytes,
            )
        )
    return found


def tokens_in(spec: CacheSpec, size_bytes: int) -> int:
    """Return how many tokens fit into `size_bytes`, all within the attention window."""
    return int(size_bytes / spec.bytes_per_token)


def sequences_in(spec: CacheSpec, size_bytes: int, context_tokens: int) -> int:
    """Return how many sequences of `context_tokens` fit into `size_bytes`, without sharing."""
    return int(size_bytes / spec.sequence_bytes(context_tokens))


def _largest_share(spec: CacheSpec, tp: int, pp: int) -> float:
    if not 1 <= pp <= spec.layers:
        raise InvalidArgument(f"pp is {pp}: it must be from 1 to the {spec.layers} layers")
    layers = -(-spec.layers // pp)
    return spec.shard(tp).kv_heads / spec.kv_heads * layers / spec.layers


def _too_small(spec: CacheSpec, weight_bytes: int, hbm_bytes: int, reserve_bytes: int, gpus: int) -> str:
    name = spec.model or "the model"
    usable_bytes = hbm_bytes - reserve_bytes
    if usable_bytes <= 0:
        return f"the reserve of {_gb(reserve_bytes)} takes all of a GPU's {_gb(hbm_bytes)}: reduce it"
    enough = weight_bytes // usable_bytes + 1
    return (
        f"{name} has {_gb(weight_bytes)} of weights: {gpus} x {_gb(hbm_bytes)} less {_gb(reserve_bytes)} each leave no space for its "
        f"KV cache; use at least {max(enough, gpus + 1)} such GPUs (tp x pp)"
    )


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
