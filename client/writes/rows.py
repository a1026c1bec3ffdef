"""Rows of one array that go into slots of a node: which of them lie one behind the other in both places, and are one copy."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from kvstore.transfer.memory.memcpy import Pair

RUN_BYTES: Final = 256 << 10
"""A copy is no larger, unless one row is: what has been copied is hashed while it is in the processor's cache."""

Part = Callable[[int, int], memoryview]
"""The memory of a slab from an offset on, by its size."""


def runs_of_rows(
    flat: memoryview, row_bytes: int, rows: Sequence[int], slabs: Sequence[int], offsets: Sequence[int], parts: Mapping[int, Part]
) -> list[Pair]:
    """The copies of these rows of `flat`, in order, each to its slab and offset."""
    row, slab, offset = np.array(rows, np.int64), np.array(slabs, np.int64), np.array(offsets, np.int64)
    is_end = (np.diff(row) != 1) | (np.diff(slab) != 0) | (np.diff(offset) != row_bytes)
    most = max(1, RUN_BYTES // row_bytes)
    pairs = []
    for begin, end in pairwise([0, *(np.flatnonzero(is_end) + 1).tolist(), len(rows)]):
        part, source, target = parts[slabs[begin]], rows[begin] * row_bytes, offsets[begin]
        for at in range(0, (end - begin) * row_bytes, most * row_bytes):
            size = min(most * row_bytes, (end - begin) * row_bytes - at)
            pairs.append((part(target + at, size), flat[source + at : source + at + size]))
    return pairs
