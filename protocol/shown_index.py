"""The index that a node shows to the clients of its host, and the desk at which each of them sits: their form in shared memory.

A node keeps one index a tenant: which keys have a copy in DRAM, and where. It alone writes it, clients map it read-only and find
blocks without asking. It is set-associative: a key's hash names a set of WAYS entries, and it may miss, for the way over the node is always
there. All words are 64 bits wide, in the host's byte order, and aligned, so that a store of one is never seen torn.

    header     HEADER_BYTES  MAGIC, sets, heartbeat (CLOCK_MONOTONIC, ns), is_over, slabs given up
    tags       sets x WAYS words: the hash of the key that the entry shows, 0 for none
    entries    sets x WAYS x ENTRY_WORDS words: sequence, check, slab | key bytes << 32, offset, size, generation, xxh3_64 of the value,
               slot, and the key in KEY_WORDS words, filled up with zeros

An entry's sequence is odd while it shows nothing and rises at every change. A reader takes the sequence, then the rest, then the value, and
then the sequence again: the same even number both times says that the slot was not given to another block in between, because a node
hides an entry before its slot can be used again. x86-64 keeps loads and stores in these orders; elsewhere the check of the entry and
the checksum of the value tell (docs/internals.md).

A desk is written by its client and read by the node. It belongs to one connection and ends with it.

    header     DESK_WORDS    MAGIC; is_over and accesses taken, set by the node; accesses written and lost, and hazards in
               use, by the client
    hazards    HAZARDS words: slot + 1 of each value that the client is looking at, which must not be reused meanwhile | a number that tells
               this look from the next one << LOOK_SHIFT
    accesses   ACCESSES words, a ring: entry | the low half of its sequence << 32
"""

import platform
import struct
from collections.abc import Sequence
from operator import mul
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

ORDERED: Final = platform.machine() in ("x86_64", "AMD64")
"""Whether the processor keeps loads in order, and stores: then entries need no checks, and have none."""
MAGIC: Final = 0x31_58_44_4E_49_56_4B_53
"""Changes with the form."""
HEADER_BYTES: Final = 4096
AT_MAGIC, AT_SETS, AT_HEARTBEAT, AT_IS_OVER, AT_SLABS_GONE = range(5)
"""Words of an index's header."""

WAYS: Final = 16
"""A set's tags are two lines of the cache, which processors fetch together. Of an index that is 0.4 full one key in
twelve thousand finds no place; with 8 it is one in four hundred, and most long prefixes have such a key."""
KEY_WORDS: Final = 8
MAX_KEY_BYTES: Final = 8 * KEY_WORDS
"""Longer keys are not shown: an entry holds its key whole, so that no other key's bytes are ever taken for it."""
ENTRY_WORDS: Final = 16
ENTRY_BYTES: Final = 8 * ENTRY_WORDS
SEQUENCE, CHECK, PLACE, OFFSET, SIZE, GENERATION, CHECKSUM, SLOT, KEY = range(9)
"""Words of an entry; the key begins at the last."""
KEY_BYTES_SHIFT: Final = 32
"""In the word of the place: the slab below, the key's length above."""

HAZARDS: Final = 64
LOOK_SHIFT: Final = 48
LOOK_NUMBERS: Final = 1 << 16
ACCESSES: Final = 32_768
"""What a client reads between two looks of its node fits; of what is beyond it only the number is known."""
DESK_WORDS: Final = 8
AT_DESK_MAGIC, AT_DESK_OVER, AT_TAKEN, AT_ACCESSES, AT_HAZARDS_USED, AT_LOST = range(6)
"""Words of a desk's header."""
AT_HAZARDS: Final = DESK_WORDS
AT_RING: Final = DESK_WORDS + HAZARDS
DESK_BYTES: Final = 8 * (AT_RING + ACCESSES)

