"""Copies between this process's buffers and mapped slabs, by several threads when there is much to copy.

One thread does not fill a memory bus; the copies and the hashing run without the GIL, so a few threads together do. It owns the threads.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final, TypeVar

import numpy as np
import xxhash

R = TypeVar("R")
Pair = tuple[memoryview, memoryview]
"""(destination, source), equally long."""

COPY_BYTES: Final = 64 << 10
"""From here on a copy goes through numpy, which lets other threads run meanwhile; below, its call costs more than the copy."""
PARALLEL_BYTES: Final = 4 << 20
"""Below this, handing work to another thread costs more than it saves: about 0.1 ms for a thread that sleeps."""


class MemcpyPool:
    """Thread-safe. `threads` of 0 takes as many as there are processors, 4 at most."""

    def __init__(self, threads: int) -> None:
        self._threads = threads or min(4, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(max(1, self._threads - 1), thread_name_prefix="kvstore-copy")

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy every source to its destination."""
        self._spread(copy_all, pairs)

    def copy_and_sum(self, pairs: Sequence[Pair]) -> list[int]:
        """Copy every source to its destination; the sources' checksums."""
        return [found for part in self._spread(copy_and_sum_all, pairs) for found in part]

    def _spread(self, work: Callable[[Sequence[Pair]], R], pairs: Sequence[Pair]) -> list[R]:
        parts = _cut(pairs, self._threads) if self._threads > 1 else [pairs]
        others = [self._pool.submit(work, part) for part in parts[1:]]
        try:
            mine = work(parts[0])
        finally:
            wait(others)  # even when interrupted: the slots may be another's as soon as this returns
        return [mine, *(other.result() for other in others)]

    def close(self) -> None:
        """End the threads. A second close is a no-op."""
        self._pool.shutdown(wait=False)


def copy(destination: memoryview, source: memoryview) -> None:
    """Copy `source` into the equally long `destination`."""
    if len(source) < COPY_BYTES:
        destination[:] = source
    else:
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))


def copy_all(pairs: Sequence[Pair]) -> None:
    for destination, source in pairs:
        copy(destination, source)


def copy_and_sum_all(pairs: Sequence[Pair]) -> list[int]:
    """Each value is hashed right after it was copied, while the processor's cache has it."""
    sums = []
    for destination, source in pairs:
        copy(destination, source)
        sums.append(xxhash.xxh3_64_intdigest(source))
    return sums


def _cut(pairs: Sequence[Pair], most: int) -> list[Sequence[Pair]]:
    """At most `most` runs of about as many bytes each, in order; one for what is not worth sharing."""
    total = sum(len(source) for _, source in pairs)
    if total < PARALLEL_BYTES or len(pairs) < 2:
        return [pairs]
    share, parts, begin, filled = -(-total // most), [], 0, 0
    for index, (_, source) in enumerate(pairs):
        filled += len(source)
        if filled >= share:
            parts.append(pairs[begin : index + 1])
            begin, filled = index + 1, 0
    if begin < len(pairs):
        parts.append(pairs[begin:])
    return parts
