"""The reader's side of the index that a node of this host shows (protocol/shown_index.py). It finds places, and says later whether what was
read there was still the block's: no value is touched here.
"""

import dataclasses
import os
import threading
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import Broken
from kvstore.protocol.shown_index import (
    AT_HEARTBEAT,
    AT_IS_OVER,
    AT_MAGIC,
    AT_SETS,
    AT_SLABS_GONE,
    CHECK,
    CHECKSUM,
    ENTRY,
    ENTRY_BYTES,
    ENTRY_WORDS,
    KEY,
    KEY_BYTES_SHIFT,
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
    key_words,
    tag_of,
    tags_at,
    tags_of,
)
from kvstore.transfer.memory.mapping import map_slab

PART_KEYS: Final = 4096
"""Keys that are looked up at a time: what is gathered for them stays in the processor's cache."""
FOREVER_NS: Final = 1 << 62
SLAB_MASK: Final = (1 << KEY_BYTES_SHIFT) - 1


Flags = npt.NDArray[np.bool_]


class Found(NamedTuple):
    """Where a block is. `at` is its entry's first word, `sequence` what that word was."""

    at: int
    sequence: int
    slab: int
    offset: int
    size: int
    checksum: int
    slot: int


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """As Found, of many keys, in columns. `is_there` says which keys they are; the other columns have a row for those alone, in order."""

    is_there: Flags
    at: npt.NDArray[np.int64]
    """Entries, by number."""
    sequences: Words
    slabs: Words
    offsets: Words
    sizes: Words
    checksums: Words

    def only(self, which: Flags) -> "FoundBatch":
        """Of those found, some. `is_there` stays as it was."""
        columns = (self.at, self.sequences, self.slabs, self.offsets, self.sizes, self.checksums)
        return FoundBatch(self.is_there, *(column[which] for column in columns))  # type: ignore[arg-type]


class _Room(threading.local):
    """Where a thread's look-ups gather what they compare: fresh memory for it would cost a page fault for every 32 entries."""

    def __init__(self) -> None:
        self.tags = np.empty((PART_KEYS, WAYS), np.uint64)
        self.is_tag = np.empty((PART_KEYS, WAYS), bool)
        self.entries = np.empty((PART_KEYS, ENTRY_WORDS), np.uint64)


