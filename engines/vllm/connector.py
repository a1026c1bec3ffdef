"""vLLM's KV connector: `kv_connector` KVStoreConnector, `kv_connector_module_path` kvstore.engines.vllm.connector
(docs/engines.md).

vLLM creates one for its scheduler and one in each rank. This module passes vLLM's objects to the modules beside it,
which hold the logic.
"""

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats, PromMetric, PromMetricT
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstore.client import Client
from kvstore.client.instances.weights import WeightsReporter
from kvstore.client.jobs.jobs import Jobs
from kvstore.engines.reachability import ReachabilityCheck
from kvstore.engines.retention import RetentionReader
from kvstore.engines.vllm.counters import LOG, ConnectorCounters
from kvstore.engines.vllm.disaggregation import POLL_S, Disaggregation
from kvstore.engines.vllm.engine_weights import follow_weights
from kvstore.engines.vllm.facts import check_engine, check_share_tp, group_pools, layer_groups, log_unshareable_layers, rank_group
from kvstore.engines.vllm.identity import Shard, Variant
from kvstore.engines.vllm.lookup import StoreLookup
from kvstore.engines.vllm.metrics import KVStorePromMetrics, KVStoreStats
from kvstore.engines.vllm.plan import SchedulerPlan, StepPlan, loads_all_or_nothing
from kvstore.engines.vllm.settings import connect, from_extra_config
from kvstore.engines.vllm.variants import Variants
from kvstore.engines.vllm.waiting_requests import FoundTokens
from kvstore.engines.vllm.worker import RankGroup, Worker
from kvstore.kvcache.namespace import Namespace

