"""Which engines share blocks, and which engines are refused.

Which engines may read one another's blocks: everything that changes the bytes of a block and is not in vLLM's own block hash.

A block's key is the id of a kvcache Namespace and vLLM's hash of the block, which covers its tokens and all before it, the LoRA's name,
multimodal inputs and the request's salt. The namespace covers the rest: the model and its weights, element types, the split over ranks, and
how the attention backend lays out a block in memory. Each rank of an engine has one of its own, unless ranks hold equal bytes; it is made
where that memory is known, in the rank, and told to the scheduler.

How an engine must not be started: refusals in plain values, which facts.py reads from vLLM, each with what to change.

Blocks would not be found again, be found under a name by which others mean something else, or count as loaded when they are not.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ConfigError

MAX_VARIANTS: Final = 4096
"""Namespaces that are remembered: shards times adapters and weight versions."""
LONG_ROPE: Final = ("longrope", "su")
"""Its names in configurations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """What one rank of an engine is, in plain values; `facts.py` reads them from vLLM. Texts may be empty where there is nothing to say."""

    model: str
    """Its name, or its architecture: weights are identified by their bytes, wherever they lie."""
    config: str
    """The model's configuration: rope scaling, overrides and all."""
    rope: str
    """What else the engine's settings change about positions: see `long_rope`."""
    settings: str
    """Values of the engine's other settings that change bytes: see fields.py."""
    draft: str
    """The model that drafts tokens, whose layers have caches among the others."""
    dtype: str
    cache_dtype: str
    """`auto` is the model's."""
    quantization: str
    quantization_config: str
    """What the engine was told of it."""
    block_tokens: int
    hash_algorithm: str
    device: str
    layers: tuple[str, ...]
    """Of each layer that this rank holds its name, backend, element type, and the axes of a block in memory order with their places."""
    pools: tuple[str, ...]
    """Of each layer the kind of its cache, and the engine's own name of its elements: several are stored as uint8."""
    tp_rank: int
    tp_size: int
    kv_replicas: int
    """Consecutive tensor-parallel ranks with equal bytes: of MLA, and of models with fewer heads than ranks."""

    @property
    def is_writer(self) -> bool:
        """Of ranks with equal bytes one stores them."""
        return self.tp_rank % self.kv_replicas == 0


@dataclass(frozen=True, slots=True)
class Variant:
    """Weights and adapter that computed a request's blocks. The scheduler chooses one for each request and sends it with every transfer."""

    weights: str
    """Identity of the weights: a fingerprint of the files or a revision, with the weight version where there is one."""
    adapter: str = ""
    """Fingerprint of the LoRA; empty for none."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The blocks of one rank, or of several that hold equal bytes."""

    namespace: Namespace

    def of(self, variant: Variant) -> "Shard":
        """This shard's blocks of one variant. The shard that a rank describes is a template that names no weights."""
        return _varied(self, variant)

    def canonical(self) -> list[bytes]:
        """The canonical form of its namespace, alone in a list: see `HeadShards`."""
        return [self.namespace.canonical()]

    def key(self, block_hash: bytes) -> bytes:
        """Of the block that vLLM calls `block_hash`."""
        return self.namespace.id + block_hash

    def keys(self, hashes: Iterable[bytes]) -> list[bytes]:
        seed = self.namespace.id
        return [seed + block_hash for block_hash in hashes]


def shard(facts: RankFacts, *, salt: str = "") -> Shard:
    """That of a rank. Equal for engines that may share blocks."""
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
    """Of a model with LongRoPE, by its configuration, which factors its keys are turned by: vLLM takes the long ones for prompts of any
    length if the engine takes longer prompts than the model was first trained for. Empty for other models."""
    found = list(_mappings(config))
    if not any(of.get(name) in LONG_ROPE for of in found for name in ("rope_type", "type")):
        return ""
    trained = sorted({tokens for of in found if (tokens := of.get("original_max_position_embeddings"))})
    factors = [f"{'long' if max_model_tokens > tokens else 'short'} of {tokens}" for tokens in trained]
    return " ".join(factors) or str(max_model_tokens)


def _mappings(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """It and all those in it."""
    yield value
    for inner in value.values():
        if isinstance(inner, Mapping):
            yield from _mappings(inner)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32] if text else ""


UNSTABLE_HASHES: Final = frozenset({"xxhash", "xxhash_cbor"})
"""vLLM seeds these anew in each process, unless PYTHONHASHSEED is set."""


def check_hash(algorithm: str, *, is_seeded: bool) -> None:
    """`is_seeded`: PYTHONHASHSEED is set. Raises ConfigError if what vLLM calls a block is not what any other process calls it."""
    if algorithm in UNSTABLE_HASHES and not is_seeded:
        raise ConfigError(
            f"vLLM's {algorithm} hashes are other ones in each process, so that no other would find a block again: start it with "
            "--prefix-caching-hash-algo sha256, or with the same PYTHONHASHSEED everywhere"
        )


def check_images(*, processor_cache_gb: float, has_prefix_cache: bool) -> None:
    """Of an engine that takes images, audio or video. Raises ConfigError if vLLM, which has no use for it, does not hash them: it numbers
    them then, as any other engine does."""
    if not processor_cache_gb and not has_prefix_cache:
        raise ConfigError(
            "vLLM calls images by numbers, not by their content, without its caches, so that prompts would find blocks of other images: "
            "start it with --enable-prefix-caching, or with --mm-processor-cache-gb above 0"
        )
