"""What fits where: weights, KV cache and the rest in the memory of GPUs; and what tiers below them add. Sizes only, no times.

A GPU's memory has its share of the weights, a reserve for activations and the runtime, and KV cache in all that is left. Tensor parallelism
divides KV heads among GPUs (with more GPUs than KV heads each keeps a copy of one), pipeline parallelism layers: the GPU with the most
of both is full first. Below HBM a cache is kept once, whatever the parallelism.

Source: the division into weights, 2 GB of activations and overhead, and KV cache, with the example of Llama 3 70B on two H100, is that of
the chapter "The KV cache", section 22.4.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvstore.kvcache.models.spec import CacheSpec
from kvstore.protocol.errors import ConfigError, InvalidArgument

DEFAULT_RESERVE_BYTES: Final = 2 * 10**9
"""Of a GPU, for activations and what the framework takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HbmCapacity:
    """The memory of GPUs that hold one copy of a model together. Figures are of the GPU that is full first, unless they say otherwise."""

    spec: CacheSpec
    tp: int
    pp: int
    hbm_bytes: int
    weight_bytes: int
    reserve_bytes: int
    share: float
    """Of a sequence's cache that this GPU keeps: its layers and heads over all of the model's."""

    @property
    def gpus(self) -> int:
        return self.tp * self.pp

    @property
    def kv_bytes(self) -> int:
        """Left for KV cache."""
        return self.hbm_bytes - self.weight_bytes - self.reserve_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        return self.share * self.spec.bytes_per_token

    @property
    def cache_bytes(self) -> int:
        """Of caches that the GPUs have room for together, copies of heads counted once."""
        return int(self.kv_bytes / self.share)

    @property
    def tokens(self) -> int:
        """That fit, in whatever sequences."""
        return tokens_in(self.spec, self.cache_bytes)

    def sequences(self, context_tokens: int) -> int:
        """Of `context_tokens` each that fit."""
        return sequences_in(self.spec, self.cache_bytes, context_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCapacity:
    """One more tier, and all down to it."""

    name: str
    size_bytes: int
    """Its own."""
    tokens: int
    """That fit in it."""
    sequences: int
    """Of the context in question that fit in it."""
    total_bytes: int
    """Of caches in it and in all tiers above."""
    total_tokens: int
    total_sequences: int
    factor: float
    """total_bytes over those of HBM."""


def hbm_capacity(
    spec: CacheSpec, *, weight_bytes: int, hbm_bytes: int, tp: int = 1, pp: int = 1, reserve_bytes: int = DEFAULT_RESERVE_BYTES
) -> HbmCapacity:
    """Of `tp` x `pp` GPUs with `hbm_bytes` each; `weight_bytes`: of the whole model, divided evenly.

    Raises:
        InvalidArgument: heads or layers cannot be divided so.
        ConfigError: weights and reserve leave no room for a token; the message says how many GPUs there must be at least.
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
    """HBM and every tier of `sizes_bytes` (name to size, fastest first), each with what all down to it hold together."""
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
    """Tokens whose caches fit into `size_bytes`, none of them outside a window."""
    return int(size_bytes / spec.bytes_per_token)


def sequences_in(spec: CacheSpec, size_bytes: int, context_tokens: int) -> int:
    """Sequences of `context_tokens` that fit into `size_bytes`, nothing shared between them."""
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
        return f"a reserve of {_gb(reserve_bytes)} leaves nothing of a GPU's {_gb(hbm_bytes)}: make it smaller"
    enough = weight_bytes // usable_bytes + 1
    return (
        f"{name} has {_gb(weight_bytes)} of weights: {gpus} x {_gb(hbm_bytes)} less {_gb(reserve_bytes)} each leave no room for its "
        f"KV cache; it takes at least {max(enough, gpus + 1)} such GPUs (tp x pp)"
    )


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
