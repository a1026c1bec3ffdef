"""The store as a secondary tier of vLLM's offloading: `type` KVStoreTier, `module_path` kvstore.engines.vllm.tier
(docs/engines.md).

vLLM copies blocks between GPU and host memory itself; this tier moves chunks of that memory to and from the store. It
runs in the scheduler's process and never blocks it on the store.
"""

import hashlib
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvstore.engines.reachability import ReachabilityCheck
from kvstore.engines.retention import RequestRetention, RetentionReader
from kvstore.engines.settings import settings_from
from kvstore.engines.vllm.chunks import ChunkResult, Chunks
from kvstore.engines.vllm.counters import LOG
from kvstore.engines.vllm.identity import Shard
from kvstore.engines.vllm.settings import SECTION, VllmSettings, connect
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.retention import Retention


class KVStoreTier(SecondaryTierManager):
    """Stores chunks that leave the engine's host memory, shared by all engines of the same configuration."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **parameters: Any,
    ) -> None:
        """Connect to the store. `parameters` has the tier's other configuration entries, named as the connector's
        settings. Raises ConfigError."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        LOG.warning(
            "kvstore: a vLLM tier sees neither weights nor contents of LoRAs: chunks are identified by the model name %r and the "
            "revision %r. Change `revision` whenever the weights change, and give each LoRA its own name",
            parameters.get("model") or offloading_spec.config.model.name,
            parameters.get("revision", ""),
        )
        settings = settings_from(VllmSettings, SECTION, parameters, source="secondary_tiers", engine_names={"locality"})
        client = connect(settings)
        self._reachability = ReachabilityCheck(client, settings.master, LOG)
        self._chunks = Chunks(client, chunk_shard(offloading_spec.config, settings), primary_kv_view, settings)
        self._lookups = _Lookups(self._chunks, tier_type)
        self._hints = RetentionReader(settings, LOG)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        hints = self._hints.read(req_context.kv_transfer_params)
        if hints is not None:
            req_context.set_state(hints)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        is_there = self._lookups.lookup(key, req_context)
        if is_there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if is_there else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._chunks.store(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist(), _hint(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._chunks.load(job_metadata.job_id, list(job_metadata.keys), job_metadata.chunk_ids.tolist(), _hint(job_metadata))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(moved) for moved in self._chunks.take_moved()]

    def has_pending_work(self) -> bool:
        return self._chunks.is_busy

    def drain_jobs(self) -> None:
        self._chunks.drain()

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._reachability.close()
        self._chunks.close()

    def _result(self, moved: ChunkResult) -> JobResult:
        """Return vLLM's result. Missing chunks are marked so that the requests do not look them up again."""
        if moved.is_load:
            self._lookups.mark_miss([OffloadKey(name) for name in moved.missing])
        loaded = [OffloadKey(name) for name in moved.hashes] if moved.is_load and moved.missing else None
        return JobResult(moved.job_id, not moved.missing, loaded, transfer_time=moved.seconds, transfer_bytes=moved.moved_bytes)


class _Lookups(AsyncLookupManager):
    """Looks up all chunks of a step in one batch, in a thread of vLLM's."""

    def __init__(self, chunks: Chunks, tier_type: str) -> None:
        self._chunks = chunks
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._chunks.exists(keys)


def _hint(job: TransferJob) -> Retention | None:
    """Return the request's hint for all chunks of a job, whose tokens are not looked at."""
    hints = job.req_context.get_state(RequestRetention)
    return hints.of_unknown if hints is not None else None


def chunk_shard(config: OffloadingConfig, settings: VllmSettings) -> Shard:
    """Return the namespace that engines must agree on to share chunks.

    A chunk has the bytes of all ranks. vLLM does not give a tier the attention backend's memory order, so the device
    and the CPU's instruction set stand in for it.
    """
    parallel = config.parallel
    is_cpu = current_platform.is_cpu()
    form = (config.groups, config.cache, config.worker_kv_bytes_per_block, config.kv_cache_layout)
    ranks = (parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    flags = (config.replicated_layout, config.canonical_layout)
    return Shard(
        Namespace(
            model=settings.model or config.model.name,
            revision=settings.revision,
            dtype=config.model.dtype.removeprefix("torch."),
            block_tokens=config.groups[0].tokens_per_block * config.cache.blocks_per_chunk,
            extra={
                "engine": "vllm offloading",
                "form": hashlib.sha256(repr((form, ranks, flags)).encode()).hexdigest()[:32],
                "device": f"cpu {torch.backends.cpu.get_cpu_capability()}" if is_cpu else current_platform.get_device_name(),
            },
            salt=settings.salt,
            hash="sha256",
        )
    )
