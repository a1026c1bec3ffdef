"""Layout of the shared-memory index of a node's DRAM blocks, and of the reader slots of each local client.

A node keeps one index a tenant: keys with a copy in DRAM, and its slot. Only the node writes it; clients map it
read-only. It is set-associative: a key's hash selects a set of WAYS entries. A key may be missing; the client then
requests it from the node. All words are 64 bits wide, in the host's byte order, and aligned, so that a store is never
seen torn.

    header     HEADER_BYTES  MAGIC, sets, heartbeat (CLOCK_MONOTONIC, ns), is closed, slabs freed, words of a key
    tags       sets x WAYS x 32 bits: part of the key's hash, 0 for none
    numbers    sets x WAYS x 32 bits: the entry of each
    entries    sets x WAYS x (KEY + words of a key) words: sequence, check, slot, offset, size | key bytes << 32,
               xxh3_64 of the value, the key, padded with zeros

Entries are allocated from the first on, freed ones first: only tags and numbers, 8 bytes a way, are sparse. With a
16-byte key an entry is one cache line.

The sequence of an entry is a seqlock: odd while the entry is empty, and higher after every change. A reader loads the
sequence, the entry, the value, and the sequence again. Two equal even numbers prove that the slot was not reused in
between, because the node clears the entry before it reuses the slot. A stale tag or number leads to another key, or to
none. x86-64 keeps loads and stores in order; elsewhere the entry's check and the value's checksum detect a torn read
(docs/internals.md).

Reader slots are written by their client and read by the node. They belong to one connection and end with it.

    header     READER_HEADER_WORDS  by the node: MAGIC, is closed, accesses read, hold words read, blocks not held;
               by the client: accesses written and lost, hazards in use, hold words written
    hazards    HAZARDS words, hazard pointers: slot + 1 of each value being read, which the node must not reuse
               | a serial number of the acquisition << HAZARD_SERIAL_SHIFT
    accesses   ACCESSES words, a ring: entry | low half of its sequence << 32
    holds      HOLD_WORDS words, a ring of records: number of the hold, its end (CLOCK_MONOTONIC, ns; 0 releases the
               hold), count of the words that follow, and these words: the held blocks, encoded as in `accesses`

The node reads hold records before it chooses a victim of the tenant in DRAM, and every few milliseconds.
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
"""True if the processor keeps loads in order, and stores. Entries then have no check."""
MAGIC: Final = 0x32_58_44_4E_49_56_4B_53
"""Changes with the layout."""
HEADER_BYTES: Final = 4096
AT_MAGIC, AT_SETS, AT_HEARTBEAT, AT_INDEX_CLOSED, AT_SLABS_FREED, AT_KEY_WORDS = range(6)
"""Words of an index's header."""

WAYS: Final = 32
"""Entries of a set. A set's tags are two cache lines, which processors fetch together. In a half-full index one key in
100,000 does not fit into its set; with 16 ways it is one in 1,400, and most long prefixes have such a key."""
KEY_WORDS: Final = (2, 4, 8)
"""Words of a key in an index: the smallest that fits its longest key."""
MAX_KEY_BYTES: Final = 8 * KEY_WORDS[-1]
"""Longer keys are not indexed: an entry has its whole key, which rules out false matches."""
SEQUENCE, CHECK, SLOT, OFFSET, SIZE, CHECKSUM, KEY = range(7)
"""Words of an entry; the key begins at the last."""
KEY_BYTES_SHIFT: Final = 32
"""In the size word: value's size below, key's length above."""
SIZE_MASK: Final = (1 << KEY_BYTES_SHIFT) - 1
SLAB_SHIFT: Final = 20
"""In a slot word: slab number above, index within the slab below."""

HAZARDS: Final = 64
HAZARD_SERIAL_SHIFT: Final = 48
HAZARD_SERIALS: Final = 1 << 16
ACCESSES: Final = 32_768
"""More than a client reads between two polls of its node; further accesses are only counted."""
HOLD_WORDS: Final = 16_384
"""A lookup of more blocks than fit gets no hold."""
HOLD_HEADER_WORDS: Final = 3
READER_HEADER_WORDS: Final = 16
(
    AT_READER_MAGIC,
    AT_READER_CLOSED,
    AT_ACCESSES_READ,
    AT_ACCESSES_WRITTEN,
    AT_HAZARDS_USED,
    AT_ACCESSES_LOST,
    AT_HOLDS_READ,
    AT_HOLDS_WRITTEN,
    AT_HOLDS_MISSED,
) = range(9)
"""Words of the header of reader slots."""
AT_HAZARDS: Final = READER_HEADER_WORDS
AT_RING: Final = READER_HEADER_WORDS + HAZARDS
AT_HOLDS: Final = AT_RING + ACCESSES
READER_SLOTS_BYTES: Final = 8 * (AT_HOLDS + HOLD_WORDS)

