"""Large values of the NVMe tier: placed in extents of the value file, read and written by several threads.

Keeps no headers. The caller reports which values are durable and which are deleted for good.
"""

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Final

import xxhash

from kvstore.protocol.errors import ChecksumMismatch, TierFailed
from kvstore.rpc.thread_pools import started
from kvstore.tiers.placements import PAGE_BYTES, Placement, Placements, Runs, pages_of
from kvstore.tiers.tier import Buffer, TierFull
from kvstore.tiers.value_file import FilePiece, ValueFile, joined, pieces_of

Job = Callable[[], None]

MIN_SEGMENT_BYTES: Final = 1 << 20

MAX_SEGMENT_BYTES: Final = 1 << 30

SEGMENTS: Final = 64
"""The value file grows by 1/SEGMENTS of the capacity, within MIN_ and MAX_SEGMENT_BYTES: 64 MiB for 4 GiB."""

SLACK_BYTES: Final = 32 << 20
"""The file may exceed the capacity by this or by a segment; by at most a quarter for small tiers. Freed extents wait
there for the next transaction, so that writes do not. A batch is 8 MiB.
"""

IO_THREADS: Final = 8
"""Reads and writes in flight, in addition to those in callers' threads."""

WRITE_ATTEMPTS: Final = 3
"""Attempts to write a batch before the device counts as failed."""

RELEASE_WAIT_S: Final = 10.0
"""Longest wait of a write for reads of freed extents, when no others are free. Then the tier is full."""

CLOSE_WAIT_S: Final = 30.0
"""Longest wait of `close` for reads and writes. Afterwards the file stays open until the process ends."""


class IoThreads:
    """Thread pool shared by all batches. Thread-safe."""

    def __init__(self, threads: int) -> None:
        """Raises ConfigError if the threads cannot be started."""
        self._threads = threads
        self._pool = started(threads, "nvme-io")

    def run(self, jobs: Iterable[Job]) -> None:
        """Run all jobs concurrently, started in order; return when the last one ends. Jobs must not raise.

        The calling thread runs jobs too, so a batch makes progress while others occupy all threads.
        """
        waiting = deque(jobs)

        def work() -> None:
            while True:
                try:
                    job = waiting.popleft()
                except IndexError:
                    return
                job()

        helpers = [self._pool.submit(work) for _ in range(min(len(waiting) - 1, self._threads))]
        work()
        for helper in helpers:
            if not helper.cancel():
                helper.result()

    def close(self) -> None:
        """Wait for running jobs. A second close is a no-op."""
        self._pool.shutdown()


class ExtentRead:
    """One value to read into `buffer`, which has its size. `error` is set if it is missing or damaged."""

    __slots__ = ("_checksum", "_done", "buffer", "error", "pieces")

    def __init__(self, placement: Placement, buffer: memoryview) -> None:
        self.buffer = buffer
        self.pieces = pieces_of(placement.runs, buffer)
        self.error: Exception | None = None
        self._checksum = placement.checksum
        self._done = itertools.count(1)
        """Lock-free counter: `next` is atomic under the GIL."""

    def finish_piece(self) -> None:
        """Count a piece as done; the thread that finishes the last one verifies the value."""
        if next(self._done) == len(self.pieces) and self.error is None and xxhash.xxh3_64_intdigest(self.buffer) != self._checksum:
            self.error = ChecksumMismatch("the value file does not hold the bytes that were written")


