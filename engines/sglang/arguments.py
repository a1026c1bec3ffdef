"""SGLang's arguments that change the bytes of a page, by SGLang's argument group. Imports neither SGLang nor the
client.

tests/engines/live/sglang/test_arguments.py gives the reason for each argument that is left out: its effect is in the
key (checkpoint fingerprint, pool regions, rank), it selects kernels that differ by rounding, or pages do not depend on
it.
"""

import json
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

IN_KEY: Final[Mapping[str, tuple[str, ...]]] = {
    "model": (
        "custom_weight_loader",
        "decrypted_config_file",
        "decrypted_draft_config_file",
        "dtype",
        "json_model_override_args",
        "kv_cache_dtype",
        "model_loader_extra_config",
        "modelopt_quant",
        "qsa_indexer_dtype",
        "quantization",
        "quantization_param_path",
        "rl_quant_profile",
    ),
    "spec": (
        "enable_multi_layer_eagle",
        "speculative_algorithm",
        "speculative_draft_kv_cache_dtype",
        "speculative_draft_load_format",
        "speculative_draft_model_quantization",
        "speculative_draft_sink_size",
        "speculative_draft_window_size",
        "speculative_enable_w4a4_mxfp4_megamoe",
        "uno_lora_path",
    ),
    "lora": ("experts_shared_outer_loras", "lora_target_modules"),
    "exec.mamba": (
        "enable_int8_mamba_checkpoint",
        "enable_linear_replayssm",
        "enable_linear_replayssm_spec",
        "enable_mamba_cache_stochastic_rounding",
        "linear_replayssm_cache_len",
        "mamba_cache_philox_rounds",
        "mamba_ssm_dtype",
    ),
    "exec.kernel": ("enable_deepseek_v4_fp4_indexer", "enable_precise_embedding_interpolation"),
    "exec.moe": ("enable_w4a4_mxfp4_megamoe", "flashinfer_mxfp4_moe_precision", "kt_method", "kt_weight_path"),
    "exec.comm": ("enable_quant_communications",),
    "exec.deterministic": ("enable_deterministic_inference", "rl_on_policy_target"),
    "exec.dllm": ("dllm_algorithm", "dllm_algorithm_config"),
    "exec.features": ("enable_decoder_swa_bounded_replay", "enable_encoder_swa_bounded_replay"),
    "mm": ("disable_fast_image_processor", "image_processor_backend", "mm_process_config"),
    "memory": ("enable_page_major_kv_layout", "enable_unified_memory"),
    "parallel": ("cp_strategy", "enable_dsa_cache_layer_split", "enable_kv_cache_sharding"),
    "schedule": ("c128_page_size",),
    "observability": ("forward_hooks",),
}
FILES: Final = frozenset(
    {
        "decrypted_config_file",
        "decrypted_draft_config_file",
        "dllm_algorithm_config",
        "model_loader_extra_config",
        "quantization_param_path",
    }
)
"""Arguments that may name a file: the key has its contents, not its path."""
MAX_FILE_BYTES: Final = 16 << 20
NOT_OF_THE_CACHE: Final = frozenset({"_name_or_path", "_commit_hash", "use_cache", "transformers_version"})
"""Entries of a model's config.json that do not change a page."""


def told(group: Callable[[str], Any]) -> str:
    """Return the arguments that are set, as canonical JSON; empty if none is. `group` returns SGLang's object for a
    group's name."""
    given = {name: _content(name, getattr(group(where), name, None)) for where, names in IN_KEY.items() for name in names}
    given = {name: value for name, value in given.items() if value and value != "{}"}
    return json.dumps(given, sort_keys=True, default=str) if given else ""


def config_digest(folder: Path | None) -> str:
    """Return a digest of a checkpoint's config.json, 32 hexadecimal digits; empty without the file."""
    if folder is None:
        return ""
    try:
        raw = (folder / "config.json").read_bytes()
    except OSError:
        return ""
    try:
        entries = json.loads(raw).items()
        raw = json.dumps({name: value for name, value in entries if name not in NOT_OF_THE_CACHE}, sort_keys=True).encode()
    except (ValueError, AttributeError, RecursionError):
        pass  # not the JSON that transformers writes: hash the raw bytes
    return blake2b(raw, digest_size=16).hexdigest()


def architecture(folder: Path | None) -> str:
    """Return the first architecture in a checkpoint's config.json, or an empty text."""
    try:
        named = json.loads((folder / "config.json").read_bytes())["architectures"][0] if folder is not None else ""
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return ""
    return named if isinstance(named, str) else ""


def _content(name: str, value: Any) -> Any:
    if name not in FILES or not isinstance(value, str) or not value:
        return value
    try:
        with open(value, "rb") as file:
            return blake2b(file.read(MAX_FILE_BYTES), digest_size=16).hexdigest()
    except (OSError, ValueError):
        return value
