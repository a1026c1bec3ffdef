"""One tenant's index in shared memory: the writer's side (protocol/shared_index.py says its form, and what readers rely on).

It owns the memory, and which entry shows which block; it neither keeps a block alive nor knows tiers. The node's loop is the only writer.
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
from kvstore.store.block_table.block import NOT_SHOWN, Block
from kvstore.store.block_table.rows import keys_of, read, rows_of
from kvstore.store.shared_memory import make_shared_memory
from kvstore.transfer.memory.mapping import give_back_pages

FIRST_SETS: Final = 128
"""4,096 entries, 299 kB where keys have 16 bytes."""
MAX_SETS: Final = 1 << 20
FULL_SHARE: Final = 0.5
"""An index that shows more than this share of its entries grows: fuller sets begin to push one another out."""
MAX_PUSHED_OUT: Final = 1000
NUMBER_SHIFT: Final = 24
"""Sequences begin here, times the number of the index: below lie eight million changes of one entry."""
PAGE_ENTRIES: Final = 4096
"""For so many memory is taken at a time to know which block an entry shows."""
Numbers = npt.NDArray[np.int64]
Places = Sequence[int] | npt.NDArray[np.int64]
"""Of blocks, a column: offsets in slabs, or indexes of slots."""
_NO_TAG: Final = bytes(TAG_BYTES)
_ROUND_UP: Final = TAG_BYTES - 1


class SharedIndexTable:
    """See the module. It never grows: store/shared_index/index_growth.py fills a larger one. Pages of it that show nothing take no
    memory."""

    def __init__(self, sets: int = FIRST_SETS, *, key_words: int = KEY_WORDS[0], number: int = 0, is_ordered: bool = ORDERED) -> None:
        """Keys have at most `key_words` words, one of KEY_WORDS. `number` tells the index from the tenant's other ones, so that what was
        said of an entry of one is not taken for another's. Not `is_ordered`: entries get checks. Raises TierFailed: the system has no
        descriptor or memory left.
        """
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
        self._places = np.empty(self.entries, np.uint32)
        """By entry, where its tag and its number are; memory is taken for those that were used."""
        self._shown: list[list[Block | None] | None] = [None] * (-(-self.entries // PAGE_ENTRIES))
        """By entry, in pages that are made when they are used: a list of all entries would stop the loop while it is made."""
        self.used = 0
        """Entries from here on have shown nothing yet."""
        self._free = array("I")
        """Those before it that show nothing."""
        self._fence = threading.Lock()
        self._first_sequence = (number & 0xFF) << NUMBER_SHIFT
        self.count = 0
        self.pushed_out: list[Block] = []
        """Blocks that gave their entries to others, or whose keys are too long, MAX_PUSHED_OUT at most: a larger index has one for them."""
        self._words[AT_SETS], self._words[AT_KEY_WORDS] = sets, key_words
        self._words[AT_MAGIC] = MAGIC

    @property
    def is_full(self) -> bool:
        """Whether a larger one is due."""
        return self.count > FULL_SHARE * self.entries and self.sets < MAX_SETS

    def export(self) -> int:
        """A new descriptor for reading, owned by the caller."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def show(self, block: Block, offset: int, checksum: int, slot: int) -> None:
        """Readers find the block there from now on; one with a key that is too long they do not. It must not be shown yet."""
        if len(block.key) <= self.max_key_bytes:
            block.shown, left = self.put(block, offset, checksum, slot)
            if left is not None:
                left.shown = NOT_SHOWN

    def show_all(self, blocks: Sequence[Block], offsets: Places, slots: Places) -> list[int]:
        """As `show`, of blocks whose keys are of one length and can be shown, and whose copies are what was put: the numbers of those whose
        sets are full, which are not shown."""
        key_bytes = len(blocks[0].key)
        columns, known = blocks[0].columns, rows_of(blocks)
        words = words_of(keys_of(blocks), key_bytes)
        hashes = hashes_of(words, key_bytes)
        places, fits = self._free_places(hashes)
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
            self._store(blocks, rows, hashes, places)
            return []
        self._store(list(compress(blocks, fits.tolist())), rows[fits], hashes[fits], places[fits])
        left: list[int] = np.flatnonzero(~fits).tolist()
        return left

    def _store(self, blocks: Sequence[Block], rows: Words, hashes: Words, places: Numbers) -> None:
        """Show the blocks by these rows, at free places: each gets an entry, and says so."""
        if not blocks:
            return
        entries = self._take(len(blocks))
        sequences = self._rows[entries, SEQUENCE]
        sequences[sequences == 0] = self._first_sequence
        sequences |= np.uint64(1)
        self._rows[entries, SEQUENCE] = sequences
        self._rows[entries, CHECK:] = rows[:, CHECK:]
        self._rows[entries, SEQUENCE] = sequences + np.uint64(1)
        self._number_column[places] = entries
        self._tag_column[places] = tags_of(hashes)
        self._places[entries] = places
        np.frombuffer(blocks[0].columns.shown, np.int32)[rows_of(blocks)] = entries
        pages, page_of, place_in = self._shown, (entries // PAGE_ENTRIES).tolist(), (entries % PAGE_ENTRIES).tolist()
        for number in set(page_of):
            self._page(number * PAGE_ENTRIES)
        for block, number, place in zip(blocks, page_of, place_in, strict=True):
            pages[number][place] = block
        self.count += len(blocks)

    def _take(self, count: int) -> Numbers:
        """So many entries that show nothing: as many as there are free places."""
        again = min(count, len(self._free))
        entries = np.empty(count, np.int64)
        if again:
            entries[:again] = np.array(self._free[-again:], np.int64)[::-1]
            del self._free[-again:]
        entries[again:] = np.arange(self.used, self.used + count - again)
        self.used += count - again
        return entries

    def hide(self, block: Block) -> None:
        """No reader who comes now finds the block, and one who is copying it will notice. It must be shown."""
        entry, block.shown = block.shown, NOT_SHOWN
        self.clear(entry)

    def hide_all(self, blocks: Sequence[Block]) -> None:
        """As `hide`, one after the other."""
        shown, rows = blocks[0].columns.shown, rows_of(blocks)
        entries = np.frombuffer(shown, np.int32)[rows].astype(np.int64)
        self._rows[entries, SEQUENCE] += np.uint64(1)
        self._tag_column[self._places[entries]] = 0
        pages = self._shown
        for number, place in zip((entries // PAGE_ENTRIES).tolist(), (entries % PAGE_ENTRIES).tolist(), strict=True):
            page = pages[number]
            assert page is not None, "it shows something"
            page[place] = None
        np.frombuffer(shown, np.int32)[rows] = NOT_SHOWN
        self._free.frombytes(entries.astype(np.uint32).tobytes())
        self.count -= len(blocks)

    def put(self, block: Block, offset: int, checksum: int, slot: int) -> tuple[int, Block | None]:
        """As `show`, but for what the blocks say themselves: the block's entry, and the block that had to leave its own for it, which is
        found by asking the node, as ever."""
        key = block.key
        hashed = hash_of(key)
        first = (hashed >> self._shift) * WAYS
        left = None
        found = TAGS.unpack_from(self._memory, HEADER_BYTES + TAG_BYTES * first)[0].find(_NO_TAG)
        if found >= 0:
            place = first + (found + _ROUND_UP) // TAG_BYTES  # no tag begins with a zero: the last of these four is a free place's
        else:
            place = first + (hashed >> 32 & WAYS - 1)
            left = self.block_at(self._numbers[place])
            assert left is not None
            self.clear(self._numbers[place])
            self.leave_out(left)
        if self._free:
            entry = self._free.pop()
        else:
            entry, self.used = self.used, self.used + 1
        body = (slot, offset, block.size_bytes | len(key) << KEY_BYTES_SHIFT, checksum, key)
        check = 0 if self.is_ordered else self._check_of(body)
        words, at = self._words, self._entries + entry * self._entry_words
        sequence = words[at] or self._first_sequence
        words[at] = sequence | 1  # as it is since it was hidden, or for the first time
        BODIES[self.key_words].pack_into(self._memory, 8 * at + 8, check, *body)
        words[at] = (sequence | 1) + 1
        self._numbers[place] = entry
        self._tags[place] = tag_of(hashed)
        self._places[entry] = place
        self._page(entry)[entry % PAGE_ENTRIES] = block
        self.count += 1
        return entry, left

    def leave_out(self, block: Block) -> None:
        """The block is for a larger index to show, as far as these are remembered."""
        if len(self.pushed_out) < MAX_PUSHED_OUT:
            self.pushed_out.append(block)

    def _check_of(self, body: tuple[int, int, int, int, bytes]) -> int:
        _, *words = struct.unpack(f"{self._entry_words - 1}Q", BODIES[self.key_words].pack(0, *body))
        return check_of(words)

    def clear(self, entry: int) -> None:
        """The entry shows its block no more."""
        self._words[self._entries + entry * self._entry_words] += 1
        self._tags[int(self._places[entry])] = 0
        self._page(entry)[entry % PAGE_ENTRIES] = None
        self._free.append(entry)
        self.count -= 1

    def block_at(self, entry: int) -> Block | None:
        """The block that the entry shows; None also where there is no such entry."""
        page = self._shown[entry // PAGE_ENTRIES] if 0 <= entry < self.entries else None
        return None if page is None else page[entry % PAGE_ENTRIES]

    def shows(self, blocks: Sequence[Block]) -> list[bool]:
        """Of each block, whether it is shown here, where it says."""
        pages, entries = self._shown, self.entries
        found = []
        for block in blocks:
            entry = block.shown
            page = pages[entry // PAGE_ENTRIES] if 0 <= entry < entries else None
            found.append(page is not None and page[entry % PAGE_ENTRIES] is block)
        return found

    def entry_of(self, block: Block) -> int:
        """The entry that shows the block; NOT_SHOWN if none does."""
        hashed = hash_of(block.key)
        first = (hashed >> self._shift) * WAYS
        ways = np.flatnonzero(self._tag_column[first : first + WAYS] == tag_of(hashed))
        entries: list[int] = self._number_column[first + ways].tolist()
        return next((entry for entry in entries if self.block_at(entry) is block), NOT_SHOWN)

    def _page(self, entry: int) -> "list[Block | None]":
        number = entry // PAGE_ENTRIES
        page = self._shown[number]
        if page is None:
            page = self._shown[number] = [None] * PAGE_ENTRIES
        return page

    def part(self, begin: int, end: int) -> "tuple[list[Block], Words]":
        """What is shown between two entries of one page: the blocks and their entries."""
        blocks, entries = self._between(begin, end)
        return blocks, self._rows[entries]

    def _between(self, begin: int, end: int) -> "tuple[list[Block], Numbers]":
        """The blocks that are shown between two entries of one page, and their entries."""
        page, start = self._shown[begin // PAGE_ENTRIES], begin % PAGE_ENTRIES
        part = page[start : start + end - begin] if page is not None else ()
        entries = [entry for entry, block in enumerate(part, begin) if block is not None]
        return [block for block in part if block is not None], np.array(entries, np.int64)

    def add(self, blocks: "list[Block]", rows: Words) -> None:
        """Show blocks of another index, by its entries, whose keys are no longer than this one's may be; those whose sets are full stay
        where they are. Nobody may read this index yet."""
        wide = np.zeros((len(rows), self._entry_words), np.uint64)
        wide[:, : rows.shape[1]] = rows
        if not self.is_ordered:
            wide[:, CHECK] = checks_of(wide)
        hashes = hashes_of(rows[:, KEY:], rows[:, SIZE] >> np.uint64(KEY_BYTES_SHIFT))
        places, fits = self._free_places(hashes)
        if fits.all():
            self._store(blocks, wide, hashes, places)
        else:
            self._store(list(compress(blocks, fits.tolist())), wide[fits], hashes[fits], places[fits])

    def _free_places(self, hashes: Words) -> "tuple[Numbers, npt.NDArray[np.bool_]]":
        """A place of its own for each of these keys, and whether its set has room for it."""
        sets = (hashes >> np.uint64(self._shift)).astype(np.int64)
        is_free = self._tag_column.reshape(-1, WAYS)[sets] == 0
        ways = is_free.argmax(axis=1)
        fits = is_free[np.arange(len(sets)), ways]
        # numpy sorts 16 bits by their digits, which takes a sixth of the time.
        order = np.argsort(sets.astype(np.uint16) if self.sets <= 1 << 16 else sets, kind="stable")
        begins = np.flatnonzero(np.diff(sets[order], prepend=-1))
        ranks = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
        after = np.flatnonzero(ranks)  # as a rule few: of those in one set but the first
        ranks, after = ranks[after], order[after]
        free = is_free[after].cumsum(axis=1, dtype=np.int8)
        ways[after] = (free > ranks[:, None]).argmax(axis=1)
        fits[after] = ranks < free[:, -1]
        return sets * WAYS + ways, fits

    def wipe(self, begin: int, end: int) -> "list[Block]":
        """Show nothing between two entries of one page any more, as by `clear`, and never again: the blocks that were shown there. Their
        memory is given back: to free all of a large index at once stops the loop, too."""
        blocks, entries = self._between(begin, end)
        if blocks:
            self._rows[entries, SEQUENCE] += np.uint64(1)
            self._tag_column[self._places[entries]] = 0
            start = begin % PAGE_ENTRIES
            self._page(begin)[start : start + end - begin] = [None] * (end - begin)
            self.count -= len(blocks)
            first, words = self._entries, self._entry_words
            give_back_pages(self._memory[8 * (first + begin * words) : 8 * (first + end * words)])
        return blocks

    def accessed(self, word: int) -> Block | None:
        """The block that a reader means by a word of its ring: None if its entry shows another one by now, or it makes no sense."""
        entry = word & 0xFFFF_FFFF
        block = self.block_at(entry)
        if block is None or self._words[self._entries + entry * self._entry_words + SEQUENCE] & 0xFFFF_FFFF != word >> 32:
            return None
        return block

    def all_accessed(self, words: Sequence[int]) -> list[Block]:
        """As `accessed`, of many words: the blocks that they mean still, in order."""
        given = np.array(words, np.uint64)
        entries = (given & np.uint64(0xFFFF_FFFF)).astype(np.int64)
        if (entries >= self.entries).any():
            is_entry = entries < self.entries
            given, entries = given[is_entry], entries[is_entry]
        is_same = self._rows[entries, SEQUENCE] & np.uint64(0xFFFF_FFFF) == given >> np.uint64(32)
        found = map(self.block_at, (entries if is_same.all() else entries[is_same]).tolist())
        return [block for block in found if block is not None]

    def fence(self) -> None:
        """What was stored before is seen by everyone before anything is loaded after it: a lock is taken and given back."""
        with self._fence:
            pass

    def beat(self, now_ns: int) -> None:
        """The node lives."""
        self._words[AT_HEARTBEAT] = now_ns

    def tell_slabs_gone(self, count: int) -> None:
        """So many slabs have been given up since the node began: clients look whether they map one of them."""
        self._words[AT_SLABS_FREED] = count

    def tell_over(self) -> None:
        """Clients are to ask for another index. What this one shows stays true."""
        self._words[AT_INDEX_CLOSED] = 1

    @property
    def memory_bytes(self) -> int:
        """What it takes of the host's memory."""
        return os.fstat(self.fd).st_blocks * 512

    def close(self) -> None:
        """It shows nothing any more, and says so; its memory goes with the last mapping. A second close is a no-op."""
        if self.fd < 0:
            return
        self.tell_over()
        for number, page in enumerate(self._shown):
            if page is not None and self.count:
                self.wipe(number * PAGE_ENTRIES, min((number + 1) * PAGE_ENTRIES, self.entries))
        os.close(self.fd)
        self.fd = -1