class ValueStore:
    """Values by block id. Thread-safe. A value is placed, written, published, and then read."""

    def __init__(self, path: str | os.PathLike[str], *, capacity_bytes: int, sync: bool) -> None:
        """Open or create the file, for `capacity_bytes` of whole pages. Raises ConfigError."""
        self._sync = sync
        segment_bytes = min(max(capacity_bytes // SEGMENTS, MIN_SEGMENT_BYTES), MAX_SEGMENT_BYTES)
        slack_bytes = max(segment_bytes, min(SLACK_BYTES, capacity_bytes // 4))
        self._segment_pages = segment_bytes // PAGE_BYTES
        self._max_pages = (capacity_bytes + slack_bytes) // PAGE_BYTES
        self._growing = threading.Lock()
        self.placements = Placements()
        self._threads = IoThreads(IO_THREADS)
        try:
            self._file = ValueFile(Path(path))
        except BaseException:
            self._threads.close()
            raise
        self.failure = ""
        """Reason that it accepts no more values, or ""."""
        self._full_disk = ""
        """Error of the last growth of the file, if it failed."""

    @property
    def written_bytes(self) -> int:
        """Bytes written to the device since it was opened."""
        return self._file.written_bytes

    def restore(self, placements: Sequence[tuple[int, Placement]]) -> set[int]:
        """As Placements.restore. Call once, first."""
        lost = self.placements.restore(placements, self._file.pages)
        end_pages = max(self._max_pages, self.placements.end_pages)
        if end_pages < self._file.pages:  # the capacity was reduced
            self._file.shrink(end_pages)
        self.placements.grow(self._file.pages)
        return lost

    def place(self, sizes: Sequence[int], *, flush: Callable[[], None]) -> list[Runs]:
        """Allocate extents for values of these sizes; the caller owns them until they are published or discarded.

        `flush` makes pending deletions durable and releases their extents. Raises TierFull or TierFailed; nothing is
        allocated then.
        """
        placed: list[Runs] = []
        try:
            for size_bytes in sizes:
                placed.append(self._place_one(pages_of(size_bytes), flush))  # noqa: PERF401 - keeps the earlier ones on an exception
        except BaseException:
            self.discard(placed)
            raise
        return placed

    def discard(self, placed: Sequence[Runs]) -> None:
        """Free extents of `place` that hold no value."""
        for runs in placed:
            self.placements.discard(runs)

    def write(self, placed: Sequence[Runs], values: Sequence[Buffer]) -> None:
        """Write the values to their extents; with `sync` they are on the device on return.

        A failed write is repeated one piece after the other: a transient error affects several writes in flight.

        Raises TierFull or TierFailed: WRITE_ATTEMPTS failed, and no more values are accepted.
        """
        pieces = [piece for runs, value in zip(placed, values, strict=True) for piece in pieces_of(runs, memoryview(value).cast("B"))]
        groups = joined(sorted(pieces, key=itemgetter(0)))
        for attempt in range(WRITE_ATTEMPTS):
            try:
                self._write(groups, concurrently=attempt == 0)
                return
            except TierFailed as error:
                failed = error
        self.failure = f"out of order: {failed}"
        raise failed

    def read(self, reads: Sequence[ExtentRead]) -> None:
        """Fill and verify the buffers: short values in this thread with all reads in flight, large ones in the I/O
        threads.

        Call between `Placements.begin_read` and `end_read`.
        """
        parts = [(piece, read) for read in reads for piece in read.pieces]
        parts.sort(key=lambda part: part[0].offset_bytes)
        if len(parts) > 1:
            self._file.prefetch([piece for piece, _ in parts])
        for piece, read in parts:
            if not piece.is_large:
                self._read_piece(piece, read)
        self._threads.run([partial(self._read_piece, piece, read) for piece, read in parts if piece.is_large])

    def close(self) -> None:
        """Wait for reads and writes in flight. A second close is a no-op."""
        if self.placements.close(CLOSE_WAIT_S):
            self._threads.close()
            self._file.close()

    def _place_one(self, pages: int, flush: Callable[[], None]) -> Runs:
        """Allocate one run, growing the file if needed; else several runs. Waits for reads of freed extents last."""
        take = partial(self.placements.take, pages)
        if (runs := take(in_pieces=False)) or (self._grow(pages) and (runs := take(in_pieces=False))):
            return runs
        flush()
        while (runs := take(in_pieces=False) or take(in_pieces=True)) is None:
            if not self.placements.wait_for_release(RELEASE_WAIT_S):
                raise TierFull(self._full_disk or f"{pages} pages requested, and the value file has no more")
        return runs

    def _grow(self, pages: int) -> bool:
        """Grow the file by a segment, or by the value if that is longer, up to its limit. Returns False at the limit or
        on a full disk.
        """
        with self._growing:
            before = self.placements.end_pages
            for step in dict.fromkeys((max(pages, self._segment_pages), pages)):
                end_pages = min(before + step, self._max_pages)
                if end_pages <= before:
                    return False
                try:
                    self._file.grow(end_pages)
                except TierFull as error:
                    self._full_disk = f"{error}: free space there, or give the tier a smaller size"
                    continue
                self._full_disk = ""
                self.placements.grow(end_pages)
                return True
            return False

    def _read_piece(self, piece: FilePiece, read: ExtentRead) -> None:
        try:
            if not self._file.read(piece):
                read.error = ChecksumMismatch("the value file ends within the value")
        except Exception as error:
            read.error = error
        read.finish_piece()

    def _write(self, groups: Sequence[Sequence[FilePiece]], *, concurrently: bool) -> None:
        failures: list[Exception] = []

        def write(group: Sequence[FilePiece]) -> None:
            try:
                if not failures:
                    self._file.write(group)
            except Exception as error:
                failures.append(error)

        jobs = [partial(write, group) for group in groups]
        if concurrently:
            self._threads.run(jobs)
        else:
            for job in jobs:
                job()
        if failures:
            raise failures[0]
        if self._sync:
            self._file.sync()
            self._file.drop_cached(groups)
