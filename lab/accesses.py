"""A trace's blocks one after the other, as arrays: which, when, and where each was used before and is used next. It measures nothing."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.kvcache.traces.mooncake import TraceRequest

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Accesses:
    """Uses of blocks in the order of prompts and of blocks in them; all arrays have one element a use."""

    times_s: NDArray[np.float64]
    """Of the prompts, ascending: one that is earlier in the trace than the prompt before has that one's time."""
    blocks: Indices
    """Numbered from 0 without gaps, in no order that matters."""
    previous: Indices
    """Index of the same block's use before, -1 for its first."""
    next: Indices
    """Index of the same block's next use, -1 for its last."""

    def __len__(self) -> int:
        return self.blocks.size

    @property
    def unique(self) -> int:
        return int(np.count_nonzero(self.previous < 0))


def flatten(requests: Iterable[TraceRequest]) -> Accesses:
    """O(n log n) for n uses of blocks."""
    lengths: list[int] = []
    times_ms: list[float] = []
    ids: list[int] = []
    for request in requests:
        lengths.append(len(request.hash_ids))
        times_ms.append(request.timestamp_ms)
        ids += request.hash_ids
    times_s = np.repeat(np.maximum.accumulate(np.asarray(times_ms, dtype=np.float64)) / 1000, lengths)
    every: NDArray[np.uint64] = np.asarray(ids, dtype=np.uint64)
    blocks: Indices = np.unique(every, return_inverse=True)[1].astype(np.int64)
    # Stable: uses of one block stand together, in their order.
    order = np.argsort(blocks, kind="stable")
    is_same = blocks[order[1:]] == blocks[order[:-1]]
    previous = np.full(len(ids), -1, dtype=np.int64)
    following = previous.copy()
    previous[order[1:][is_same]] = order[:-1][is_same]
    following[order[:-1][is_same]] = order[1:][is_same]
    return Accesses(times_s, blocks, previous, following)
