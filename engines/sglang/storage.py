"""kvstore as a HiCache storage back end of SGLang, named by `--hicache-storage-backend dynamic` and its extra configuration:

    {"backend_name": "kvstore", "module_path": "kvstore.engines.sglang.storage", "class_name": "KVStoreHiCache", "interface_v1": 1,
     "master": "127.0.0.1:7440"}

The other entries are the settings of SGLangSettings. This module imports SGLang, and is imported by it only.
"""

import json
import logging
from collections.abc import Callable
from typing import Any, Final

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_model, get_spec

from kvstore.client.config import ClientSettings
from kvstore.client.jobs.job import Job
from kvstore.client.jobs.jobs import Jobs
from kvstore.client.sync import Client
from kvstore.engines.sglang.hits import PoolPages, restorable_prefixes
from kvstore.engines.sglang.pages import Pool, Rank
from kvstore.engines.sglang.settings import SGLangSettings, from_extra_config
from kvstore.protocol.errors import ConfigError
from kvstore.security.tls.config import tls_of

log = logging.getLogger("kvstore.engines.sglang")

REPLICATED_POOLS: Final = frozenset({"MLATokenToKVPoolHost", "DeepSeekV4PagedHostPool"})
"""SGLang's classes of pools of which all tensor-parallel ranks have the same, whatever the primary pool is."""
OWN_KIND: Final = frozenset({PoolName.DRAFT, PoolName.DRAFT_INDEXER, PoolName.DRAFT_SWA})
"""Pools of a draft model, of one of these classes or not whatever the primary pool is."""


class KVStoreHiCache(HiCacheStorage):
    """Pages of SGLang's host pools as blocks of the store, one block a page and pool, read and written in place. Thread-safe.

    A call blocks for as long as its deadline and never raises, whatever becomes of the store: what failed is a page that is not there, or
    was not stored. An unreachable store is one within a millisecond, until it is found again.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Asks nobody: the store may come later. Raises ConfigError for settings that make no sense, as SGLang attaches."""
        extra = storage_config.extra_config or {}
        self._settings = settings = from_extra_config(extra)
        if not extra.get("interface_v1"):
            raise ConfigError(
                'hicache_storage_backend_extra_config: add "interface_v1": 1, without which SGLang copies each page once more'
            )
        if not (settings.model or storage_config.model_name):
            raise ConfigError('hicache_storage_backend_extra_config: SGLang names no model; add "model"')
        self._config = storage_config
        self._pools: dict[str, tuple[Any, Pool]] = {}
        self._client = Client(settings.master, tenant=settings.tenant, token=settings.token, settings=ClientSettings(**tls_of(settings)))
        self._jobs = Jobs(self._client, settings.jobs())

    # --- pools ---

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        if getattr(mem_pool_host, "kv_buffer", None) is not None:  # else its memory is in pools that come by v2
            self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """Raises ValueError for a pool whose pages have no regions that could be read in place."""
        if host_pool_name not in self._pools:
            self._pools[host_pool_name] = host_pool, _described(host_pool, host_pool_name, self._config, self._settings)

    # --- pages of the primary pool ---

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many are there, from the first on without a gap."""
        try:
            return self._jobs.match_prefix(self._pools[PoolName.KV][1].keys(keys))
        except Exception:
            log.exception("pages could not be looked up")
            return 0

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        return self.batch_get_v2([PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys)], extra_info)[PoolName.KV]

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        return self.batch_set_v2([PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys)], extra_info)[PoolName.KV]

    # --- pages of several pools ---

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> PoolTransferResult:
        """The prefixes of which each pool has what it needs. A pool of groups of blocks has no say in it, as SGLang has it."""
        try:
            asked = [each for each in pool_transfers or [] if each.hit_policy is not PoolHitPolicy.BLOCK_GROUPS]
            has_kv = PoolName.KV in self._pools
            names = [*([PoolName.KV] if has_kv else []), *(each.name for each in asked)]
            found = self._jobs.exists([key for name in names for key in self._pools[name][1].keys(keys)])
            rows = [found[start : start + len(keys)] for start in range(0, len(found), len(keys) or 1)]
            kv = rows.pop(0) if has_kv else [True] * len(keys)
            others = [
                PoolPages(each.name, row, None if each.hit_policy is PoolHitPolicy.ALL_PAGES else len(each.keys or []))
                for each, row in zip(asked, rows, strict=True)
            ]
            hits = restorable_prefixes(kv.index(False) if False in kv else len(kv), PoolName.KV, others)
            return PoolTransferResult(hits.pages, hits.by_pool, hits.restorable)
        except Exception:
            log.exception("pages could not be looked up")
            return PoolTransferResult(0, {}, [])

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None) -> dict[str, list[bool]]:
        """For each page: it was read into its place. The place of one that was not may have been written."""

        def load(pool: Pool, keys: list[str], places: list[Any]) -> Job:
            return self._jobs.load(pool.keys(keys), places, on_done=_ignore)

        return self._carried_out(transfers, load, lambda pool, job: [size == pool.page_bytes for size in job.results])

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None) -> dict[str, list[bool]]:
        """For each page: the store has it."""
        before = ((extra_info.prefix_keys if extra_info is not None else None) or [])[-1:]

        def store(pool: Pool, hashes: list[str], places: list[Any]) -> Job:
            keys = pool.keys([*before, *hashes])
            parents = [None, *keys[:-1]][-len(hashes) :]
            return self._jobs.store(keys[len(before) :], places, namespace=pool.namespace, parents=parents, on_done=_ignore)

        return self._carried_out(transfers, store, lambda pool, job: job.succeeded)

    # --- what is asked of other back ends ---

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing: a page is read into its place, by v1 or v2."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        return False

    def clear(self) -> None:
        """Other engines use the store: SGLang's order to clear it clears nothing."""
        log.warning("the store is shared, and was not cleared: take another salt or revision instead")

    def close(self) -> None:
        """What is under way is given up, and SGLang's memory is not touched any more."""
        self._jobs.close()
        self._client.close()

    def _carried_out(
        self,
        transfers: list[PoolTransfer],
        submit: Callable[[Pool, list[str], list[Any]], Job],
        judge: Callable[[Pool, Job], list[bool]],
    ) -> dict[str, list[bool]]:
        """One job a transfer, all at once; what became of each page."""
        begun: list[tuple[Pool, Job] | None] = []
        for transfer in transfers:
            keys = transfer.keys or []
            try:
                host_pool, pool = self._pools[transfer.name]
                pointers, sizes = host_pool.get_page_buffer_meta(transfer.host_indices) if keys else ((), ())
                begun.append((pool, submit(pool, keys, pool.places(pointers, sizes, len(keys)))))
            except Exception:
                log.exception("pages of pool %s could not be moved", transfer.name)
                begun.append(None)
        results = {}
        for transfer, each in zip(transfers, begun, strict=True):
            if each is None:
                results[transfer.name] = [False] * len(transfer.keys or [])
            else:
                pool, job = each
                job.wait()
                results[transfer.name] = judge(pool, job)
        return results


