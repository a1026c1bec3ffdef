"""Which block is in which slot of a tier made of slabs: a list a slab, 8 bytes a slot, where a dict of all slots takes 100 a block."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from kvstore.store.blocks.block import Block
from kvstore.tiers.slabs import POSITION_BITS, position_of, slab_number_of
from kvstore.tiers.tier import Slot

_POSITION: Final = (1 << POSITION_BITS) - 1


class SlabIndex:
    """Blocks by the place of their slot; its size is that of the slabs that have any. Not thread-safe."""

    def __init__(self) -> None:
        self._slabs: dict[int, list[Block | None]] = {}
        self._counts: dict[int, int] = {}

    def add(self, slot: Slot, block: Block) -> None:
        number, position = slab_number_of(slot), position_of(slot)
        blocks = self._slabs.get(number)
        if blocks is None:
            blocks = self._slabs[number] = []
            self._counts[number] = 0
        if position >= len(blocks):
            blocks.extend([None] * (position + 1 - len(blocks)))
        blocks[position] = block
        self._counts[number] += 1

    def add_all(self, slots: Sequence[Slot], blocks: Sequence[Block]) -> None:
        """As `add`, one after the other."""
        for begin, end, number, first in _runs(slots):
            known = self._slabs.setdefault(number, [])
            known.extend([None] * (first + end - begin - len(known)))
            known[first : first + end - begin] = blocks[begin:end]
            self._counts[number] = self._counts.get(number, 0) + end - begin

    def remove(self, slot: Slot) -> None:
        """The slot has a block."""
        number = slab_number_of(slot)
        self._slabs[number][position_of(slot)] = None
        self._counts[number] -= 1
        if not self._counts[number]:
            del self._slabs[number], self._counts[number]

    def remove_all(self, slots: Sequence[Slot]) -> None:
        """As `remove`, one after the other."""
        for begin, end, number, first in _runs(slots):
            self._slabs[number][first : first + end - begin] = [None] * (end - begin)
            self._counts[number] -= end - begin
            if not self._counts[number]:
                del self._slabs[number], self._counts[number]

    def get(self, slot: Slot) -> Block | None:
        blocks = self._slabs.get(slab_number_of(slot), ())
        position = position_of(slot)
        return blocks[position] if position < len(blocks) else None

    def mates(self, slot: Slot) -> Sequence[Block | None]:
        """By place, the blocks in the slab of this slot, which has one; the caller leaves the list as it is."""
        return self._slabs[slab_number_of(slot)]

    def count(self, slot: Slot) -> int:
        """How many blocks there are among `mates`."""
        return self._counts[slab_number_of(slot)]

    def check_integrity(self) -> None:
        """Assert that the counts are right. For tests; O(slots)."""
        found = {number: sum(block is not None for block in blocks) for number, blocks in self._slabs.items()}
        assert self._counts == found
        assert 0 not in found.values()


def _runs(slots: Sequence[Slot]) -> Iterator[tuple[int, int, int, int]]:
    """(begin, end, slab, position of the first) of slots that lie one behind the other in one slab: a batch has a few such runs."""
    indexes = np.array([slot.index for slot in slots], np.int64)
    is_end = (np.diff(indexes) != 1) | (np.diff(indexes >> POSITION_BITS) != 0)
    for begin, end in pairwise([0, *(np.flatnonzero(is_end) + 1).tolist(), len(slots)]):
        if begin < end:
            yield begin, end, int(indexes[begin]) >> POSITION_BITS, int(indexes[begin]) & _POSITION
