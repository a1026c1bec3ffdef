"""One tenant's index in shared memory: the writer's side (protocol/shown_index.py says its form, and what readers rely on).

It owns the memory, and which entry shows which block; it neither keeps a block alive nor knows tiers. The node's loop is the only writer.
"""

import fcntl
import os
import threading
from typing import Final

import numpy as np

from kvstore.protocol.errors import Broken, TierFailed
from kvstore.protocol.shown_index import (
    AT_HEARTBEAT,
    AT_IS_OVER,
    AT_MAGIC,
    AT_SETS,
    AT_SLABS_GONE,
    BODY,
    CHECK,
    ENTRY_WORDS,
    KEY,
    KEY_BYTES_SHIFT,
    KEY_WORDS,
    MAGIC,
    MAX_KEY_BYTES,
    ORDERED,
    SEQUENCE,
    TAGS,
    WAYS,
    Words,
    check_of,
    checks_of,
    entries_at,
    index_bytes,
    key_words,
    tag_of,
    tags_at,
)
from kvstore.store.blocks.block import NOT_SHOWN, Block
from kvstore.transfer.memory.mapping import map_slab

FIRST_SETS: Final = 256
"""4,096 entries, 557 kB."""
MAX_SETS: Final = 1 << 21
FULL_SHARE: Final = 0.4
"""An index that shows more than this share of its entries grows: fuller sets begin to push one another out."""
MAX_PUSHED_OUT: Final = 1000
NUMBER_SHIFT: Final = 24
"""Sequences begin here, times the number of the index: below lie eight million changes of one entry."""


