"""vLLM's tiered offloading on a CPU, for tests: the worker that it lacks there, which copies between the engine's pool and host memory."""

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuWorker(OffloadingWorker):
    """Copies at once. Of one group of layers, with one block a chunk."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pools = [each.tensor.view(torch.int8).flatten(1) for each in kv_caches.tensors]
        self._hosts = [region.create_next_worker_view(each.page_size_bytes) for each in kv_caches.tensors]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        begin_s = time.monotonic()
        for pool, host in zip(self._pools, self._hosts, strict=True):
            for block, chunk in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                host[int(chunk)].copy_(pool[int(block)])
        return self._end(job_id, len(src_spec.block_ids), begin_s)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        begin_s = time.monotonic()
        for pool, host in zip(self._pools, self._hosts, strict=True):
            for chunk, block in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                pool[int(block)].copy_(host[int(chunk)])
        return self._end(job_id, len(dst_spec.block_ids), begin_s)

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """All are over."""

    def shutdown(self) -> None:
        self._region.cleanup()

    def _end(self, job_id: int, blocks: int, begin_s: float) -> bool:
        moved_bytes = blocks * sum(pool.shape[1] for pool in self._pools)
        self._finished.append(TransferResult(job_id, True, moved_bytes, time.monotonic() - begin_s))
        return True


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's, but for the worker."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Called once."""
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return CpuWorker(kv_caches, region)
