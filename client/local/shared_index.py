"""The reader's side of the index that a node of this host shows (protocol/shared_index.py). It finds places, and says later whether what
was read there was still the block's: no value is touched here.
"""

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
from kvstore.transfer.memory.mapping import map_slab

PART_KEYS: Final = 4096
"""Keys that are looked up at a time: what is gathered for them stays in the processor's cache."""
FOREVER_NS: Final = 1 << 62
_SET_BYTES: Final = TAGS.size
_WAY_BITS: Final = WAYS.bit_length() - 1
_WITHIN_A_TAG: Final = TAG_BYTES - 1
_TAG_SHIFT: Final = TAG_BYTES.bit_length() - 1
_unpack_tags: Final = TAGS.unpack_from
_unpack_up_to_key: Final = [form.unpack_from for form in UP_TO_KEY]

UNKNOWN_FORM: Final = "a node of this host shows an index in a form that this release does not know"
Flags = npt.NDArray[np.bool_]
Indexes = npt.NDArray[np.int64]
_NONE: Final[Indexes] = np.empty(0, np.int64)
Place = tuple[int, int, int, int, int, int, int]
"""Where a block is: its entry's first word and what that was (`at` and `sequence`), slab, offset, size, checksum, slot. A tuple, for
to make a named one takes as long as half of the look-up."""


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """As Place, of many keys, in columns. `which` are the indexes of the keys that were found, in order; the others have a row for each."""

    which: Indexes
    at: Indexes
    """Entries, by number."""
    sequences: Words
    slabs: Words
    offsets: Words
    sizes: Words
    checksums: Words

    def only(self, chosen: Flags) -> "FoundBatch":
        """Of those found, some."""
        return FoundBatch(*(column[chosen] for column in self.columns()))  # type: ignore[arg-type]

    def columns(self) -> tuple[npt.NDArray[np.generic], ...]:
        return self.which, self.at, self.sequences, self.slabs, self.offsets, self.sizes, self.checksums


class _LookupScratch(threading.local):
    """Where a thread's look-ups gather what they compare: fresh memory for it would cost a page fault for every 32 entries."""

    def __init__(self, entry_words: int) -> None:
        self.tags = np.empty((PART_KEYS, WAYS), np.uint32)
        self.is_tag = np.empty((PART_KEYS, WAYS), bool)
        self.entries = np.empty((PART_KEYS, entry_words), np.uint64)


