"""Fields of vLLM's configurations and cache specifications: which are part of a block's key, and why the others are
not.

A field in neither table is of a newer vLLM: it is part of the key if its value is not the default. A live test lists
such fields.
"""

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ELSEWHERE: Final = "covered by another part of the key"
WEIGHTS: Final = "covered by the fingerprint of the weights"
LAYERS: Final = "covered by the layers: names, backends, element types, sizes and memory order"
ROUNDING: Final = "same values from other kernels, processes or schedules; they differ by rounding"
TOKENS: Final = "changes tokens or their hashes, which are in the key"
SAMPLING: Final = "changes sampling from logits only"
SIZES: Final = "capacity and retention of memory"
ACCESS: Final = "access rights and locations"
REFUSED: Final = "engines with it are refused"

IN_KEY: Final[Mapping[str, str]] = {
    "ModelConfig": "runner convert trust_remote_code code_revision disable_sliding_window model_class_overrides model_impl",
    "CacheConfig": "kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode replayssm_buffer_len use_replayssm "
    "use_kda_recoverssm kv_sharing_fast_prefill swa_bounded_replay",
    "LoadConfig": "model_loader_extra_config ignore_patterns",
    "SpeculativeConfig": "method quantization kv_cache_dtype code_revision draft_tensor_parallel_size index_share_for_mtp_iteration "
    "disable_eagle_block_drop use_heterogeneous_vocab parallel_drafting",
    "ParallelConfig": "worker_cls",
    "LoRAConfig": "lora_dtype target_modules enable_tower_connector_lora enable_mixed_moe_lora_format enable_moe_shared_loras",
    "MultiModalConfig": "media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_encoder_attn_dtype mm_encoder_fp8_scale_path "
    "video_pruning_rate video_pruning_method allow_missing_mm_embeddings",
    "AttentionConfig": "disable_flashinfer_q_quantization use_prefill_query_quantization indexer_kv_dtype indexer_sparse_logits "
    "hisparse_config use_non_causal",
    "MambaConfig": "enable_stochastic_rounding stochastic_rounding_philox_rounds",
    "KVTransferConfig": "",
    "VllmConfig": "additional_config diffusion_config engram_config",
}
"""Fields of each class whose values are in the key. Those of LoRAConfig are in the key of requests with a LoRA only."""
NOT_IN_KEY: Final[Mapping[str, Mapping[str, str]]] = {
    "ModelConfig": {
        ELSEWHERE: "model dtype hf_config hf_text_config hf_config_path hf_overrides quantization quantization_config max_model_len "
        "multimodal_config config_format",
        WEIGHTS: "model_weights revision seed word_embeddings_untied_by_checkpoint",
        ROUNDING: "enforce_eager disable_cascade_attn",
        TOKENS: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init enable_prompt_embeds renderer_num_workers "
        "io_processor_plugin",
        SAMPLING: "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay generation_config "
        "override_generation_config logits_processors pooler_config",
        SIZES: "spec_target_max_model_len enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
        "enable_nccl_comm_suspend enable_cumem_allocator is_submodel_config",
        ACCESS: "allowed_local_media_path allowed_media_domains served_model_name hf_token allow_deprecated_quantization",
    },
    "CacheConfig": {
        ELSEWHERE: "block_size cache_dtype prefix_caching_hash_algo sliding_window mamba_block_size",
        LAYERS: "kv_cache_layout mamba_page_size_padded skip_page_size_padded",
        TOKENS: "prefix_match_unit hash_block_size",
        SIZES: "user_specified_block_size gpu_memory_utilization is_attention_free num_gpu_blocks_override enable_prefix_caching "
        "prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint num_gpu_blocks num_cpu_blocks "
        "effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency cache_hit_alignment_tokens kv_cache_memory_bytes "
        "kv_offloading_size kv_offloading_backend _block_size_resolved",
    },
    "LoadConfig": {
        WEIGHTS: "load_format download_dir",
        ROUNDING: "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size device use_tqdm_on_load "
        "pt_load_map_location",
    },
    "SpeculativeConfig": {
        ELSEWHERE: "draft_model_config target_model_config target_parallel_config",
        WEIGHTS: "model revision draft_load_config",
        LAYERS: "num_speculative_tokens attention_backend draft_parallel_config",
        ROUNDING: "enforce_eager moe_backend disable_padded_drafter_batch use_local_argmax_reduction",
        SAMPLING: "prompt_lookup_max prompt_lookup_min num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth "
        "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob rejection_sample_method "
        "synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification draft_sample_method dspark_draft_topk",
        SIZES: "max_model_len tensor_parallel_size",
    },
    "ParallelConfig": {
        ELSEWHERE: "tensor_parallel_size rank",
        LAYERS: "pipeline_parallel_size",
        REFUSED: "prefill_context_parallel_size decode_context_parallel_size dcp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate "
        "cp_kv_cache_interleave_size _allow_auto_resolve_cp_interleave_size",
        ROUNDING: "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_master_ip "
        "data_parallel_rpc_port dp_sync_interval data_parallel_master_port data_parallel_backend data_parallel_external_lb "
        "data_parallel_hybrid_lb is_moe_model enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter "
        "enable_eplb eplb_config expert_placement_strategy all2all_backend max_parallel_loading_workers disable_custom_all_reduce "
        "enable_shm_tensor_arena enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env placement_group "
        "distributed_executor_backend worker_extension_cls master_addr master_port node_rank nnodes numa_bind numa_bind_nodes "
        "numa_bind_cpus assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds world_size "
        "_data_parallel_master_port_list _coord_store_port data_parallel_index _api_process_count _api_process_rank "
        "enable_fault_tolerance fault_tolerance_config",
    },
    "LoRAConfig": {
        ROUNDING: "max_lora_rank fully_sharded_loras specialize_active_lora",
        SIZES: "max_loras max_cpu_loras max_lora_cls_labels",
        WEIGHTS: "default_mm_loras",
    },
    "MultiModalConfig": {
        TOKENS: "mm_hasher_algorithm interleave_mm_strings",
        ROUNDING: "mm_encoder_tp_mode mm_encoder_attn_backend",
        ACCESS: "language_model_only limit_per_prompt enable_mm_embeds mm_encoder_only mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin",
        SIZES: "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb skip_mm_profiling mm_tensor_ipc "
        "mm_ipc_gpu_memory_gb",
    },
    "AttentionConfig": {
        LAYERS: "backend backend_per_kind",
        ROUNDING: "minimax_m3_msa_decode_backend flash_attn_version flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
        "tq_max_kv_splits_for_cuda_graph use_trtllm_attention mla_prefill_backend sparse_mla_force_mqa "
        "sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size",
    },
    "MambaConfig": {ROUNDING: "backend ssu_algorithm"},
    "KVTransferConfig": {
        LAYERS: "enable_permute_local_kv",
        ACCESS: "kv_connector engine_id kv_role kv_connector_module_path kv_load_failure_policy kv_buffer_device kv_port "
        "kv_connector_extra_config",
    },
    "VllmConfig": {
        ELSEWHERE: "model_config cache_config parallel_config load_config attention_config mamba_config lora_config speculative_config "
        "device_config quant_config kv_transfer_config",
        ROUNDING: "scheduler_config offload_config kernel_config compilation_config optimization_level performance_mode",
        SAMPLING: "watermark_config structured_outputs_config reasoning_config",
        SIZES: "aux_output_config ec_manager_config",
        ACCESS: "observability_config logging_config profiler_config kv_events_config ec_transfer_config instance_id "
        "weight_transfer_config shutdown_timeout",
    },
}
SPEC_NOT_IN_KEY: Final[Mapping[str, str]] = {
    ELSEWHERE: "block_size",
    LAYERS: "num_kv_heads page_size_padded page_size block_stride_alignment num_head_slots shapes num_heads tp_replicated kv_cache_specs",
    SIZES: "max_tp_shards blocks_per_request num_speculative_blocks num_prefill_checkpoint_blocks prefill_checkpoint_alignment "
    "extra_retained_tokens is_index_group_leader",
    REFUSED: "dcp_sharded",
}
"""Fields of KVCacheSpec and its subclasses. The other fields are in the key."""
FILES: Final = frozenset({"mm_encoder_fp8_scale_path"})
"""Fields that name a file: the key has its contents."""
MAX_TEXT: Final = 900
"""Maximum length of `summary` in characters: a Namespace's texts have at most 1,024 bytes."""


