"""kvstore as a HiCache storage back end of SGLang, named by `--hicache-storage-backend dynamic` and its extra
configuration:

    {"backend_name": "kvstore", "module_path": "kvstore.engines.sglang.storage", "class_name": "KVStoreHiCache",
    "interface_v1": 1,
     "master": "127.0.0.1:7440"}

Other entries are settings of SGLangSettings. This module imports SGLang; only SGLang imports it.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
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
from sglang.srt.runtime_context import process_model_config

from kvstore.client.instances.weights import WeightsReporter
from kvstore.client.jobs.jobs import Jobs
from kvstore.client.sync import Client
from kvstore.engines.reachability import ReachabilityCheck
from kvstore.engines.sglang import hooks
from kvstore.engines.sglang.head_pages import by_heads, host_heads
from kvstore.engines.sglang.identity import describe_pool, engine_facts, started
from kvstore.engines.sglang.metrics import PageCounters
from kvstore.engines.sglang.page_mover import AnyPool, Finish, PageMover, whole_pages
from kvstore.engines.sglang.pages import PlainHostPool, PoolPages, restorable_prefixes
from kvstore.engines.sglang.settings import from_extra_config
from kvstore.engines.sglang.weights import CurrentWeights
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.retention import Retention

log = logging.getLogger("kvstore.engines.sglang")

WITHHELD_WARNING_S: Final = 60.0
"""Pages that are withheld for this long after an update of the weights: SGLang's cache was not flushed."""


