"""Page allocator of the value file and the table of placements: which extents each value has, and when they can be
reused.

Allocation is best fit over runs of 4 KiB pages, in bins of eight steps per power of two (TLSF). Neighbours are
coalesced on free. A value for which no run is long enough gets several, longest first, so that fragmentation never
makes a value size unstorable. Source: Masmano et al., TLSF: a new dynamic memory allocator for real-time systems, ECRTS
2004.

Reuse is epoch-based reclamation. An extent is free once its value's deletion is durable and the last read or write of
it has ended: the value file has no snapshots, and a reader of a reused extent would get another value's bytes.
"""

import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from kvstore.protocol.errors import Closed

PAGE_BYTES: Final = 4096
"""Unit of extents: O_DIRECT needs offsets and lengths in logical blocks of 512 or 4,096 bytes."""

STEPS_BITS: Final = 3
"""Bins have 2**3 = 8 steps per power of two."""

MAX_PROBED: Final = 4
"""Runs of the value's own bin that are probed: some of them are shorter than the value."""

_CHECKSUM: Final = struct.Struct(">Q")

_RUN: Final = struct.Struct(">QI")

_ONE_RUN: Final = struct.Struct(">QQI")
"""Packed form of nearly all values."""


class PageRun(NamedTuple):
    """Pages [begin, end)."""

    begin: int
    end: int

    @property
    def pages(self) -> int:
        return self.end - self.begin


class ExtentAllocator:
    """Allocator of pages [0, end_pages). Not thread-safe."""

    def __init__(self) -> None:
        self.end_pages = 0
        self.free_pages = 0
        self._end_by_begin: dict[int, int] = {}
        """The free runs."""
        self._begin_by_end: dict[int, int] = {}
        self._bins: dict[int, dict[int, None]] = {}
        """Begins of the free runs by bin; no bin is empty."""
        self._filled = 0
        """Bitmap of bins that have a run."""

    def grow(self, end_pages: int) -> None:
        """Add the pages up to `end_pages`, free."""
        begin, self.end_pages = self.end_pages, end_pages
        if begin < end_pages:
            self.free(PageRun(begin, end_pages))

    def take(self, pages: int) -> PageRun | None:
        """Allocate a run of `pages`, or return None if no free run is that long."""
        begin = self._find(pages)
        if begin is None:
            return None
        end = self._remove(begin)
        if begin + pages < end:
            self._insert(begin + pages, end)
        return PageRun(begin, begin + pages)

    def take_pieces(self, pages: int) -> list[PageRun]:
        """Allocate `pages` in few runs, longest first. At least that many must be free."""
        assert pages <= self.free_pages
        runs: list[PageRun] = []
        while pages:
            run = self.take(pages)
            if run is None:
                longest = next(iter(self._bins[self._filled.bit_length() - 1]))
                run = PageRun(longest, self._remove(longest))
            runs.append(run)
            pages -= run.pages
        return runs

    def free(self, run: PageRun) -> None:
        """Free an allocated run, or part of one."""
        begin, end = run
        if (before := self._begin_by_end.get(begin)) is not None:
            self._remove(before)
            begin = before
        if end in self._end_by_begin:
            end = self._remove(end)
        self._insert(begin, end)

    def take_all(self, runs: Iterable[PageRun]) -> None:
        """Mark the runs of an opened file as allocated, in an empty allocator. `runs` are sorted and disjoint."""
        assert self.end_pages == 0
        for begin, end in runs:
            if self.end_pages < begin:
                self._insert(self.end_pages, begin)
            self.end_pages = end

    def free_runs(self) -> Iterator[PageRun]:
        return (PageRun(begin, end) for begin, end in self._end_by_begin.items())

    def check_integrity(self) -> None:
        """Assert that free runs are coalesced, within the file, and in the right bins. For tests; O(runs)."""
        runs = sorted(self.free_runs())
        assert all(left.end < right.begin for left, right in pairwise(runs)), "neighbours are not joined"
        assert all(0 <= run.begin < run.end <= self.end_pages for run in runs)
        assert self.free_pages == sum(run.pages for run in runs)
        assert self._begin_by_end == {run.end: run.begin for run in runs}
        assert sorted((number, begin) for number, runs_in in self._bins.items() for begin in runs_in) == sorted(
            (_bin(run.pages), run.begin) for run in runs
        )
        assert self._filled == sum(1 << number for number in self._bins)

    def _find(self, pages: int) -> int | None:
        own = _bin(pages)
        for _, begin in zip(range(MAX_PROBED), self._bins.get(own, ()), strict=False):
            if self._end_by_begin[begin] - begin >= pages:
                return begin
        longer = self._filled >> (own + 1)
        if not longer:
            return None
        return next(iter(self._bins[own + (longer & -longer).bit_length()]))

    def _insert(self, begin: int, end: int) -> None:
        number = _bin(end - begin)
        self._end_by_begin[begin] = end
        self._begin_by_end[end] = begin
        self._bins.setdefault(number, {})[begin] = None
        self._filled |= 1 << number
        self.free_pages += end - begin

    def _remove(self, begin: int) -> int:
        """Remove a free run and return its end."""
        end = self._end_by_begin.pop(begin)
        del self._begin_by_end[end]
        number = _bin(end - begin)
        runs = self._bins[number]
        del runs[begin]
        if not runs:
            del self._bins[number]
            self._filled &= ~(1 << number)
        self.free_pages -= end - begin
        return end


