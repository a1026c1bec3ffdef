"""A peer library's half of a pair of processes: its memory, and the answers to a parent's questions about speed. See peer_pair.py.

Runs in the peer library's own Python environment too, so it needs nothing but numpy.
"""

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

BLOCKS: Final = 32
HALF_BYTES: Final = 256 << 20
"""Batches wander through it, so that no processor's cache holds what is copied."""
SOURCE, SINK = 0, HALF_BYTES
"""An arena's first half is only read, its second only written."""
SMALL_BYTES: Final = 4096
SMALL_CALLS: Final = 500


class Initiator(ABC):
    """One-sided reads and writes of a target's arena, by the library that is measured."""

    @abstractmethod
    def copy(self, operation: Literal["read", "write"], here: int, there: int, block_bytes: int, blocks: int) -> None:
        """Move `blocks` adjacent blocks between offset `here` of our arena and `there` of the target's; return when all is done."""


def arena(seed: int) -> Bytes:
    """Memory of which every page has been touched: random bytes of `seed` to be read, zeros to be written."""
    memory = np.zeros(2 * HALF_BYTES, np.uint8)
    memory[:HALF_BYTES] = pattern(seed, HALF_BYTES)
    memory[SINK:].fill(0)
    return memory


def pattern(seed: int, size_bytes: int) -> Bytes:
    """Random bytes, repeated at a distance that no block size divides."""
    return np.resize(np.random.default_rng(seed).integers(0, 256, (1 << 20) + 7, np.uint8), size_bytes)


TARGET_SEED, INITIATOR_SEED = 1, 2


def target(start: Callable[[Bytes], Any]) -> None:
    """Make the arena, send the parent the result of `start` for the initiator, and run until the parent closes the pipe."""
    memory = arena(TARGET_SEED)
    print(json.dumps(start(memory)), flush=True)
    sys.stdin.read()


def initiator(start: Callable[[Bytes, Any], Initiator]) -> None:
    """Answer the parent's questions, a line of JSON each, about the target that the first line describes."""
    memory = arena(INITIATOR_SEED)
    peer = start(memory, json.loads(sys.stdin.readline()))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        operation, block_bytes = question["operation"], question["block_bytes"]
        if operation == "latency":
            answer = latencies_us(peer)
        else:
            answer = {"gb_s": throughput(peer, memory, operation, block_bytes, question["seconds"])}
        print(json.dumps(answer), flush=True)


def throughput(peer: Initiator, memory: Bytes, operation: Literal["read", "write"], block_bytes: int, seconds: float) -> float:
    """GB/s of batches of BLOCKS; afterwards every byte that had to arrive is compared."""
    batch_bytes = BLOCKS * block_bytes
    slots = HALF_BYTES // batch_bytes
    here, there = (SINK, SOURCE) if operation == "read" else (SOURCE, SINK)
    memory[SINK:].fill(0)
    batches, begun = 0, time.perf_counter()
    while (taken := time.perf_counter() - begun) < seconds or not batches:
        offset = batches % slots * batch_bytes
        peer.copy(operation, here + offset, there + offset, block_bytes, BLOCKS)
        batches += 1
    moved_bytes = min(batches, slots) * batch_bytes
    if operation == "write":
        peer.copy("read", SINK, SINK, moved_bytes // BLOCKS, BLOCKS)
    expected = pattern(TARGET_SEED if operation == "read" else INITIATOR_SEED, moved_bytes)
    if not np.array_equal(memory[SINK : SINK + moved_bytes], expected):
        raise AssertionError(f"wrong bytes after {operation}s of {block_bytes} bytes")
    return batches * batch_bytes / taken / 1e9


def latencies_us(peer: Initiator) -> dict[str, float]:
    """Median and 99th percentile of reads of one small block, each from other memory."""
    taken = []
    for i in range(SMALL_CALLS):
        begun = time.perf_counter()
        peer.copy("read", SINK + i * SMALL_BYTES, SOURCE + i * SMALL_BYTES, SMALL_BYTES, 1)
        taken.append((time.perf_counter() - begun) * 1e6)
    return {"p50": float(np.percentile(taken, 50)), "p99": float(np.percentile(taken, 99))}
