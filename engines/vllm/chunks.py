"""Stores and loads chunks of an offloading engine's host memory by jobs: the tier of tier.py, without vLLM."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvstore.client import Client
from kvstore.client.jobs.job import Job, JobKind
from kvstore.client.jobs.jobs import Jobs
from kvstore.engines.vllm.counters import FailureLog
from kvstore.engines.vllm.identity import Shard
from kvstore.engines.vllm.settings import LOAD_THREADS, VllmSettings
from kvstore.protocol.retention import Retention


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """Outcome of one of the engine's jobs."""

    job_id: int
    hashes: tuple[bytes, ...]
    """Chunks that were stored or loaded."""
    missing: tuple[bytes, ...]
    is_load: bool
    moved_bytes: int
    seconds: float


class Chunks:
    """Chunks in the store, by rows of the engine's host memory. One thread calls it, except `exists`, which any
    thread may call. Errors of the store are not raised: a chunk that could not be moved is reported as missing."""

    def __init__(self, client: Client, shard: Shard, memory: memoryview, settings: VllmSettings) -> None:
        """Create it. `client` is owned. `memory`, `[chunks, bytes]`, is the engine's host memory."""
        self._client = client
        self._job_settings = replace(settings.jobs(), read_workers=LOAD_THREADS)
        self._jobs = Jobs(client, self._job_settings)
        self._shard = shard
        self._rows: NDArray[np.uint8] = np.asarray(memory).view(np.uint8)
        self._begun: dict[int, tuple[Job, tuple[bytes, ...], float]] = {}
        self._failure_logs = {
            JobKind.LOAD: FailureLog("loading chunks", "they are computed"),
            JobKind.STORE: FailureLog("storing chunks", "they stay in the engine only"),
        }

    def exists(self, hashes: Sequence[bytes]) -> list[bool]:
        """Return which chunks can be loaded now; none if the store does not respond in time."""
        return self._jobs.exists(self._shard.keys(hashes))

    def store(self, job_id: int, hashes: Sequence[bytes], rows: Sequence[int], retention: Retention | None = None) -> None:
        """Start to store chunks from these rows, with a hint. The rows must not change until `take_moved` has returned
        the job."""
        keys = self._shard.keys(hashes)
        job = self._jobs.store(keys, self._memory(rows), namespace=self._shard.namespace, retention=retention, request=job_id)
        self._begun[job_id] = (job, tuple(hashes), time.monotonic())

    def load(self, job_id: int, hashes: Sequence[bytes], rows: Sequence[int], retention: Retention | None = None) -> None:
        """Start to load chunks into these rows, with a hint."""
        job = self._jobs.load(self._shard.keys(hashes), self._memory(rows), retention=retention, request=job_id)
        self._begun[job_id] = (job, tuple(hashes), time.monotonic())

    def take_moved(self) -> list[ChunkResult]:
        """Return the results of jobs that ended since the last call."""
        return [self._moved(job) for job in self._jobs.finished()]

    @property
    def is_busy(self) -> bool:
        """True if started jobs have results that were not taken."""
        return bool(self._begun)

    def drain(self) -> None:
        """Wait until no job uses the memory, at most as long as the deadlines of the jobs."""
        for job, _, _ in self._begun.values():
            job.wait()

    def close(self) -> None:
        """Finish stores within their deadline, cancel other jobs, and disconnect."""
        self._jobs.close(drain_s=self._job_settings.store_deadline_s)
        self._client.close()

    def _memory(self, rows: Sequence[int]) -> list[NDArray[np.uint8]]:
        return [self._rows[row] for row in rows]

    def _moved(self, job: Job) -> ChunkResult:
        assert isinstance(job.request, int)
        _, hashes, begin_s = self._begun.pop(job.request)
        self._failure_logs[job.kind].record(job.error)
        row_bytes = self._rows.shape[1]
        is_load = job.kind is JobKind.LOAD
        done = [result == row_bytes for result in job.results] if is_load else job.succeeded
        there = tuple(name for name, is_done in zip(hashes, done, strict=True) if is_done)
        missing = tuple(name for name, is_done in zip(hashes, done, strict=True) if not is_done)
        return ChunkResult(job.request, there, missing, is_load, len(there) * row_bytes, time.monotonic() - begin_s)