def _bin(pages: int) -> int:
    """Return the bin of runs of this length; longer runs are in the same or later bins."""
    shift = max(0, pages.bit_length() - 1 - STEPS_BITS)
    return (shift << STEPS_BITS) + (pages >> shift)


Runs = tuple[PageRun, ...]


class Placement(NamedTuple):
    """A value's runs, in the order of its bytes, and the xxh3_64 of these."""

    checksum: int
    runs: Runs


class Placements:
    """Extents by block id. Thread-safe; only `wait_for_release` and `close` block.

    Reads are numbered. A retired extent is free once all reads with a number below its own have ended (epoch-based
    reclamation), so a batch of reads costs two steps.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allocator = ExtentAllocator()
        self._packed_by_id: dict[int, bytes] = {}
        """Checksum and runs, packed: a third of the memory of objects."""
        self._reads: dict[int, None] = {}
        """Numbers of the reads in flight, ascending."""
        self._next_read = 0
        self._retired: deque[tuple[int, Runs]] = deque()
        """Extents of deleted values, each with the number of the first read that cannot see it, ascending."""
        self._is_closed = False

    @property
    def end_pages(self) -> int:
        return self._allocator.end_pages

    def grow(self, end_pages: int) -> None:
        """Add the file's pages up to `end_pages`."""
        with self._changed:
            self._allocator.grow(end_pages)

    def take(self, pages: int, *, in_pieces: bool) -> Runs | None:
        """Allocate extents for a value. The caller owns them until `publish` or `discard`. None: no run is long enough
        or, with `in_pieces`, too few pages are free.
        """
        with self._changed:
            if not in_pieces:
                run = self._allocator.take(pages)
                return None if run is None else (run,)
            return tuple(self._allocator.take_pieces(pages)) if pages <= self._allocator.free_pages else None

    def discard(self, runs: Runs) -> None:
        """Free extents of `take` that were not published."""
        with self._changed:
            self._free(runs)

    def publish(self, block_id: int, placement: Placement) -> None:
        """Make a written value with a durable header readable. The block's former extents are retired."""
        with self._changed:
            before = self._packed_by_id.get(block_id)
            self._packed_by_id[block_id] = _pack(placement)
            if before is not None:
                self._retire(_unpack(before).runs)

    def release(self, block_ids: Iterable[int]) -> None:
        """Retire the extents of values whose deletion is durable. Ids without extents are ignored."""
        with self._changed:
            for block_id in block_ids:
                packed = self._packed_by_id.pop(block_id, None)
                if packed is not None:
                    self._retire(_unpack(packed).runs)

    def begin_read(self) -> int:
        """Begin a read and return its number. Extents that `find` returns until `end_read` are not reused before.
        Raises Closed.
        """
        with self._changed:
            if self._is_closed:
                raise Closed("the NVMe tier was closed")
            number = self._next_read
            self._next_read += 1
            self._reads[number] = None
            return number

    def find(self, block_id: int) -> Placement | None:
        """Return the value's placement, or None if it has no extent. Call between `begin_read` and `end_read`."""
        packed = self._packed_by_id.get(block_id)
        return None if packed is None else _unpack(packed)

    def end_read(self, number: int) -> None:
        with self._changed:
            del self._reads[number]
            self._free_retired()

    def wait_for_release(self, timeout_s: float) -> bool:
        """Wait until all retired extents are free. Returns False if none was retired or the time is over."""
        with self._changed:
            return bool(self._retired) and self._changed.wait_for(lambda: not self._retired, timeout_s)

    def restore(self, placements: Sequence[tuple[int, Placement]], file_pages: int) -> set[int]:
        """Load the placements of an opened folder into a new table; returns the ids of values that are lost.

        A value is lost if it lies behind the end of the file, or if a newer value overlaps it. Both are left by a power
        cut without `sync`.
        """
        lost = {block_id for block_id, placement in placements if max(run.end for run in placement.runs) > file_pages}
        lost |= _overlapped([(block_id, placement.runs) for block_id, placement in placements if block_id not in lost])
        with self._changed:
            kept = [(block_id, placement) for block_id, placement in placements if block_id not in lost]
            self._packed_by_id = {block_id: _pack(placement) for block_id, placement in kept}
            self._allocator.take_all(sorted(run for _, placement in kept for run in placement.runs))
        return lost

    def close(self, timeout_s: float) -> bool:
        """Refuse new reads and wait for those in flight. Returns False if the time is over."""
        with self._changed:
            self._is_closed = True
            return self._changed.wait_for(lambda: not self._reads, timeout_s)

    def check_integrity(self) -> None:
        """Assert that each page is free or has one owner, while no value is written. For tests; O(values)."""
        with self._changed:
            self._allocator.check_integrity()
            runs = [run for packed in self._packed_by_id.values() for run in _unpack(packed).runs]
            runs += [run for _, retired in self._retired for run in retired]
            cover = sorted([*runs, *self._allocator.free_runs()])
            assert [run.end for run in cover] == [*(run.begin for run in cover[1:]), *([self.end_pages] if cover else [])]
            assert not cover or cover[0].begin == 0

    def _retire(self, runs: Runs) -> None:
        self._retired.append((self._next_read, runs))
        self._free_retired()

    def _free_retired(self) -> None:
        oldest = next(iter(self._reads), self._next_read)
        while self._retired and self._retired[0][0] <= oldest:
            self._free(self._retired.popleft()[1])
        self._changed.notify_all()

    def _free(self, runs: Runs) -> None:
        for run in runs:
            self._allocator.free(run)


