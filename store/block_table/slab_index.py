"""Which block is in which slot of a tier made of slabs: a list a slab, 8 bytes a slot, where a dict of all slots takes 100 a block."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from kvstore.store.block_table.block import Block
from kvstore.store.block_table.rows import Numbers
from kvstore.tiers.slabs import POSITION_BITS, POSITION_MASK


class SlabIndex:
    """Blocks by the index of their slot, which names its place; its size is that of the slabs that have any. Not thread-safe."""

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
        """As `add`, one after the other."""
        for begin, end, number, first in _runs(indexes):
            known = self._slabs.setdefault(number, [])
            known.extend([None] * (first + end - begin - len(known)))
            known[first : first + end - begin] = blocks[begin:end]
            self._counts[number] = self._counts.get(number, 0) + end - begin

    def remove(self, index: int) -> None:
        """The slot has a block."""
        number = index >> POSITION_BITS
        self._slabs[number][index & POSITION_MASK] = None
        self._counts[number] -= 1
        if not self._counts[number]:
            del self._slabs[number], self._counts[number]

    def remove_all(self, indexes: Numbers) -> None:
        """As `remove`, one after the other."""
        # What leaves at the end of a prompt first lies the other way round.
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
        """By place, the blocks in the slab of this slot, which has one; the caller leaves the list as it is."""
        return self._slabs[index >> POSITION_BITS]

    def count(self, index: int) -> int:
        """How many blocks there are among `mates`."""
        return self._counts[index >> POSITION_BITS]


def _runs(indexes: Numbers) -> Iterator[tuple[int, int, int, int]]:
    """(begin, end, slab, position of the first) of slots that lie one behind the other in one slab: a batch has a few such runs."""
    is_end = (np.diff(indexes) != 1) | (np.diff(indexes >> POSITION_BITS) != 0)
    for begin, end in pairwise([0, *(np.flatnonzero(is_end) + 1).tolist(), len(indexes)]):
        if begin < end:
            yield begin, end, int(indexes[begin]) >> POSITION_BITS, int(indexes[begin]) & POSITION_MASK
