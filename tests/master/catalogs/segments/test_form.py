"""Tests of form.py: what a segment says comes back, byte for byte, in few bytes; what is damaged is refused."""

import contextlib
import random

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.master.catalogs.interface import BlockDeletes, BlockPuts, Op
from kvstore.master.catalogs.segments.form import MAX_SEGMENT_BYTES, Blocks, Row, cut, decode, encode, head, replay
from kvstore.protocol.errors import Corrupt

U64 = st.one_of(st.integers(0, 300), st.integers(0, (1 << 64) - 1))
KEY = st.binary(min_size=1, max_size=20)
ROW = st.tuples(
    U64, U64, U64, st.text(max_size=5), st.one_of(st.just(b""), KEY), st.lists(st.integers(0, (1 << 32) - 1), max_size=3).map(tuple)
)
BLOCKS = st.dictionaries(st.text(max_size=9), st.dictionaries(KEY, st.none() | ROW, min_size=1, max_size=30), max_size=3)


def rows(drawn: dict[str, dict[bytes, tuple[object, ...] | None]]) -> Blocks:
    return {tenant: {key: row and (key, *row) for key, row in found.items()} for tenant, found in drawn.items()}  # type: ignore[misc]


def again(value: bytes) -> Blocks:
    found: Blocks = {}
    replay(found, decode(value, b"s/name").changes)
    return found


@given(BLOCKS, st.booleans())
def test_what_a_segment_says_comes_back(drawn: dict[str, dict[bytes, tuple[object, ...] | None]], merged: bool) -> None:
    blocks = rows(drawn)
    value = encode(blocks, merged=merged)
    assert again(value) == blocks
    assert head(value, b"s/name") == decode(value, b"s/name")[:2] == (merged, sum(map(len, blocks.values())))


def test_the_form_is_as_the_module_says_byte_for_byte() -> None:
    value = encode(
        {"red": {b"gone": None, b"k1": (b"k1", 100, 7, 1000, "ns", b"", (1,)), b"k2": (b"k2", 100, 9, 1300, "ns", b"k1", (1,))}},
        merged=True,
    )
    rest = bytes.fromhex(
        "01 01 0200 03000000"  # version, flags, sections, operations
        "00 03 01000000"
        + b"red".hex()
        + "00 0400000000000000"
        + b"gone".hex()  # deletions
        + "01 03 02000000"
        + b"red".hex()
        + "00 0200000000000000"
        + b"k1k2".hex()  # puts: keys
        + "00 6400000000000000"  # sizes
        "01 0700000000000000 00 02"  # checksums
        "02 e803000000000000 0000 2c01"  # generations
        "01000000 00 0200000000000000" + b"ns".hex() + "00 0000000000000000"  # namespaces
        "00000000 00 0000000000000000 01 0000000000000000 00 01"  # parents: no others; none, the first key
        "01000000 00 0100000000000000 00 0100000000000000 00 0000000000000000"  # holders: one set of one node, 1
    )
    assert value == xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest


def typical(count: int, *, parents: str) -> Blocks:
    """Blocks of prompts as nodes report them: keys are hashes, generations follow one another, two nodes hold them."""
    rng = random.Random(1)
    keys = [rng.randbytes(16) for _block in range(count)]
    found: dict[bytes, Row | None] = {}
    for at, key in enumerate(keys):
        parent = {"elsewhere": rng.randbytes(16), "here": keys[at - 1], "none": b""}[parents]
        found[key] = (key, 131_072, rng.getrandbits(64), (1 << 60) + 3 * at, "model", parent, (1 + at % 2,))
    return {"tenant": found}


@pytest.mark.parametrize(("parents", "most_bytes"), [("none", 32), ("here", 34), ("elsewhere", 50)])
def test_a_block_takes_few_bytes(parents: str, most_bytes: int) -> None:
    assert len(encode(typical(1000, parents=parents))) / 1000 <= most_bytes


