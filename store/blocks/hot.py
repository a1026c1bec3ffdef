"""Which blocks clients read most, counted only while somebody asks: the frequent ones of any number, in bounded memory.

Misra and Gries' counters, a batch at a time: when twice `MAX_COUNTED` blocks have one, the count of the `MAX_COUNTED`th goes off all of
them, and who has nothing left goes. So a count is never too high, and too low by one in `MAX_COUNTED` of all reads at most; a read costs
O(1) on average. With each question counts are aged, so that they stand for the last `SPAN_S`. Reads from other hosts are counted by
themselves as well, the same way. Sans-I/O; `now_ns` is passed in.

Source: J. Misra and D. Gries, "Finding Repeated Elements", 1982; in batches: D. Anderson et al., "A High-Performance Algorithm for
Identifying Frequent Items in Data Streams", 2017.
"""

import heapq
import math
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvstore.store.blocks.block import Block

MAX_COUNTED: Final = 1024
"""Blocks that keep a counter; twice as many have one between two cuts: 300 kB, and as much for reads from other hosts."""
SPAN_S: Final = 60.0
"""A read counts for 1/e after this."""
IDLE_S: Final = 30.0
"""Nobody has asked for so long: nothing is counted any more."""


class BlockReads(NamedTuple):
    """How often clients read a block, and of that those of other hosts."""

    block: Block
    reads_per_s: float
    far_reads_per_s: float


class HotBlocks:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(self) -> None:
        self.is_counting = False
        self._counts: dict[Block, float] = {}
        self._far: dict[Block, float] = {}
        self._counted_s = 0.0
        """What `_counts` stand for, aged as they are, up to `_told_ns`."""
        self._told_ns = 0

    def read(self, blocks: Iterable[Block], *, is_far: bool) -> None:
        """Clients were given these, of other hosts where `is_far`. While it is counting only."""
        self._counts = _counted(self._counts, blocks)
        if is_far:
            self._far = _counted(self._far, blocks)

    def told(self, most: int, now_ns: int) -> list[BlockReads]:
        """The `most` that are read most and still here, the hottest first; nothing when it begins to count. 0: nobody asks."""
        elapsed_s = (now_ns - self._told_ns) / 1e9
        if not most:
            if elapsed_s > IDLE_S:
                self._stop()
            return []
        if not self.is_counting:
            self.is_counting, self._told_ns = True, now_ns
            return []
        if elapsed_s <= 0:
            return []
        self._counted_s += elapsed_s
        self._told_ns = now_ns
        here = ((count, block) for block, count in self._counts.items() if not block.is_gone)
        found = [
            BlockReads(block, count / self._counted_s, self._far.get(block, 0.0) / self._counted_s)
            for count, block in heapq.nlargest(most, here, key=lambda one: one[0])
        ]
        self._age(math.exp(-elapsed_s / SPAN_S))
        return found

    def _age(self, share: float) -> None:
        self._counted_s *= share
        self._counts = _aged(self._counts, share)
        self._far = _aged(self._far, share)

    def _stop(self) -> None:
        self.is_counting, self._counted_s = False, 0.0
        self._counts, self._far = {}, {}


def _counted(counts: dict[Block, float], blocks: Iterable[Block]) -> dict[Block, float]:
    """The counts with these reads, cut where they had become too many."""
    for block in blocks:
        counts[block] = counts.get(block, 0.0) + 1.0
    if len(counts) <= 2 * MAX_COUNTED:
        return counts
    least = heapq.nlargest(MAX_COUNTED, counts.values())[-1]
    return {block: count - least for block, count in counts.items() if count > least}


def _aged(counts: dict[Block, float], share: float) -> dict[Block, float]:
    return {block: count * share for block, count in counts.items() if not block.is_gone}
