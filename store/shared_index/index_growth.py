"""How a tenant's index grows without stopping the node's loop: a larger one is filled part by part, while the smaller one goes on being
read and kept true; then it takes the smaller one's place, and that is emptied part by part, and kept true for those who still read it
until nothing is left there.

A block says which entry shows it in the larger one, once it is there, else in the smaller one: which of the two it is tells the block that
the larger one has at that entry.
"""

from collections.abc import Collection, Sequence
from typing import Final

from kvstore.store.block_table.block import NOT_SHOWN, Block
from kvstore.store.shared_index.index import Places, SharedIndexTable

PART_ENTRIES: Final = 512
"""Entries that are copied or emptied at a time, a part of a page: nearly as many blocks, 0.6 ms with the pages that are touched for the
first time, or 0.2."""


FOURFOLD_SETS: Final = 2048
"""Up to so many sets, 5 MB, an index grows fourfold, for each growth takes as long as showing what is there once more; beyond that
twofold, for one that has just grown takes more memory a block then."""


class IndexGrowth:
    """See the module. `index` is the one that clients are given. The node's loop is the only caller."""

    def __init__(self, old: SharedIndexTable, key_words: int = 0) -> None:
        """For longer keys it is as large as before, where it is not full. Raises TierFailed: there is no memory for a larger one. The old
        one goes on as it is."""
        self.old = old
        self.index = old
        is_larger = key_words <= old.key_words or old.is_full
        sets = old.sets * ((4 if old.sets <= FOURFOLD_SETS else 2) if is_larger else 1)
        self._new = SharedIndexTable(sets, key_words=max(key_words, old.key_words), number=old.number + 1, is_ordered=old.is_ordered)
        self._next = 0
        """The first entry of the old one that is not copied, or not emptied, yet."""

    @property
    def _is_copied(self) -> bool:
        return self.index is self._new

    @property
    def max_key_bytes(self) -> int:
        """Longer keys are not shown: of the larger index."""
        return self._new.max_key_bytes

    def show(self, block: Block, offset: int, checksum: int, slot: int) -> None:
        """As SharedIndexTable.show."""
        if len(block.key) > self.max_key_bytes:
            self.index.leave_out(block)
            return
        if not self._is_copied and len(block.key) <= self.old.max_key_bytes:
            _, left = self.old.put(block, offset, checksum, slot)
            if left is not None and not self._is_in_new(left):
                left.shown = NOT_SHOWN
        block.shown, left = self._new.put(block, offset, checksum, slot)
        if left is not None:
            left.shown = self.old.entry_of(left)

    def show_all(self, blocks: Sequence[Block], offsets: Places, slots: Places) -> list[int]:
        """As SharedIndexTable.show_all. What has a place in one of them only is shown there."""
        is_in_old = not self._is_copied and len(blocks[0].key) <= self.old.max_key_bytes
        left: Collection[int] = set(self.old.show_all(blocks, offsets, slots)) if is_in_old else range(len(blocks))
        return [number for number in self._new.show_all(blocks, offsets, slots) if number in left]

    def hide(self, block: Block) -> None:
        """As SharedIndexTable.hide, for whoever reads either of them."""
        entry = block.shown
        if self._is_in_new(block):
            self._new.clear(entry)
            entry = self.old.entry_of(block)
        if entry != NOT_SHOWN:
            self.old.clear(entry)
        block.shown = NOT_SHOWN

    def _is_in_new(self, block: Block) -> bool:
        return self._new.block_at(block.shown) is block

    def accessed(self, word: int) -> Block | None:
        """As SharedIndexTable.accessed, of clients of either."""
        return self.index.accessed(word) or self.old.accessed(word)

    def all_accessed(self, words: Sequence[int]) -> list[Block]:
        """As SharedIndexTable.all_accessed, of clients of either."""
        return [block for word in words if (block := self.accessed(word)) is not None]

    def go_on(self) -> bool:
        """Do the next part; whether anything is left to do. `index` is the larger one from the end of the copy on."""
        if self._is_copied:
            self._empty_part()
        else:
            self._copy_part()
        if self._next < self.old.used:
            return True
        if self._is_copied:
            self.old.close()
            return False
        self._next = 0
        self.index = self._new
        self.old.tell_over()
        return True

    def _copy_part(self) -> None:
        begin, self._next = self._next, min(self._next + PART_ENTRIES, self.old.used)
        blocks, entries = self.old.part(begin, self._next)
        are_in_new = self._new.shows(blocks)
        if True in are_in_new:
            chosen = [i for i, is_in_new in enumerate(are_in_new) if not is_in_new]
            blocks, entries = [blocks[i] for i in chosen], entries[chosen]
        if blocks:
            self._new.add(blocks, entries)  # what finds no place there stays where it is until that is emptied

    def _empty_part(self) -> None:
        begin, self._next = self._next, min(self._next + PART_ENTRIES, self.old.used)
        blocks = self.old.wipe(begin, self._next)
        for block, is_in_new in zip(blocks, self._new.shows(blocks), strict=True):
            if not is_in_new:
                block.shown = NOT_SHOWN
                self._new.pushed_out.append(block)

    @property
    def count(self) -> int:
        """Entries of both that show something."""
        return self.old.count + self._new.count

    @property
    def memory_bytes(self) -> int:
        """Of both."""
        return self.old.memory_bytes + self._new.memory_bytes

    def close(self) -> None:
        """Neither shows anything any more, and says so."""
        self.old.close()
        self._new.close()
