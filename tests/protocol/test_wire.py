"""Promises of wire.py: columns come back as they were written, and no bytes of a peer raise anything but ProtocolError."""

import struct
import tracemalloc
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.frames import MAX_BATCH, MAX_BLOB_BYTES, MAX_COUNT
from kvstore.protocol.wire import VARIABLE, Form, Reader, Writer, pack_blob, pack_keys


class Parcel(NamedTuple):
    keys: list[bytes]
    sizes: "array[int]"
    weight: int


KEYS = st.one_of(
    st.lists(st.binary(min_size=1, max_size=255), max_size=20),
    st.integers(1, 40).flatmap(lambda size: st.lists(st.binary(min_size=size, max_size=size), max_size=300)),
)


@given(st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_scalars_round_trip(u8: int, u32: int, u64: int) -> None:
    reader = Reader(Writer().u8(u8).u32(u32).u64(u64).done())
    assert (reader.u8(), reader.u32(), reader.u64()) == (u8, u32, u64)
    reader.end()


@given(st.binary(max_size=300), st.text(max_size=50))
def test_strings_round_trip(blob: bytes, text: str) -> None:
    data = Writer().blob(blob).text(text).done()
    assert data.startswith(pack_blob(blob))
    reader = Reader(bytearray(data))
    assert (reader.blob(), reader.text()) == (blob, text)


@given(st.lists(st.integers(0, 255)), st.lists(st.integers(0, 2**32 - 1)), st.lists(st.integers(0, 2**64 - 1)))
def test_columns_of_integers_round_trip(u8s: list[int], u32s: list[int], u64s: list[int]) -> None:
    reader = Reader(memoryview(Writer().u8s(bytes(u8s)).u32s(u32s).done() + array("Q", u64s).tobytes()))
    assert list(reader.u8s(len(u8s))) == u8s
    assert reader.u32s(len(u32s)) == array("I", u32s)
    assert reader.u64s(len(u64s)) == array("Q", u64s)
    reader.end()


@given(KEYS)
def test_keys_round_trip_whatever_their_lengths(keys: list[bytes]) -> None:
    for data in (pack_keys(keys), memoryview(pack_keys(keys))):
        reader = Reader(data)
        assert reader.keys() == keys
        reader.end()


@pytest.mark.parametrize("keys", [[b"", b"a", b""], [b"", b""], []])
def test_empty_keys_pass_only_where_they_are_allowed(keys: list[bytes]) -> None:
    assert Reader(pack_keys(keys)).keys(allow_empty=True) == keys
    if keys:
        with pytest.raises(ProtocolError, match=r"1 to 255 bytes"):
            Reader(pack_keys(keys)).keys()


@pytest.mark.parametrize("size", [256, VARIABLE - 1])
def test_a_key_over_255_bytes_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"a key of {size} bytes"):
        Reader(struct.pack("<IH", 1, size) + bytes(size)).keys()


@pytest.mark.parametrize("size", [0, 16, VARIABLE])
def test_a_batch_over_the_limit_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match="over the limit of 65536"):
        Reader(struct.pack("<IH", MAX_BATCH + 1, size)).keys(allow_empty=True)


@pytest.mark.parametrize(
    "read",
    [
        Reader.u8,
        Reader.u32,
        Reader.u64,
        Reader.blob,
        Reader.text,
        Reader.keys,
        lambda reader: reader.u8s(1),
        lambda reader: reader.u32s(1),
        lambda reader: reader.u64s(1),
    ],
)
def test_nothing_is_read_beyond_the_end(read: Callable[[Reader], Any]) -> None:
    with pytest.raises(ProtocolError, match="is too short"):
        read(Reader(b""))


@given(st.binary(max_size=64))
def test_garbage_gives_keys_or_a_protocol_error(garbage: bytes) -> None:
    for allow_empty in (False, True):
        try:
            Reader(garbage).keys(allow_empty=allow_empty)
        except ProtocolError:
            continue


