"""Reader of a local node's shared-memory index (protocol/shared_index.py): lookups and seqlock validation. It touches
no value."""

import os
import threading
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import Broken
from kvstore.protocol.shared_index import (
    AT_HEARTBEAT,
    AT_INDEX_CLOSED,
    AT_KEY_WORDS,
    AT_MAGIC,
    AT_SETS,
    AT_SLABS_FREED,
    CHECK,
    CHECKSUM,
    ENTRIES,
    KEY,
    KEY_BYTES_SHIFT,
    KEY_WORDS,
    MAGIC,
    OFFSET,
    ORDERED,
    SEQUENCE,
    SIZE,
    SIZE_MASK,
    SLAB_SHIFT,
    SLOT,
    TAG_BYTES,
    TAGS,
    UP_TO_KEY,
    WAYS,
    Words,
    check_of,
    checks_of,
    entries_at,
    hash_of,
    hashes_of,
    index_bytes,
    numbers_at,
    tag_bytes_of,
    tags_at,
    tags_of,
)
from kvstore.transfer.memory.mapped_memory import map_slab

PART_KEYS: Final = 4096
"""Keys looked up at a time: their scratch fits the processor's cache."""
FOREVER_NS: Final = 1 << 62
_SET_BYTES: Final = TAGS.size
_WAY_BITS: Final = WAYS.bit_length() - 1
_WITHIN_A_TAG: Final = TAG_BYTES - 1
_TAG_SHIFT: Final = TAG_BYTES.bit_length() - 1
_unpack_tags: Final = TAGS.unpack_from
_unpack_up_to_key: Final = [form.unpack_from for form in UP_TO_KEY]

UNKNOWN_FORM: Final = "the index of a local node has an unknown format: run client and node of the same release"
Flags = npt.NDArray[np.bool_]
Indexes = npt.NDArray[np.int64]
_NONE: Final[Indexes] = np.empty(0, np.int64)
IndexEntry = tuple[int, int, int, int, int, int, int]
"""(at, sequence, slab, offset, size, checksum, slot): `at` is the entry's first word, `sequence` its value when read. A
plain tuple, because a named one costs half of the lookup."""


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """Entries of many keys, in columns. `which` holds the indexes of the keys found, in order; each other column has a
    row per key found."""

    which: Indexes
    at: Indexes
    """Entry numbers."""
    sequences: Words
    slabs: Words
    offsets: Words
    sizes: Words
    checksums: Words

    def only(self, chosen: Flags) -> "FoundBatch":
        """The chosen rows."""
        return FoundBatch(*(column[chosen] for column in self.columns()))  # type: ignore[arg-type]

    def columns(self) -> tuple[npt.NDArray[np.generic], ...]:
        return self.which, self.at, self.sequences, self.slabs, self.offsets, self.sizes, self.checksums


class _LookupScratch(threading.local):
    """A thread's scratch for batch lookups. Fresh memory would cost a page fault per 32 entries."""

    def __init__(self, entry_words: int) -> None:
        self.tags = np.empty((PART_KEYS, WAYS), np.uint32)
        self.is_tag = np.empty((PART_KEYS, WAYS), bool)
        self.entries = np.empty((PART_KEYS, entry_words), np.uint64)


