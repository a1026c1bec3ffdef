"""Byte copies between the regions of two ranks, as arrays."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.protocol.errors import InvalidArgument

Bytes = NDArray[np.uint8]
"""A region of memory: one-dimensional, contiguous."""
Int64s = NDArray[np.int64]
Column = NDArray[np.int64 | np.uint32]


class CopyArrays(NamedTuple):
    """Arrays of equal length, one entry per copy; destinations never overlap. Some are read-only views of one repeated
    number.

    Offsets of many copies are uint32 if that holds the end of each, else int64: beware of overflow when adding to them.
    """

    source_region: Column
    source_offset: Column
    """All offsets and lengths are in bytes."""
    destination_region: Column
    destination_offset: Column
    length: Column


def as_bytes(region: Any) -> Bytes:
    """Return a flat array of bytes over the buffer's memory. Raises InvalidArgument unless it is contiguous."""
    if isinstance(region, np.ndarray):
        if not region.flags.c_contiguous:
            raise InvalidArgument("a region must be a contiguous buffer")
        return region.reshape(-1).view(np.uint8)
    try:
        return np.frombuffer(region, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidArgument(f"a region must be a contiguous buffer: {error}") from None
