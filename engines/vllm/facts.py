"""What vLLM's configuration and layers say of a rank, as plain values for identity.py, and what the connector asks of them."""

import json
import os
from collections.abc import Mapping

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig

from kvstore.engines.vllm.identity import RankFacts, check_hash
from kvstore.engines.vllm.layout import LayerPools
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.protocol.errors import ConfigError

OF_THE_COPY = frozenset({"_name_or_path", "_commit_hash", "transformers_version"})
"""What a model's configuration says of where it lies and who read it."""


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises ConfigError with what to change: for an engine whose blocks would not be found again, or which fails when the store does."""
    check_hash(vllm_config.cache_config.prefix_caching_hash_algo, is_seeded="PYTHONHASHSEED" in os.environ)
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
        raise ConfigError('set "kv_load_failure_policy": "recompute" in --kv-transfer-config: else a block that is lost fails its request')
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ConfigError("context parallelism is not supported: a rank holds parts of blocks there; use tensor or pipeline parallelism")
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) != 1 or not isinstance(specs[0], AttentionSpec):
        kinds = ", ".join(type(spec).__name__ for spec in specs)
        raise ConfigError(
            f"this model's layers have caches of several kinds ({kinds}), of which only attention over one block table is supported: "
            "--disable-hybrid-kv-cache-manager makes one of them where the others are sliding windows"
        )


def rank_facts(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, pools: Mapping[str, torch.Tensor], settings: VllmSettings
) -> RankFacts:
    """Of the rank that holds `pools`, by layer name."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    hf_config = {name: value for name, value in model.hf_config.to_dict().items() if name not in OF_THE_COPY}
    load_format = str(vllm_config.load_config.load_format)
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase, list(pools))
    forms = [f"{name} {_backend(layers[name])} {LayerPools.form(pool, kv_cache_config.num_blocks)}" for name, pool in pools.items()]
    is_cpu = current_platform.is_cpu()
    return RankFacts(
        model=settings.model or model.model,
        revision=settings.revision or model.revision or getattr(model.hf_config, "_commit_hash", None) or "",
        config=json.dumps(hf_config, sort_keys=True, default=str),
        weights=f"random, seed {model.seed}" if load_format == "dummy" else "",
        dtype=str(model.dtype).removeprefix("torch."),
        cache_dtype=cache.cache_dtype,
        quantization=str(model.quantization or ""),
        block_tokens=block_tokens(kv_cache_config),
        hash_algorithm=cache.prefix_caching_hash_algo,
        device=current_platform.device_type if is_cpu else current_platform.get_device_name(),
        layers=tuple(forms),
        tp_rank=parallel.rank % parallel.tensor_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        kv_replicas=kv_cache_config.kv_tp_replicas,
    )


def block_tokens(kv_cache_config: KVCacheConfig) -> int:
    """Tokens in a block of the engine's pool."""
    return int(kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def _backend(layer: AttentionLayerBase) -> str:
    """Its name, and on CPUs the instruction set by which it orders the elements of a block."""
    return f"{layer.get_attn_backend().get_name()}/{getattr(layer, 'isa', '')}"