def test_an_announced_length_takes_no_memory() -> None:
    lies = [struct.pack("<I", 2**32 - 1), struct.pack("<IH", MAX_BATCH, 255), struct.pack("<IH", MAX_BATCH, VARIABLE)]
    tracemalloc.start()
    try:
        for lie in lies:
            with pytest.raises(ProtocolError):
                Reader(lie).blob() if len(lie) == 4 else Reader(lie).keys()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(ProtocolError, match="UTF-8"):
        Reader(pack_blob(b"\xff")).text()


def test_bytes_behind_the_last_field_are_refused() -> None:
    with pytest.raises(ProtocolError, match="2 bytes more"):
        Reader(b"ab").end()


class Row:
    """Any object with the attributes of a form will do."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields


EVERY_KIND = Form(
    (
        ("a", "u8"),
        ("c", "u32"),
        ("d", "u64"),
        ("name", "text"),
        ("tags", "texts"),
        ("keys", "keys"),
        ("parents", "parents"),
        ("labels", "labels"),
        ("blobs", "blobs"),
        ("small", "u8s"),
        ("middle", "count"),
        ("middle", "u32s"),
        ("large", "u64s"),
        ("last", "u32"),
    ),
    ("keys", "a", "c", "d", "name", "tags", "parents", "labels", "blobs", "small", "middle", "large", "last"),
)
ROW = Row(
    a=1, c=3, d=4, name="n\u00e9", tags=["x", "", "yy"], keys=[b"k1", b"k2"], parents=[b"", b"p"], labels=["l", "m"],
    blobs=[b"", b"\0" * 300], small=b"\1\2", middle=[7, 8, 9], large=[1, 2, 3], last=6,
)  # fmt: skip


def test_a_form_gives_its_values_in_the_order_of_the_parameters() -> None:
    data = EVERY_KIND.pack(ROW)
    assert data.startswith(struct.pack("<BIQ", 1, 3, 4) + pack_blob("n\u00e9".encode()))
    assert EVERY_KIND.unpack(data) == [
        [b"k1", b"k2"], 1, 3, 4, "n\u00e9", ["x", "", "yy"], [b"", b"p"], ["l", "m"], [b"", bytes(300)],
        b"\1\2", array("I", [7, 8, 9]), array("Q", [1, 2, 3]), 6,
    ]  # fmt: skip


def test_a_blob_over_the_limit_is_refused() -> None:
    form = Form((("keys", "keys"), ("blobs", "blobs")), ("keys", "blobs"))
    assert form.unpack(form.pack(Row(keys=[b"a"], blobs=[bytes(MAX_BLOB_BYTES)])))[1] == [bytes(MAX_BLOB_BYTES)]
    with pytest.raises(ProtocolError, match="a blob of 262145 bytes is over the limit of 262144"):
        form.unpack(form.pack(Row(keys=[b"a"], blobs=[bytes(MAX_BLOB_BYTES + 1)])))


@pytest.mark.parametrize("blobs", [[b""] * 3, [b"", b"", b"x"], [b"\0", b"", b""], []])
def test_empty_blobs_are_lengths_alone(blobs: list[bytes]) -> None:
    form = Form((("keys", "keys"), ("blobs", "blobs"), ("last", "u8")), ("keys", "blobs", "last"))
    keys = [b"%d" % number for number in range(len(blobs))]
    packed = form.pack(Row(keys=keys, blobs=blobs, last=7))
    assert packed.endswith(b"".join(len(blob).to_bytes(4, "little") + blob for blob in blobs) + b"\7")
    assert form.unpack(packed)[1:] == [blobs, 7]
    for size in range(len(form.pack(Row(keys=keys, blobs=[], last=7))) - 1, len(packed)):
        if blobs:
            with pytest.raises(ProtocolError):
                form.unpack(packed[:size])


def test_a_count_over_the_limit_is_refused() -> None:
    form = Form((("ids", "count"), ("ids", "u8s")), ("ids",))
    with pytest.raises(ProtocolError, match="over the limit"):
        form.unpack(struct.pack("<I", MAX_COUNT + 1) + bytes(MAX_COUNT + 1))
