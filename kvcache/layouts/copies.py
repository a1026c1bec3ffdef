"""Byte copies between the regions of two ranks, as arrays: what a plan is made of, and a memcpy of it on one host."""

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.protocol.errors import InvalidArgument

Bytes = NDArray[np.uint8]
"""A region of memory: one-dimensional and contiguous."""
Int64s = NDArray[np.int64]
Column = NDArray[np.int64 | np.uint32]

_CHUNK_BYTES: Final = 256 << 10
"""Copied at once: numpy collects what it gathers before it stores that, and so much stays in the cache."""


class Copies(NamedTuple):
    """Equally long arrays, an entry a copy; destinations never overlap. Some are read-only views of one repeated number.

    Offsets of many copies are of uint32 where that holds the end of each, else of int64: mind what you add to them.
    """

    source_region: Column
    source_offset: Column
    """In bytes, as all offsets and lengths."""
    destination_region: Column
    destination_offset: Column
    length: Column

    @property
    def total_bytes(self) -> int:
        return int(self.length.sum())

    def apply(self, source_regions: Sequence[Any], destination_regions: Sequence[Any]) -> None:
        """Copy within this process. Regions are contiguous buffers; those written to must not overlap those read.

        Raises:
            InvalidArgument: a copy reaches outside of a region, or a region is not contiguous or may not be written. Copies before it
                in the order of lengths may have been made.
        """
        ours = [as_bytes(region) for region in source_regions]
        theirs = [as_bytes(region) for region in destination_regions]
        for rows in self._alike():
            first = rows[0]
            length = int(self.length[first])
            from_rows = _windows(ours, int(self.source_region[first]), self.source_offset[rows], length)
            to_rows = _windows(theirs, int(self.destination_region[first]), self.destination_offset[rows], length)
            if not to_rows.flags.writeable:
                raise InvalidArgument(f"region {self.destination_region[first]} is written to, but is read-only")
            for at in range(0, len(rows), chunk := max(1, _CHUNK_BYTES // length)):
                part = rows[at : at + chunk]
                to_rows[self.destination_offset[part]] = from_rows[self.source_offset[part]]

    def _alike(self) -> Iterator[NDArray[np.intp]]:
        """Indexes of copies of one length between the same two regions."""
        if not len(self.length):
            return
        keys = np.stack((self.length, self.source_region, self.destination_region))
        order = np.lexsort(keys)
        changes = np.flatnonzero((np.diff(keys[:, order]) != 0).any(axis=0)) + 1
        yield from np.split(order, changes)


def as_bytes(region: Any) -> Bytes:
    """A buffer as a flat array of bytes over the same memory. Raises InvalidArgument unless it is contiguous."""
    if isinstance(region, np.ndarray):
        if not region.flags.c_contiguous:
            raise InvalidArgument("a region must be a contiguous buffer")
        return region.reshape(-1).view(np.uint8)
    try:
        return np.frombuffer(region, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgument(f"a region must be a contiguous buffer: {error}") from None


def _windows(regions: Sequence[Bytes], region: int, offsets: Column, length: int) -> Bytes:
    """All places of `length` bytes in a region, as rows by offset."""
    if region >= len(regions):
        raise InvalidArgument(f"copies reach region {region}, but there are {len(regions)} regions")
    flat = regions[region]
    if int(offsets.max()) + length > flat.size:
        raise InvalidArgument(f"copies reach byte {int(offsets.max()) + length} of region {region}, which has {flat.size}")
    return np.lib.stride_tricks.as_strided(flat, (flat.size - length + 1, length), (1, 1), writeable=flat.flags.writeable)