class KVStoreHiCache(HiCacheStorage):
    """Pages of SGLang's host pools as blocks of the store: one block a page and pool, read and written in place.
    Thread-safe.

    A call blocks at most for its deadline. Errors of the store are never raised: a page that failed is missing, or was
    not stored. While the store is unreachable, calls fail within a millisecond (circuit breaker).
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        """Read the checkpoint's fingerprint; the store may start later.

        Raises:
            ConfigError: invalid settings, or unreadable weights. SGLang does not attach the back end then.
        """
        extra = storage_config.extra_config or {}
        self._settings = settings = from_extra_config(extra)
        if not extra.get("interface_v1"):
            raise ConfigError('hicache_storage_backend_extra_config: add "interface_v1": 1; SGLang copies each page once more without it')
        hooks.install()
        if settings.retention_from_requests:
            hooks.install_priorities()
        self._facts = engine_facts(storage_config, settings, log)
        loaded = started(settings, log)
        hooks.WEIGHTS.start(loaded)
        self._config = storage_config
        self._pools: dict[str, tuple[Any, AnyPool]] = {}
        self._named: tuple[CurrentWeights | None, dict[str, AnyPool]] = None, {}
        self._withheld_since: float | None = None
        self._counters = PageCounters(storage_config.tp_rank, storage_config.pp_rank, storage_config.dp_rank)
        client = Client(settings=settings.client())
        self._client = client
        self._jobs = Jobs(client, settings.jobs())
        self._mover = PageMover(self._jobs)
        rank = f"tp{storage_config.tp_rank}-pp{storage_config.pp_rank}-dp{storage_config.dp_rank}"
        self._reporter = WeightsReporter(client, f"sglang-{loaded.nonce}-{rank}")
        self._check = ReachabilityCheck(client, settings.master, log)

    # --- pools ---

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        if getattr(mem_pool_host, "kv_buffer", None) is not None:  # else its memory is in pools registered by v2
            self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """Add a pool. Raises ValueError: its pages cannot be read in place. Raises ConfigError: `share_tp` is not
        possible."""
        if host_pool_name not in self._pools:
            whole = describe_pool(host_pool, host_pool_name, self._config, self._facts)
            share_tp = self._settings.share_tp or self._config.tp_lcm_size or 0
            pool = _split_heads(host_pool, host_pool_name, whole, share_tp) if share_tp else whole
            _ = pool.namespace  # raises InvalidArgument early
            self._pools[host_pool_name] = host_pool, pool
            self._named = None, {}

    def on_host_pools_registered(self) -> None:
        """Log the namespaces of the engine's pages."""
        for name, pool in (self._current() or {}).items():
            log.info("kvstore: pages of pool %s are in namespace %s: %s", name, pool.namespace.id.hex(), pool.namespace)

    def _current(self) -> Mapping[str, AnyPool] | None:
        """Return the pools under the current weights. None: weights are changing, or SGLang's cache still has pages
        of older ones."""
        weights = hooks.WEIGHTS.current
        known, pools = self._named
        if weights is None:
            self._note_withheld()
            return None
        self._withheld_since = None
        if known is not weights:
            pools = {name: pool.under(weights.target.text, weights.draft) for name, (_, pool) in self._pools.items()}
            self._named = weights, pools
            namespaces = [pool.namespace.canonical() for pool in pools.values()]
            self._reporter.use(weights.target.base, weights.target.version, namespaces)
        return pools

    def _note_withheld(self) -> None:
        now_s = time.monotonic()
        if self._withheld_since is None:
            self._withheld_since = now_s
        elif now_s - self._withheld_since > WITHHELD_WARNING_S:
            self._withheld_since = float("inf")
            log.warning("kvstore: weights were updated without a flush of SGLang's cache: flush it; no page is loaded or saved until then")

    # --- pages of the primary pool ---

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many leading pages exist without a gap."""
        found = 0
        try:
            if (pools := self._current()) is not None:
                pool = pools[PoolName.KV]
                found = self._jobs.match_prefix(pool.keys(keys)) // pool.values_per_page
        except Exception:
            log.exception("pages could not be looked up")
        self._counters.looked_up(len(keys), found)
        return found

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        return self.batch_get_v2([PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys)], extra_info)[PoolName.KV]

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None) -> list[bool]:
        return self.batch_set_v2([PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys)], extra_info)[PoolName.KV]

    # --- pages of several pools ---

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[PoolTransfer] | None = None, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> PoolTransferResult:
        """Return the prefixes for which every pool has the pages that it needs. Pools with BLOCK_GROUPS are ignored,
        as in SGLang."""
        hits = PoolTransferResult(0, {}, [])
        try:
            if (pools := self._current()) is not None:
                hits = self._hits(pools, keys, pool_transfers or [])
        except Exception:
            log.exception("pages could not be looked up")
        self._counters.looked_up(len(keys), hits.kv_hit_pages)
        return hits

    def _hits(self, current: Mapping[str, AnyPool], keys: list[str], transfers: list[PoolTransfer]) -> PoolTransferResult:
        asked = [each for each in transfers if each.hit_policy is not PoolHitPolicy.BLOCK_GROUPS]
        has_kv = PoolName.KV in current
        pools = [current[name] for name in [*([PoolName.KV] if has_kv else []), *(each.name for each in asked)]]
        found = iter(self._jobs.exists([key for pool in pools for key in pool.keys(keys)]))
        rows = [whole_pages(pool, list(islice(found, len(keys) * pool.values_per_page))) for pool in pools]
        kv = rows.pop(0) if has_kv else [True] * len(keys)
        others = [
            PoolPages(each.name, row, None if each.hit_policy is PoolHitPolicy.ALL_PAGES else len(each.keys or []))
            for each, row in zip(asked, rows, strict=True)
        ]
        hits = restorable_prefixes(kv.index(False) if False in kv else len(kv), PoolName.KV, others)
        return PoolTransferResult(hits.pages, hits.by_pool, hits.restorable)

    def batch_get_v2(self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None) -> dict[str, list[bool]]:
        """Return whether each page was read in place. The memory of a page that was not may have been overwritten.
        All False if weights changed meanwhile."""
        before = hooks.WEIGHTS.current
        results = self._run_transfers(transfers, self._mover.load)
        if hooks.WEIGHTS.current is not before:
            results = {name: [False] * len(read) for name, read in results.items()}
        self._counters.loaded(results)
        return results

    def batch_set_v2(self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None) -> dict[str, list[bool]]:
        """Return whether the store has each page."""
        before = ((extra_info.prefix_keys if extra_info is not None else None) or [])[-1:]

        hint = self._hint(transfers)

        def store(pool: AnyPool, hashes: list[str], pointers: Sequence[int], sizes: Sequence[int]) -> Finish:
            return self._mover.store(pool, hashes, before, pointers, sizes, hint)

        results = self._run_transfers(transfers, store)
        self._counters.stored(results)
        return results

    # --- calls for back ends that copy pages ---

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Return nothing: pages are read in place, by v1 or v2."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[torch.Tensor | None]:
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return False

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        return False

    def clear(self) -> None:
        """Give the engine's pages a new version, so that it finds no older ones. Nothing is deleted: other engines
        share the store."""
        hooks.WEIGHTS.clear()

    def close(self) -> None:
        """Cancel jobs and disconnect. SGLang's memory is not used afterwards."""
        self._check.close()
        self._reporter.close()
        self._jobs.close()
        self._client.close()

    def _hint(self, transfers: Sequence[PoolTransfer]) -> Retention | None:
        """Return the hint of the node of SGLang's tree whose pages these are."""
        if not self._settings.retention_from_requests:
            return None
        hashes: Sequence[str] = next((each.keys for each in transfers if each.keys), ())
        return hooks.PRIORITIES.hint(hashes, self._settings.retention_ceiling)

    def _run_transfers(
        self, transfers: list[PoolTransfer], begin: Callable[[AnyPool, list[str], Sequence[int], Sequence[int]], Finish]
    ) -> dict[str, list[bool]]:
        """Start all transfers, wait for them, and return each page's success."""
        pools = self._current()
        if pools is None:
            return {transfer.name: _none(len(transfer.keys or [])) for transfer in transfers}
        begun: list[Finish] = []
        for transfer in transfers:
            keys = transfer.keys or []
            try:
                pool = pools[transfer.name]
                meta = self._pools[transfer.name][0].get_page_buffer_meta
                pointers, sizes = meta(transfer.host_indices) if keys else ((), ())
                begun.append(begin(pool, keys, pointers, sizes))
            except Exception:
                log.exception("pages of pool %s could not be moved", transfer.name)
                begun.append(partial(_none, len(keys)))
        return {transfer.name: finish() for transfer, finish in zip(transfers, begun, strict=True)}


def _none(pages: int) -> list[bool]:
    return [False] * pages


def _split_heads(host_pool: Any, name: PoolName, whole: PlainHostPool, share_tp: int) -> AnyPool:
    """Return `whole` split by KV heads, or unsplit if all ranks hold the same. Raises ConfigError: the primary pool
    cannot be split."""
    if whole.is_replicated:
        return whole
    is_primary = name == PoolName.KV
    total_heads = (lambda: int(process_model_config().get_total_num_kv_heads())) if is_primary else None
    try:
        return by_heads(whole, host_heads(host_pool, whole.page_tokens), share_tp, total_heads=total_heads)
    except ConfigError as error:
        if is_primary:
            raise
        log.warning("pages of pool %s are shared by engines of the same TP only: %s", name, error)
        return whole
