"""Value file of the NVMe tier: large values in extents of 4 KiB pages, read and written with O_DIRECT.

`values` lies beside LMDB's `data.mdb` and holds only values, zero-padded to whole pages. It is preallocated one segment
at a time.

- Values of DIRECT_BYTES and more use O_DIRECT: the caller's memory if aligned, else a bounce buffer.
- Shorter values, and all where the file system refuses O_DIRECT, use the page cache. A second read of a short value
  costs no I/O.
  `prefetch` starts many such reads at once.
"""

import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from kvstore.protocol.errors import ConfigError, TierFailed
from kvstore.protocol.settings import format_size
from kvstore.tiers.nvme_env import DEVICE_FULL
from kvstore.tiers.placements import PAGE_BYTES, Runs
from kvstore.tiers.tier import TierFull

DIRECT_BYTES: Final = 128 << 10
"""Smallest value for O_DIRECT. At 64 KiB the page cache is 1.4 times as fast for 8 cold reads at once; at 256 KiB it
takes 1.5 times the processor time.
"""

PIECE_BYTES: Final = 2 << 20
"""Longest single read or write."""

MAX_BUFFERS: Final = 16
"""Bounce buffers of PIECE_BYTES, and so concurrent reads and writes of unaligned memory."""

MAX_JOINED: Final = 256
"""Adjacent pieces per write call: two buffers each, of the kernel's IOV_MAX (1,024)."""

NUMPY_COPY_BYTES: Final = 64 << 10
"""From this size on numpy copies: it releases the GIL, at 1 us per call. A memoryview is twice as fast at 4 KiB and,
below this size, holds the GIL for at most 5 us.
"""

_ZEROS: Final = bytes(PAGE_BYTES)


class AlignedBuffers:
    """Pool of up to `count` page-aligned buffers of `size_bytes`, created on demand. Thread-safe."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._available = threading.BoundedSemaphore(count)
        self._idle: list[mmap.mmap] = []

    @contextmanager
    def lease(self) -> Iterator[memoryview]:
        """Lease a buffer for one read or write. Blocks while all are leased."""
        with self._available:
            try:
                memory = self._idle.pop()
            except IndexError:
                memory = mmap.mmap(-1, self._size_bytes)
            try:
                yield memoryview(memory)
            finally:
                self._idle.append(memory)


def address_of(buffer: memoryview) -> int:
    """Return the address of a non-empty buffer's first byte."""
    return int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])


class FilePiece(NamedTuple):
    """Bytes of a value that are contiguous in the file, at most PIECE_BYTES: whole pages except at the value's end.

    `end_bytes` is the next page boundary. `is_large` refers to the whole value.
    """

    offset_bytes: int
    end_bytes: int
    buffer: memoryview
    is_large: bool