MASK: Final = (1 << 64) - 1
_FACTORS: Final = (
    0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB,
    0x8EBC6AF09C88C6E3, 0x589965CC75374CC3, 0x1D8E4E27C47D124F, 0xEB44ACCAB455D165, 0x9C6E6877736C46E3, 0x7C3E92D6E1B2F4A5,
    0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53,
)  # fmt: skip
"""Odd 64-bit multipliers (from well-known mixers), one a word."""
_LENGTH_FACTOR: Final = 0x2545F4914F6CDD1D
_ARRAY_FACTORS: Final = np.array(_FACTORS, np.uint64)
_KEY_FORMS: Final = [struct.Struct(f"{count}Q") for count in range(KEY_WORDS[-1] + 1)]
_TWO_WORDS: Final = struct.Struct("2Q")
_TWO_WORDS_START: Final = 16 * _LENGTH_FACTOR & MASK
BODIES: Final = {count: struct.Struct(f"{KEY - 1}Q{8 * count}s") for count in KEY_WORDS}
"""Entries without their sequence, by the words of a key. The sequence is stored separately: pack_into writes zeros
first."""
ENTRIES: Final = {count: struct.Struct(f"{KEY + count}Q") for count in KEY_WORDS}
UP_TO_KEY: Final = [struct.Struct(f"{KEY}Q{key_bytes}s") for key_bytes in range(MAX_KEY_BYTES + 1)]
"""Entries up to the end of the key, by the key's length."""
TAG_BYTES: Final = 4
TAGS: Final = struct.Struct(f"{WAYS * TAG_BYTES}s")
"""The tags of a set as bytes: a search takes a third of the time of one in numbers."""
_HIGH_BITS: Final = 32
_LOW_BITS: Final = 12
"""A tag mixes a hash's high bits, which depend on the whole key, with bits below those that select the set."""
_TAG_MASK: Final = (1 << 8 * TAG_BYTES) - 1


def tags_at(sets: int) -> int:
    """Return the offset of the tags, in bytes."""
    return HEADER_BYTES


def numbers_at(sets: int) -> int:
    """Return the offset of the numbers of entries, in bytes."""
    return HEADER_BYTES + TAG_BYTES * WAYS * sets


def entries_at(sets: int) -> int:
    """Return the offset of the entries, in bytes."""
    return HEADER_BYTES + 2 * TAG_BYTES * WAYS * sets


def index_bytes(sets: int, key_words: int) -> int:
    return entries_at(sets) + 8 * (KEY + key_words) * WAYS * sets


def key_words_for(key_bytes: int) -> int:
    """Return the words of a key of an index for keys of this length, at most MAX_KEY_BYTES."""
    return next(count for count in KEY_WORDS if key_bytes <= 8 * count)


def key_words(key: bytes) -> tuple[int, ...]:
    """Return a key of at most MAX_KEY_BYTES as words, padded with zeros."""
    count = (len(key) + 7) >> 3
    return _KEY_FORMS[count].unpack(key if not len(key) & 7 else key.ljust(8 * count, b"\0"))


def hash_of(key: bytes) -> int:
    """Return the multilinear hash of a key; its high bits, which depend on the whole key, select the set."""
    if len(key) == 16:  # the usual length; takes half as long
        low, high = _TWO_WORDS.unpack(key)
        return int(low * _FACTORS[0] + high * _FACTORS[1] + _TWO_WORDS_START & MASK)
    return int(sum(map(mul, key_words(key), _FACTORS), len(key) * _LENGTH_FACTOR) & MASK)


def hashes_of(words: Words, key_bytes: "int | Words") -> Words:
    """`hash_of` of many keys, an array of shape (keys, words), of one length or of these lengths."""
    lengths = np.uint64(key_bytes * _LENGTH_FACTOR & MASK) if isinstance(key_bytes, int) else key_bytes * np.uint64(_LENGTH_FACTOR)
    found = np.empty(len(words), np.uint64)
    found[:] = lengths
    for column in range(words.shape[1]):
        found += words[:, column] * _ARRAY_FACTORS[column]
    return found


def tag_of(hashed: int) -> int:
    """Return the tag for a hash; neither it nor its lowest byte is 0."""
    return (hashed >> _HIGH_BITS ^ hashed >> _LOW_BITS) & _TAG_MASK | 1


def tag_bytes_of(hashed: int) -> bytes:
    """Return the tag for a hash, as in the bytes of TAGS."""
    return ((hashed >> _HIGH_BITS ^ hashed >> _LOW_BITS) & _TAG_MASK | 1).to_bytes(TAG_BYTES, "little")


def tags_of(hashes: Words) -> Tags:
    """`tag_of` of many hashes."""
    found: Tags = (hashes >> np.uint64(_HIGH_BITS) ^ hashes >> np.uint64(_LOW_BITS)).astype(np.uint32)
    found |= np.uint32(1)
    return found


def words_of(keys: Sequence[bytes], key_bytes: int) -> Words:
    """Return keys of one length as an array of words, of shape (keys, words)."""
    whole = -(-key_bytes // 8) * 8
    joined = b"".join(keys if whole == key_bytes else [key.ljust(whole, b"\0") for key in keys])
    return np.frombuffer(joined, np.uint64).reshape(len(keys), whole // 8)


def check_of(body: Sequence[int]) -> int:
    """Return the check of an entry's words from SLOT on; multilinear, for a vectorised form."""
    return int(sum(map(mul, body, _FACTORS)) & MASK)


def checks_of(entries: Words) -> Words:
    """`check_of` of whole entries, an array of shape (entries, words of an entry)."""
    body: Any = entries[:, SLOT:]
    found: Words = (body * _ARRAY_FACTORS[: body.shape[1]]).sum(axis=1, dtype=np.uint64)
    return found