class ShownIndex:
    """See the module. `grown` makes the one that takes its place."""

    def __init__(self, sets: int = FIRST_SETS, *, number: int = 0, is_ordered: bool = ORDERED) -> None:
        """`number` tells it from the tenant's other indexes, so that what was said of an entry of one is not taken for another's. Not
        `is_ordered`: entries get checks. Raises TierFailed: the system has no descriptor or memory left.
        """
        self.sets = sets
        self._number = number
        self._is_ordered = is_ordered
        self.size_bytes = index_bytes(sets)
        try:
            self.fd = os.memfd_create("kvstore-index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as refusal:
            raise TierFailed(f"no shared memory for an index: {refusal}") from refusal
        try:
            os.fchmod(self.fd, 0o400)  # a reader of another user cannot open it again for writing
            os.ftruncate(self.fd, self.size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._memory = map_slab(os.dup(self.fd), self.size_bytes, writable=True).memory
        except (OSError, Broken) as refusal:
            os.close(self.fd)
            raise TierFailed(f"no shared memory of {self.size_bytes} bytes for an index: {refusal}") from refusal
        self._words = self._memory.cast("Q")
        self._shift = 64 - sets.bit_length() + 1
        self._tags = tags_at(sets) // 8
        self._entries = entries_at(sets) // 8
        self._shown: list[Block | None] = [None] * (sets * WAYS)
        self._fence = threading.Lock()
        self.count = 0
        self.pushed_out: list[Block] = []
        """Blocks that gave their entries to others, MAX_PUSHED_OUT at most: a larger index has one for them."""
        np.frombuffer(self._memory, np.uint64)[self._entries + SEQUENCE :: ENTRY_WORDS] = self._first_sequence | 1
        self._words[AT_SETS] = sets
        self._words[AT_MAGIC] = MAGIC

    @property
    def _first_sequence(self) -> int:
        return (self._number & 0xFF) << NUMBER_SHIFT

    @property
    def is_full(self) -> bool:
        """Whether `grown` is due."""
        return self.count > FULL_SHARE * len(self._shown) and self.sets < MAX_SETS

    def export(self) -> int:
        """A new descriptor for reading, owned by the caller."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def show(self, block: Block, slab: int, offset: int, checksum: int, slot: int) -> None:
        """Readers find the block there from now on; one with a key that is too long they do not. It must not be shown yet."""
        key = block.key
        if len(key) > MAX_KEY_BYTES:
            return
        words = key_words(key)
        tag = tag_of(words, len(key))
        first = (tag >> self._shift) * WAYS
        tags = TAGS.unpack_from(self._memory, 8 * (self._tags + first))
        entry = first + (tags.index(0) if 0 in tags else self._displace(first, tag))
        body = (slab | len(key) << KEY_BYTES_SHIFT, offset, block.size_bytes, block.generation, checksum, slot, *words)
        body += (0,) * (ENTRY_WORDS - 2 - len(body))
        at = self._entries + entry * ENTRY_WORDS
        # Its sequence is odd since it was hidden, or from the beginning.
        BODY.pack_into(self._memory, 8 * at + 8, 0 if self._is_ordered else check_of(body), *body)
        self._words[at + SEQUENCE] += 1
        self._words[self._tags + entry] = tag
        self._shown[entry] = block
        block.shown = entry
        self.count += 1

    def _displace(self, first: int, tag: int) -> int:
        """Make room in a full set: the block that leaves it is found by asking the node, as ever."""
        way = tag >> 8 & WAYS - 1
        block = self._shown[first + way]
        assert block is not None
        self.hide(block)
        if len(self.pushed_out) < MAX_PUSHED_OUT:
            self.pushed_out.append(block)
        return way

    def hide(self, block: Block) -> None:
        """No reader who comes now finds the block, and one who is copying it will notice. It must be shown."""
        entry, block.shown = block.shown, NOT_SHOWN
        self._words[self._entries + entry * ENTRY_WORDS + SEQUENCE] += 1
        self._words[self._tags + entry] = 0
        self._shown[entry] = None
        self.count -= 1

    def accessed(self, word: int) -> Block | None:
        """The block that a reader means by a word of its ring: None if its entry shows another one by now, or it makes no sense."""
        entry = word & 0xFFFF_FFFF
        if entry >= len(self._shown):
            return None
        block = self._shown[entry]
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

    def grown(self) -> "ShownIndex":
        """One of twice as many sets that shows the same blocks; this one is over. Raises TierFailed: it goes on as it is."""
        other = ShownIndex(2 * self.sets, number=self._number + 1, is_ordered=self._is_ordered)
        shown = np.flatnonzero(np.fromiter((block is not None for block in self._shown), bool, len(self._shown)))
        words = np.frombuffer(self._memory, np.uint64)
        entries: Words = words[self._entries :].reshape(-1, ENTRY_WORDS)[shown]
        tags: Words = words[self._tags : self._tags + len(self._shown)][shown]
        other._take_over([self._shown[entry] for entry in shown.tolist()], entries, tags)
        other.beat(int(words[AT_HEARTBEAT]))
        other.tell_slabs_gone(int(words[AT_SLABS_GONE]))
        self.close()
        return other

    def _take_over(self, blocks: "list[Block | None]", entries: Words, tags: Words) -> None:
        """Show blocks of another index by its entries and tags. This one is empty, and nobody reads it yet."""
        sets = (tags >> np.uint64(self._shift)).astype(np.int64)
        order = np.argsort(sets, kind="stable")
        ranks = np.arange(len(order)) - np.searchsorted(sets[order], sets[order])
        places = np.empty(len(order), np.int64)
        places[order] = sets[order] * WAYS + ranks
        fits = np.empty(len(order), bool)
        fits[order] = ranks < WAYS
        words = np.frombuffer(self._memory, np.uint64)
        entries = entries[fits]
        entries[:, SEQUENCE] = self._first_sequence + 2
        words[self._entries :].reshape(-1, ENTRY_WORDS)[places[fits]] = entries
        words[self._tags : self._tags + len(self._shown)][places[fits]] = tags[fits]
        for block, place, is_shown in zip(blocks, places.tolist(), fits.tolist(), strict=True):
            assert block is not None
            block.shown = place if is_shown else NOT_SHOWN
            if is_shown:
                self._shown[place] = block
        self.count = int(fits.sum())

    def close(self) -> None:
        """It shows nothing any more, and says so; its memory goes with the last mapping. A second close is a no-op."""
        if self.fd < 0:
            return
        self._words[AT_IS_OVER] = 1
        words = np.frombuffer(self._memory, np.uint64)
        words[self._tags : self._tags + len(self._shown)] = 0
        words[self._entries + SEQUENCE :: ENTRY_WORDS] |= np.uint64(1)
        os.close(self.fd)
        self.fd = -1

    def check_integrity(self) -> None:
        """Assert that entries, tags and blocks agree. For tests."""
        words = np.frombuffer(self._memory, np.uint64)
        tags = words[self._tags : self._tags + len(self._shown)]
        entries: Words = words[self._entries :].reshape(-1, ENTRY_WORDS)
        shown_at = np.flatnonzero(tags).tolist()
        assert self.count == len(shown_at) == len(self._shown) - self._shown.count(None)
        assert ((entries[:, SEQUENCE] & np.uint64(1)) == (tags == 0)).all()
        for entry in shown_at:
            block = self._shown[entry]
            assert block is not None
            assert block.shown == entry
            assert entries[entry, KEY : KEY + KEY_WORDS].tobytes() == block.key.ljust(MAX_KEY_BYTES, b"\0")
            assert int(tags[entry]) == tag_of(key_words(block.key), len(block.key))
        shown = entries[tags != 0]
        assert np.array_equal(shown[:, CHECK], checks_of(shown)) or self._is_ordered