def _ignore(job: Job) -> None:
    """Whoever submitted it waits for it: without this the jobs would keep it for whoever asks what is over."""


def _described(host_pool: Any, name: PoolName, config: HiCacheStorageConfig, settings: SGLangSettings) -> Pool:
    page_tokens = getattr(host_pool, "page_size", 1) or 1
    _, sizes = host_pool.get_page_buffer_meta(torch.arange(page_tokens))
    if name == PoolName.MAMBA:
        is_replicated = False  # linear layers are split even where latent attention is not
    elif name in OWN_KIND:
        is_replicated = any(base.__name__ in REPLICATED_POOLS for base in type(host_pool).__mro__)
    else:
        is_replicated = config.is_mla_model
    return Pool(
        name=str(name),
        model=settings.model or config.model_name,
        revision=settings.revision or get_model().revision or "",
        salt=settings.salt,
        dtype=str(getattr(host_pool, "dtype", "bytes")).removeprefix("torch."),
        layout=getattr(host_pool, "layout", "") or "",
        page_tokens=page_tokens,
        regions=tuple(sizes),
        rank=Rank(
            tp=(config.tp_rank, config.tp_size),
            pp=(config.pp_rank, config.pp_size),
            cp=(config.attn_cp_rank, config.attn_cp_size),
            dcp=(config.dcp_rank, config.dcp_size),
        ),
        is_replicated=is_replicated,
        told=_told(),
        draft=_draft() if name in OWN_KIND else "",
    )


def _told() -> str:
    """What pages depend on, and neither the model's name nor its revision says."""
    chosen = get_model()
    told = {
        "overrides": json.loads(chosen.json_model_override_args),
        "configuration": chosen.decrypted_config_file,
        "quantization": chosen.quantization,
        "scales": chosen.quantization_param_path,
        "weights": "random" if chosen.load_format == "dummy" else "",
    }
    told = {name: value for name, value in told.items() if value}
    return json.dumps(told, sort_keys=True) if told else ""


def _draft() -> str:
    """The name or path and the revision of the model that drafts tokens, as SGLang was given them."""
    chosen = get_spec()
    return f"{chosen.speculative_draft_model_path or ''} {chosen.speculative_draft_model_revision or ''}".strip()
