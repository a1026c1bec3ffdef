"""Copies between buffers of this process and mapped slabs, with several threads for large copies.

One thread does not saturate a memory bus. Copies and hashes run without the GIL, and the calling thread works along
with the pool. No call returns or raises while a thread touches its buffers (signal_safety.py).

While another thread computes in Python, small single-threaded copies keep the GIL (rpc/gil_contention.py).
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import xxhash

from kvstore.rpc.gil_contention import GilContention
from kvstore.transfer.memory.signal_safety import Gate, begin_thread

R = TypeVar("R")
Pair = tuple[memoryview, memoryview]
"""(destination, source), of equal length."""
Gather = tuple[memoryview, Sequence[memoryview]]
"""(destination, sources that fill it in order): one value."""


class CopyMode(NamedTuple):
    """Functions to copy (destination first) and hash one value, with or without the GIL."""

    copy: Callable[[memoryview, memoryview], None]
    checksum: Callable[[memoryview], int]
    update: Callable[[Any, memoryview], None]
    """Update an xxh3_64 with the bytes."""


C = TypeVar("C", bound=tuple[memoryview, object])
C_contra = TypeVar("C_contra", bound=tuple[memoryview, object], contravariant=True)
R_co = TypeVar("R_co", covariant=True)

Scatter = tuple[memoryview, Sequence[memoryview]]
"""(source, destinations that it fills in order): one value."""


class CopyWork(Protocol[C_contra, R_co]):
    """Work on some pairs in one thread."""

    def __call__(self, pairs: Sequence[C_contra], mode: CopyMode = ..., /) -> R_co: ...


COPY_BYTES: Final = 64 << 10
"""From this size on a copy uses numpy, which releases the GIL; below, the call costs more than the copy."""
PART_BYTES: Final = 512 << 10
"""Below this size the parts of one value are copied with the GIL. Beside a thread that computes, as an engine's does,
reacquiring it after each part takes up to the switch interval of 5 ms. 480 parts of 256 KiB: benchmarks/RESULTS.md,
Engines.
"""
PARALLEL_BYTES: Final = 4 << 20
"""Below this size a hand-over to another thread costs more than it saves: about 0.1 ms to wake one."""

HASHED_BYTES: Final = 64 << 10
"""Bytes hashed per call with the GIL: xxhash releases it above 100 KB."""
HELD_BYTES: Final = 4 << 20
"""Largest copy with the GIL, half a millisecond; longer ones would delay other threads."""


class MemcpyPool:
    """Thread pool for copies. Thread-safe. `threads` includes the calling thread; 0: one per processor, at most 4."""

    def __init__(self, threads: int) -> None:
        self._threads = threads or min(4, os.cpu_count() or 1)
        self._helpers = _Helpers(self._threads - 1)
        self.gil = GilContention()
        """Measures whether other threads compete for the GIL."""
        weakref.finalize(self, self._helpers.stop).atexit = False

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy every source to its destination."""
        self._spread(copy_all, pairs)

    def scatter(self, scatters: Sequence[Scatter]) -> None:
        """Fill the destinations of every source from it."""
        self._spread(scatter_all, scatters)

    def gather_and_sum(self, gathers: Sequence[Gather]) -> list[int]:
        """Fill every destination from its sources; returns the values' checksums."""
        return [found for part in self._spread(gather_and_sum_all, gathers) for found in part]

    def copy_and_sum_rows(self, pairs: Sequence[Pair], row_bytes: int) -> list[int]:
        """As `gather_and_sum`, for values of `row_bytes` each; a pair may hold several consecutive values."""
        return [found for part in self._spread(partial(copy_and_sum_all_rows, row_bytes=row_bytes), pairs) for found in part]

    def _spread(self, work: "CopyWork[C, R]", pairs: Sequence[C]) -> list[R]:
        parts = _cut(pairs, self._threads) if self._threads > 1 else [pairs]
        if len(parts) == 1:
            return [self._run_alone(work, pairs)]
        shared = _Shared(work, parts)
        try:
            self._helpers.call(shared, len(parts) - 1)
            shared.take_parts()
        finally:
            try:
                shared.gate.close_and_wait()
            finally:
                shared.left.clear()  # a late helper must not keep references to the caller's buffers
        return shared.outcome()

    def _run_alone(self, work: "CopyWork[C, R]", pairs: Sequence[C]) -> R:
        """Run in this thread, with the GIL if another thread computes and the copy is small."""
        size_bytes = sum(len(destination) for destination, _ in pairs)
        if size_bytes < COPY_BYTES:
            return work(pairs)
        if self.gil.holds():
            return work(pairs, HELD if size_bytes <= HELD_BYTES else HASH_HELD)
        began_ns, used_ns = time.monotonic_ns(), time.thread_time_ns()
        result = work(pairs)
        self.gil.copied(time.monotonic_ns() - began_ns - (time.thread_time_ns() - used_ns))
        return result

    def close(self) -> None:
        """Stop the threads; later copies run in the calling thread only. A second close is a no-op."""
        self._helpers.stop()


