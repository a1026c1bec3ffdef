"""Byte copies between the regions of two ranks, as arrays: what a plan is made of."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.protocol.errors import InvalidArgument

Bytes = NDArray[np.uint8]
"""A region of memory: one-dimensional and contiguous."""
Int64s = NDArray[np.int64]
Column = NDArray[np.int64 | np.uint32]


class CopyArrays(NamedTuple):
    """Equally long arrays, an entry a copy; destinations never overlap. Some are read-only views of one repeated number.

    Offsets of many copies are of uint32 where that holds the end of each, else of int64: mind what you add to them.
    """

    source_region: Column
    source_offset: Column
    """In bytes, as all offsets and lengths."""
    destination_region: Column
    destination_offset: Column
    length: Column


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
