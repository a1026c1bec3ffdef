"""Run in vLLM's environment: `fields_child.py MODEL`. Changes each field of vLLM's configurations and cache specifications in turn.

Prints, as JSON, for each `Class.field` whether the key of an engine's blocks changed, or null for a field that cannot be changed alone.
"""

import copy
import dataclasses
import enum
import inspect
import json
import sys
from typing import Any

import torch
import vllm.v1.kv_cache_interface as interface
from vllm import EngineArgs
from vllm.config import KVTransferConfig, LoRAConfig, MultiModalConfig, SpeculativeConfig, VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

from kvstore.engines.vllm import fields
from kvstore.engines.vllm.engine_weights import weights_source
from kvstore.engines.vllm.facts import rank_facts
from kvstore.engines.vllm.identity import Variant, shard
from kvstore.engines.vllm.settings import VllmSettings

SPEC: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 4,
    "dtype": torch.float32,
    "sliding_window": 64,
    "attention_chunk_size": 64,
    "rswa_window": 64,
    "sink_len": 4,
    "shapes": ((2, 4), (2, 2)),
    "dtypes": (torch.float32, torch.float32),
    "page_size": 64,
    "blocks_per_request": 2,
    "kv_cache_specs": {},
}
"""Arguments of specifications that have no default."""
LAYER = "model.layers.0.self_attn.attn"


class Backend:
    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"


class Layer(AttentionLayerBase):
    """A layer with a cache, without its weights."""

    kv_cache_dtype = "auto"

    def get_attn_backend(self) -> Any:
        return Backend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        return None


def other(value: Any) -> Any:
    """A value of the same kind that is not `value`."""
    match value:
        case bool():
            return not value
        case enum.Enum():
            members = list(type(value))
            return members[(members.index(value) + 1) % len(members)]
        case int() | float():
            return value + 1
        case str():
            return value + "x"
        case torch.dtype():
            return torch.float16 if value is not torch.float16 else torch.float32
        case list():
            return [*value, "x"]
        case tuple():
            return (*value, "x")
        case set():
            return {*value, "x"}
        case dict():
            return {**value, "x": 1}
    return "x"


def key(config: VllmConfig) -> bytes:
    """Id of the namespace of a rank's blocks."""
    settings = VllmSettings()
    spec = FullAttentionSpec(block_size=config.cache_config.block_size, num_kv_heads=2, head_size=4, dtype=torch.float32)
    caches = KVCacheConfig(num_blocks=2, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([LAYER], spec)])
    facts = rank_facts(config, caches, 0, {LAYER: [torch.zeros(2, 2, 16, 2, 4)]}, settings)
    return shard(facts).of(Variant(weights_source(config, settings).identity().text)).namespace.id


def changes(config: VllmConfig) -> dict[str, bool | None]:
    """Of the configurations that an engine with a model has."""
    config.compilation_config.static_forward_context[LAYER] = Layer()
    before = key(config)
    found: dict[str, bool | None] = {}
    parts = ["model_config", "cache_config", "load_config", "parallel_config", "attention_config", "mamba_config", "kv_transfer_config"]
    for owner in (config, *(getattr(config, name) for name in parts)):
        for field in dataclasses.fields(owner):
            name, value = f"{type(owner).__name__}.{field.name}", getattr(owner, field.name)
            if dataclasses.is_dataclass(value) or type(value).__module__.startswith(("transformers", "vllm.transformers_utils")):
                found[name] = None
                continue
            object.__setattr__(owner, field.name, other(value))
            try:
                found[name] = key(config) != before
            except Exception as error:
                print(f"{name} = {other(value)!r}: {error!r}", file=sys.stderr)
                found[name] = None
            finally:
                object.__setattr__(owner, field.name, value)
    assert key(config) == before
    return found


def value_changes(config: Any) -> dict[str, bool | None]:
    """Of a configuration that the engine of `changes` has not."""
    found: dict[str, bool | None] = {}
    for field in dataclasses.fields(config):
        changed = copy.copy(config)
        new = __file__ if field.name in fields.FILES else other(getattr(config, field.name))
        object.__setattr__(changed, field.name, new)
        found[f"{type(config).__name__}.{field.name}"] = fields.values(changed) != fields.values(config)
    return found


def spec_changes() -> dict[str, bool | None]:
    found: dict[str, bool | None] = {}
    for kind in vars(interface).values():
        if inspect.isclass(kind) and issubclass(kind, KVCacheSpec):
            names = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
            given = {name: SPEC[name] for name, field in names.items() if name in SPEC and field.init}
            try:
                spec = kind(**given)
            except TypeError:  # an abstract one
                continue
            for name in names:  # of the specification and those above it
                changed = copy.copy(spec)
                object.__setattr__(changed, name, other(getattr(spec, name)))
                found[f"{kind.__name__}.{name}"] = fields.spec_text(changed) != fields.spec_text(spec)
    return found


def main() -> None:
    module = "kvstore.engines.vllm.connector"
    transfer = KVTransferConfig(kv_connector="KVStoreConnector", kv_connector_module_path=module, kv_role="kv_both")
    config = EngineArgs(model=sys.argv[1], dtype="float32", block_size=16, kv_transfer_config=transfer).create_engine_config()
    found = changes(config)
    found |= value_changes(LoRAConfig()) | value_changes(MultiModalConfig()) | spec_changes()
    found |= value_changes(SpeculativeConfig(method="ngram", num_speculative_tokens=2, prompt_lookup_max=2, prompt_lookup_min=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
