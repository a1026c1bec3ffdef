"""Copies between this process's buffers and mapped slabs, by several threads when there is much to copy.

One thread does not fill a memory bus; the copies and the hashing run without the GIL, so a few threads together do. The caller copies
along: whoever is free takes the next part. No call returns or raises while a thread touches what it was given (signal_safety.py).

Beside a thread that computes in Python, what one thread copies alone is copied with the GIL (rpc/gil_contention.py).
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
"""(destination, source), equally long."""
Gather = tuple[memoryview, Sequence[memoryview]]
"""(destination, sources that fill it in order): one value."""


class CopyMode(NamedTuple):
    """How one value is copied to an equally long destination, which is named first, and hashed: with the GIL or without."""

    copy: Callable[[memoryview, memoryview], None]
    checksum: Callable[[memoryview], int]
    update: Callable[[Any, memoryview], None]
    """Have an xxh3_64 go on with the bytes."""


C = TypeVar("C", bound=tuple[memoryview, object])
C_contra = TypeVar("C_contra", bound=tuple[memoryview, object], contravariant=True)
R_co = TypeVar("R_co", covariant=True)

Scatter = tuple[memoryview, Sequence[memoryview]]
"""(source, destinations that take it in order): one value."""


class CopyWork(Protocol[C_contra, R_co]):
    """What is done with some pairs in one thread."""

    def __call__(self, pairs: Sequence[C_contra], mode: CopyMode = ..., /) -> R_co: ...


COPY_BYTES: Final = 64 << 10
"""From here on a copy goes through numpy, which lets other threads run meanwhile; below, its call costs more than the copy."""
PART_BYTES: Final = 512 << 10
"""Below this the parts of one value are copied with the GIL: beside a thread that computes, as an engine's does, to get it back after each
takes up to the interpreter's switch interval of 5 ms. 480 parts of 256 KiB: benchmarks/RESULTS.md, Engines."""
PARALLEL_BYTES: Final = 4 << 20
"""Below this, handing work to another thread costs more than it saves: about 0.1 ms for a thread that sleeps."""

HASHED_BYTES: Final = 64 << 10
"""So many at once are hashed with the GIL: xxhash lets go of it for more than 100 KB."""
HELD_BYTES: Final = 4 << 20
"""Up to so much may be copied with the GIL, in half a millisecond; beyond it, other threads would notice."""


class MemcpyPool:
    """Thread-safe. `threads` of 0 takes as many as there are processors, 4 at most; the caller's own is one of them."""

    def __init__(self, threads: int) -> None:
        self._threads = threads or min(4, os.cpu_count() or 1)
        self._helpers = _Helpers(self._threads - 1)
        self.gil = GilContention()
        """What copies find out of other threads that compute."""
        weakref.finalize(self, self._helpers.stop).atexit = False

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy every source to its destination."""
        self._spread(copy_all, pairs)

    def scatter(self, scatters: Sequence[Scatter]) -> None:
        """Fill the destinations of every source from it."""
        self._spread(scatter_all, scatters)

    def gather_and_sum(self, gathers: Sequence[Gather]) -> list[int]:
        """Fill every destination from its sources; the values' checksums."""
        return [found for part in self._spread(gather_and_sum_all, gathers) for found in part]

    def copy_and_sum_rows(self, pairs: Sequence[Pair], row_bytes: int) -> list[int]:
        """As `gather_and_sum`, of values of `row_bytes` each: every pair has one of them or several in a row."""
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
                shared.left.clear()  # a helper that comes later must not hold on to the caller's buffers
        return shared.outcome()

    def _run_alone(self, work: "CopyWork[C, R]", pairs: Sequence[C]) -> R:
        """In this thread: with the GIL where another one computes, as far as it is not much."""
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
        """End the threads; later copies are the caller's alone. A second close is a no-op."""
        self._helpers.stop()


class _Shared(Generic[C, R]):
    """One piece of work in parts, which the caller and the helpers take as they come."""

    def __init__(self, work: "CopyWork[C, R]", parts: Sequence[Sequence[C]]) -> None:
        self.gate = Gate()
        self.left = deque(enumerate(parts))
        self._work = work
        self._results: dict[int, R] = {}
        self._error: BaseException | None = None

    def take_parts(self) -> None:
        """Work until no part is left to take."""
        while True:
            try:
                index, part = self.left.popleft()
            except IndexError:
                return
            self._results[index] = self._work(part)

    def help(self) -> None:
        """A helper's share; what goes wrong is told to the caller."""
        try:
            self.take_parts()
        except BaseException as error:
            self._error = error

    def outcome(self) -> list[R]:
        """The results in order. Raises the error of a helper."""
        if self._error is not None:
            raise self._error
        return [self._results[index] for index in range(len(self._results))]


class _Helpers:
    """At most `limit` threads that are started when first called and wait for work. Daemons: what they do, a caller waits for."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls: SimpleQueue[_Shared[Any, Any] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._running = 0
        self._is_stopped = False

    def call(self, shared: "_Shared[Any, Any]", count: int) -> None:
        """Have up to `count` of them help. Nobody needs to come: the caller takes all parts that nobody takes."""
        if self._is_stopped:
            return
        helpers = self._running
        for _ in range(self._running, self._limit):
            try:
                begin_thread(self._serve)
            except RuntimeError:  # the system has none: the next call tries again
                break
            helpers += 1
        for _ in range(min(count, helpers)):  # else nobody would ever take them out, and what they hold with them
            self._calls.put(shared)

    def _serve(self) -> None:
        with self._lock:
            if self._running >= self._limit:  # one more was started: a signal hid the start of another, or two callers saw none
                return
            self._running += 1
        while (shared := self._calls.get()) is not None:
            shared.gate.run_inside(shared.help)
            del shared  # with it go the caller's buffers
        self._calls.put(None)  # for the next one

    def stop(self) -> None:
        """End the threads, each after what it is at."""
        self._is_stopped = True
        self._calls.put(None)


def copy(destination: memoryview, source: memoryview) -> None:
    """Copy `source` into the equally long `destination`."""
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
    """Each value, or part of one, is hashed right after it was copied, while the processor's cache has it."""
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
    """At most `max_parts` runs of about as many bytes each, in order; one for what is not worth sharing."""
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
