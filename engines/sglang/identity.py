"""Identity of an engine's pages, read from SGLang: model, weights, adapters, arguments, and each host pool's kind
and element types."""

import hashlib
import logging
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.runtime_context import (
    get_exec,
    get_lora,
    get_memory,
    get_mm,
    get_model,
    get_observability,
    get_parallel,
    get_schedule,
    get_server_args,
    get_serving,
    get_spec,
)

from kvstore.engines.sglang.arguments import architecture, config_digest, told
from kvstore.engines.sglang.pages import PlainHostPool, Rank
from kvstore.engines.sglang.settings import SGLangSettings
from kvstore.engines.sglang.weights import StartWeights
from kvstore.engines.weights.files import find_checkpoint
from kvstore.engines.weights.fingerprint import Mode, adapter_fingerprint, fingerprint
from kvstore.engines.weights.identity import WeightsIdentity, identify
from kvstore.protocol.errors import ConfigError

REPLICATED_POOLS: Final = frozenset({"MLATokenToKVPoolHost", "DeepSeekV4PagedHostPool"})
"""Classes of pools with equal contents on all tensor-parallel ranks, independent of the primary pool."""
DRAFT_POOLS: Final = frozenset({PoolName.DRAFT, PoolName.DRAFT_INDEXER, PoolName.DRAFT_SWA})
"""Pools of a draft model; their class, not the primary pool, decides whether ranks have equal contents."""
TYPES: Final = ("dtype", "store_dtype", "conv_dtype", "temporal_dtype", "indexer_dtype", "index_k_dtype")
"""Attributes of pools that hold element types."""
PACKED_DRAFTS: Final = ("_draft_layer_num", "mtp_draft_buffer_infos", "mtp_draft_device_pools")
"""Attributes of pools that also hold draft layers."""
NONCE_KEY: Final = "kvstore/engine"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts that all pools of an engine share."""

    model: str
    config: str
    adapters: str
    told: str
    salt: str


def engine_facts(config: HiCacheStorageConfig, settings: SGLangSettings, log: logging.Logger) -> EngineFacts:
    """Read the facts from SGLang. Raises ConfigError: SGLang names no model, or an adapter cannot be read."""
    given = get_model()
    folder = _folder(given.model_path, given.revision, given.download_dir)
    is_known_by_bytes = folder is not None and not settings.revision and settings.fingerprint != "off"
    is_local = Path(given.model_path).expanduser().exists()
    name = settings.model or (is_known_by_bytes and is_local and architecture(folder)) or config.model_name
    if not name:
        raise ConfigError('hicache_storage_backend_extra_config: SGLang has no model name: add "model"')
    arguments = told(_group)
    return EngineFacts(
        model=name,
        config=config_digest(folder),
        adapters=_adapters(settings, log),
        told=arguments and hashlib.blake2b(arguments.encode(), digest_size=16).hexdigest(),
        salt=settings.salt,
    )


def started(settings: SGLangSettings, log: logging.Logger) -> StartWeights:
    """Return the weights that the engine has loaded so far. Raises ConfigError: files cannot be read."""
    given, drafting, arguments = get_model(), get_spec(), get_server_args()
    target = _identify(given.model_path, given.revision, settings, given.load_format, log)
    draft_path = drafting.speculative_draft_model_path
    draft = ""
    if draft_path:
        draft = _identify(draft_path, drafting.speculative_draft_model_revision, settings, given.load_format, log).text or draft_path
    elif drafting.speculative_algorithm:
        draft = target.text or given.model_path
    named = str(get_serving().weight_version)
    if named != arguments.weight_version and given.model_path == arguments.model_path:
        target = target.named(named)
    mode: Mode = "full" if settings.fingerprint == "full" else "sampled"
    is_by_bytes = not settings.revision and settings.fingerprint != "off"

    def of_files(path: str) -> WeightsIdentity | None:
        found = _folder(path, None, given.download_dir) if is_by_bytes else None
        return WeightsIdentity(fingerprint(found, mode=mode)) if found is not None else None

    return StartWeights(target, draft, _nonce(), of_files)


def describe_pool(host_pool: Any, name: PoolName, config: HiCacheStorageConfig, facts: EngineFacts) -> PlainHostPool:
    """Describe a host pool, without weights. Raises ValueError: its pages cannot be read in place."""
    page_tokens = getattr(host_pool, "page_size", 1) or 1
    _, sizes = host_pool.get_page_buffer_meta(torch.arange(page_tokens))
    if name == PoolName.MAMBA:
        is_replicated = False  # linear layers are split even where latent attention is not
    elif name in DRAFT_POOLS:
        is_replicated = any(base.__name__ in REPLICATED_POOLS for base in type(host_pool).__mro__)
    else:
        is_replicated = config.is_mla_model
    has_draft = name in DRAFT_POOLS or any(getattr(host_pool, each, None) for each in PACKED_DRAFTS) or _packed_layers(host_pool) > 0
    tag = getattr(host_pool, "storage_format_tag", None)
    return PlainHostPool(
        name=str(name),
        kind=type(host_pool).__name__ + (f" {tag}" if tag else ""),
        model=facts.model,
        weights="",
        salt=facts.salt,
        dtype=element_types(host_pool),
        layout=getattr(host_pool, "layout", "") or "",
        page_tokens=page_tokens,
        regions=tuple(sizes),
        rank=Rank(
            tp=(config.tp_rank, config.tp_size),
            pp=(config.pp_rank, config.pp_size),
            cp=(config.attn_cp_rank, config.attn_cp_size),
            dcp=(config.dcp_rank, config.dcp_size),
        ),
        layers=f"{getattr(host_pool, 'start_layer', None)}:{getattr(host_pool, 'end_layer', None)}",
        is_replicated=is_replicated,
        adapters=facts.adapters,
        config=facts.config,
        told=facts.told,
        draft="draft" if has_draft else "",
    )


def element_types(host_pool: Any) -> str:
    """Return the types of a pool's elements: of its storage, of the device pool behind it, and the configured
    `kv_cache_dtype`, which defines the meaning of stored bytes."""
    pools = [host_pool, getattr(host_pool, "device_pool", None), getattr(getattr(host_pool, "decl", None), "device_pool", None)]
    found = {f"{name}={getattr(pool, name)}" for pool in pools for name in TYPES if getattr(pool, name, None) is not None}
    chosen = get_model().kv_cache_dtype
    return " ".join([f"kv_cache_dtype={chosen}", *sorted(found)]).replace("torch.", "")


def _packed_layers(host_pool: Any) -> int:
    target = getattr(host_pool, "target_layer_num", None)
    return 0 if target is None else int(host_pool.layer_num) - int(target)


def _group(name: str) -> Any:
    where, _, inner = name.partition(".")
    getters = {
        "model": get_model,
        "spec": get_spec,
        "lora": get_lora,
        "exec": get_exec,
        "mm": get_mm,
        "memory": get_memory,
        "parallel": get_parallel,
        "schedule": get_schedule,
        "observability": get_observability,
    }
    found = getters[where]()
    return getattr(found, inner) if inner else found


def _identify(path: str, revision: str | None, settings: SGLangSettings, load_format: str, log: logging.Logger) -> WeightsIdentity:
    if load_format == "dummy" and not settings.revision:
        return WeightsIdentity("dummy")
    cache = get_model().download_dir
    return identify(
        path,
        settings.fingerprint,
        revision=settings.revision,
        hub_revision=revision or "",
        hub_cache=Path(cache) if cache else None,
        log=log,
    )


def _adapters(settings: SGLangSettings, log: logging.Logger) -> str:
    """Return a digest of the contents of the start-up LoRAs, because SGLang's hash has only name and path. Empty
    without LoRAs, or with `off`."""
    if settings.fingerprint == "off":
        return ""
    mode: Mode = "full" if settings.fingerprint == "full" else "sampled"
    found = []
    for adapter in get_lora().lora_paths or []:
        path = _folder(adapter.lora_path, None, get_model().download_dir)
        if path is None:
            log.warning("kvstore: found no files of LoRA %s at %s: only its name identifies it", adapter.lora_name, adapter.lora_path)
        found.append(f"{adapter.lora_id} {adapter_fingerprint(path, mode=mode) if path is not None else ''}")
    return hashlib.blake2b("\n".join(sorted(found)).encode(), digest_size=16).hexdigest() if found else ""


def _folder(path: str, revision: str | None, cache: str | None) -> Path | None:
    return find_checkpoint(path, revision=revision or "", hub_cache=Path(cache) if cache else None)


def _nonce() -> str:
    """Return a random text that is equal on all ranks of the engine. The first rank publishes it in torch's store of
    the process group."""
    mine = uuid.uuid4().hex
    if not torch.distributed.is_initialized():
        return mine
    store = torch.distributed.distributed_c10d._get_default_store()
    agreed: bytes = store.compare_set(NONCE_KEY, "", mine)
    return agreed.decode()