class IndexView:
    """See the module. Any thread may read. The mapping goes with its last user."""

    def __init__(self, fd: int, size_bytes: int, *, is_ordered: bool = ORDERED) -> None:
        """Takes no ownership of `fd`. Not `is_ordered`: entries are compared with their checks.

        Raises Broken: it is no index, or not one of this release."""
        self._memory = map_slab(os.dup(fd), size_bytes, writable=False).memory
        self._words = self._memory.cast("Q")
        sets = self._words[AT_SETS] if size_bytes > entries_at(0) else 0
        if not sets or self._words[AT_MAGIC] != MAGIC or sets & (sets - 1) or index_bytes(sets) != size_bytes:
            raise Broken("a node of this host shows an index in a form that this release does not know")
        self._is_ordered = is_ordered
        self._room = _Room()
        self._shift = 64 - sets.bit_length() + 1
        self._tags_bytes = tags_at(sets)
        self._entries = entries_at(sets) // 8
        words = np.frombuffer(self._memory, np.uint64)
        self._tags: Words = words[self._tags_bytes // 8 : self._entries].reshape(sets, WAYS)
        self._rows: Words = words[self._entries :].reshape(-1, ENTRY_WORDS)
        self._sequences: Words = self._rows[:, SEQUENCE]

    def find(self, key: bytes) -> Found | None:
        """The place of a key of 1 to MAX_KEY_BYTES bytes."""
        words = key_words(key)
        tag = tag_of(words, len(key))
        number = tag >> self._shift
        tags = TAGS.unpack_from(self._memory, self._tags_bytes + 8 * WAYS * number)
        if tag not in tags:
            return None
        at = self._entries + (number * WAYS + tags.index(tag)) * ENTRY_WORDS
        entry = ENTRY.unpack_from(self._memory, 8 * at)
        place = entry[PLACE]
        if entry[SEQUENCE] & 1 or place >> KEY_BYTES_SHIFT != len(key) or entry[KEY : KEY + len(words)] != words:
            return None
        if not self._is_ordered and entry[CHECK] != check_of(entry[PLACE:]):
            return None
        if self._words[at] != entry[SEQUENCE]:
            return None
        return Found(at, entry[SEQUENCE], place & SLAB_MASK, entry[OFFSET], entry[SIZE], entry[CHECKSUM], entry[SLOT])

    def still(self, found: Found) -> bool:
        """Whether the place was the block's all the time since it was found."""
        return self._words[found.at] == found.sequence

    def find_batch(self, keys: Words, key_bytes: int) -> FoundBatch:
        """The places of keys of one length, given as words of shape (keys, words)."""
        parts = [self._find_part(keys[begin : begin + PART_KEYS], key_bytes) for begin in range(0, len(keys), PART_KEYS)]
        if len(parts) == 1:
            return parts[0]
        names = [field.name for field in dataclasses.fields(FoundBatch)]
        return FoundBatch(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def exist_batch(self, keys: Words, key_bytes: int) -> Flags:
        """Which keys of one length are there."""
        parts = [self._compare(keys[begin : begin + PART_KEYS], key_bytes)[0] for begin in range(0, len(keys), PART_KEYS)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _find_part(self, keys: Words, key_bytes: int) -> FoundBatch:
        is_there, at, entries = self._compare(keys, key_bytes)
        if not is_there.all():
            at, entries = at[is_there], entries[is_there]
        columns = (entries[:, column].copy() for column in (SEQUENCE, PLACE, OFFSET, SIZE, CHECKSUM))
        sequences, places, offsets, sizes, checksums = columns
        places &= np.uint64(SLAB_MASK)
        return FoundBatch(is_there, at, sequences, places, offsets, sizes, checksums)

    def _compare(self, keys: Words, key_bytes: int) -> tuple[Flags, npt.NDArray[np.int64], Words]:
        """Which of at most PART_KEYS keys are there; the entry where each is or would be, and that entry, in the thread's room."""
        count, room = len(keys), self._room
        tags = tags_of(keys, key_bytes)
        at = (tags >> np.uint64(self._shift)).astype(np.int64)
        of_set = np.take(self._tags, at, axis=0, out=room.tags[:count], mode="clip")
        is_tag = np.equal(of_set, tags[:, None], out=room.is_tag[:count])
        at *= WAYS
        at += is_tag.argmax(axis=1)
        sequences = self._sequences[at]
        entries = np.take(self._rows, at, axis=0, out=room.entries[:count], mode="clip")
        is_there: Flags = (sequences & np.uint64(1)) == 0
        is_there &= entries[:, PLACE] >> np.uint64(KEY_BYTES_SHIFT) == np.uint64(key_bytes)
        for column in range(keys.shape[1]):
            is_there &= entries[:, KEY + column] == keys[:, column]
        if not self._is_ordered:
            is_there &= entries[:, CHECK] == checks_of(entries)
        is_there &= self._sequences[at] == sequences
        entries[:, SEQUENCE] = sequences
        return is_there, at, entries

    def still_batch(self, found: FoundBatch) -> Flags:
        """As `still`, for each that was found."""
        is_same: Flags = self._sequences[found.at] == found.sequences
        return is_same

    def access_word(self, found: Found) -> int:
        """What tells the node that it was read."""
        return (found.at - self._entries) // ENTRY_WORDS | (found.sequence & 0xFFFF_FFFF) << 32

    def access_words(self, found: FoundBatch) -> Words:
        words: Words = found.at.astype(np.uint64) | (found.sequences & np.uint64(0xFFFF_FFFF)) << np.uint64(32)
        return words

    def age_ns(self, now_ns: int) -> int:
        """How long ago the node said that it lives, by CLOCK_MONOTONIC; FOREVER_NS once the index is over."""
        words = self._words
        return FOREVER_NS if words[AT_IS_OVER] else now_ns - words[AT_HEARTBEAT]

    @property
    def is_over(self) -> bool:
        """Another one has taken its place, or the node stops."""
        return bool(self._words[AT_IS_OVER])

    @property
    def slabs_gone(self) -> int:
        """Slabs that the node has given up since it began."""
        return self._words[AT_SLABS_GONE]


def is_showable(key: object) -> bool:
    """Whether it is a key that an index can show."""
    return type(key) is bytes and 0 < len(key) <= MAX_KEY_BYTES


assert ENTRY_BYTES == ENTRY.size
