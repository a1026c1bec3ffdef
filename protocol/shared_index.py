"""The index that a node shows to the clients of its host, and the desk at which each of them sits: their form in shared memory.

A node keeps one index a tenant: which keys have a copy in DRAM, and where. It alone writes it, clients map it read-only and find
blocks without asking. It is set-associative: a key's hash names a set of WAYS entries, and it may miss, for the way over the node is always
there. All words are 64 bits wide, in the host's byte order, and aligned, so that a store of one is never seen torn.

    header     HEADER_BYTES  MAGIC, sets, heartbeat (CLOCK_MONOTONIC, ns), is_over, slabs given up, words of a key
    tags       sets x WAYS x 32 bits: of the hash of the key that is shown there, 0 for none
    numbers    sets x WAYS x 32 bits: the entry of each
    entries    sets x WAYS x (KEY + words of a key) words: sequence, check, slot, offset, size | key bytes << 32, xxh3_64 of the value,
               and the key, filled up with zeros

Entries are used from the first on, and those that are free again before others: tags and numbers take 8 bytes a way, and only they are
sparse. A key of 16 bytes makes an entry a line of the cache.

An entry's sequence is odd while it shows nothing and rises at every change. A reader takes the sequence, then the rest, then the value, and
then the sequence again: the same even number both times says that the slot was not given to another block in between, because a node
hides an entry before its slot can be used again. A tag or number that is older or newer than the entry leads to another key, or to none.
x86-64 keeps loads and stores in these orders; elsewhere the check of the entry and the checksum of the value tell (docs/internals.md).

A desk is written by its client and read by the node. It belongs to one connection and ends with it.

    header     DESK_WORDS    MAGIC; is_over, accesses taken, hold words taken and blocks not held, set by the node; accesses written and
               lost, hazards in use, and hold words written, by the client
    hazards    HAZARDS words: slot + 1 of each value that the client is looking at, which must not be reused meanwhile | a number that tells
               this look from the next one << LOOK_SHIFT
    accesses   ACCESSES words, a ring: entry | the low half of its sequence << 32
    holds      HOLD_WORDS words, a ring of records: the hold's number, its end (CLOCK_MONOTONIC, ns), the count of words that follow, and
               these words, which name the blocks that are to stay as `accesses` does. An end of 0 releases the hold

The node takes hold records before it looks for a block of the tenant that may leave DRAM, and every few milliseconds.
"""

import platform
import struct
from collections.abc import Sequence
from operator import mul
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Tags = npt.NDArray[np.uint32]

ORDERED: Final = platform.machine() in ("x86_64", "AMD64")
"""Whether the processor keeps loads in order, and stores: then entries need no checks, and have none."""
MAGIC: Final = 0x32_58_44_4E_49_56_4B_53
"""Changes with the form."""
HEADER_BYTES: Final = 4096
AT_MAGIC, AT_SETS, AT_HEARTBEAT, AT_IS_OVER, AT_SLABS_GONE, AT_KEY_WORDS = range(6)
"""Words of an index's header."""

WAYS: Final = 32
"""A set's tags are two lines of the cache, which processors fetch together. Of an index that is half full one key in a hundred thousand
finds no place; with 16 it is one in fourteen hundred, and most long prefixes have such a key."""
KEY_WORDS: Final = (2, 4, 8)
"""Of an index: as many words as its longest key needs."""
MAX_KEY_BYTES: Final = 8 * KEY_WORDS[-1]
"""Longer keys are not shown: an entry holds its key whole, so that no other key's bytes are ever taken for it."""
SEQUENCE, CHECK, SLOT, OFFSET, SIZE, CHECKSUM, KEY = range(7)
"""Words of an entry; the key begins at the last."""
KEY_BYTES_SHIFT: Final = 32
"""In the word of the size: the value's size below, the key's length above."""
SIZE_MASK: Final = (1 << KEY_BYTES_SHIFT) - 1
SLAB_SHIFT: Final = 20
"""A slot's index is its slab's number above, its place there below."""

HAZARDS: Final = 64
LOOK_SHIFT: Final = 48
LOOK_NUMBERS: Final = 1 << 16
ACCESSES: Final = 32_768
"""What a client reads between two looks of its node fits; of what is beyond it only the number is known."""
HOLD_WORDS: Final = 16_384
"""A lookup of more blocks than fit in here gets no hold."""
HOLD_HEADER_WORDS: Final = 3
DESK_WORDS: Final = 16
(
    AT_DESK_MAGIC,
    AT_DESK_OVER,
    AT_TAKEN,
    AT_ACCESSES,
    AT_HAZARDS_USED,
    AT_LOST,
    AT_HOLDS_TAKEN,
    AT_HOLDS_WRITTEN,
    AT_UNHELD,
) = range(9)
"""Words of a desk's header."""
AT_HAZARDS: Final = DESK_WORDS
AT_RING: Final = DESK_WORDS + HAZARDS
AT_HOLDS: Final = AT_RING + ACCESSES
DESK_BYTES: Final = 8 * (AT_HOLDS + HOLD_WORDS)

