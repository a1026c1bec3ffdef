"""Promises of batch_of_one.py: the bytes and values are those that the columns give, and what is no batch of one is
left to them.
"""

import struct
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol import batch_of_one as module
from kvstore.protocol.batch_of_one import BatchOfOne, OnePut, OnePutForm
from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.node_messages import ACK_CLUSTER, ACK_NODE, Put
from kvstore.protocol.wire import Form

KEYED = (("engine", "u8"), ("lease", "u64"), ("keys", "keys"), ("sizes", "u64s"), ("slabs", "u32s"), ("flags", "u8s"))
PUT = (
    ("ack", "u8"),
    ("namespace", "text"),
    ("keys", "keys"),
    ("sizes", "u64s"),
    ("flags", "u8s"),
    ("checksums", "u64s"),
    ("parents", "parents"),
)
"""Much as the message Put."""
COUNTED = (("share", "u64"), ("flags", "count"), ("flags", "u8s"), ("sizes", "u64s"), ("weight", "u8"), ("wait", "u32"))
KEYS = st.binary(min_size=1, max_size=255)
U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
U8 = st.integers(0, 255)


def by_columns(columns: tuple[tuple[str, str], ...]) -> Form:
    """The form as it would be without batches of one."""
    form = Form(columns, [name for name, kind in columns if kind != "count"])
    form.of_one = None
    return form


def row(**values: Any) -> Any:
    return SimpleNamespace(**values)


def plain(values: list[Any]) -> list[Any]:
    """With columns of integers as lists."""
    return [list(value) if isinstance(value, tuple | array) else value for value in values]


def put(*keys: bytes, namespace: str = "ns", parent: bytes = b"", **values: Any) -> Any:
    many = len(keys)
    columns = {"sizes": [4] * many, "flags": bytes(many), "checksums": [5] * many, "parents": [parent] * many}
    return row(ack=1, namespace=namespace, keys=list(keys), **(columns | values))


@given(KEYS, U64, U64, U32, U8)
def test_one_key_is_packed_and_read_as_the_columns_do(key: bytes, lease: int, size: int, slab: int, flag: int) -> None:
    one, columns = BatchOfOne(KEYED), by_columns(KEYED)
    message = row(engine=1, lease=lease, keys=[key], sizes=[size], slabs=array("I", [slab]), flags=bytes([flag]))
    body = one.pack(message)
    assert body == columns.pack(message)
    for data in (body, memoryview(bytearray(body))):
        assert one.unpack(data) == [1, lease, [key], (size,), (slab,), bytes([flag])]
        assert columns.unpack(data) == [1, lease, [key], array("Q", [size]), array("I", [slab]), bytes([flag])]


@given(U8, U64, U8, U32, U64)
def test_one_entry_without_a_key_too(flag: int, size: int, weight: int, wait: int, share: int) -> None:
    one, columns = BatchOfOne(COUNTED), by_columns(COUNTED)
    message = row(share=share, flags=bytearray([flag]), sizes=(size,), weight=weight, wait=wait)
    body = one.pack(message)
    assert body == columns.pack(message)
    assert one.unpack(body) == [share, bytes([flag]), (size,), weight, wait]
    assert columns.unpack(body) == [share, bytes([flag]), array("Q", [size]), weight, wait]


@given(st.text(max_size=60), KEYS, st.binary(max_size=255), U64, U64)
def test_texts_and_parents_too(namespace: str, key: bytes, parent: bytes, size: int, checksum: int) -> None:
    one, columns = BatchOfOne(PUT), by_columns(PUT)
    message = put(key, namespace=namespace, parent=parent, sizes=[size], checksums=[checksum])
    body = one.pack(message)
    assert body == columns.pack(message)
    for data in (body, memoryview(bytearray(body))):
        assert one.unpack(data) == [1, namespace, [key], (size,), b"\0", (checksum,), [parent]]
        assert plain(columns.unpack(data)) == [1, namespace, [key], [size], b"\0", [checksum], [parent]]


@pytest.mark.parametrize(
    "message",
    [
        put(b"k", namespace="n" * 256),
        put(b"k", parent=bytes(256)),
        put(b"k", parents=[]),
        put(b"k", flags=b""),
        put(b"k", flags=[0]),  # the columns take it, too
    ],
)
def test_batch_of_one_leaves_long_or_several_entries_to_columns(message: Any) -> None:
    assert BatchOfOne(PUT).pack(message) is None


@pytest.mark.parametrize(
    "body",
    [
        by_columns(PUT).pack(put()),
        by_columns(PUT).pack(put(b"a", b"b")),
        by_columns(PUT).pack(put(b"a", b"longer")),
        by_columns(PUT).pack(put(b"a", namespace="x" * 256)),
        by_columns(PUT).pack(put(b"a", parents=[b"b", b"c"])),
        by_columns(PUT).pack(put(b"a", parent=bytes(256))),
        by_columns(PUT).pack(put(b"a")).replace(b"ns", b"\xff\xff"),
        by_columns(PUT).pack(put(b"")),
    ],
)
def test_other_bodies_with_texts_and_parents_are_not_read(body: bytes) -> None:
    assert BatchOfOne(PUT).unpack(body) is None