def pages_of(size_bytes: int) -> int:
    """Return the pages that a value takes."""
    return -(-size_bytes // PAGE_BYTES)


def _pack(placement: Placement) -> bytes:
    return _CHECKSUM.pack(placement.checksum) + pack_runs(placement.runs)


def _unpack(packed: bytes) -> Placement:
    if len(packed) == _ONE_RUN.size:
        checksum, begin, pages = _ONE_RUN.unpack(packed)
        return Placement(checksum, (PageRun(begin, begin + pages),))
    return Placement(_CHECKSUM.unpack_from(packed)[0], unpack_runs(packed[_CHECKSUM.size :]))


def pack_runs(runs: Runs) -> bytes:
    """Pack 12 bytes per run: first page (uint64), pages (uint32), big-endian."""
    return b"".join(_RUN.pack(run.begin, run.pages) for run in runs)


def unpack_runs(packed: bytes) -> Runs:
    return tuple(PageRun(begin, begin + pages) for begin, pages in _RUN.iter_unpack(packed))


def _overlapped(placed: Sequence[tuple[int, Runs]]) -> set[int]:
    """Return the ids of values that share a page with a newer value (one with a larger id)."""
    lost: set[int] = set()
    while True:
        runs = sorted((run, block_id) for block_id, runs_of in placed if block_id not in lost for run in runs_of)
        found = {
            min(block_id, other)
            for (run, block_id), (following, other) in pairwise(runs)
            if following.begin < run.end and block_id != other
        }
        if not found:
            return lost
        lost |= found
