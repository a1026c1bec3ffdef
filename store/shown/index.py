"""One tenant's index in shared memory: the writer's side (protocol/shown_index.py says its form, and what readers rely on).

It owns the memory, and which entry shows which block; it neither keeps a block alive nor knows tiers. The node's loop is the only writer.
"""

import fcntl
import os
import struct
import threading
from collections.abc import Sequence
from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import Broken, TierFailed
from kvstore.protocol.shown_index import (
    AT_HEARTBEAT,
    AT_IS_OVER,
    AT_MAGIC,
    AT_SETS,
    AT_SLABS_GONE,
    BODY,
    CHECK,
    CHECKSUM,
    ENTRY_WORDS,
    GENERATION,
    KEY,
    KEY_BYTES_SHIFT,
    KEY_WORDS,
    MAGIC,
    MAX_KEY_BYTES,
    OFFSET,
    ORDERED,
    PLACE,
    SEQUENCE,
    SIZE,
    SLOT,
    TAGS,
    WAYS,
    Words,
    check_of,
    checks_of,
    entries_at,
    index_bytes,
    tag_of,
    tags_at,
    tags_of,
    words_of,
)
from kvstore.store.blocks.block import Block
from kvstore.store.blocks.columns import NOT_SHOWN
from kvstore.store.blocks.rows import keys_of, read, rows_of
from kvstore.transfer.memory.mapping import give_back_pages, map_slab

FIRST_SETS: Final = 256
"""4,096 entries, 557 kB."""
MAX_SETS: Final = 1 << 21
FULL_SHARE: Final = 0.4
"""An index that shows more than this share of its entries grows: fuller sets begin to push one another out."""
MAX_PUSHED_OUT: Final = 1000
NUMBER_SHIFT: Final = 24
"""Sequences begin here, times the number of the index: below lie eight million changes of one entry."""
PAGE_ENTRIES: Final = 4096
"""For so many memory is taken at a time to know which block an entry shows."""
Places = Sequence[int] | npt.NDArray[np.int64]
"""Of blocks, a column: the numbers of slabs, offsets in them, or indexes of slots."""
_BODY_WORDS: Final = struct.Struct(f"{ENTRY_WORDS - 1}Q")


