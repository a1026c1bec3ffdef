"""vLLM's KV connector: `kv_connector` KVStoreConnector, `kv_connector_module_path` kvstore.engines.vllm.connector (docs/engines.md).

Made by vLLM once for its scheduler and once in each rank. Everything that it decides stands in the modules beside it; this one passes
vLLM's objects on to them.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvstore.client import Client
from kvstore.client.jobs.jobs import Jobs
from kvstore.engines.vllm.connecting import connect
from kvstore.engines.vllm.counters import Counters
from kvstore.engines.vllm.facts import block_tokens, check_engine, rank_facts
from kvstore.engines.vllm.identity import Shard, shard
from kvstore.engines.vllm.layout import LayerPools
from kvstore.engines.vllm.lookup import Lookup
from kvstore.engines.vllm.plan import Plan, StepPlan
from kvstore.engines.vllm.settings import from_extra_config, job_settings
from kvstore.engines.vllm.trouble import LOG
from kvstore.engines.vllm.worker import Worker
from kvstore.kvcache.namespace import Namespace


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the scheduler to the ranks, each step."""

    plan: StepPlan


@dataclass
class RankMetadata(KVConnectorHandshakeMetadata):
    """From each rank to the scheduler, once."""

    namespace: bytes
    """In its canonical form."""


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
        self._shard: Shard | None = None
        tokens = block_tokens(kv_cache_config)
        self._plan = Plan(
            tokens,
            hash_block_tokens=kv_cache_config.hash_block_size or tokens,
            loads=self._kv_transfer_config.is_kv_consumer,
            saves=self._kv_transfer_config.is_kv_producer,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is lost is computed again."""
        return False

    # --- the scheduler's ---

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        found = {told.namespace: None for told in metadata.values() if isinstance(told, RankMetadata)}
        shards = [Shard(Namespace.from_canonical(canonical)) for canonical in found]
        self._client = connect(self._settings)
        self._jobs = Jobs(self._client, job_settings(self._settings))
        self._lookup = Lookup(self._jobs, shards, deadline_s=self._settings.lookup_deadline_s)
        self._lookup.connect()

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        wanted = [] if request.skip_reading_prefix_cache else self._plan.wanted(request, num_computed_tokens)
        count = self._lookup.count(wanted) if self._lookup is not None else 0
        tokens = self._plan.found(request, num_computed_tokens, count)
        return tokens, self._settings.load_async and tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._plan.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state

        def block_table(request_id: str) -> list[int] | None:
            tables = state.get_block_ids(request_id) if state is not None else None
            return tables[0] if tables is not None else None

        scheduled = scheduler_output.num_scheduled_tokens
        return StepMetadata(self._plan.step(block_table, scheduled, is_idle=not scheduled))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._plan.failed(connector_output.invalid_block_ids or ())
        self._plan.released(connector_output.finished_sending or ())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._plan.finished(request, block_ids), None

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def has_pending_block_frees(self) -> bool:
        return self._plan.is_holding

    def reset_cache(self) -> bool:
        """Never done: the blocks are other engines', too. Weights that change are another `revision`."""
        return False

    # --- a rank's ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        facts = rank_facts(self._vllm_config, self._kv_cache_config, kv_caches, self._settings)
        self._shard = shard(facts, salt=self._settings.salt)
        LOG.info("kvstore: blocks of this rank are of the namespace %s", self._shard.namespace.id.hex())
        pools = LayerPools(list(kv_caches.values()), self._kv_cache_config.num_blocks)
        self._worker = Worker(connect(self._settings), self._shard, pools, self._settings, is_writer=facts.is_writer)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return RankMetadata(self._shard.namespace.canonical()) if self._shard is not None else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are of all layers at once."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are saved with all their layers, once they are confirmed."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._step())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self._worker is None:
            return None, None
        if self._step().is_idle:
            self._worker.wait_idle()
        copied, loaded = self._worker.take_finished()
        return copied or None, loaded or None

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

    def _step(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.plan
