"""vLLM's KV connector: `kv_connector` KVStoreConnector, `kv_connector_module_path` kvstore.engines.vllm.connector (docs/engines.md).

Made by vLLM once for its scheduler and once in each rank. Everything that it decides stands in the modules beside it; this one passes
vLLM's objects on to them.
"""

import time
from dataclasses import dataclass, field
from typing import Any

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
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstore.client import Client
from kvstore.client.jobs.breaker import State
from kvstore.client.jobs.jobs import Jobs
from kvstore.engines.vllm.connecting import connect
from kvstore.engines.vllm.counters import Counters
from kvstore.engines.vllm.disaggregation import POLL_S, Disaggregation
from kvstore.engines.vllm.facts import check_engine, check_layers, group_pools, layer_groups, rank_facts
from kvstore.engines.vllm.groups import fail_whole
from kvstore.engines.vllm.identity import Shard, shard
from kvstore.engines.vllm.layout import LayerPools
from kvstore.engines.vllm.lookup import Lookup
from kvstore.engines.vllm.plan import Plan, StepPlan
from kvstore.engines.vllm.settings import from_extra_config, job_settings
from kvstore.engines.vllm.trouble import LOG
from kvstore.engines.vllm.worker import RankGroup, Worker
from kvstore.kvcache.namespace import Namespace


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to the ranks, each step."""

    plan: StepPlan


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):
    """From each rank to the scheduler, once."""

    namespaces: list[bytes | None]
    """Of each group of layers, in its canonical form; None: this rank has no layer of it."""


@dataclass
class KVStoreStats(KVConnectorStats):
    """What the connector did in an interval: the fields of Counters."""

    data: dict[str, Any] = field(default_factory=lambda: Counters().values())

    def reset(self) -> None:
        self.data = Counters().values()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        total = Counters.of(self.data)
        total.add(Counters.of(other.data))
        self.data = total.values()
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """One of the two: the scheduler's, with a plan and a look-up, or a rank's, with a worker."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises ConfigError: a setting of `kv_connector_extra_config`, or one of the engine that does not go with a store."""
        super().__init__(vllm_config, role, kv_cache_config)
        check_engine(vllm_config, kv_cache_config)
        self._settings = from_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        self._client: Client | None = None
        self._jobs: Jobs | None = None
        self._lookup: Lookup | None = None
        self._worker: Worker | None = None
        self._rank_groups: list[RankGroup | None] = []
        self._layers: dict[str, int] = {}
        self._block_pool: BlockPool | None = None
        self._groups = layer_groups(kv_cache_config)
        self._plan = Plan(
            self._groups,
            hash_block_tokens=kv_cache_config.hash_block_size or min(group.block_tokens for group in self._groups),
            is_whole=self._is_whole,
            loads=self._kv_transfer_config.is_kv_consumer,
            saves=self._kv_transfer_config.is_kv_producer,
        )
        # Where a prefix does not end with each block of all layers, nobody could wait for one that does.
        promises = self._kv_transfer_config.is_kv_producer and not fail_whole(self._groups)
        self._disaggregation = Disaggregation(self._groups[0].block_tokens, wait_s=self._settings.prefill_wait_s, saves=promises)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is lost is computed again."""
        return False

    # --- the scheduler's ---

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        told = [of_rank.namespaces for of_rank in metadata.values() if isinstance(of_rank, RankMetadata)]
        found = [dict.fromkeys(canonical for canonical in of_group if canonical is not None) for of_group in zip(*told, strict=True)]
        shards = [[Shard(Namespace.from_canonical(canonical)) for canonical in of_group] for of_group in found]
        self._client = connect(self._settings)
        self._jobs = Jobs(self._client, job_settings(self._settings))
        self._lookup = Lookup(self._jobs, self._groups, shards, deadline_s=self._settings.lookup_deadline_s)
        self._lookup.connect()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """None: to be asked again in a later step, for the engine that computed the prompt is still storing it."""
        begin_s = time.monotonic()
        if self._disaggregation.is_early(request, begin_s):
            return None, False
        tokens, is_answered = 0, False
        if self._lookup is not None and self._jobs is not None and not request.skip_reading_prefix_cache:
            wanted = self._plan.wanted(request, num_computed_tokens)
            tokens = self._lookup.tokens(num_computed_tokens, wanted)
            is_answered = all(wanted) and self._jobs.stats().reads.state is State.CLOSED
        if self._disaggregation.waits(request, num_computed_tokens + tokens, begin_s, is_answered=is_answered):
            return None, False
        self._plan.found(request, num_computed_tokens)
        return tokens, self._settings.load_async and tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._plan.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        assert state is not None, "vLLM gives it to every connector"
        scheduled = scheduler_output.num_scheduled_tokens
        if not scheduled and self._disaggregation.is_waiting:
            time.sleep(POLL_S)  # vLLM asks again at once where there is nothing else to do
        prepared = set(scheduler_output.new_block_ids_to_zero or ())
        prepared.update(copy.dst_block_id for copy in scheduler_output.kv_cache_block_copies or ())
        plan = self._plan.step(state.get_block_ids, scheduled, state.boundary_state_offloads, is_idle=not scheduled, prepared=prepared)
        self._forget(self._plan.barred_blocks(state.get_block_ids, scheduled))
        return StepMetadata(plan)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._forget(self._plan.failed_blocks(connector_output.invalid_block_ids or ()))
        self._plan.failed_requests(connector_output.failed_recving or ())
        self._plan.released(connector_output.finished_sending or ())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self._plan.finished(request, block_ids), self._disaggregation.finished(request)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._block_pool = gpu_block_pool

    def has_pending_block_frees(self) -> bool:
        return self._plan.is_holding

    def reset_cache(self) -> bool:
        """Never done: the blocks are other engines', too. Weights that change are another `revision`."""
        return False

    # --- a rank's ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """An engine that makes its caches anew calls it again: what was of the old ones is let go."""
        if self._worker is not None:
            self._worker.close()
        self._rank_groups, self._layers = [], {}
        facts = None
        for place, pools in enumerate(group_pools(self._kv_cache_config, kv_caches)):
            if not pools:
                self._rank_groups.append(None)
                continue
            facts = rank_facts(self._vllm_config, self._kv_cache_config, place, pools, self._settings)
            of_group = shard(facts, salt=self._settings.salt)
            LOG.info("kvstore: blocks of this rank are of the namespace %s", of_group.namespace.id.hex())
            tensors = [tensor for of_layer in pools.values() for tensor in of_layer]
            self._rank_groups.append(RankGroup(of_group, LayerPools(tensors, self._kv_cache_config.num_blocks)))
            self._layers.update({name: layer for layer, name in enumerate(pools)})
        if self._settings.load_by_layer and not self._settings.load_async:
            check_layers(self._vllm_config, list(self._layers))
        is_writer = facts is not None and facts.is_writer
        client = connect(self._settings)
        self._worker = Worker(client, self._rank_groups, self._settings, is_writer=is_writer, fails_whole=fail_whole(self._groups))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._worker is None:
            return None
        return RankMetadata([group.shard.namespace.canonical() if group is not None else None for group in self._rank_groups])

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Called in each step, before anything is written to blocks that have changed hands since the last one."""
        if self._worker is not None:
            assert isinstance(kv_connector_metadata, StepMetadata)
            self._worker.save(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A layer that has no cache of its own reads that of one before it."""
        if self._worker is not None and layer_name in self._layers:
            self._worker.wait_layer(self._layers[layer_name])

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved with all their layers, once they are confirmed."""

    def wait_for_save(self) -> None:
        """Blocks were copied before the step: see `handle_preemptions`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        if self._step().is_idle:
            self._worker.wait_idle()
        self._worker.wait_layers()
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
        """Not of vLLM's interface: come back when what was saved so far can be read by all. For programs that end, and tests."""
        if self._worker is not None:
            self._worker.flush()

    # --- both ---

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        counters = Counters()
        if self._worker is not None:
            counters.add(self._worker.take_counters())
        if self._lookup is not None:
            counters.add(self._lookup.counters.take())
        stats = KVStoreStats(counters.values())
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KVStoreStats(data) if data is not None else KVStoreStats()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._jobs is not None:
            self._jobs.close()
        if self._client is not None:
            self._client.close()

    def _forget(self, blocks: set[int]) -> None:
        """Have vLLM's prefix cache find none of these; whoever computes on them goes on."""
        if blocks and self._block_pool is not None:
            self._block_pool.evict_blocks(blocks)

    def _is_whole(self, block_id: int) -> bool:
        """Whether nobody has a block that a request has let go since the last step. Where blocks are zeroed, states are also moved to those
        of this step, and both may come before its saves are copied; what was zeroed for nobody the plan is told by `prepared`."""
        if not self._kv_cache_config.needs_kv_cache_zeroing:
            return True
        return self._block_pool is not None and self._block_pool.blocks[block_id].ref_cnt == 0

    def _step(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.plan