@pytest.mark.promise("records-durable")
def test_damaged_segment_is_detected_and_named() -> None:
    value = encode({"red": {b"k": (b"k", 1, 2, 3, "ns", b"p", (1, 2)), b"gone": None}})
    for at in range(8 * len(value)):
        damaged = bytearray(value)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(Corrupt, match="s/name"):
            decode(bytes(damaged), b"s/name")
    for size in range(len(value)):
        with pytest.raises(Corrupt, match="s/name"):
            decode(value[:size], b"s/name")


def checked(rest: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest


@given(st.integers(0, 200), st.binary(min_size=1, max_size=9))
def test_invalid_segment_with_valid_checksum_is_bounded(at: int, written: bytes) -> None:
    rest = encode({"red": {b"k": (b"k", 1, 2, 3, "ns", b"p", (1, 2)), b"l": (b"l", 9, 8, 7, "n", b"k", (1,)), b"gone": None}})[8:]
    at %= len(rest)
    with contextlib.suppress(Corrupt):
        decode(checked(rest[:at] + written + rest[at + len(written) :]), b"s/name")


HEADER = "01 00 0100 01000000"


@pytest.mark.parametrize(
    "rest",
    [
        "02 00 0000 00000000",  # another version
        "01 00 0000 00000000 00",  # what follows the end
        "01 00 0000 01000000",  # operations that are not there
        HEADER + "02 00 01000000 00 0100000000000000 6b",  # a section of another kind
        HEADER + "00 01 01000000 ff 00 0100000000000000 6b",  # a tenant that is no text
        HEADER + "00 00 01000000 03 0100000000000000 000000 6b",  # integers of three bytes
        HEADER + "00 00 ffffffff 00 0000000000000000",  # more entries than there are bytes
        HEADER + "00 00 01000000 08 ffffffffffffffff ffffffffffffffff",  # a text longer than there are bytes
    ],
)
def test_what_no_release_wrote_is_refused(rest: str) -> None:
    with pytest.raises(Corrupt, match="s/name"):
        decode(checked(bytes.fromhex(rest)), b"s/name")


def test_parts_fit_a_segment_and_lose_nothing() -> None:
    blocks = typical(40_000, parents="elsewhere") | {"other": dict.fromkeys(number.to_bytes(200, "big") for number in range(9_000))}
    parts = list(cut(blocks))
    assert len(parts) > 5
    assert all(len(encode(part)) <= MAX_SEGMENT_BYTES for part in parts)
    found: Blocks = {}
    for part in parts:
        for tenant, rows in part.items():
            assert rows
            found.setdefault(tenant, {}).update(rows)
    assert found == blocks
    assert list(cut({})) == list(cut({"red": {}})) == []


@pytest.mark.parametrize("name_bytes", [5, 128])
def test_parts_of_many_small_tenants_fit_a_segment(name_bytes: int) -> None:
    names = [f"{number:05}".ljust(name_bytes, "x") for number in range(9_000)]
    [put], deletion = typical(1, parents="elsewhere").values(), dict[bytes, Row | None].fromkeys([b"a"])
    for rows in (put, deletion, put | deletion):
        parts = list(cut(dict.fromkeys(names, rows)))
        assert [name for part in parts for name in part] == names
        assert all(len(encode(part)) <= MAX_SEGMENT_BYTES for part in parts)


def test_a_block_larger_than_a_part_is_a_part_of_its_own() -> None:
    many = tuple(range(MAX_SEGMENT_BYTES // 4 + 1))
    large = {b"a": (b"a", 1, 1, 1, "", b"", many), b"b": (b"b", 1, 1, 1, "", b"", many), b"c": None}
    assert [sorted(part["red"]) for part in cut({"red": large})] == [[b"a"], [b"b"], [b"c"]]
    assert [[*part] for part in cut({"red": {b"a": large[b"a"]}, "blue": {b"b": large[b"b"]}})] == [["red"], ["blue"]]


def test_replaying_takes_blocks_only_and_the_last_word_counts() -> None:
    blocks: Blocks = {}
    replay(blocks, [BlockPuts("red", [b"k"], [1], [2], [3], ["n"], [b""], [(1,)]), Op(b"x", b""), BlockDeletes("red", [b"k", b"l"])])
    assert blocks == {"red": {b"k": None, b"l": None}}
