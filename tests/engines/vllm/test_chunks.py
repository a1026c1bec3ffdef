"""Chunks of host memory go to a real store and come back, without an engine."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.engines.vllm.chunks import ChunkResult, Chunks
from kvstore.engines.vllm.identity import Shard
from kvstore.engines.vllm.settings import VllmSettings
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import Full, Unavailable
from kvstore.protocol.retention import Retention
from kvstore.testing.transfer.awaited import eventually
from tests.client.jobs.faulty import Barrier, raises
from tests.engines.put_client import PutClient

ROWS, ROW_BYTES = 6, 4096
NUMBERS = itertools.count()
HASHES = [bytes([index]) * 36 for index in range(4)]


class Host:
    """Host memory of whose rows each is full of its number, and its chunks."""

    def __init__(self, address: str, shard: Shard) -> None:
        self.memory = np.repeat(np.arange(ROWS, dtype=np.uint8), ROW_BYTES).reshape(ROWS, ROW_BYTES)
        self.client = PutClient(address)
        self.chunks = Chunks(self.client, shard, self.memory.data, VllmSettings())

    def moved(self, count: int = 1) -> list[ChunkResult]:
        """Wait for the next `count` jobs and return their results, by job id."""
        found: list[ChunkResult] = []

        def are_over() -> bool:
            found.extend(self.chunks.take_moved())
            return len(found) >= count

        eventually(are_over, "the jobs are over")
        return sorted(found, key=lambda moved: moved.job_id)


@pytest.fixture
def shard() -> Shard:
    return Shard(Namespace(model=f"chunks-{next(NUMBERS)}", dtype="float32", block_tokens=16))


@pytest.fixture
def host(address: str, shard: Shard) -> Iterator[Host]:
    host = Host(address, shard)
    yield host
    host.chunks.close()


def test_chunks_come_back_into_other_rows(host: Host) -> None:
    host.chunks.store(7, HASHES[:2], [3, 1])
    assert host.chunks.is_busy
    (stored,) = host.moved()
    assert (stored.job_id, stored.hashes, stored.missing, stored.is_load) == (7, tuple(HASHES[:2]), (), False)
    assert stored.moved_bytes == 2 * ROW_BYTES
    assert not host.chunks.is_busy
    host.client.flush()
    assert host.chunks.exists(HASHES) == [True, True, False, False]
    host.chunks.load(8, HASHES[:2], [0, 5])
    (loaded,) = host.moved()
    assert loaded.is_load
    assert [set(row.tolist()) for row in host.memory] == [{3}, {1}, {2}, {3}, {4}, {1}]


def test_missing_chunks_do_not_affect_the_others(host: Host) -> None:
    host.chunks.store(1, [HASHES[0], HASHES[2]], [0, 2])
    host.moved()
    host.chunks.load(2, HASHES[:3], [3, 4, 5])
    (loaded,) = host.moved()
    assert (loaded.hashes, loaded.missing) == ((HASHES[0], HASHES[2]), (HASHES[1],))
    assert loaded.moved_bytes == 2 * ROW_BYTES


def test_a_chunk_of_another_size_is_missing(host: Host, shard: Shard) -> None:
    host.client.put(shard.key(HASHES[0]), b"short")
    host.chunks.load(1, HASHES[:1], [3])
    assert host.moved()[0].missing == (HASHES[0],)


def test_a_store_that_takes_nothing_raises_nothing(host: Host) -> None:
    host.client.faults.append(raises(Full("no room")))
    host.chunks.store(1, HASHES[:1], [0])
    assert host.moved()[0].missing == (HASHES[0],)


def test_a_store_that_cannot_be_reached_has_nothing(host: Host) -> None:
    host.client.faults.append(raises(Unavailable("away")))
    assert host.chunks.exists(HASHES[:1]) == [False]


def test_draining_waits_until_nothing_uses_the_memory(host: Host) -> None:
    barrier = Barrier()
    host.client.faults.append(barrier)
    host.chunks.store(1, HASHES[:1], [0])
    assert barrier.is_reached.acquire(timeout=60)
    barrier.open()
    host.chunks.drain()
    assert [moved.job_id for moved in host.chunks.take_moved()] == [1]


def test_hints_of_jobs_reach_puts_and_gets(host: Host) -> None:
    hint = Retention(70, session="s")
    host.chunks.store(1, HASHES[:2], [3, 1], hint)
    host.moved()
    host.chunks.load(2, HASHES[:2], [4, 5], hint)
    host.moved()
    assert host.client.hints == [hint, hint]