MASK: Final = (1 << 64) - 1
_FACTORS: Final = (
    0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F, 0xE7037ED1A0B428DB,
    0x8EBC6AF09C88C6E3, 0x589965CC75374CC3, 0x1D8E4E27C47D124F, 0xEB44ACCAB455D165, 0x9C6E6877736C46E3, 0x7C3E92D6E1B2F4A5,
    0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53,
)  # fmt: skip
"""Odd numbers of 64 bits (from the well-known mixers), one a word."""
_LENGTH_FACTOR: Final = 0x2545F4914F6CDD1D
_ARRAY_FACTORS: Final = np.array(_FACTORS, np.uint64)
_KEY_FORMS: Final = [struct.Struct(f"{count}Q") for count in range(KEY_WORDS + 1)]
_TWO_WORDS: Final = struct.Struct("2Q")
_TWO_WORDS_START: Final = 16 * _LENGTH_FACTOR & MASK
_CHECKED: Final = slice(PLACE, ENTRY_WORDS)
BODY: Final = struct.Struct(f"{KEY - 1}Q{MAX_KEY_BYTES}s")
"""An entry without its sequence, which is stored by itself: pack_into writes zeros first."""
ENTRY: Final = struct.Struct(f"{ENTRY_WORDS}Q")
UP_TO_KEY: Final = [struct.Struct(f"{KEY}Q{key_bytes}s") for key_bytes in range(MAX_KEY_BYTES + 1)]
"""An entry up to the end of its key, by the key's length."""
TAGS: Final = struct.Struct(f"{WAYS}Q")


def tags_at(sets: int) -> int:
    """Where the tags begin, in bytes."""
    return HEADER_BYTES


def entries_at(sets: int) -> int:
    """Where the entries begin, in bytes."""
    return HEADER_BYTES + 8 * WAYS * sets


def index_bytes(sets: int) -> int:
    return entries_at(sets) + ENTRY_BYTES * WAYS * sets


def key_words(key: bytes) -> tuple[int, ...]:
    """A key of at most MAX_KEY_BYTES as words, filled up with zeros to whole ones."""
    count = (len(key) + 7) >> 3
    return _KEY_FORMS[count].unpack(key if not len(key) & 7 else key.ljust(8 * count, b"\0"))


def tag_of(key: bytes) -> int:
    """The hash of a key, multilinear: its high bits, which all of the key's reach, name the set. Never 0."""
    if len(key) == 16:  # most are, and this takes half as long
        low, high = _TWO_WORDS.unpack(key)
        return int(low * _FACTORS[0] + high * _FACTORS[1] + _TWO_WORDS_START & MASK | 1)
    return int(sum(map(mul, key_words(key), _FACTORS), len(key) * _LENGTH_FACTOR) & MASK | 1)


def tags_of(words: Words, key_bytes: int) -> Words:
    """As `tag_of`, of keys of one length: an array of shape (keys, words)."""
    found = np.full(len(words), key_bytes * _LENGTH_FACTOR & MASK, np.uint64)
    for column in range(words.shape[1]):
        found += words[:, column] * _ARRAY_FACTORS[column]
    found |= np.uint64(1)
    return found


def words_of(keys: Sequence[bytes], key_bytes: int) -> Words:
    """Keys of one length as an array of words of shape (keys, words)."""
    whole = -(-key_bytes // 8) * 8
    joined = b"".join(keys if whole == key_bytes else [key.ljust(whole, b"\0") for key in keys])
    return np.frombuffer(joined, np.uint64).reshape(len(keys), whole // 8)


def check_of(body: Sequence[int]) -> int:
    """What an entry's second word says of those after it (PLACE and on): multilinear, so that numpy does many at once."""
    return int(sum(map(mul, body, _FACTORS)) & MASK)


def checks_of(entries: Words) -> Words:
    """As `check_of`, of whole entries: an array of shape (entries, ENTRY_WORDS)."""
    body: Any = entries[:, _CHECKED]
    found: Words = (body * _ARRAY_FACTORS[: ENTRY_WORDS - PLACE]).sum(axis=1, dtype=np.uint64)
    return found
