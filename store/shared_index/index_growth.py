"""Incremental growth of a tenant's index: entries are copied to a larger index in steps, then the old one is emptied in
steps.

Both are kept up to date. Clients use the old one until the copy ends, then the new one; the old one stays valid until
it is empty. A block's `index_entry` is its entry in the new index if it has one there, else in the old one; the new
index's entry identifies which.
"""

from collections.abc import Collection, Sequence
from typing import Final

from kvstore.store.block_table.block import NOT_INDEXED, Block
from kvstore.store.shared_index.index import IntColumn, SharedIndexTable

PART_ENTRIES: Final = 512
"""Entries copied or emptied per step, within one page: 0.6 ms with first-touched pages, else 0.2 ms."""


FOURFOLD_SETS: Final = 2048
"""Up to this size (5 MB) an index grows fourfold, because each growth copies all entries; above it twofold, because a
grown index takes more memory per block."""


class IndexGrowth:
    """Growth in progress. `index` is the one for clients. Not thread-safe: called from the node's loop."""

    def __init__(self, old: SharedIndexTable, key_words: int = 0) -> None:
        """Create the larger index; for longer keys only it has the same size unless it is full. Raises TierFailed: no
        memory; the old index is unchanged."""
        self.old = old
        self.index = old
        is_larger = key_words <= old.key_words or old.is_full
        sets = old.sets * ((4 if old.sets <= FOURFOLD_SETS else 2) if is_larger else 1)
        self._new = SharedIndexTable(sets, key_words=max(key_words, old.key_words), number=old.number + 1, is_ordered=old.is_ordered)
        self._next = 0
        """First entry of the old index that is not copied, or not emptied."""

    @property
    def _is_copied(self) -> bool:
        return self.index is self._new

    @property
    def max_key_bytes(self) -> int:
        """Longest key of the larger index."""
        return self._new.max_key_bytes

    def add(self, block: Block, offset: int, checksum: int, slot: int) -> None:
        """See SharedIndexTable.add."""
        if len(block.key) > self.max_key_bytes:
            self.index.leave_out(block)
            return
        if not self._is_copied and len(block.key) <= self.old.max_key_bytes:
            _, left = self.old.put(block, offset, checksum, slot)
            if left is not None and not self._is_in_new(left):
                left.index_entry = NOT_INDEXED
        block.index_entry, left = self._new.put(block, offset, checksum, slot)
        if left is not None:
            left.index_entry = self.old.entry_of(left)

    def add_all(self, blocks: Sequence[Block], offsets: IntColumn, slots: IntColumn) -> list[int]:
        """See SharedIndexTable.add_all. A block that fits into one index only is added there."""
        is_in_old = not self._is_copied and len(blocks[0].key) <= self.old.max_key_bytes
        left: Collection[int] = set(self.old.add_all(blocks, offsets, slots)) if is_in_old else range(len(blocks))
        return [number for number in self._new.add_all(blocks, offsets, slots) if number in left]

    def remove(self, block: Block) -> None:
        """See SharedIndexTable.remove; removes the block from both."""
        entry = block.index_entry
        if self._is_in_new(block):
            self._new.clear(entry)
            entry = self.old.entry_of(block)
        if entry != NOT_INDEXED:
            self.old.clear(entry)
        block.index_entry = NOT_INDEXED

    def _is_in_new(self, block: Block) -> bool:
        return self._new.block_at(block.index_entry) is block

    def accessed(self, word: int) -> Block | None:
        """See SharedIndexTable.accessed; for clients of either."""
        return self.index.accessed(word) or self.old.accessed(word)

    def all_accessed(self, words: Sequence[int]) -> list[Block]:
        """See SharedIndexTable.all_accessed; for clients of either."""
        return [block for word in words if (block := self.accessed(word)) is not None]

    def step(self) -> bool:
        """Do the next step; return True if more are left."""
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
        self.old.mark_superseded()
        return True

    def _copy_part(self) -> None:
        begin, self._next = self._next, min(self._next + PART_ENTRIES, self.old.used)
        blocks, entries = self.old.part(begin, self._next)
        are_in_new = self._new.shows(blocks)
        if True in are_in_new:
            chosen = [i for i, is_in_new in enumerate(are_in_new) if not is_in_new]
            blocks, entries = [blocks[i] for i in chosen], entries[chosen]
        if blocks:
            self._new.add_rows(blocks, entries)  # entries that do not fit stay in the old index

    def _empty_part(self) -> None:
        begin, self._next = self._next, min(self._next + PART_ENTRIES, self.old.used)
        blocks = self.old.wipe(begin, self._next)
        for block, is_in_new in zip(blocks, self._new.shows(blocks), strict=True):
            if not is_in_new:
                block.index_entry = NOT_INDEXED
                self._new.pushed_out.append(block)

    @property
    def count(self) -> int:
        """Used entries of both."""
        return self.old.count + self._new.count

    @property
    def memory_bytes(self) -> int:
        """Memory of both."""
        return self.old.memory_bytes + self._new.memory_bytes

    def close(self) -> None:
        """Close both."""
        self.old.close()
        self._new.close()