def test_layouts_of_lengths_that_a_peer_chooses_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LAYOUTS", 4)
    one = BatchOfOne(PUT)
    for length in range(1, 20):
        body = one.pack(put(bytes(length), parent=bytes(length)))
        assert body is not None
        assert one.unpack(body) is not None
        assert len(one._layouts) <= 4


@pytest.mark.parametrize("columns", [KEYED, COUNTED, PUT])
def test_bytes_of_another_form_are_not_read(columns: tuple[tuple[str, str], ...]) -> None:
    message = row(
        engine=0,
        lease=0,
        keys=[b"k"],
        sizes=[5],
        slabs=[6],
        flags=b"\1",
        share=0,
        weight=1,
        wait=2,
        ack=1,
        namespace="ns",
        checksums=[9],
        parents=[b"p"],  # of all forms
    )
    one = BatchOfOne(columns)
    body = one.pack(message)
    assert body is not None
    for wrong in [body[:end] for end in range(len(body))] + [body + b"\0"]:
        assert one.unpack(wrong) is None
        with pytest.raises(ProtocolError):
            by_columns(columns).unpack(wrong)
    at = body.index(struct.pack("<I", 1), 1)  # the batch's length
    assert one.unpack(body[:at] + struct.pack("<I", 2) + body[at + 4 :]) is None


@given(st.binary(max_size=80))
def test_garbage_is_read_as_the_columns_read_it_or_not_at_all(garbage: bytes) -> None:
    for columns in (KEYED, COUNTED, PUT):
        values = BatchOfOne(columns).unpack(garbage)
        if values is not None:
            assert repr(plain(values)) == repr(plain(by_columns(columns).unpack(garbage)))


@pytest.mark.parametrize(
    "columns",
    [
        (("keys", "keys"),),
        (("labels", "labels"), ("keys", "keys")),
        (("parents", "parents"), ("keys", "keys")),
        (("a", "count"), ("a", "u8s"), ("b", "count"), ("b", "u8s")),
        (("value", "u64"), ("other", "u8")),
        (("a", "count"), ("b", "u8s")),
    ],
)
def test_batch_of_one_does_not_suit_texts_or_several_batches(columns: tuple[tuple[str, str], ...]) -> None:
    assert not BatchOfOne.suits(columns)
    assert BatchOfOne.suits(KEYED)
    assert BatchOfOne.suits(COUNTED)
    assert BatchOfOne.suits(PUT)


PUTS = st.builds(
    OnePut,
    st.sampled_from((ACK_CLUSTER, ACK_NODE)),
    st.text(max_size=20),
    st.binary(min_size=1, max_size=255),
    U64,
    U64,
    st.binary(max_size=255),
)


def as_message(put: OnePut, generation: int = 0) -> bytes:
    return Put(put.namespace, [put.key], [put.size_bytes], [generation], [put.checksum], [put.parent], put.ack).pack()


@given(PUTS)
def test_the_body_is_that_of_the_message_and_says_the_same(put: OnePut) -> None:
    form = OnePutForm()
    body = form.pack(*put)
    assert body == as_message(put)
    assert form.unpack(body) == form.unpack(memoryview(body)) == put


@pytest.mark.parametrize(
    "put",
    [
        OnePut(1, "n" * 256, b"key", 1, 1, b""),
        OnePut(1, "\ud800", b"key", 1, 1, b""),
        OnePut(1, "", b"", 1, 1, b""),
        OnePut(1, "", b"k" * 256, 1, 1, b""),
        OnePut(1, "", b"key", 1, 1, b"p" * 256),
    ],
)
def test_what_fits_into_no_field_is_left_to_the_message(put: OnePut) -> None:
    assert OnePutForm().pack(*put) is None


@given(PUTS, st.integers(0, 200), st.integers(0, 255))
def test_of_any_bytes_it_reads_what_the_message_reads_or_nothing(put: OnePut, at: int, byte: int) -> None:
    """One byte of a good body is another."""
    body = bytearray(as_message(put))
    body[at % len(body)] = byte
    found = OnePutForm().unpack(body)
    try:
        message = Put.unpack(body)
    except ProtocolError:
        assert found is None
        return
    if found is not None:
        assert as_message(found) == bytes(body)
        assert list(message.generations) == [0]
        assert message.keys == [found.key]


def test_one_put_leaves_several_or_reserved_blocks_to_message() -> None:
    several = Put("ns", [b"a", b"b"], [1, 1], [0, 0], [1, 1], [b"", b""]).pack()
    assert OnePutForm().unpack(several) is None
    one = OnePut(1, "ns", b"key", 1, 1, b"")
    assert OnePutForm().unpack(as_message(one, generation=7)) is None
    assert OnePutForm().unpack(as_message(one)) == one
    assert OnePutForm().unpack(as_message(one)[:41]) is None
    no_text = bytearray(as_message(one))
    no_text[5] = 0xFF
    assert OnePutForm().unpack(no_text) is None
    two_parents = bytearray(as_message(one))
    two_parents[-6] = 2
    assert OnePutForm().unpack(two_parents) is None
    long_text = bytearray(as_message(one))
    long_text[2] = 1
    assert OnePutForm().unpack(long_text) is None
    no_key = bytearray(as_message(one))
    no_key[11:13] = b"\0\0"
    assert OnePutForm().unpack(no_key) is None
