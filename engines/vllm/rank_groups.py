"""Build what a rank stores of each group of layers: keys and memory, in one value a block or, with `share_tp`, in several by KV heads."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec, iter_layer_specs

from kvstore.engines.head_split import HeadSplit, head_split
from kvstore.engines.vllm.facts import rank_facts
from kvstore.engines.vllm.head_values import HeadPools, HeadShards, head_slices
from kvstore.engines.vllm.identity import shard
from kvstore.engines.vllm.layout import LayerPools
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.engines.vllm.trouble import LOG
from kvstore.engines.vllm.worker import RankGroup
from kvstore.protocol.errors import ConfigError

LATENT: Final = (MLAAttentionSpec, SlidingWindowMLASpec)
"""Caches of one latent head, which all tensor-parallel ranks hold: one value whatever TP is."""


def check_share_tp(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, settings: VllmSettings) -> None:
    """Raises ConfigError: `share_tp` does not go with the model, the ranks or other settings."""
    if settings.share_tp and settings.load_by_layer and not settings.load_async:
        raise ConfigError('set "load_by_layer": false: blocks in values by heads (share_tp) are not loaded layer by layer')
    for place in range(len(kv_cache_config.kv_cache_groups)):
        group_split(vllm_config, kv_cache_config, place, settings.share_tp)


def rank_group(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, place: int, pools: Mapping[str, Sequence[torch.Tensor]], settings: VllmSettings
) -> RankGroup:
    """Return what this rank stores of group `place`, whose layers have `pools`. Raises ConfigError."""
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
    """Return the values by heads of the blocks of group `place` that this rank holds; None for one value with all that the rank has.

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
                f"share_tp is {share_tp}: set it to 0, for not all layers of this model (or of the one that drafts for it) have {heads} KV "
                "heads with a place of their own for each in the attention backend's memory"
            )
    return split


def log_unshared(kv_cache_config: KVCacheConfig, share_tp: int, tp_size: int) -> None:
    """Log in one line which layers' blocks engines of another TP do not share, where `share_tp` asks that they do."""
    kinds = {
        type(spec).__name__
        for group in kv_cache_config.kv_cache_groups
        for spec in iter_layer_specs(group.kv_cache_spec)
        if not isinstance(spec, AttentionSpec) or (isinstance(spec, LATENT) and kv_cache_config.kv_tp_replicas != tp_size)
    }
    if share_tp and kinds:
        LOG.warning(
            "kvstore: share_tp %d: caches of the kind %s cannot be cut by heads: only engines of the same TP, %d, share blocks",
            share_tp,
            ", ".join(sorted(kinds)),
            tp_size,
        )


def layer_specs(kv_cache_config: KVCacheConfig, place: int) -> dict[str, KVCacheSpec]:
    """Return the spec of each layer of group `place`, by name."""
    group = kv_cache_config.kv_cache_groups[place]
    of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return dict(of_layers) if of_layers is not None else dict.fromkeys(group.layer_names, group.kv_cache_spec)
