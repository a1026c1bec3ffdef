"""How a tenant's index grows without stopping the node's loop: a larger one is filled part by part, while the smaller one goes on being
read and kept true; then it takes the smaller one's place, and that is emptied part by part, and kept true for those who still read it
until nothing is left there.

A block says which entry shows it in the larger one, once it is there, else in the smaller one: which of the two it is tells the block that
the larger one has at that entry.
"""

from collections.abc import Collection, Sequence
from typing import Final

from kvstore.protocol.shown_index import MAX_KEY_BYTES
from kvstore.store.blocks.block import Block
from kvstore.store.blocks.columns import NOT_SHOWN
from kvstore.store.shown.index import Places, ShownIndex

PART_ENTRIES: Final = 1024
"""Entries that are copied or emptied at a time, a part of a page: about 400 blocks, 0.6 ms with the pages that are touched for the first
time, or 0.2."""


FOURFOLD_SETS: Final = 4096
"""Up to so many sets, 9 MB, an index grows fourfold, for each growth takes as long as showing what is there once more; beyond that
twofold, for one that has just grown takes four times as much memory a block then."""


class Growth:
    """See the module. `index` is the one that clients are given. The node's loop is the only caller."""

    def __init__(self, old: ShownIndex) -> None:
        """Raises TierFailed: there is no memory for a larger one. The old one goes on as it is."""
        self.old = old
        self.index = old
        self._new = ShownIndex((4 if old.sets <= FOURFOLD_SETS else 2) * old.sets, number=old.number + 1, is_ordered=old.is_ordered)
        self._next = 0
        """The first entry of the old one that is not copied, or not emptied, yet."""

    @property
    def _is_copied(self) -> bool:
        return self.index is self._new

    def show(self, block: Block, slab: int, offset: int, checksum: int, slot: int) -> None:
        """As ShownIndex.show."""
        if len(block.key) > MAX_KEY_BYTES:
            return
        if not self._is_copied:
            _, left = self.old.put(block, slab, offset, checksum, slot)
            if left is not None and not self._is_in_new(left):
                left.shown = NOT_SHOWN
        block.shown, left = self._new.put(block, slab, offset, checksum, slot)
        if left is not None:
            left.shown = self.old.entry_of(left)

    def show_all(self, blocks: Sequence[Block], slabs: Places, offsets: Places, slots: Places) -> list[int]:
        """As ShownIndex.show_all. What has a place in one of them only is shown there."""
        left: Collection[int] = range(len(blocks)) if self._is_copied else set(self.old.show_all(blocks, slabs, offsets, slots))
        return [number for number in self._new.show_all(blocks, slabs, offsets, slots) if number in left]

    def hide(self, block: Block) -> None:
        """As ShownIndex.hide, for whoever reads either of them."""
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
        """As ShownIndex.accessed, of clients of either."""
        return self.index.accessed(word) or self.old.accessed(word)

    def go_on(self) -> bool:
        """Do the next part; whether anything is left to do. `index` is the larger one from the end of the copy on."""
        if self._is_copied:
            self._empty_part()
        else:
            self._copy_part()
        if self._next < self.old.entries:
            return True
        if self._is_copied:
            self.old.close()
            return False
        self._next = 0
        self.index = self._new
        self.old.tell_over()
        return True

    def _copy_part(self) -> None:
        begin, self._next = self._next, min(self._next + PART_ENTRIES, self.old.entries)
        blocks, entries, tags = self.old.part(begin, self._next)
        are_in_new = self._new.shows(blocks)
        if True in are_in_new:
            chosen = [i for i, is_in_new in enumerate(are_in_new) if not is_in_new]
            blocks, entries, tags = [blocks[i] for i in chosen], entries[chosen], tags[chosen]
        if blocks:
            self._new.add(blocks, entries, tags)  # what finds no place there stays where it is until that is emptied

    def _empty_part(self) -> None:
        begin, self._next = self._next, min(self._next + PART_ENTRIES, self.old.entries)
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

    def check_integrity(self) -> None:
        """Assert that each block says where it is, and that both show the same as far as they do. For tests."""
        new, old = self._new.shown(), self.old.shown()
        assert all(block.shown == entry for entry, block in new.items())
        assert all(self._is_in_new(block) or block.shown == entry for entry, block in old.items())
        if self._is_copied:
            assert all(entry >= self._next for entry in old)