class _Shared(Generic[C, R]):
    """Work in parts, from which the caller and the helpers take."""

    def __init__(self, work: "CopyWork[C, R]", parts: Sequence[Sequence[C]]) -> None:
        self.gate = Gate()
        self.left = deque(enumerate(parts))
        self._work = work
        self._results: dict[int, R] = {}
        self._error: BaseException | None = None

    def take_parts(self) -> None:
        """Run parts until none is left."""
        while True:
            try:
                index, part = self.left.popleft()
            except IndexError:
                return
            self._results[index] = self._work(part)

    def help(self) -> None:
        """Run parts in a helper; an error is raised in the caller."""
        try:
            self.take_parts()
        except BaseException as error:
            self._error = error

    def outcome(self) -> list[R]:
        """Return the results in order. Raises a helper's error."""
        if self._error is not None:
            raise self._error
        return [self._results[index] for index in range(len(self._results))]


class _Helpers:
    """At most `limit` daemon threads, started on demand. A caller waits for their work, so they need not be joined."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls: SimpleQueue[_Shared[Any, Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._running = 0
        self._is_stopped = False

    def call(self, shared: "_Shared[Any, Any]", count: int) -> None:
        """Request up to `count` helpers. None is required: the caller runs the parts that no helper takes."""
        if self._is_stopped:
            return
        helpers = self._running
        for _ in range(self._running, self._limit):
            try:
                begin_thread(self._serve)
            except RuntimeError:  # no thread can be started: the next call tries again
                break
            helpers += 1
        for _ in range(min(count, helpers)):  # a call that no helper takes would stay queued, with its buffers
            self._calls.put(shared)

    def _serve(self) -> None:
        with self._lock:
            if self._running >= self._limit:  # surplus: a signal hid another start, or two callers raced
                return
            self._running += 1
        while (shared := self._calls.get()) is not None:
            shared.gate.run_inside(shared.help)
            del shared  # drops the caller's buffers
        self._calls.put(None)  # for the next helper

    def stop(self) -> None:
        """Stop the threads, each after its current work."""
        self._is_stopped = True
        self._calls.put(None)


def copy(destination: memoryview, source: memoryview) -> None:
    """Copy `source` into `destination`, of equal length."""
    if len(source) < COPY_BYTES:
        destination[:] = source
    else:
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))


def _copy_held(destination: memoryview, source: memoryview) -> None:
    destination[:] = source


def _update(digest: Any, source: memoryview) -> None:
    digest.update(source)


def _update_held(digest: Any, source: memoryview) -> None:
    for at in range(0, len(source), HASHED_BYTES):
        digest.update(source[at : at + HASHED_BYTES])


def _checksum_held(source: memoryview) -> int:
    digest = xxhash.xxh3_64()
    _update_held(digest, source)
    return digest.intdigest()


FREE: Final = CopyMode(copy, xxhash.xxh3_64_intdigest, _update)
HELD: Final = CopyMode(_copy_held, _checksum_held, _update_held)
HASH_HELD: Final = CopyMode(copy, _checksum_held, _update_held)


def copy_all(pairs: Sequence[Pair], mode: CopyMode = FREE) -> None:
    for destination, source in pairs:
        mode.copy(destination, source)


def scatter_all(scatters: Sequence[Scatter], mode: CopyMode = FREE) -> None:
    for source, destinations in scatters:
        if len(destinations) == 1:
            mode.copy(destinations[0], source)
            continue
        at = 0
        for destination in destinations:
            _copy_part(destination, source[at : at + len(destination)], mode)
            at += len(destination)


def gather_and_sum_all(gathers: Sequence[Gather], mode: CopyMode = FREE) -> list[int]:
    """Gather values and hash each value or part right after its copy, while it is in the processor's cache."""
    sums = []
    for destination, sources in gathers:
        if len(sources) == 1:
            mode.copy(destination, sources[0])
            sums.append(mode.checksum(sources[0]))
        else:
            sums.append(_gather_and_sum(destination, sources, mode))
    return sums


def _gather_and_sum(destination: memoryview, sources: Sequence[memoryview], mode: CopyMode) -> int:
    digest, at = xxhash.xxh3_64(), 0
    for source in sources:
        _copy_part(destination[at : at + len(source)], source, mode)
        mode.update(digest, source)
        at += len(source)
    return digest.intdigest()


def _copy_part(destination: memoryview, source: memoryview, mode: CopyMode) -> None:
    if len(source) < PART_BYTES:
        destination[:] = source
    else:
        mode.copy(destination, source)


def copy_and_sum_all_rows(pairs: Sequence[Pair], mode: CopyMode = FREE, *, row_bytes: int) -> list[int]:
    sums: list[int] = []
    for destination, source in pairs:
        mode.copy(destination, source)
        rows: Any = np.frombuffer(source, np.uint8).reshape(-1, row_bytes)
        sums += map(mode.checksum, rows)
    return sums


def _cut(pairs: Sequence[C], max_parts: int) -> list[Sequence[C]]:
    """Split into at most `max_parts` runs of about equal size, in order; one run if the work is small."""
    total = sum(len(destination) for destination, _ in pairs)
    if total < PARALLEL_BYTES or len(pairs) < 2:
        return [pairs]
    share, begin, filled = -(-total // max_parts), 0, 0
    parts: list[Sequence[C]] = []
    for index, (destination, _) in enumerate(pairs):
        filled += len(destination)
        if filled >= share:
            parts.append(pairs[begin : index + 1])
            begin, filled = index + 1, 0
    if begin < len(pairs):
        parts.append(pairs[begin:])
    return parts
