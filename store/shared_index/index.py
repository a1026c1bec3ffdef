"""Shared-memory index of one tenant, writer's side (format and reader's guarantees: protocol/shared_index.py).

It owns the memory and the mapping from entries to blocks. It keeps no block alive and knows no tiers. The node's loop
is the only writer.
"""

import os
import struct
import threading
from array import array
from collections.abc import Sequence
from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.protocol.shared_index import (
    AT_HEARTBEAT,
    AT_INDEX_CLOSED,
    AT_KEY_WORDS,
    AT_MAGIC,
    AT_SETS,
    AT_SLABS_FREED,
    BODIES,
    CHECK,
    CHECKSUM,
    HEADER_BYTES,
    KEY,
    KEY_BYTES_SHIFT,
    KEY_WORDS,
    MAGIC,
    OFFSET,
    ORDERED,
    SEQUENCE,
    SIZE,
    SLOT,
    TAG_BYTES,
    TAGS,
    WAYS,
    Words,
    check_of,
    checks_of,
    entries_at,
    hash_of,
    hashes_of,
    index_bytes,
    numbers_at,
    tag_of,
    tags_at,
    tags_of,
    words_of,
)
from kvstore.store.block_table.block import NOT_INDEXED, Block
from kvstore.store.block_table.rows import keys_of, read, rows_of
from kvstore.store.shared_memory import make_shared_memory
from kvstore.transfer.memory.mapped_memory import free_pages

FIRST_SETS: Final = 128
"""4,096 entries, 299 kB with keys of 16 bytes."""
MAX_SETS: Final = 1 << 20
FULL_SHARE: Final = 0.5
"""Share of used entries at which an index grows. Fuller sets begin to replace entries."""
MAX_PUSHED_OUT: Final = 1000
NUMBER_SHIFT: Final = 24
"""Sequences start at the index's number shifted by this; below are eight million changes of one entry."""
PAGE_ENTRIES: Final = 4096
"""Entries per page of the entry-to-block mapping."""
Numbers = npt.NDArray[np.int64]
IntColumn = Sequence[int] | npt.NDArray[np.int64]
"""Column of integers, by block."""
_NO_TAG: Final = bytes(TAG_BYTES)
_ROUND_UP: Final = TAG_BYTES - 1


