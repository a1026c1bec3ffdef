"""Copies of equally long values from slabs into the rows of one array, without a Python object per value."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.client.local.shared_index import Indexes
from kvstore.protocol.shared_index import Words

Rows = npt.NDArray[np.uint8]

GATHER_BYTES: Final = 256 << 10
"""Bytes gathered at a time for rows that are not contiguous: fits the processor's cache."""


class _GatherBuffer(threading.local):
    """A thread's gather buffer. Fresh memory would cost a page fault per 4 KiB, more than the copy."""

    def __init__(self) -> None:
        self.memory = np.empty(GATHER_BYTES, np.uint8)


_buffer = _GatherBuffer()


def by_slab(slabs: Words) -> Iterator[tuple[int, Indexes]]:
    """Each distinct slab with the indexes at which it occurs, in order."""
    if (slabs == slabs[0]).all():
        yield int(slabs[0]), np.arange(len(slabs))
        return
    narrow = slabs.astype(np.uint16) if int(slabs.max()) < 1 << 16 else slabs  # numpy radix-sorts 16-bit words
    order = np.argsort(narrow, kind="stable")
    in_order = slabs[order]
    cuts = np.flatnonzero(in_order[1:] != in_order[:-1]) + 1
    for begin, end in pairwise([0, *cuts.tolist(), len(slabs)]):
        yield int(in_order[begin]), order[begin:end]


def gather(slab: memoryview, offsets: Indexes, rows: Rows, indexes: Indexes) -> None:
    """Copy the values at `offsets` of a slab into rows `indexes`, which are ascending."""
    row_bytes = rows.shape[1]
    memory = np.frombuffer(slab, np.uint8)
    if (offsets % row_bytes).any():
        for index, offset in zip(indexes.tolist(), offsets.tolist(), strict=True):
            rows[index] = memory[offset : offset + row_bytes]
        return
    source = memory[: len(memory) // row_bytes * row_bytes].reshape(-1, row_bytes)
    positions = offsets // row_bytes
    if indexes[-1] - indexes[0] == len(indexes) - 1:
        np.take(source, positions, axis=0, out=rows[indexes[0] : indexes[-1] + 1], mode="clip")
        return
    at_once = GATHER_BYTES // row_bytes
    if not at_once:
        for index, position in zip(indexes.tolist(), positions.tolist(), strict=True):
            rows[index] = source[position]
        return
    buffer = _buffer.memory[: at_once * row_bytes].reshape(at_once, row_bytes)
    for begin in range(0, len(indexes), at_once):
        part = indexes[begin : begin + at_once]
        np.take(source, positions[begin : begin + at_once], axis=0, out=buffer[: len(part)], mode="clip")
        rows[part] = buffer[: len(part)]
