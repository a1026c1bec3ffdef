"""The form of a shown index: one key and many have the same hash, and keys of all kinds spread over the sets."""

import os
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.shared_index import (
    BODIES,
    ENTRIES,
    KEY,
    KEY_WORDS,
    MAX_KEY_BYTES,
    READER_SLOTS_BYTES,
    TAG_BYTES,
    TAGS,
    UP_TO_KEY,
    WAYS,
    check_of,
    checks_of,
    entries_at,
    hash_of,
    hashes_of,
    index_bytes,
    key_words,
    key_words_for,
    numbers_at,
    tag_bytes_of,
    tag_of,
    tags_at,
    tags_of,
    words_of,
)

ENTRY_WORDS = KEY + KEY_WORDS[-1]
KEYS = st.binary(min_size=1, max_size=MAX_KEY_BYTES)


@given(KEYS | st.binary(min_size=16, max_size=16))
def test_one_key_and_many_have_the_same_words_and_hash(key: bytes) -> None:
    other = bytes(reversed(key))
    words = words_of([key, other], len(key))
    assert tuple(words[0].tolist()) == key_words(key)
    hashes = hashes_of(words, len(key))
    assert hashes.tolist() == [hash_of(key), hash_of(other)]
    assert tags_of(hashes).tolist() == [tag_of(hash_of(key)), tag_of(hash_of(other))]


@given(st.lists(KEYS, min_size=1))
def test_keys_of_many_lengths_have_the_hashes_of_each(keys: list[bytes]) -> None:
    words = words_of([key.ljust(MAX_KEY_BYTES, b"\0") for key in keys], MAX_KEY_BYTES)
    lengths = np.array([len(key) for key in keys], np.uint64)
    assert hashes_of(words, lengths).tolist() == [hash_of(key) for key in keys]


def test_words_of_a_key_are_the_fewest_that_hold_it() -> None:
    assert [key_words_for(length) for length in (0, 1, 16, 17, 32, 33, MAX_KEY_BYTES)] == [2, 2, 2, 4, 4, 8, 8]


@given(st.binary(min_size=1, max_size=MAX_KEY_BYTES - 1))
def test_a_key_and_itself_with_a_zero_behind_are_two(key: bytes) -> None:
    assert tag_of(hash_of(key)) != tag_of(hash_of(key + b"\0"))


@given(st.integers(0, (1 << 64) - 1))
def test_no_tag_begins_with_a_zero(hashed: int) -> None:
    tag = tag_bytes_of(hashed)
    assert tag[0] != 0
    assert (len(tag), int.from_bytes(tag, "little")) == (TAG_BYTES, tag_of(hashed))


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=ENTRY_WORDS, max_size=ENTRY_WORDS))
def test_one_entry_and_many_have_the_same_check(entry: list[int]) -> None:
    rows = np.array([entry, entry[::-1]], np.uint64)
    assert checks_of(rows).tolist() == [check_of(entry[2:]), check_of(entry[::-1][2:])]


def test_a_check_tells_any_word_from_another() -> None:
    body = list(range(100, 100 + ENTRY_WORDS - 2))
    for at in range(len(body)):
        assert check_of(body) != check_of([*body[:at], body[at] ^ 1, *body[at + 1 :]])


@pytest.mark.parametrize(
    "make",
    [
        lambda i: os.urandom(16),
        lambda i: os.urandom(32),
        lambda i: b"layer-0/block-%08d" % i,
        lambda i: i.to_bytes(8, "little"),
        lambda i: i.to_bytes(8, "big"),
        lambda i: i.to_bytes(16, "big"),
    ],
)
def test_keys_of_all_kinds_spread_over_the_sets(make: Callable[[int], bytes]) -> None:
    keys = [make(i) for i in range(8192)]
    words = words_of(keys, len(keys[0]))
    sets = Counter((hashes_of(words, len(keys[0])) >> np.uint64(64 - 11)).tolist())
    shown = sum(min(count, WAYS) for count in sets.values())
    assert shown >= 0.98 * len(keys)


def test_the_parts_lie_behind_one_another_and_words_are_aligned() -> None:
    for sets in (1, 8, 4096):
        assert tags_at(sets) % 64 == numbers_at(sets) % 64 == entries_at(sets) % 64 == 0
        assert tags_at(sets) + sets * TAGS.size == numbers_at(sets)
        assert numbers_at(sets) + sets * WAYS * TAG_BYTES == entries_at(sets)
        for count in KEY_WORDS:
            assert entries_at(sets) + sets * WAYS * ENTRIES[count].size == index_bytes(sets, count)
    for count in KEY_WORDS:
        assert BODIES[count].size + 8 == ENTRIES[count].size == 8 * (KEY + count)
    assert UP_TO_KEY[MAX_KEY_BYTES].size == ENTRIES[KEY_WORDS[-1]].size
    assert ENTRIES[KEY_WORDS[0]].size == 64
    assert READER_SLOTS_BYTES % 8 == 0