class SharedIndexReader:
    """See the module. Any thread may read. The mapping goes with its last user."""

    def __init__(self, fd: int, size_bytes: int, *, is_ordered: bool = ORDERED) -> None:
        """Takes no ownership of `fd`. Not `is_ordered`: entries are compared with their checks.

        Raises Broken: it is no index, or not one of this release."""
        self._memory = map_slab(os.dup(fd), size_bytes, writable=False, populated=False).memory
        self.words = self._memory.cast("Q")
        """All of it. What lies in a place was its block's all the time while the word at `at` is what it was, the `sequence`."""
        sets, key_words = (self.words[AT_SETS], self.words[AT_KEY_WORDS]) if size_bytes > entries_at(0) else (0, 0)
        if self.words[AT_MAGIC] != MAGIC or not sets or sets & (sets - 1) or key_words not in KEY_WORDS:
            raise Broken(UNKNOWN_FORM)
        if index_bytes(sets, key_words) != size_bytes:
            raise Broken(UNKNOWN_FORM)
        self._is_ordered = is_ordered
        self._max_key_bytes = 8 * key_words
        self.entry_words = KEY + key_words
        self._entry = ENTRIES[key_words]
        self._room = _LookupScratch(self.entry_words)
        self._shift = 64 - sets.bit_length() + 1
        self._tags_bytes = tags_at(sets)
        self.entries = entries_at(sets) // 8
        """The word at which they begin."""
        self._ways_mask = sets * WAYS - 1
        numbers = self._memory[numbers_at(sets) : entries_at(sets)]
        self._numbers = numbers.cast("I")
        self._tags = np.frombuffer(self._memory[tags_at(sets) : numbers_at(sets)], np.uint32).reshape(sets, WAYS)
        self._all_numbers = np.frombuffer(numbers, np.uint32)
        self._rows: Words = np.frombuffer(self._memory, np.uint64)[self.entries :].reshape(-1, self.entry_words)
        self.sequences: Words = self._rows[:, SEQUENCE]
        """Of each entry, by number."""

    def find(self, key: bytes) -> Place | None:
        """The place of a key. None as well for what is no key, or a longer one than is shown."""
        if type(key) is not bytes or (key_bytes := len(key)) > self._max_key_bytes:
            return None
        hashed = hash_of(key)
        number = hashed >> self._shift
        found = _unpack_tags(self._memory, self._tags_bytes + _SET_BYTES * number)[0].find(tag_bytes_of(hashed))
        if found & _WITHIN_A_TAG:  # -1, too. To look behind two tags that look like one is not worth it: what is not found takes a message
            return None
        at = self.entries + (self._numbers[number * WAYS + (found >> _TAG_SHIFT)] & self._ways_mask) * self.entry_words
        sequence, _, slot, offset, size, checksum, shown = _unpack_up_to_key[key_bytes](self._memory, 8 * at)
        if sequence & 1 or shown != key or size >> KEY_BYTES_SHIFT != key_bytes:
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
        """The places of keys of one length, given as words of shape (keys, words)."""
        parts = [self._find_part(keys, begin, key_bytes) for begin in range(0, len(keys), PART_KEYS)]
        if len(parts) == 1:
            return parts[0]
        return FoundBatch(*map(np.concatenate, zip(*(part.columns() for part in parts), strict=True)))

    def exist_batch(self, keys: Words, key_bytes: int) -> Flags:
        """Which keys of one length are there."""
        is_there = np.zeros(len(keys), bool)
        for begin in range(0, len(keys), PART_KEYS):
            is_there[begin + self._compare(keys[begin : begin + PART_KEYS], key_bytes)[0]] = True
        return is_there

    def _find_part(self, keys: Words, begin: int, key_bytes: int) -> FoundBatch:
        which, at, entries = self._compare(keys[begin : begin + PART_KEYS], key_bytes)
        if (which[1:] == which[:-1]).any():  # it went from one entry to another meanwhile
            which, first = np.unique(which, return_index=True)
            at, entries = at[first], entries[first]
        sequences, offsets, checksums = (entries[:, column].copy() for column in (SEQUENCE, OFFSET, CHECKSUM))
        slabs, sizes = entries[:, SLOT] >> np.uint64(SLAB_SHIFT), entries[:, SIZE] & np.uint64(SIZE_MASK)
        return FoundBatch(which + begin, at, sequences, slabs, offsets, sizes, checksums)

    def _compare(self, keys: Words, key_bytes: int) -> tuple[Indexes, Indexes, Words]:
        """Of at most PART_KEYS keys those that are there: indexes, entries by number, and these entries, in the thread's room."""
        if key_bytes > self._max_key_bytes:
            return _NONE, _NONE, self._rows[:0]
        which, at = self._candidates(keys, key_bytes)
        if not len(which):
            return which, at, self._rows[:0]
        sequences = self.sequences[at]
        entries = np.take(self._rows, at, axis=0, out=self._room.entries[: len(at)], mode="clip")
        wanted = keys if len(which) == len(keys) else keys[which]
        is_there: Flags = (sequences & np.uint64(1)) == 0
        is_there &= entries[:, SIZE] >> np.uint64(KEY_BYTES_SHIFT) == np.uint64(key_bytes)
        for column in range(keys.shape[1]):
            is_there &= entries[:, KEY + column] == wanted[:, column]
        if not self._is_ordered:
            is_there &= entries[:, CHECK] == checks_of(entries)
        is_there &= self.sequences[at] == sequences
        entries[:, SEQUENCE] = sequences
        return (which, at, entries) if is_there.all() else (which[is_there], at[is_there], entries[is_there])

    def _candidates(self, keys: Words, key_bytes: int) -> tuple[Indexes, Indexes]:
        """The keys whose tags are there, by their indexes, and their entries by number: nothing else is looked at further."""
        count, room = len(keys), self._room
        hashes = hashes_of(keys, key_bytes)
        tags, sets = tags_of(hashes), (hashes >> np.uint64(self._shift)).view(np.int64)
        of_set = np.take(self._tags, sets, axis=0, out=room.tags[:count], mode="clip")
        ways = np.flatnonzero(np.equal(of_set, tags[:, None], out=room.is_tag[:count]))
        which = ways >> _WAY_BITS
        if len(which) >= count and (which[1:] == which[:-1]).any():
            # Of keys of one hash, and of one that goes from entry to entry, only the first is looked at: the room is for so many. As many
            # candidates as keys are one of each from here on.
            which, first = np.unique(which, return_index=True)
            ways = ways[first]
        places = (sets if len(which) == count else sets[which]) * WAYS + (ways & WAYS - 1)
        return which, (self._all_numbers[places] & np.uint32(self._ways_mask)).astype(np.int64)

    def still_batch(self, found: FoundBatch) -> Flags:
        """For each that was found, whether the place was the block's all the time since."""
        is_same: Flags = self.sequences[found.at] == found.sequences
        return is_same

    def access_words(self, found: FoundBatch) -> Words:
        """What tells the node that these were read."""
        words: Words = found.at.view(np.uint64) | (found.sequences & np.uint64(0xFFFF_FFFF)) << np.uint64(32)
        return words

    def age_ns(self, now_ns: int) -> int:
        """How long ago the node said that it lives, by CLOCK_MONOTONIC; FOREVER_NS once the index is over."""
        words = self.words
        return FOREVER_NS if words[AT_INDEX_CLOSED] else now_ns - words[AT_HEARTBEAT]

    @property
    def is_over(self) -> bool:
        """Another one has taken its place, or the node stops."""
        return bool(self.words[AT_INDEX_CLOSED])

    @property
    def slabs_gone(self) -> int:
        """Slabs that the node has given up since it began."""
        return self.words[AT_SLABS_FREED]