class ValueFile:
    """The file at `path`. Threads may read and write disjoint pieces; one at a time may call `grow`."""

    def __init__(self, path: Path) -> None:
        """Open or create it. Raises ConfigError."""
        self._path = path
        try:
            self._cached = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        os.fchmod(self._cached, 0o600)
        # Reads are of whole values at random offsets: read-ahead would be wasted.
        os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_RANDOM)
        self._buffers = AlignedBuffers(MAX_BUFFERS, PIECE_BYTES)
        self._direct = self._open_direct()
        self.written_bytes = 0
        """Bytes written to the device since it was opened."""
        self._counting = threading.Lock()

    @property
    def pages(self) -> int:
        return os.fstat(self._cached).st_size // PAGE_BYTES

    @property
    def is_direct(self) -> bool:
        """True if the file system supports O_DIRECT."""
        return self._direct >= 0

    def grow(self, pages: int) -> None:
        """Preallocate up to `pages`. Raises TierFull (nothing changed) or TierFailed."""
        before_bytes = self.pages * PAGE_BYTES
        try:
            os.posix_fallocate(self._cached, before_bytes, pages * PAGE_BYTES - before_bytes)
        except OSError as error:
            with suppress(OSError):  # may fail on a broken device
                os.ftruncate(self._cached, before_bytes)
            raise self._translate(f"cannot grow beyond {format_size(before_bytes)}", error) from error

    def shrink(self, pages: int) -> None:
        """Truncate to `pages`; no value lies behind. Best effort."""
        with suppress(OSError):
            os.ftruncate(self._cached, pages * PAGE_BYTES)

    def prefetch(self, pieces: Sequence[FilePiece]) -> None:
        """Start reading sorted `pieces` into the page cache, so that one thread has many reads in flight."""
        for group in joined([piece for piece in pieces if not self._goes_direct(piece)]):
            begin = group[0].offset_bytes
            with suppress(OSError):  # the read itself reports the error
                os.posix_fadvise(self._cached, begin, group[-1].end_bytes - begin, os.POSIX_FADV_WILLNEED)

    def read(self, piece: FilePiece) -> bool:
        """Fill the piece's buffer. Returns False if the file ends before. Raises TierFailed."""
        try:
            if not self._goes_direct(piece):
                return os.preadv(self._cached, (piece.buffer,), piece.offset_bytes) == len(piece.buffer)
            with self._direct_parts(piece) as (parts, tail, bounce):
                count = os.preadv(self._direct, parts, piece.offset_bytes)
                copy(bounce[: len(tail)], tail)
                return count >= len(piece.buffer)
        except OSError as error:
            raise self._translate("cannot be read", error) from error

    def write(self, group: Sequence[FilePiece]) -> None:
        """Write a group of `joined`, zero-padded. Raises TierFull, TierFailed."""
        begin, end = group[0].offset_bytes, group[-1].end_bytes
        try:
            count = self._write_direct(group[0]) if self._goes_direct(group[0]) else self._write_cached(group)
        except OSError as error:
            raise self._translate("cannot be written", error) from error
        with self._counting:
            self.written_bytes += count
        if count < end - begin:
            raise TierFull(f"{self._path}: {count} of {end - begin} bytes were written")

    def sync(self) -> None:
        """Flush written data to the device. Raises TierFull, TierFailed."""
        try:
            os.fdatasync(self._cached)
        except OSError as error:
            raise self._translate("cannot be synced", error) from error

    def drop_cached(self, groups: Sequence[Sequence[FilePiece]]) -> None:
        """Drop large values from the page cache: if they are read soon, the DRAM tier serves them."""
        for group in groups:
            if not self.is_direct and group[0].is_large:
                begin = group[0].offset_bytes
                os.posix_fadvise(self._cached, begin, group[-1].end_bytes - begin, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """A second close is a no-op."""
        for descriptor in (self._cached, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._cached = self._direct = -1

    def _open_direct(self) -> int:
        """Return a descriptor for O_DIRECT, or -1 if the file system refuses it on open or read."""
        descriptor = -1
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            with self._buffers.lease() as memory:
                os.preadv(descriptor, [memory[:PAGE_BYTES]], 0)
        except OSError:
            if descriptor >= 0:
                os.close(descriptor)
            return -1
        return descriptor

    def _goes_direct(self, piece: FilePiece) -> bool:
        return self.is_direct and piece.is_large

    def _write_cached(self, group: Sequence[FilePiece]) -> int:
        parts: list[memoryview | bytes] = []
        for piece in group:
            parts.append(piece.buffer)
            if padding := (piece.offset_bytes - piece.end_bytes + len(piece.buffer)) % PAGE_BYTES:
                parts.append(_ZEROS[:-padding])
        return os.pwritev(self._cached, parts, group[0].offset_bytes)

    def _write_direct(self, piece: FilePiece) -> int:
        with self._direct_parts(piece) as (parts, tail, bounce):
            copy(tail, bounce[: len(tail)])
            padding = -len(tail) % PAGE_BYTES
            bounce[len(tail) : len(tail) + padding] = _ZEROS[:padding]
            return os.pwritev(self._direct, parts, piece.offset_bytes)

    @contextmanager
    def _direct_parts(self, piece: FilePiece) -> Iterator[tuple[list[memoryview], memoryview, memoryview]]:
        """Yield the buffers of one direct transfer, the part of the piece that is copied, and its bounce buffer.

        An unaligned piece is copied whole, an aligned one only behind its last whole page.
        """
        whole_bytes = len(piece.buffer) // PAGE_BYTES * PAGE_BYTES if address_of(piece.buffer) % PAGE_BYTES == 0 else 0
        whole, tail = piece.buffer[:whole_bytes], piece.buffer[whole_bytes:]
        if not tail:
            yield [whole], tail, memoryview(bytearray())
            return
        with self._buffers.lease() as bounce:
            copied = bounce[: piece.end_bytes - piece.offset_bytes - whole_bytes]
            yield [whole, copied] if whole_bytes else [copied], tail, bounce

    def _translate(self, failed_action: str, error: OSError) -> Exception:
        kind = TierFull if error.errno in DEVICE_FULL else TierFailed
        return kind(f"{self._path} {failed_action}: {error.strerror}")


def pieces_of(runs: Runs, value: memoryview) -> list[FilePiece]:
    """Split a value into pieces, as they lie in its runs."""
    size_bytes = len(value)
    is_large = size_bytes >= DIRECT_BYTES
    pieces, done_bytes = list[FilePiece](), 0
    for begin, end in runs:
        offset_bytes, run_end_bytes = begin * PAGE_BYTES, end * PAGE_BYTES
        while offset_bytes < run_end_bytes:
            end_bytes = min(offset_bytes + PIECE_BYTES, run_end_bytes)
            next_bytes = min(done_bytes + end_bytes - offset_bytes, size_bytes)
            pieces.append(FilePiece(offset_bytes, end_bytes, value[done_bytes:next_bytes], is_large))
            offset_bytes, done_bytes = end_bytes, next_bytes
    return pieces


def joined(pieces: Sequence[FilePiece]) -> list[list[FilePiece]]:
    """Group sorted pieces by write call: adjacent pieces of short values together, each piece of a large value alone."""
    groups: list[list[FilePiece]] = []
    for piece in pieces:
        last = groups[-1] if groups else []
        is_next = last and not (piece.is_large or last[0].is_large) and last[-1].end_bytes == piece.offset_bytes
        if is_next and len(last) < MAX_JOINED and piece.end_bytes - last[0].offset_bytes <= PIECE_BYTES:
            last.append(piece)
        else:
            groups.append([piece])
    return groups


def copy(source: memoryview, destination: memoryview) -> None:
    """Copy between buffers of equal length; from NUMPY_COPY_BYTES on without the GIL."""
    if len(source) < NUMPY_COPY_BYTES:
        destination[:] = source
    else:
        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))
