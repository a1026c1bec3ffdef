"""Reads vLLM's configuration and layers as plain values, and derives what each rank stores of them.

The values are those of identity.py. A rank stores keys and memory of each group of layers: one value a block, or with
`share_tp` several, by KV heads.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from vllm.config import ModelConfig, VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from kvstore.engines.head_split import HeadSplit, head_split
from kvstore.engines.vllm import fields
from kvstore.engines.vllm.counters import LOG
from kvstore.engines.vllm.identity import RankFacts, check_hash, check_images, long_rope, shard
from kvstore.engines.vllm.plan import LayerGroup
from kvstore.engines.vllm.pools import HeadPools, HeadShards, LayerPools, head_slices
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.engines.vllm.worker import RankGroup
from kvstore.protocol.errors import ConfigError

LOCAL_CONFIG_FIELDS = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
"""Entries of a model's configuration that depend on its path or reader."""


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises ConfigError, with what to change, if blocks could not be found again or a store failure would fail
    requests."""
    check_hash(vllm_config.cache_config.prefix_caching_hash_algo, is_seeded="PYTHONHASHSEED" in os.environ)
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if (images := vllm_config.model_config.multimodal_config) is not None:
        has_prefix_cache = bool(vllm_config.cache_config.enable_prefix_caching)
        check_images(processor_cache_gb=images.mm_processor_cache_gb, has_prefix_cache=has_prefix_cache)
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
        raise ConfigError('set "kv_load_failure_policy": "recompute" in --kv-transfer-config: otherwise a lost block fails its request')
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError("context parallelism is not supported (its ranks hold parts of blocks): use tensor or pipeline parallelism")
    groups = layer_groups(kv_cache_config)
    if any(group.is_state for group in groups) and vllm_config.speculative_config is not None:
        raise ConfigError("speculative decoding is not supported with layers that keep a state (Mamba, linear attention)")


def layer_groups(kv_cache_config: KVCacheConfig) -> list[LayerGroup]:
    """Return one group for each block table. Raises ConfigError: a kind of cache is not supported."""
    return [_layer_group(group) for group in kv_cache_config.kv_cache_groups]


def _layer_group(group: KVCacheGroupSpec) -> LayerGroup:
    tokens = int(group.kv_cache_spec.block_size)
    kinds = {_window_tokens(spec) if group.enable_kv_transfer else None for spec in iter_layer_specs(group.kv_cache_spec)}
    if len(kinds) != 1 or None in kinds:
        names = ", ".join(sorted({type(spec).__name__ for spec in iter_layer_specs(group.kv_cache_spec)}))
        raise ConfigError(
            f"this model's layers have unsupported caches ({names}): supported are full attention, attention in a "
            "sliding window, and states (Mamba, short convolutions) with --enable-prefix-caching and --mamba-cache-mode align"
        )
    (window_tokens,) = kinds
    assert window_tokens is not None
    return LayerGroup(tokens, window_tokens, is_state=isinstance(group.kv_cache_spec, MambaSpec))


def _window_tokens(spec: KVCacheSpec) -> int | None:
    """Return the tokens before a position that a layer needs, 0 for all; None for caches whose contents no block
    hash identifies."""
    if not spec.prefix_cacheable or isinstance(spec, RSWASpec):
        return None
    if isinstance(spec, MambaSpec):
        return 1 if spec.mamba_cache_mode == "align" else None
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window - 1 + spec.extra_retained_tokens)
    return 0 if isinstance(spec, FullAttentionSpec) else None


def rank_facts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, place: int, pools: Mapping[str, Sequence[torch.Tensor]], settings: VllmSettings
) -> RankFacts:
    """Return the facts of a rank. `pools` has the tensors of its layers of group `place`, by layer name."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(pools))
    forms = [
        f"{name} {_backend(layers[name])} {' '.join(LayerPools.form(tensor, kv_cache_config.num_blocks) for tensor in tensors)}"
        for name, tensors in pools.items()
    ]
    is_cpu = current_platform.is_cpu()
    return RankFacts(
        model=settings.model or model.architecture,
        config=_config(model),
        rope=long_rope(model.hf_config.to_dict(), model.max_model_len),
        settings=fields.summary(settings_values(vllm_config)),
        draft=_draft(vllm_config),
        dtype=str(model.dtype).removeprefix("torch."),
        cache_dtype=cache.cache_dtype,
        quantization=str(model.quantization or ""),
        quantization_config=str(model.quantization_config or ""),
        block_tokens=int(kv_cache_config.kv_cache_groups[place].kv_cache_spec.block_size),
        hash_algorithm=cache.prefix_caching_hash_algo,
        device=current_platform.device_type if is_cpu else current_platform.get_device_name(),
        layers=tuple(forms),
        pools=tuple(_pool(layers[name], kv_cache_config.kv_cache_groups[place].kv_cache_spec, name) for name in pools),
        tp_rank=parallel.rank % parallel.tensor_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        kv_replicas=kv_cache_config.kv_tp_replicas,
    )


def group_pools(
    kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
) -> list[dict[str, Sequence[torch.Tensor]]]:
    """Return, for each group, the tensors of this rank's layers by name: one for an attention layer, several for a
    state."""
    pools: dict[str, Sequence[torch.Tensor]] = {
        name: [of_layer] if isinstance(of_layer, torch.Tensor) else list(of_layer) for name, of_layer in kv_caches.items()
    }
    groups = kv_cache_config.kv_cache_groups
    if len(groups) == 1:
        return [pools]
    names = [set(group.layer_names) for group in groups]
    return [{name: tensors for name, tensors in pools.items() if name in of_group} for of_group in names]


def revision(model: ModelConfig) -> str:
    return str(model.revision or getattr(model.hf_config, "_commit_hash", None) or "")


