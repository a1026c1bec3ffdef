"""Free space of the value file, in runs of 4 KiB pages. It does no I/O, and knows neither values nor who reads them.

Best fit: a run from the first bin whose runs are long enough; bins are eight a doubling of the length. Neighbours are joined when a run
is freed. A value for which no run is long enough gets several, the longest first: free pages are of use to a value of any size, and one
size never starves another, whichever values are evicted.
Source: Masmano et al., TLSF: a new dynamic memory allocator for real-time systems, ECRTS 2004.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final, NamedTuple

PAGE_BYTES: Final = 4096
"""Unit of extents: O_DIRECT needs offsets and lengths in whole logical blocks, which are 512 or 4,096 bytes."""

STEPS_BITS: Final = 3
"""Bins have 2**3 = 8 steps a doubling."""

MAX_LOOKED: Final = 4
"""Runs of the bin of a value's own length that are looked at: some of them are shorter than the value."""


class Run(NamedTuple):
    """Pages [begin, end)."""

    begin: int
    end: int

    @property
    def pages(self) -> int:
        return self.end - self.begin


class ExtentAllocator:
    """Pages [0, end_pages), each free or taken. Not thread-safe."""

    def __init__(self) -> None:
        self.end_pages = 0
        self.free_pages = 0
        self._end_by_begin: dict[int, int] = {}
        """The free runs."""
        self._begin_by_end: dict[int, int] = {}
        self._bins: dict[int, dict[int, None]] = {}
        """Begins of the free runs by bin of their length. None is empty."""
        self._filled = 0
        """A bit for each bin that has a run."""

    def grow(self, end_pages: int) -> None:
        """The pages from the end up to `end_pages` are there from now on, and free."""
        begin, self.end_pages = self.end_pages, end_pages
        if begin < end_pages:
            self.free(Run(begin, end_pages))

    def take(self, pages: int) -> Run | None:
        """A run of so many pages; None: no free run is that long."""
        begin = self._find(pages)
        if begin is None:
            return None
        end = self._remove(begin)
        if begin + pages < end:
            self._insert(begin + pages, end)
        return Run(begin, begin + pages)

    def take_pieces(self, pages: int) -> list[Run]:
        """So many pages in as few runs as are found at once, the longest first. At least so many must be free."""
        assert pages <= self.free_pages
        runs: list[Run] = []
        while pages:
            run = self.take(pages)
            if run is None:
                longest = next(iter(self._bins[self._filled.bit_length() - 1]))
                run = Run(longest, self._remove(longest))
            runs.append(run)
            pages -= run.pages
        return runs

    def free(self, run: Run) -> None:
        """Give back a run that was taken, or a part of one."""
        begin, end = run
        if (before := self._begin_by_end.get(begin)) is not None:
            self._remove(before)
            begin = before
        if end in self._end_by_begin:
            end = self._remove(end)
        self._insert(begin, end)

    def take_all(self, runs: Iterable[Run]) -> None:
        """Of an allocator that has no pages yet: the file has these values already. `runs` are sorted and do not overlap."""
        assert self.end_pages == 0
        for begin, end in runs:
            if self.end_pages < begin:
                self._insert(self.end_pages, begin)
            self.end_pages = end

    def free_runs(self) -> Iterator[Run]:
        return (Run(begin, end) for begin, end in self._end_by_begin.items())

    def check_integrity(self) -> None:
        """Assert that free runs are joined, lie in the file, and are in the bins of their lengths. For tests; O(runs)."""
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
        for _, begin in zip(range(MAX_LOOKED), self._bins.get(own, ()), strict=False):
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
        """The run's end."""
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
    """Number of the bin of runs of this length; longer runs are in the same or in later ones."""
    shift = max(0, pages.bit_length() - 1 - STEPS_BITS)
    return (shift << STEPS_BITS) + (pages >> shift)