def values(config: Any) -> dict[str, str]:
    """Return the fields of one vLLM configuration that are in the key, as `Class.field`."""
    kind = type(config).__name__
    known, outside = IN_KEY[kind].split(), {name for names in NOT_IN_KEY[kind].values() for name in names.split()}
    found = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in known or (field.name not in outside and _text(value) != _text(_default(field))):
            found[f"{kind}.{field.name}"] = _contents(value) if field.name in FILES and value else _text(value)
    return found


def spec_text(spec: Any) -> str:
    """Return the kind of a layer's KVCacheSpec and its fields that are in the key."""
    outside = {name for names in SPEC_NOT_IN_KEY.values() for name in names.split()}
    fields = (field.name for field in dataclasses.fields(spec) if field.name not in outside)
    return f"{type(spec).__name__} {' '.join(f'{name}={_text(getattr(spec, name))}' for name in fields)}"


def digest(found: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:32]


def summary(found: Mapping[str, str]) -> str:
    """Return a text that is equal for equal `values`: a hash, then the non-empty values for people, cut at MAX_TEXT."""
    shown = ", ".join(f"{name}={value}" for name, value in sorted(found.items()) if value not in ("null", "false", "[]", "{}", '"auto"'))
    return f"{digest(found)} {shown}"[:MAX_TEXT].strip()


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _text(value: Any) -> str:
    """Return JSON that is equal for equal values, in every process."""
    return json.dumps(value, sort_keys=True, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    name: str | None = getattr(value, "__qualname__", None)  # of classes and functions
    return name if name is not None else str(value)


def _contents(path: Any) -> str:
    """Return a hash of the file. Raises OSError, like vLLM does for an unreadable file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