def draft_models(vllm_config: VllmConfig) -> list[ModelConfig]:
    """Return the draft model if its layers have caches. Drafting from prompt tokens has none."""
    speculative = vllm_config.speculative_config
    return [speculative.draft_model_config] if speculative is not None and speculative.uses_draft_kv_cache() else []


def _config(model: ModelConfig) -> str:
    return _text({name: value for name, value in model.hf_config.to_dict().items() if name not in LOCAL_CONFIG_FIELDS})


def settings_values(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the configuration fields that are part of every block's key; see fields.py."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    configs: list[Any] = [vllm_config, model, vllm_config.cache_config, vllm_config.load_config, vllm_config.parallel_config]
    configs += [vllm_config.attention_config, vllm_config.mamba_config, vllm_config.kv_transfer_config]
    configs += [model.multimodal_config] if model.multimodal_config is not None else []
    configs += [speculative] if draft_models(vllm_config) else []
    return {name: value for config in configs for name, value in fields.values(config).items()}


def _pool(layer: AttentionLayerBase, spec: KVCacheSpec, name: str) -> str:
    of_layer = getattr(spec, "kv_cache_specs", {}).get(name, spec)
    return f"{name} {getattr(layer, 'kv_cache_dtype', '')} {fields.spec_text(of_layer)}"


def _draft(vllm_config: VllmConfig) -> str:
    """Return what the draft model's caches depend on, other than its weights."""
    method = vllm_config.speculative_config.method if vllm_config.speculative_config is not None else ""
    return "".join(f"{method} {model.quantization or ''} {_config(model)}" for model in draft_models(vllm_config))


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _backend(layer: AttentionLayerBase) -> str:
    """Return the attention backend's name; on CPUs with the instruction set, which decides the order of elements."""
    return f"{layer.get_attn_backend().get_name()}/{getattr(layer, 'isa', '')}"


LATENT: Final = (MLAAttentionSpec, SlidingWindowMLASpec)
"""Caches of one latent head, which all tensor-parallel ranks hold: one value for any TP."""


def check_share_tp(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: VllmSettings) -> None:
    """Raises ConfigError: `share_tp` does not fit the model, the ranks or other settings."""
    for place in range(len(kv_cache_config.kv_cache_groups)):
        group_split(vllm_config, kv_cache_config, place, settings.share_tp)


def rank_group(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, place: int, pools: Mapping[str, Sequence[torch.Tensor]], settings: VllmSettings
) -> RankGroup:
    """Return this rank's keys and memory of group `place`, whose layers have `pools`. Raises ConfigError."""
    block_count = kv_cache_config.num_blocks
    split = group_split(vllm_config, kv_cache_config, place, settings.share_tp)
    if split is None:
        facts = rank_facts(vllm_config, kv_cache_config, place, pools, settings)
        tensors = [tensor for of_layer in pools.values() for tensor in of_layer]
        return RankGroup(shard(facts, salt=settings.salt), LayerPools(tensors, block_count), is_writer=facts.is_writer)
    specs = layer_specs(kv_cache_config, place)
    slices = {name: head_slices(tensor, specs[name].num_kv_heads, split.count) for name, (tensor,) in pools.items()}
    # Layers are described by the heads of one value, which do not depend on TP.
    of_value = {name: [of_layer[0]] for name, of_layer in slices.items()}
    template = shard(rank_facts(vllm_config, kv_cache_config, place, of_value, settings), salt=settings.salt)
    values = [LayerPools([of_layer[value] for of_layer in slices.values()], block_count) for value in range(split.count)]
    return RankGroup(HeadShards.of_rank(template.namespace, split), HeadPools(values), is_writer=split.is_writer)


def group_split(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, place: int, share_tp: int) -> HeadSplit | None:
    """Return which values by heads this rank holds of group `place`; None: one value with all heads of the rank.

    Raises ConfigError: `share_tp` is not possible for this model and these ranks.
    """
    specs = list(iter_layer_specs(kv_cache_config.kv_cache_groups[place].kv_cache_spec))
    if not share_tp or all(isinstance(spec, LATENT) for spec in specs):
        return None
    if not all(isinstance(spec, AttentionSpec) and not isinstance(spec, LATENT) for spec in specs):
        return None
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    size, heads = parallel.tensor_parallel_size, model.get_total_num_kv_heads()
    split = head_split(share_tp, kv_heads=heads, tp=(parallel.rank % size, size))
    for spec in specs:
        if spec.num_kv_heads != max(1, heads // size) or spec.num_heads != spec.num_kv_heads:
            raise ConfigError(
                f"share_tp is {share_tp}: set it to 0, because not all layers of this model (or of its draft model) have {heads} KV "
                "heads that the attention backend stores separately"
            )
    return split


def log_unshareable_layers(kv_cache_config: KVCacheConfig, share_tp: int, tp_size: int) -> None:
    """Log which layers' blocks engines of another TP cannot share although `share_tp` is set."""
    kinds = {
        type(spec).__name__
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
        if not isinstance(spec, AttentionSpec) or (isinstance(spec, LATENT) and kv_cache_config.kv_tp_replicas != tp_size)
    }
    if share_tp and kinds:
        LOG.warning(
            "kvstore: share_tp %d: caches of kind %s cannot be split by heads: only engines with the same TP, %d, share blocks",
            share_tp,
            ", ".join(sorted(kinds)),
            tp_size,
        )


def layer_specs(kv_cache_config: KVCacheConfig, place: int) -> dict[str, KVCacheSpec]:
    """Return the spec of each layer of group `place`, by name."""
    group = kv_cache_config.kv_cache_groups[place]
    of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return dict(of_layers) if of_layers is not None else dict.fromkeys(group.layer_names, group.kv_cache_spec)
