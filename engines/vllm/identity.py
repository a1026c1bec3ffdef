"""Namespaces of ranks, by which engines share blocks, and checks that reject engine configurations.

**Keys.** A block's key is the id of a kvcache Namespace followed by vLLM's block hash. vLLM's hash covers the tokens up
to the block's end, the LoRA's name, multimodal inputs and the request's salt. The namespace covers everything else that
changes a block's bytes: model and weights, element types, the split over ranks, and the attention backend's memory
layout.

**Ranks.** Each rank has its own namespace, unless ranks hold equal bytes. The rank computes it, because only it knows
the memory layout, and sends it to the scheduler.

**Refusals.** `check_hash` and `check_images` reject configurations whose hashes are not reproducible in other
processes.

facts.py reads the plain values from vLLM; this module imports no engine.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ConfigError

MAX_VARIANTS: Final = 4096
"""Cached namespaces: shards times adapters and weight versions."""
LONG_ROPE: Final = ("longrope", "su")
"""Names of LongRoPE in model configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """Everything that decides a rank's namespace, in plain values; `facts.py` reads them from vLLM. Empty texts: not
    applicable."""

    model: str
    """Name or architecture. The weights are identified by their bytes, not by their path."""
    config: str
    """Model configuration as JSON, with rope scaling and overrides."""
    rope: str
    """Other settings that change positions: see `long_rope`."""
    settings: str
    """Other engine settings that change bytes: see fields.py."""
    draft: str
    """Draft model of speculative decoding, if its layers have caches."""
    dtype: str
    cache_dtype: str
    """`auto` is the model's dtype."""
    quantization: str
    quantization_config: str
    """Quantization options that the engine was started with."""
    block_tokens: int
    hash_algorithm: str
    device: str
    layers: tuple[str, ...]
    """Name, backend, element type and memory order of block axes of each layer on this rank."""
    pools: tuple[str, ...]
    """Cache kind and engine-side element type of each layer: several types are stored as uint8."""
    tp_rank: int
    tp_size: int
    kv_replicas: int
    """Consecutive tensor-parallel ranks with equal bytes: of MLA, and of models with fewer heads than ranks."""

    @property
    def is_writer(self) -> bool:
        """True if this rank stores the blocks. Of the ranks with equal bytes, one stores them."""
        return self.tp_rank % self.kv_replicas == 0


@dataclass(frozen=True, slots=True)
class Variant:
    """Weights and adapter that computed a request's blocks. The scheduler assigns it to each request and sends it
    with every transfer."""

    weights: str
    """Fingerprint of the files or a revision, followed by the weight version if there is one."""
    adapter: str = ""
    """Fingerprint of the LoRA; empty without one."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Keys of one rank's blocks, or of several ranks with equal bytes."""

    namespace: Namespace

    def of(self, variant: Variant) -> "Shard":
        """Return this shard for one variant. A rank describes a template without weights."""
        return _varied(self, variant)

    def canonical(self) -> list[bytes]:
        """Return the canonical form of its namespace, as a list of one: see `HeadShards`."""
        return [self.namespace.canonical()]

    def key(self, block_hash: bytes) -> bytes:
        """Return the key of a block by vLLM's hash."""
        return self.namespace.id + block_hash

    def keys(self, hashes: Iterable[bytes]) -> list[bytes]:
        seed = self.namespace.id
        return [seed + block_hash for block_hash in hashes]


def shard(facts: RankFacts, *, salt: str = "") -> Shard:
    """Return a rank's shard, without weights. Equal for engines that may share blocks."""
    head_shards = facts.tp_size // facts.kv_replicas
    extra = {
        "engine": "vllm",
        "config": _digest(facts.config),
        "rope": facts.rope,
        "settings": facts.settings,
        "draft": _digest(facts.draft),
        "cache": facts.cache_dtype,
        "quantization": facts.quantization,
        "quantization_config": _digest(facts.quantization_config),
        "hash": facts.hash_algorithm,
        "device": facts.device,
        "layers": _digest("\n".join(facts.layers)),
        "pools": _digest("\n".join(facts.pools)),
    }
    return Shard(
        Namespace(
            model=facts.model,
            dtype=facts.dtype,
            block_tokens=facts.block_tokens,
            heads=(facts.tp_rank // facts.kv_replicas, head_shards) if head_shards > 1 else None,
            extra={name: value for name, value in extra.items() if value},
            salt=salt,
            hash="sha256",
        )
    )


@lru_cache(MAX_VARIANTS)
def _varied(template: Shard, variant: Variant) -> Shard:
    return Shard(replace(template.namespace, revision=variant.weights, adapter=variant.adapter))


def long_rope(config: Mapping[str, Any], max_model_tokens: int) -> str:
    """Return which LongRoPE factors rotate a model's keys; empty for models without LongRoPE.

    vLLM uses the long factors for prompts of any length if the engine accepts longer prompts than the model was first
    trained for.
    """
    found = list(_mappings(config))
    if not any(of.get(name) in LONG_ROPE for of in found for name in ("rope_type", "type")):
        return ""
    trained = sorted({tokens for of in found if (tokens := of.get("original_max_position_embeddings"))})
    factors = [f"{'long' if max_model_tokens > tokens else 'short'} of {tokens}" for tokens in trained]
    return " ".join(factors) or str(max_model_tokens)


def _mappings(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield `value` and all mappings nested in it."""
    yield value
    for inner in value.values():
        if isinstance(inner, Mapping):
            yield from _mappings(inner)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32] if text else ""


UNSTABLE_HASHES: Final = frozenset({"xxhash", "xxhash_cbor"})
"""vLLM seeds these in each process, unless PYTHONHASHSEED is set."""


def check_hash(algorithm: str, *, is_seeded: bool) -> None:
    """Raises ConfigError if other processes compute other block hashes. `is_seeded`: PYTHONHASHSEED is set."""
    if algorithm in UNSTABLE_HASHES and not is_seeded:
        raise ConfigError(
            f"vLLM's {algorithm} hashes differ in each process, so no other process would find a block: start vLLM with "
            "--prefix-caching-hash-algo sha256, or with the same PYTHONHASHSEED everywhere"
        )


def check_images(*, processor_cache_gb: float, has_prefix_cache: bool) -> None:
    """Check an engine with multimodal inputs. Raises ConfigError if vLLM does not hash them: with both caches off it
    numbers them instead, and numbers repeat in other engines."""
    if not processor_cache_gb and not has_prefix_cache:
        raise ConfigError(
            "without its caches vLLM numbers images instead of hashing them, so prompts would find blocks of other images: "
            "start vLLM with --enable-prefix-caching, or with --mm-processor-cache-gb above 0"
        )
