"""Index from slot to block in a tier made of slabs: one list per slab, 8 bytes per slot. A dict takes 100 bytes per
block."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from kvstore.store.block_table.block import Block
from kvstore.store.block_table.rows import Numbers
from kvstore.tiers.slabs import POSITION_BITS, POSITION_MASK


class SlabIndex:
    """Blocks by slot index. Memory follows the slabs with blocks. Not thread-safe."""

    def __init__(self) -> None:
        self._slabs: dict[int, list[Block | None]] = {}
        self._counts: dict[int, int] = {}

    def add(self, index: int, block: Block) -> None:
        number, position = index >> POSITION_BITS, index & POSITION_MASK
        blocks = self._slabs.get(number)
        if blocks is None:
            blocks = self._slabs[number] = []
            self._counts[number] = 0
        if position >= len(blocks):
            blocks.extend([None] * (position + 1 - len(blocks)))
        blocks[position] = block
        self._counts[number] += 1

    def add_all(self, indexes: Numbers, blocks: Sequence[Block]) -> None:
        """Add blocks."""
        for begin, end, number, first in _runs(indexes):
            known = self._slabs.setdefault(number, [])
            known.extend([None] * (first + end - begin - len(known)))
            known[first : first + end - begin] = blocks[begin:end]
            self._counts[number] = self._counts.get(number, 0) + end - begin

    def remove(self, index: int) -> None:
        """Remove the slot's block; it must have one."""
        number = index >> POSITION_BITS
        self._slabs[number][index & POSITION_MASK] = None
        self._counts[number] -= 1
        if not self._counts[number]:
            del self._slabs[number], self._counts[number]

    def remove_all(self, indexes: Numbers) -> None:
        """Remove the slots' blocks."""
        # Sorted, because the end of a prompt is evicted first.
        for begin, end, number, first in _runs(np.sort(indexes)):
            self._slabs[number][first : first + end - begin] = [None] * (end - begin)
            self._counts[number] -= end - begin
            if not self._counts[number]:
                del self._slabs[number], self._counts[number]

    def get(self, index: int) -> Block | None:
        blocks = self._slabs.get(index >> POSITION_BITS, ())
        position = index & POSITION_MASK
        return blocks[position] if position < len(blocks) else None

    def mates(self, index: int) -> Sequence[Block | None]:
        """Return the blocks in the slot's slab, by position. The caller must not change the list."""
        return self._slabs[index >> POSITION_BITS]

    def count(self, index: int) -> int:
        """Number of blocks in the slot's slab."""
        return self._counts[index >> POSITION_BITS]


def _runs(indexes: Numbers) -> Iterator[tuple[int, int, int, int]]:
    """Iterate over runs of consecutive slots in one slab: (begin, end, slab, first position). A batch has few."""
    is_end = (np.diff(indexes) != 1) | (np.diff(indexes >> POSITION_BITS) != 0)
    for begin, end in pairwise([0, *(np.flatnonzero(is_end) + 1).tolist(), len(indexes)]):
        if begin < end:
            yield begin, end, int(indexes[begin]) >> POSITION_BITS, int(indexes[begin]) & POSITION_MASK