class SharedIndexReader:
    """Reader of one index. Thread-safe, lock-free. The mapping lives as long as its last user."""

    def __init__(self, fd: int, size_bytes: int, *, is_ordered: bool = ORDERED) -> None:
        """Map the index behind `fd`, which stays the caller's. Without `is_ordered`, entries are verified by their
        check word.

        Raises Broken: not an index, or one of another release.
        """
        self._memory = map_slab(os.dup(fd), size_bytes, writable=False, populated=False).memory
        self.words = self._memory.cast("Q")
        """The whole index. An entry is valid while the word at `at` still equals `sequence`."""
        sets, key_words = (self.words[AT_SETS], self.words[AT_KEY_WORDS]) if size_bytes > entries_at(0) else (0, 0)
        if self.words[AT_MAGIC] != MAGIC or not sets or sets & (sets - 1) or key_words not in KEY_WORDS:
            raise Broken(UNKNOWN_FORM)
        if index_bytes(sets, key_words) != size_bytes:
            raise Broken(UNKNOWN_FORM)
        self._is_ordered = is_ordered
        self._max_key_bytes = 8 * key_words
        self.entry_words = KEY + key_words
        self._entry = ENTRIES[key_words]
        self._scratch = _LookupScratch(self.entry_words)
        self._shift = 64 - sets.bit_length() + 1
        self._tags_bytes = tags_at(sets)
        self.entries = entries_at(sets) // 8
        """Word at which the entries begin."""
        self._ways_mask = sets * WAYS - 1
        numbers = self._memory[numbers_at(sets) : entries_at(sets)]
        self._numbers = numbers.cast("I")
        self._tags = np.frombuffer(self._memory[tags_at(sets) : numbers_at(sets)], np.uint32).reshape(sets, WAYS)
        self._all_numbers = np.frombuffer(numbers, np.uint32)
        self._rows: Words = np.frombuffer(self._memory, np.uint64)[self.entries :].reshape(-1, self.entry_words)
        self.sequences: Words = self._rows[:, SEQUENCE]
        """Sequence numbers by entry number."""

    def find(self, key: bytes) -> IndexEntry | None:
        """The entry of a key; None if absent, or if the key is not bytes or too long for this index."""
        if type(key) is not bytes or (key_bytes := len(key)) > self._max_key_bytes:
            return None
        hashed = hash_of(key)
        number = hashed >> self._shift
        found = _unpack_tags(self._memory, self._tags_bytes + _SET_BYTES * number)[0].find(tag_bytes_of(hashed))
        if found & _WITHIN_A_TAG:  # -1 too. A match across two tags is treated as a miss, which costs one message
            return None
        at = self.entries + (self._numbers[number * WAYS + (found >> _TAG_SHIFT)] & self._ways_mask) * self.entry_words
        sequence, _, slot, offset, size, checksum, stored_key = _unpack_up_to_key[key_bytes](self._memory, 8 * at)
        if sequence & 1 or stored_key != key or size >> KEY_BYTES_SHIFT != key_bytes:
            return None
        if not self._is_ordered and not self._is_whole(at):
            return None
        if self.words[at] != sequence:
            return None
        return at, sequence, slot >> SLAB_SHIFT, offset, size & SIZE_MASK, checksum, slot

    def _is_whole(self, at: int) -> bool:
        entry = self._entry.unpack_from(self._memory, 8 * at)
        return bool(entry[CHECK] == check_of(entry[SLOT:]))

    def find_batch(self, keys: Words, key_bytes: int) -> FoundBatch:
        """Entries of keys of one length, given as words of shape (keys, words)."""
        parts = [self._find_part(keys, begin, key_bytes) for begin in range(0, len(keys), PART_KEYS)]
        if len(parts) == 1:
            return parts[0]
        return FoundBatch(*map(np.concatenate, zip(*(part.columns() for part in parts), strict=True)))

    def exist_batch(self, keys: Words, key_bytes: int) -> Flags:
        """Return which keys of one length are present."""
        is_there = np.zeros(len(keys), bool)
        for begin in range(0, len(keys), PART_KEYS):
            is_there[begin + self._compare(keys[begin : begin + PART_KEYS], key_bytes)[0]] = True
        return is_there

    def _find_part(self, keys: Words, begin: int, key_bytes: int) -> FoundBatch:
        which, at, entries = self._compare(keys[begin : begin + PART_KEYS], key_bytes)
        if (which[1:] == which[:-1]).any():  # a key moved between entries meanwhile
            which, first = np.unique(which, return_index=True)
            at, entries = at[first], entries[first]
        sequences, offsets, checksums = (entries[:, column].copy() for column in (SEQUENCE, OFFSET, CHECKSUM))
        slabs, sizes = entries[:, SLOT] >> np.uint64(SLAB_SHIFT), entries[:, SIZE] & np.uint64(SIZE_MASK)
        return FoundBatch(which + begin, at, sequences, slabs, offsets, sizes, checksums)

    def _compare(self, keys: Words, key_bytes: int) -> tuple[Indexes, Indexes, Words]:
        """Match up to PART_KEYS keys: key indexes, entry numbers, and the entries, in the thread's scratch."""
        if key_bytes > self._max_key_bytes:
            return _NONE, _NONE, self._rows[:0]
        which, at = self._candidates(keys, key_bytes)
        if not len(which):
            return which, at, self._rows[:0]
        sequences = self.sequences[at]
        entries = np.take(self._rows, at, axis=0, out=self._scratch.entries[: len(at)], mode="clip")
        searched = keys if len(which) == len(keys) else keys[which]
        is_there: Flags = (sequences & np.uint64(1)) == 0
        is_there &= entries[:, SIZE] >> np.uint64(KEY_BYTES_SHIFT) == np.uint64(key_bytes)
        for column in range(keys.shape[1]):
            is_there &= entries[:, KEY + column] == searched[:, column]
        if not self._is_ordered:
            is_there &= entries[:, CHECK] == checks_of(entries)
        is_there &= self.sequences[at] == sequences
        entries[:, SEQUENCE] = sequences
        return (which, at, entries) if is_there.all() else (which[is_there], at[is_there], entries[is_there])

    def _candidates(self, keys: Words, key_bytes: int) -> tuple[Indexes, Indexes]:
        """Keys whose tags match, by index, and their entry numbers; only these are compared in full."""
        count, scratch = len(keys), self._scratch
        hashes = hashes_of(keys, key_bytes)
        tags, sets = tags_of(hashes), (hashes >> np.uint64(self._shift)).view(np.int64)
        of_set = np.take(self._tags, sets, axis=0, out=scratch.tags[:count], mode="clip")
        ways = np.flatnonzero(np.equal(of_set, tags[:, None], out=scratch.is_tag[:count]))
        which = ways >> _WAY_BITS
        if len(which) >= count and (which[1:] == which[:-1]).any():
            # Of equal hashes, and of a key that moves between entries, only the first is compared: the scratch has one row
            # per key. From here on there is at most one candidate per key.
            which, first = np.unique(which, return_index=True)
            ways = ways[first]
        places = (sets if len(which) == count else sets[which]) * WAYS + (ways & WAYS - 1)
        return which, (self._all_numbers[places] & np.uint32(self._ways_mask)).astype(np.int64)

    def validate_batch(self, found: FoundBatch) -> Flags:
        """For each entry found, whether its sequence number is unchanged."""
        is_same: Flags = self.sequences[found.at] == found.sequences
        return is_same

    def access_words(self, found: FoundBatch) -> Words:
        """Words that report these accesses to the node."""
        words: Words = found.at.view(np.uint64) | (found.sequences & np.uint64(0xFFFF_FFFF)) << np.uint64(32)
        return words

    def age_ns(self, now_ns: int) -> int:
        """Age of the node's heartbeat by CLOCK_MONOTONIC; FOREVER_NS once the index is closed."""
        words = self.words
        return FOREVER_NS if words[AT_INDEX_CLOSED] else now_ns - words[AT_HEARTBEAT]

    @property
    def is_over(self) -> bool:
        """Return whether the index was replaced, or the node stops."""
        return bool(self.words[AT_INDEX_CLOSED])

    @property
    def slabs_gone(self) -> int:
        """Number of slabs that the node has freed since it started."""
        return self.words[AT_SLABS_FREED]