class ShownIndex:
    """See the module. It never grows: store/shown/growth.py fills a larger one. Pages of it that show nothing take no memory."""

    def __init__(self, sets: int = FIRST_SETS, *, number: int = 0, is_ordered: bool = ORDERED) -> None:
        """`number` tells it from the tenant's other indexes, so that what was said of an entry of one is not taken for another's. Not
        `is_ordered`: entries get checks. Raises TierFailed: the system has no descriptor or memory left.
        """
        self.sets = sets
        self.entries = sets * WAYS
        self.number = number
        self.is_ordered = is_ordered
        self.size_bytes = index_bytes(sets)
        try:
            self.fd = os.memfd_create("kvstore-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as refusal:
            raise TierFailed(f"no shared memory for an index: {refusal}") from refusal
        try:
            os.fchmod(self.fd, 0o400)  # a reader of another user cannot open it again for writing
            os.ftruncate(self.fd, self.size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = map_slab(os.dup(self.fd), self.size_bytes, writable=True, populated=False).memory
        except (OSError, Broken) as refusal:
            os.close(self.fd)
            raise TierFailed(f"no shared memory of {self.size_bytes} bytes for an index: {refusal}") from refusal
        self._words = self._memory.cast("Q")
        self._shift = 64 - sets.bit_length() + 1
        self._tags = tags_at(sets) // 8
        self._entries = entries_at(sets) // 8
        words = np.frombuffer(self._memory, np.uint64)
        self._tag_rows: Words = words[self._tags : self._entries].reshape(sets, WAYS)
        self._rows: Words = words[self._entries :].reshape(-1, ENTRY_WORDS)
        self._shown: list[list[Block | None] | None] = [None] * (-(-self.entries // PAGE_ENTRIES))
        """By entry, in pages that are made when they are used: a list of all entries would stop the loop while it is made."""
        self._fence = threading.Lock()
        self._first_sequence = (number & 0xFF) << NUMBER_SHIFT
        self.count = 0
        self.pushed_out: list[Block] = []
        """Blocks that gave their entries to others, MAX_PUSHED_OUT at most: a larger index has one for them."""
        self._words[AT_SETS] = sets
        self._words[AT_MAGIC] = MAGIC

    @property
    def is_full(self) -> bool:
        """Whether a larger one is due."""
        return self.count > FULL_SHARE * self.entries and self.sets < MAX_SETS

    def export(self) -> int:
        """A new descriptor for reading, owned by the caller."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def show(self, block: Block, slab: int, offset: int, checksum: int, slot: int) -> None:
        """Readers find the block there from now on; one with a key that is too long they do not. It must not be shown yet."""
        if len(block.key) <= MAX_KEY_BYTES:
            block.shown, left = self.put(block, slab, offset, checksum, slot)
            if left is not None:
                left.shown = NOT_SHOWN

    def show_all(self, blocks: Sequence[Block], slabs: Places, offsets: Places, slots: Places) -> list[int]:
        """As `show`, of blocks whose keys are of one length and can be shown, and whose copies are what was put: the numbers of those whose
        sets are full, which are not shown."""
        key_bytes = len(blocks[0].key)
        columns, known = blocks[0].columns, rows_of(blocks)
        words = words_of(keys_of(blocks), key_bytes)
        tags = tags_of(words, key_bytes)
        places, fits = self._places(tags)
        rows = np.zeros((len(blocks), ENTRY_WORDS), np.uint64)
        rows[:, PLACE] = slabs
        rows[:, PLACE] |= np.uint64(key_bytes << KEY_BYTES_SHIFT)
        rows[:, OFFSET] = offsets
        rows[:, SIZE] = read(columns.sizes, known)
        rows[:, GENERATION] = read(columns.generations, known)
        rows[:, CHECKSUM] = read(columns.checksums, known)
        rows[:, SLOT] = slots
        rows[:, KEY : KEY + words.shape[1]] = words
        if not self.is_ordered:
            rows[:, CHECK] = checks_of(rows)
        is_whole = bool(fits.all())
        chosen, bodies = (places, rows[:, CHECK:]) if is_whole else (places[fits], rows[fits, CHECK:])
        sequences = self._rows[chosen, SEQUENCE]
        sequences[sequences == 0] = self._first_sequence
        sequences |= np.uint64(1)
        self._rows[chosen, SEQUENCE] = sequences
        self._rows[chosen, CHECK:] = bodies
        self._rows[chosen, SEQUENCE] = sequences + np.uint64(1)
        self._tag_rows.reshape(-1)[chosen] = tags if is_whole else tags[fits]
        self._note(blocks, chosen, fits)
        left: list[int] = np.flatnonzero(~fits).tolist()
        return left

    def _note(self, blocks: Sequence[Block], entries: npt.NDArray[np.int64], fits: npt.NDArray[np.bool_]) -> None:
        """Those of the blocks that fit have these entries now, and say so."""
        pages, page_of, place_in = self._shown, (entries // PAGE_ENTRIES).tolist(), (entries % PAGE_ENTRIES).tolist()
        for number in set(page_of):
            self._page(number * PAGE_ENTRIES)
        fitting = blocks if fits.all() else list(compress(blocks, fits.tolist()))
        if fitting:
            np.frombuffer(fitting[0].columns.shown, np.int32)[rows_of(fitting)] = entries
        for block, number, place in zip(fitting, page_of, place_in, strict=True):
            pages[number][place] = block
        self.count += len(entries)

    def hide(self, block: Block) -> None:
        """No reader who comes now finds the block, and one who is copying it will notice. It must be shown."""
        entry, block.shown = block.shown, NOT_SHOWN
        self.clear(entry)

    def hide_all(self, blocks: Sequence[Block]) -> None:
        """As `hide`, one after the other."""
        shown, rows = blocks[0].columns.shown, rows_of(blocks)
        entries = np.frombuffer(shown, np.int32)[rows].astype(np.int64)
        self._rows[entries, SEQUENCE] += np.uint64(1)
        self._tag_rows.reshape(-1)[entries] = 0
        pages = self._shown
        for number, place in zip((entries // PAGE_ENTRIES).tolist(), (entries % PAGE_ENTRIES).tolist(), strict=True):
            page = pages[number]
            assert page is not None, "it shows something"
            page[place] = None
        np.frombuffer(shown, np.int32)[rows] = NOT_SHOWN
        self.count -= len(blocks)

    def put(self, block: Block, slab: int, offset: int, checksum: int, slot: int) -> tuple[int, Block | None]:
        """As `show`, but for what the blocks say themselves: the block's entry, and the block that had to leave its own for it, which is
        found by asking the node, as ever."""
        key = block.key
        tag = tag_of(key)
        first = (tag >> self._shift) * WAYS
        tags = TAGS.unpack_from(self._memory, 8 * (self._tags + first))
        left = None
        if 0 in tags:
            entry = first + tags.index(0)
        else:
            entry = first + (tag >> 8 & WAYS - 1)
            left = self.block_at(entry)
            assert left is not None
            self.clear(entry)
            if len(self.pushed_out) < MAX_PUSHED_OUT:
                self.pushed_out.append(left)
        body = (slab | len(key) << KEY_BYTES_SHIFT, offset, block.size_bytes, block.generation, checksum, slot, key)
        check = 0 if self.is_ordered else check_of(_BODY_WORDS.unpack(BODY.pack(0, *body))[1:])
        words, at = self._words, self._entries + entry * ENTRY_WORDS
        sequence = words[at] or self._first_sequence
        words[at] = sequence | 1  # as it is since it was hidden, or for the first time
        BODY.pack_into(self._memory, 8 * at + 8, check, *body)
        words[at] = (sequence | 1) + 1
        words[self._tags + entry] = tag
        self._page(entry)[entry % PAGE_ENTRIES] = block
        self.count += 1
        return entry, left

    def clear(self, entry: int) -> None:
        """The entry shows its block no more."""
        self._words[self._entries + entry * ENTRY_WORDS] += 1
        self._words[self._tags + entry] = 0
        self._page(entry)[entry % PAGE_ENTRIES] = None
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
        tag = tag_of(block.key)
        first = (tag >> self._shift) * WAYS
        tags = TAGS.unpack_from(self._memory, 8 * (self._tags + first))
        if tag in tags:
            for entry in range(first, first + WAYS):
                if self.block_at(entry) is block:
                    return entry
        return NOT_SHOWN

    def _page(self, entry: int) -> "list[Block | None]":
        number = entry // PAGE_ENTRIES
        page = self._shown[number]
        if page is None:
            page = self._shown[number] = [None] * PAGE_ENTRIES
        return page

    def part(self, begin: int, end: int) -> "tuple[list[Block], Words, Words]":
        """What is shown between two entries of one page: the blocks, their entries and their tags."""
        tags = self._tag_rows.reshape(-1)[begin:end]
        which = np.flatnonzero(tags)
        return self._blocks(begin, end), self._rows[begin + which], tags[which]

    def _blocks(self, begin: int, end: int) -> "list[Block]":
        page = self._shown[begin // PAGE_ENTRIES]
        start = begin % PAGE_ENTRIES
        return [] if page is None else [block for block in page[start : start + end - begin] if block is not None]

    def add(self, blocks: "list[Block]", entries: Words, tags: Words) -> None:
        """Show blocks of another index, by its entries and tags; those whose sets are full stay where they are. Nobody may read this index
        yet."""
        places, fits = self._places(tags)
        entries[:, SEQUENCE] = self._first_sequence + 2
        self._rows[places[fits]] = entries[fits]
        self._tag_rows.reshape(-1)[places[fits]] = tags[fits]
        self._note(blocks, places[fits], fits)

    def _places(self, tags: Words) -> "tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]":
        """An entry of its own for each of these tags, and whether its set has room for it."""
        sets = (tags >> np.uint64(self._shift)).astype(np.int64)
        is_free = self._tag_rows[sets] == 0
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
        blocks = self._blocks(begin, end)
        if blocks:
            tags = self._tag_rows.reshape(-1)[begin:end]
            self._rows[begin + np.flatnonzero(tags), SEQUENCE] += np.uint64(1)
            tags[:] = 0
            start = begin % PAGE_ENTRIES
            self._page(begin)[start : start + end - begin] = [None] * (end - begin)
            self.count -= len(blocks)
            give_back_pages(self._memory[8 * (self._entries + begin * ENTRY_WORDS) : 8 * (self._entries + end * ENTRY_WORDS)])
        return blocks

    def accessed(self, word: int) -> Block | None:
        """The block that a reader means by a word of its ring: None if its entry shows another one by now, or it makes no sense."""
        entry = word & 0xFFFF_FFFF
        block = self.block_at(entry)
        if block is None or self._words[self._entries + entry * ENTRY_WORDS + SEQUENCE] & 0xFFFF_FFFF != word >> 32:
            return None
        return block

    def fence(self) -> None:
        """What was stored before is seen by everyone before anything is loaded after it: a lock is taken and given back."""
        with self._fence:
            pass

    def beat(self, now_ns: int) -> None:
        """The node lives."""
        self._words[AT_HEARTBEAT] = now_ns

    def tell_slabs_gone(self, count: int) -> None:
        """So many slabs have been given up since the node began: clients look whether they map one of them."""
        self._words[AT_SLABS_GONE] = count

    def tell_over(self) -> None:
        """Clients are to ask for another index. What this one shows stays true."""
        self._words[AT_IS_OVER] = 1

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

    def shown(self) -> "dict[int, Block]":
        """By entry, all that it shows, after having asserted that entries, tags and blocks agree. For tests."""
        tags, sequences = self._tag_rows.reshape(-1), self._rows[:, SEQUENCE]
        found = {entry: block for entry in range(self.entries) if (block := self.block_at(entry)) is not None}
        assert self.count == len(found)
        assert sorted(found) == np.flatnonzero(tags).tolist() == np.flatnonzero((sequences != 0) & (sequences & np.uint64(1) == 0)).tolist()
        for entry, block in found.items():
            assert self._rows[entry, KEY : KEY + KEY_WORDS].tobytes() == block.key.ljust(MAX_KEY_BYTES, b"\0")
            assert int(tags[entry]) == tag_of(block.key)
        rows = self._rows[list(found)]
        assert self.is_ordered or np.array_equal(rows[:, CHECK], checks_of(rows))
        return found

    def check_integrity(self) -> None:
        """Assert that it shows each block once, and the block says where. For tests."""
        assert all(block.shown == entry for entry, block in self.shown().items())