class SharedIndexTable:
    """Hash table in shared memory, read under per-entry sequence numbers (seqlock). It never grows: index_growth.py
    fills a larger one. Unused pages take no memory."""

    def __init__(self, sets: int = FIRST_SETS, *, key_words: int = KEY_WORDS[0], number: int = 0, is_ordered: bool = ORDERED) -> None:
        """Create the memory. `key_words`, one of KEY_WORDS, bounds the keys' length. `number` distinguishes the
        tenant's indexes, so that a reader's access to one is not applied to another. Without `is_ordered` entries have
        checks. Raises TierFailed: the system has no descriptor or memory left."""
        self.sets = sets
        self.entries = sets * WAYS
        self.key_words = key_words
        self.max_key_bytes = 8 * key_words
        self.number = number
        self.is_ordered = is_ordered
        self.size_bytes = index_bytes(sets, key_words)
        self.fd, self._memory = make_shared_memory("index", self.size_bytes, mode=0o400)
        self._words = self._memory.cast("Q")
        self._shift = 64 - sets.bit_length() + 1
        self._entry_words = KEY + key_words
        self._entries = entries_at(sets) // 8
        tags, numbers = self._memory[tags_at(sets) : numbers_at(sets)], self._memory[numbers_at(sets) : entries_at(sets)]
        self._tags, self._numbers = tags.cast("I"), numbers.cast("I")
        self._tag_column, self._number_column = np.frombuffer(tags, np.uint32), np.frombuffer(numbers, np.uint32)
        self._rows: Words = np.frombuffer(self._memory, np.uint64)[self._entries :].reshape(-1, self._entry_words)
        self._positions = np.empty(self.entries, np.uint32)
        """By entry: position of its tag and number. Memory is used for used entries only."""
        self._blocks: list[list[Block | None] | None] = [None] * (-(-self.entries // PAGE_ENTRIES))
        """By entry: its block, in pages made on demand. One list for all entries would stop the loop while it is made."""
        self.used = 0
        """Entries from here on are new."""
        self._free = array("I")
        """Unused entries before `used`."""
        self._fence = threading.Lock()
        self._first_sequence = (number & 0xFF) << NUMBER_SHIFT
        self.count = 0
        self.pushed_out: list[Block] = []
        """Blocks whose entries were replaced or whose keys are too long, at most MAX_PUSHED_OUT, for a larger index."""
        self._words[AT_SETS], self._words[AT_KEY_WORDS] = sets, key_words
        self._words[AT_MAGIC] = MAGIC

    @property
    def is_full(self) -> bool:
        """True if a larger index is due."""
        return self.count > FULL_SHARE * self.entries and self.sets < MAX_SETS

    def export(self) -> int:
        """Return a new read-only descriptor, owned by the caller."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def add(self, block: Block, offset: int, checksum: int, slot: int) -> None:
        """Add a block that is not indexed. A key that is too long is left out."""
        if len(block.key) <= self.max_key_bytes:
            block.index_entry, left = self.put(block, offset, checksum, slot)
            if left is not None:
                left.index_entry = NOT_INDEXED

    def add_all(self, blocks: Sequence[Block], offsets: IntColumn, slots: IntColumn) -> list[int]:
        """Add blocks with exact copies and keys of one permitted length. Return the numbers of those whose sets are
        full."""
        key_bytes = len(blocks[0].key)
        columns, known = blocks[0].columns, rows_of(blocks)
        words = words_of(keys_of(blocks), key_bytes)
        hashes = hashes_of(words, key_bytes)
        positions, fits = self._free_positions(hashes)
        rows = np.zeros((len(blocks), self._entry_words), np.uint64)
        rows[:, SLOT] = slots
        rows[:, OFFSET] = offsets
        rows[:, SIZE] = read(columns.sizes, known)
        rows[:, SIZE] |= np.uint64(key_bytes << KEY_BYTES_SHIFT)
        rows[:, CHECKSUM] = read(columns.checksums, known)
        rows[:, KEY : KEY + words.shape[1]] = words
        if not self.is_ordered:
            rows[:, CHECK] = checks_of(rows)
        if fits.all():
            self._store(blocks, rows, hashes, positions)
            return []
        self._store(list(compress(blocks, fits.tolist())), rows[fits], hashes[fits], positions[fits])
        left: list[int] = np.flatnonzero(~fits).tolist()
        return left

    def _store(self, blocks: Sequence[Block], rows: Words, hashes: Words, positions: Numbers) -> None:
        """Write the blocks' entries at free positions."""
        if not blocks:
            return
        entries = self._take(len(blocks))
        sequences = self._rows[entries, SEQUENCE]
        sequences[sequences == 0] = self._first_sequence
        sequences |= np.uint64(1)
        self._rows[entries, SEQUENCE] = sequences
        self._rows[entries, CHECK:] = rows[:, CHECK:]
        self._rows[entries, SEQUENCE] = sequences + np.uint64(1)
        self._number_column[positions] = entries
        self._tag_column[positions] = tags_of(hashes)
        self._positions[entries] = positions
        np.frombuffer(blocks[0].columns.index_entries, np.int32)[rows_of(blocks)] = entries
        pages, page_of, place_in = self._blocks, (entries // PAGE_ENTRIES).tolist(), (entries % PAGE_ENTRIES).tolist()
        for number in set(page_of):
            self._page(number * PAGE_ENTRIES)
        for block, number, position in zip(blocks, page_of, place_in, strict=True):
            pages[number][position] = block
        self.count += len(blocks)

    def _take(self, count: int) -> Numbers:
        """Return `count` unused entries."""
        again = min(count, len(self._free))
        entries = np.empty(count, np.int64)
        if again:
            entries[:again] = np.array(self._free[-again:], np.int64)[::-1]
            del self._free[-again:]
        entries[again:] = np.arange(self.used, self.used + count - again)
        self.used += count - again
        return entries

    def remove(self, block: Block) -> None:
        """Remove an indexed block. New readers do not find it; a copy in progress fails its validation."""
        entry, block.index_entry = block.index_entry, NOT_INDEXED
        self.clear(entry)

    def remove_all(self, blocks: Sequence[Block]) -> None:
        """Remove indexed blocks."""
        shown, rows = blocks[0].columns.index_entries, rows_of(blocks)
        entries = np.frombuffer(shown, np.int32)[rows].astype(np.int64)
        self._rows[entries, SEQUENCE] += np.uint64(1)
        self._tag_column[self._positions[entries]] = 0
        pages = self._blocks
        for number, position in zip((entries // PAGE_ENTRIES).tolist(), (entries % PAGE_ENTRIES).tolist(), strict=True):
            page = pages[number]
            assert page is not None, "it shows something"
            page[position] = None
        np.frombuffer(shown, np.int32)[rows] = NOT_INDEXED
        self._free.frombytes(entries.astype(np.uint32).tobytes())
        self.count -= len(blocks)

    def put(self, block: Block, offset: int, checksum: int, slot: int) -> tuple[int, Block | None]:
        """As `add`, without changing the blocks. Return the entry, and the block whose entry was replaced; readers get
        that one from the node."""
        key = block.key
        hashed = hash_of(key)
        first = (hashed >> self._shift) * WAYS
        left = None
        found = TAGS.unpack_from(self._memory, HEADER_BYTES + TAG_BYTES * first)[0].find(_NO_TAG)
        if found >= 0:
            position = first + (found + _ROUND_UP) // TAG_BYTES  # no tag begins with a zero byte: the last of the four is a free position
        else:
            position = first + (hashed >> 32 & WAYS - 1)
            left = self.block_at(self._numbers[position])
            assert left is not None
            self.clear(self._numbers[position])
            self.leave_out(left)
        if self._free:
            entry = self._free.pop()
        else:
            entry, self.used = self.used, self.used + 1
        body = (slot, offset, block.size_bytes | len(key) << KEY_BYTES_SHIFT, checksum, key)
        check = 0 if self.is_ordered else self._check_of(body)
        words, at = self._words, self._entries + entry * self._entry_words
        sequence = words[at] or self._first_sequence
        words[at] = sequence | 1  # odd: being written
        BODIES[self.key_words].pack_into(self._memory, 8 * at + 8, check, *body)
        words[at] = (sequence | 1) + 1
        self._numbers[position] = entry
        self._tags[position] = tag_of(hashed)
        self._positions[entry] = position
        self._page(entry)[entry % PAGE_ENTRIES] = block
        self.count += 1
        return entry, left

    def leave_out(self, block: Block) -> None:
        """Remember a block for a larger index, up to MAX_PUSHED_OUT."""
        if len(self.pushed_out) < MAX_PUSHED_OUT:
            self.pushed_out.append(block)

    def _check_of(self, body: tuple[int, int, int, int, bytes]) -> int:
        _, *words = struct.unpack(f"{self._entry_words - 1}Q", BODIES[self.key_words].pack(0, *body))
        return check_of(words)

    def clear(self, entry: int) -> None:
        """Clear the entry."""
        self._words[self._entries + entry * self._entry_words] += 1
        self._tags[int(self._positions[entry])] = 0
        self._page(entry)[entry % PAGE_ENTRIES] = None
        self._free.append(entry)
        self.count -= 1

    def block_at(self, entry: int) -> Block | None:
        """Return the entry's block; None also for an invalid entry."""
        page = self._blocks[entry // PAGE_ENTRIES] if 0 <= entry < self.entries else None
        return None if page is None else page[entry % PAGE_ENTRIES]

    def shows(self, blocks: Sequence[Block]) -> list[bool]:
        """Return for each block whether its `index_entry` in this index is its own."""
        pages, entries = self._blocks, self.entries
        found = []
        for block in blocks:
            entry = block.index_entry
            page = pages[entry // PAGE_ENTRIES] if 0 <= entry < entries else None
            found.append(page is not None and page[entry % PAGE_ENTRIES] is block)
        return found

    def entry_of(self, block: Block) -> int:
        """Return the block's entry, or NOT_SHOWN."""
        hashed = hash_of(block.key)
        first = (hashed >> self._shift) * WAYS
        ways = np.flatnonzero(self._tag_column[first : first + WAYS] == tag_of(hashed))
        entries: list[int] = self._number_column[first + ways].tolist()
        return next((entry for entry in entries if self.block_at(entry) is block), NOT_INDEXED)

    def _page(self, entry: int) -> "list[Block | None]":
        number = entry // PAGE_ENTRIES
        page = self._blocks[number]
        if page is None:
            page = self._blocks[number] = [None] * PAGE_ENTRIES
        return page

    def part(self, begin: int, end: int) -> "tuple[list[Block], Words]":
        """Return blocks and raw entries between two entries of one page."""
        blocks, entries = self._between(begin, end)
        return blocks, self._rows[entries]

    def _between(self, begin: int, end: int) -> "tuple[list[Block], Numbers]":
        """Return the blocks between two entries of one page, and their entries."""
        page, start = self._blocks[begin // PAGE_ENTRIES], begin % PAGE_ENTRIES
        part = page[start : start + end - begin] if page is not None else ()
        entries = [entry for entry, block in enumerate(part, begin) if block is not None]
        return [block for block in part if block is not None], np.array(entries, np.int64)

    def add_rows(self, blocks: "list[Block]", rows: Words) -> None:
        """Copy blocks with their raw entries from another index. Those whose sets are full are skipped. No reader may
        use this index yet."""
        wide = np.zeros((len(rows), self._entry_words), np.uint64)
        wide[:, : rows.shape[1]] = rows
        if not self.is_ordered:
            wide[:, CHECK] = checks_of(wide)
        hashes = hashes_of(rows[:, KEY:], rows[:, SIZE] >> np.uint64(KEY_BYTES_SHIFT))
        positions, fits = self._free_positions(hashes)
        if fits.all():
            self._store(blocks, wide, hashes, positions)
        else:
            self._store(list(compress(blocks, fits.tolist())), wide[fits], hashes[fits], positions[fits])

    def _free_positions(self, hashes: Words) -> "tuple[Numbers, npt.NDArray[np.bool_]]":
        """Return a distinct position for each hash, and whether its set had a free one."""
        sets = (hashes >> np.uint64(self._shift)).astype(np.int64)
        is_free = self._tag_column.reshape(-1, WAYS)[sets] == 0
        ways = is_free.argmax(axis=1)
        fits = is_free[np.arange(len(sets)), ways]
        # numpy sorts 16 bits by their digits, which takes a sixth of the time.
        order = np.argsort(sets.astype(np.uint16) if self.sets <= 1 << 16 else sets, kind="stable")
        begins = np.flatnonzero(np.diff(sets[order], prepend=-1))
        ranks = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
        after = np.flatnonzero(ranks)  # usually few: not the first in their set
        ranks, after = ranks[after], order[after]
        free = is_free[after].cumsum(axis=1, dtype=np.int8)
        ways[after] = (free > ranks[:, None]).argmax(axis=1)
        fits[after] = ranks < free[:, -1]
        return sets * WAYS + ways, fits

    def wipe(self, begin: int, end: int) -> "list[Block]":
        """Clear entries of one page for good and return their blocks. Their memory is returned to the system; freeing a
        large index at once would stop the loop."""
        blocks, entries = self._between(begin, end)
        if blocks:
            self._rows[entries, SEQUENCE] += np.uint64(1)
            self._tag_column[self._positions[entries]] = 0
            start = begin % PAGE_ENTRIES
            self._page(begin)[start : start + end - begin] = [None] * (end - begin)
            self.count -= len(blocks)
            first, words = self._entries, self._entry_words
            free_pages(self._memory[8 * (first + begin * words) : 8 * (first + end * words)])
        return blocks

    def accessed(self, word: int) -> Block | None:
        """Return the block of a reader's access word; None if the entry has changed or is invalid."""
        entry = word & 0xFFFF_FFFF
        block = self.block_at(entry)
        if block is None or self._words[self._entries + entry * self._entry_words + SEQUENCE] & 0xFFFF_FFFF != word >> 32:
            return None
        return block

    def all_accessed(self, words: Sequence[int]) -> list[Block]:
        """Return the blocks of valid access words, in order."""
        given = np.array(words, np.uint64)
        entries = (given & np.uint64(0xFFFF_FFFF)).astype(np.int64)
        if (entries >= self.entries).any():
            is_entry = entries < self.entries
            given, entries = given[is_entry], entries[is_entry]
        is_same = self._rows[entries, SEQUENCE] & np.uint64(0xFFFF_FFFF) == given >> np.uint64(32)
        found = map(self.block_at, (entries if is_same.all() else entries[is_same]).tolist())
        return [block for block in found if block is not None]

    def fence(self) -> None:
        """Full memory barrier, by taking and releasing a lock."""
        with self._fence:
            pass

    def set_heartbeat(self, now_ns: int) -> None:
        """Write the heartbeat."""
        self._words[AT_HEARTBEAT] = now_ns

    def set_freed_slabs(self, count: int) -> None:
        """Write the number of slabs freed since the node started. Clients check their mappings when it changes."""
        self._words[AT_SLABS_FREED] = count

    def mark_superseded(self) -> None:
        """Ask clients to request another index. This one's entries stay valid."""
        self._words[AT_INDEX_CLOSED] = 1

    @property
    def memory_bytes(self) -> int:
        """Memory that it uses."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """Clear all entries and mark it superseded. The memory goes with the last mapping. A second close is a no-op."""
        if self.fd < 0:
            return
        self.mark_superseded()
        for number, page in enumerate(self._blocks):
            if page is not None and self.count:
                self.wipe(number * PAGE_ENTRIES, min((number + 1) * PAGE_ENTRIES, self.entries))
        os.close(self.fd)
        self.fd = -1