DRAIN_S: Final = 5.0
"""Added to the deadline of loads, for engine steps that compute nothing."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Sent by the scheduler to the ranks in each step."""

    plan: StepPlan
    is_store_unreachable: bool = False
    """The scheduler's connector has logged that the store is unreachable."""


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):
    """Sent by each rank to the scheduler, once."""

    namespaces: list[list[bytes]]
    """Canonical namespaces of the values of each group of layers. Empty: the rank has no layer of the group."""
    labels: list[bytes]
    """Canonical namespaces that blocks are stored under: one label for each group that the rank has."""


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Connector of one role: the scheduler's has a plan and a lookup, a rank's has a worker."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ConfigError: a setting in `kv_connector_extra_config` is invalid, or an engine setting does not
        work with a store."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config, kv_cache_config)
        self._settings = from_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        check_share_tp(vllm_config, kv_cache_config, self._settings)
        self._client: Client | None = None
        self._reachability: ReachabilityCheck | None = None
        self._jobs: Jobs | None = None
        self._lookup: StoreLookup | None = None
        self._worker: Worker | None = None
        self._rank_groups: list[RankGroup | None] = []
        self._block_pool: BlockPool | None = None
        self._reporter: WeightsReporter | None = None
        self._templates: list[Shard] = []
        """Of all ranks and groups, without weights."""
        self._loading: set[str] = set()
        self.drain_deadline_s = self._settings.load_deadline_s + DRAIN_S
        self.variants: Variants | None = None
        """None in a rank's connector. engine_calls.py reports to it what the engine does to its weights."""
        if role is KVConnectorRole.SCHEDULER:
            self.variants = follow_weights(vllm_config, self._settings, on_change=self._forget_variants)
        self._groups = layer_groups(kv_cache_config)
        self._hints = RetentionReader(self._settings, LOG)
        self._plan = SchedulerPlan(
            self._groups,
            hash_block_tokens=kv_cache_config.hash_block_size or min(group.block_tokens for group in self._groups),
            is_whole=self._is_whole,
            variant=self._variant,
            retention=lambda request: self._hints.read(request.kv_transfer_params),
            loads=self._kv_transfer_config.is_kv_consumer,
            saves=self._kv_transfer_config.is_kv_producer,
        )
        # With several groups or windows a prefix does not end at every block, so a decode engine could not wait for an exact one.
        announces_tokens = self._kv_transfer_config.is_kv_producer and not loads_all_or_nothing(self._groups)
        self._disaggregation = Disaggregation(self._groups[0].block_tokens, wait_s=self._settings.prefill_wait_s, saves=announces_tokens)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache may lose blocks, which are recomputed."""
        return False

    # --- the scheduler's ---

    def _report_weights(self) -> list[Namespace]:
        """Report to the master which weights this engine uses. Return the namespaces of its blocks, none while the
        weights are unknown."""
        weights = self.variants.identity if self.variants is not None else None
        if weights is None or self._reporter is None:
            return []
        namespaces = [template.of(Variant(weights.text)).namespace for template in self._templates]
        self._reporter.use(weights.base, weights.version, [namespace.canonical() for namespace in namespaces])
        return namespaces

    def _forget_variants(self) -> None:
        """Drop all of vLLM's prefix cache: weights or an adapter changed."""
        self._plan.change_variants()
        if self._block_pool is not None:
            self._forget({block.block_id for block in self._block_pool.blocks if block.block_hash is not None})
        self._report_weights()

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        ranks = [of_rank for of_rank in metadata.values() if isinstance(of_rank, RankMetadata)]
        groups = zip(*(of_rank.namespaces for of_rank in ranks), strict=True)
        shards = [_shards(itertools.chain.from_iterable(of_group)) for of_group in groups]
        self._client = connect(self._settings)
        self._reachability = ReachabilityCheck(self._client, self._settings.master, LOG)
        self._jobs = Jobs(self._client, self._settings.jobs())
        self._lookup = StoreLookup(self._jobs, self._groups, shards, self._plan, self._settings)
        self._lookup.connect()
        self._poll_variants()
        self._templates = _shards(itertools.chain.from_iterable(of_rank.labels for of_rank in ranks))
        self._reporter = WeightsReporter(self._client, str(self._kv_transfer_config.engine_id))
        for namespace in self._report_weights()[:1]:
            LOG.info("kvstore: blocks are of the namespace %s (1 of %d): %r", namespace.id.hex(), len(self._templates), namespace)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens to load, and whether they load asynchronously. None: ask again in a later step, because
        the prefill engine is still storing them."""
        now_s = time.monotonic()
        if self.variants is not None:
            self.variants.poll((), now_s)
        found, is_answered = FoundTokens(), False
        if self._lookup is not None and not request.skip_reading_prefix_cache:
            found = self._lookup.find(request, num_computed_tokens, now_s)
            is_answered = found.asked_tokens > 0 and self._lookup.is_reachable
        if self._disaggregation.waits(request, num_computed_tokens + found.found_tokens, now_s, is_answered=is_answered):
            assert self._lookup is not None, "it answered"
            self._lookup.waiting.schedule_lookup(request.request_id, self._disaggregation.next_lookup_s(request))
            return None, False
        self._plan.found(request, num_computed_tokens)
        return found.found_tokens, found.found_tokens > 0

    def on_new_request(self, request: Request) -> None:
        if self._lookup is not None and not request.skip_reading_prefix_cache:
            self._lookup.waiting.add(request)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._loading.add(request.request_id)
        tables = blocks.get_block_ids()
        self._plan.allocated(request, tables, num_external_tokens)
        if self._lookup is not None:
            self._lookup.admitted(request.request_id, tables[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        assert state is not None, "vLLM gives it to every connector"
        scheduled = scheduler_output.num_scheduled_tokens
        self._poll_variants()
        if not scheduled and self._disaggregation.is_waiting:
            time.sleep(POLL_S)  # vLLM asks again at once where there is nothing else to do
        prepared = set(scheduler_output.new_block_ids_to_zero or ())
        prepared.update(copy.dst_block_id for copy in scheduler_output.kv_cache_block_copies or ())
        plan = self._plan.step(state.get_block_ids, scheduled, state.boundary_state_offloads, is_idle=not scheduled, prepared=prepared)
        self._forget(self._plan.tainted_blocks(state.get_block_ids, scheduled))
        return StepMetadata(plan, is_store_unreachable=self._reachability is not None and self._reachability.is_unreachable)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._forget(self._plan.failed_blocks(connector_output.invalid_block_ids or ()))
        self._plan.failed_requests(connector_output.failed_recving or ())
        self._loading.difference_update(connector_output.finished_recving or ())
        self._plan.released(connector_output.finished_sending or ())
        if self._lookup is not None:
            self._lookup.hits.failed(connector_output.invalid_block_ids or (), connector_output.failed_recving or ())
            self._lookup.loaded(connector_output.finished_recving or ())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        if self._lookup is not None:
            self._lookup.ended(request.request_id)
        is_shared = self._plan.variant(request) is not None and self.variants is not None and self.variants.is_shared
        return self._plan.finished(request, block_ids), self._disaggregation.finished(request, is_shared=is_shared)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._block_pool = gpu_block_pool

    def has_pending_block_frees(self) -> bool:
        return self._plan.is_holding

    def has_pending_push_work(self) -> bool:
        """Return True if loads are in progress. vLLM pauses once they are done."""
        return bool(self._loading)

    def reset_cache(self) -> bool:
        """Give the engine's blocks a new variant. Removes nothing from the store, because other engines share it."""
        if self.variants is not None:
            self.variants.reset()
        return True

    def requeued(self, request_ids: list[str]) -> None:
        """The scheduler took back the blocks that these requests were to load into."""
        self._plan.requeued(request_ids)

    # --- a rank's ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Start the worker. Called again by an engine that recreates its caches: the old worker is closed."""
        if self._worker is not None:
            self._worker.close()
        self._rank_groups = []
        for place, pools in enumerate(group_pools(self._kv_cache_config, kv_caches)):
            if not pools:
                self._rank_groups.append(None)
                continue
            of_group = rank_group(self._vllm_config, self._kv_cache_config, place, pools, self._settings)
            self._rank_groups.append(of_group)
        log_unshareable_layers(self._kv_cache_config, self._settings.share_tp, self._vllm_config.parallel_config.tensor_parallel_size)
        client = connect(self._settings)
        self._worker = Worker(client, self._rank_groups, self._settings, all_or_nothing=loads_all_or_nothing(self._groups))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._worker is None:
            return None
        labels = [group.shard.namespace.canonical() for group in self._rank_groups if group is not None]
        return RankMetadata([[] if group is None else group.shard.canonical() for group in self._rank_groups], labels)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Copy the blocks to save. vLLM calls it in each step, before it writes to blocks that changed owner since
        the last one."""
        if self._worker is not None:
            assert isinstance(kv_connector_metadata, StepMetadata)
            self._worker.is_store_unreachable = kv_connector_metadata.is_store_unreachable
            self._worker.save(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No-op: blocks are loaded between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """No-op: blocks are saved with all layers, once they are confirmed."""

    def wait_for_save(self) -> None:
        """No-op: blocks were copied before the step, by `handle_preemptions`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        if self._step().is_idle:
            self._worker.wait_idle()
        copied, loaded = self._worker.take_finished()
        return copied or None, loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        if self._worker is not None:
            results.failed_recving = self._worker.take_failed_requests(results.finished_recving)
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed() if self._worker is not None else set()

    def flush(self) -> None:
        """Wait until all saved blocks can be read by every client. Not part of vLLM's interface; for tests and
        programs that exit."""
        if self._worker is not None:
            self._worker.flush()

    # --- both ---

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        counters = ConnectorCounters()
        if self._worker is not None:
            counters.add(self._worker.take_counters())
        if self._lookup is not None:
            counters.add(self._lookup.take_counters())
            hinted, malformed = self._hints.take_counts()
            counters.add(ConnectorCounters(hinted_requests=hinted, malformed_hints=malformed))
        stats = KVStoreStats(counters.values())
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KVStoreStats(data) if data is not None else KVStoreStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self.variants is not None:
            self.variants.close()
        if self._reporter is not None:
            self._reporter.close()
        if self._reachability is not None:
            self._reachability.close()
        if self._jobs is not None:
            self._jobs.close()
        if self._client is not None:
            self._client.close()

    def _forget(self, blocks: set[int]) -> None:
        """Evict these blocks from vLLM's prefix cache. Requests that use them continue."""
        if blocks and self._block_pool is not None:
            self._block_pool.evict_blocks(blocks)

    def _is_whole(self, block_id: int) -> bool:
        """Return whether a freed block has no other reference, so its contents are still intact.

        Only engines that zero blocks need the check: zeroing and state copies may run before this step's saves are
        copied. Zeroed blocks without a reference are in the plan's `prepared`.
        """
        if not self._kv_cache_config.needs_kv_cache_zeroing:
            return True
        return self._block_pool is not None and self._block_pool.blocks[block_id].ref_cnt == 0

    def _variant(self, request: Any) -> Variant | None:
        return self.variants.of(request, time.monotonic()) if self.variants is not None else None

    def _poll_variants(self) -> None:
        if self.variants is not None:
            has_adapters = self._vllm_config.lora_config is not None
            self.variants.poll(self._plan.adapters() if has_adapters else (), time.monotonic())

    def _step(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.plan


def _shards(namespaces: Iterable[bytes]) -> list[Shard]:
    """Return a template for each of these canonical namespaces, without duplicates."""
    return [Shard(Namespace.from_canonical(canonical)) for canonical in dict.fromkeys(namespaces)]