MASK: Final = (1 << 64) - 1
_FACTORS: Final = (
    0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB,
    0x8EBC6AF09C88C6E3, 0x589965CC75374CC3, 0x1D8E4E27C47D124F, 0xEB44ACCAB455D165, 0x9C6E6877736C46E3, 0x7C3E92D6E1B2F4A5,
    0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53,
)  # fmt: skip
"""Odd numbers of 64 bits (from the well-known mixers), one a word."""
_LENGTH_FACTOR: Final = 0x2545F4914F6CDD1D
_ARRAY_FACTORS: Final = np.array(_FACTORS, np.uint64)
_KEY_FORMS: Final = [struct.Struct(f"{count}Q") for count in range(KEY_WORDS[-1] + 1)]
_TWO_WORDS: Final = struct.Struct("2Q")
_TWO_WORDS_START: Final = 16 * _LENGTH_FACTOR & MASK
BODIES: Final = {count: struct.Struct(f"{KEY - 1}Q{8 * count}s") for count in KEY_WORDS}
"""An entry without its sequence, which is stored by itself: pack_into writes zeros first. By the words of a key."""
ENTRIES: Final = {count: struct.Struct(f"{KEY + count}Q") for count in KEY_WORDS}
UP_TO_KEY: Final = [struct.Struct(f"{KEY}Q{key_bytes}s") for key_bytes in range(MAX_KEY_BYTES + 1)]
"""An entry up to the end of its key, by the key's length."""
TAG_BYTES: Final = 4
TAGS: Final = struct.Struct(f"{WAYS * TAG_BYTES}s")
"""Of a set, as bytes: one of them is found there in a third of the time that numbers take."""
_HIGH_BITS: Final = 32
_LOW_BITS: Final = 12
"""A tag is of a hash's high bits, which all of the key's reach, and of those below the ones that name the set, of however many."""
_TAG_MASK: Final = (1 << 8 * TAG_BYTES) - 1


def tags_at(sets: int) -> int:
    """Where the tags begin, in bytes."""
    return HEADER_BYTES


def numbers_at(sets: int) -> int:
    """Where the numbers of entries begin, in bytes."""
    return HEADER_BYTES + TAG_BYTES * WAYS * sets


def entries_at(sets: int) -> int:
    """Where the entries begin, in bytes."""
    return HEADER_BYTES + 2 * TAG_BYTES * WAYS * sets


def index_bytes(sets: int, key_words: int) -> int:
    return entries_at(sets) + 8 * (KEY + key_words) * WAYS * sets


def key_words_for(key_bytes: int) -> int:
    """The words of a key of an index that shows keys of that length; MAX_KEY_BYTES at most."""
    return next(count for count in KEY_WORDS if key_bytes <= 8 * count)


def key_words(key: bytes) -> tuple[int, ...]:
    """A key of at most MAX_KEY_BYTES as words, filled up with zeros to whole ones."""
    count = (len(key) + 7) >> 3
    return _KEY_FORMS[count].unpack(key if not len(key) & 7 else key.ljust(8 * count, b"\0"))


def hash_of(key: bytes) -> int:
    """The hash of a key, multilinear: its high bits, which all of the key's reach, name the set."""
    if len(key) == 16:  # most are, and this takes half as long
        low, high = _TWO_WORDS.unpack(key)
        return int(low * _FACTORS[0] + high * _FACTORS[1] + _TWO_WORDS_START & MASK)
    return int(sum(map(mul, key_words(key), _FACTORS), len(key) * _LENGTH_FACTOR) & MASK)


def hashes_of(words: Words, key_bytes: "int | Words") -> Words:
    """As `hash_of`, of keys of that length, or of these: an array of shape (keys, words)."""
    lengths = np.uint64(key_bytes * _LENGTH_FACTOR & MASK) if isinstance(key_bytes, int) else key_bytes * np.uint64(_LENGTH_FACTOR)
    found = np.empty(len(words), np.uint64)
    found[:] = lengths
    for column in range(words.shape[1]):
        found += words[:, column] * _ARRAY_FACTORS[column]
    return found


def tag_of(hashed: int) -> int:
    """The tag of a key by its hash; never 0, and its lowest byte neither."""
    return (hashed >> _HIGH_BITS ^ hashed >> _LOW_BITS) & _TAG_MASK | 1


def tag_bytes_of(hashed: int) -> bytes:
    """A tag as it lies among those of a set."""
    return ((hashed >> _HIGH_BITS ^ hashed >> _LOW_BITS) & _TAG_MASK | 1).to_bytes(TAG_BYTES, "little")


def tags_of(hashes: Words) -> Tags:
    """As `tag_of`."""
    found: Tags = (hashes >> np.uint64(_HIGH_BITS) ^ hashes >> np.uint64(_LOW_BITS)).astype(np.uint32)
    found |= np.uint32(1)
    return found


def words_of(keys: Sequence[bytes], key_bytes: int) -> Words:
    """Keys of one length as an array of words of shape (keys, words)."""
    whole = -(-key_bytes // 8) * 8
    joined = b"".join(keys if whole == key_bytes else [key.ljust(whole, b"\0") for key in keys])
    return np.frombuffer(joined, np.uint64).reshape(len(keys), whole // 8)


def check_of(body: Sequence[int]) -> int:
    """What an entry's second word says of those after it (SLOT and on): multilinear, so that numpy does many at once."""
    return int(sum(map(mul, body, _FACTORS)) & MASK)


def checks_of(entries: Words) -> Words:
    """As `check_of`, of whole entries: an array of shape (entries, words of an entry)."""
    body: Any = entries[:, SLOT:]
    found: Words = (body * _ARRAY_FACTORS[: body.shape[1]]).sum(axis=1, dtype=np.uint64)
    return found
