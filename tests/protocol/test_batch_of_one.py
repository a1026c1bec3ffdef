"""Promises of batch_of_one.py: the bytes and values are those that the columns give, and what is no batch of one is left to them."""

import struct
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.batch_of_one import BatchOfOne
from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.wire import Form

KEYED = (("engine", "u8"), ("lease", "u64"), ("keys", "keys"), ("sizes", "u64s"), ("slabs", "u32s"), ("flags", "u8s"))
COUNTED = (("share", "f64"), ("flags", "count"), ("flags", "u8s"), ("sizes", "u64s"), ("weight", "u16"), ("wait", "u32"))
U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
U8 = st.integers(0, 255)


def by_columns(columns: tuple[tuple[str, str], ...]) -> Form:
    """The form as it would be without batches of one."""
    form = Form(columns, [name for name, kind in columns if kind != "count"])
    form._of_one = None
    return form


def row(**values: Any) -> Any:
    return SimpleNamespace(**values)


def plain(values: list[Any]) -> list[Any]:
    """With columns of integers as lists."""
    return [list(value) if isinstance(value, tuple | array) else value for value in values]


@given(st.binary(min_size=1, max_size=255), U64, U64, U32, U8)
def test_one_key_is_packed_and_read_as_the_columns_do(key: bytes, lease: int, size: int, slab: int, flag: int) -> None:
    one, columns = BatchOfOne(KEYED), by_columns(KEYED)
    message = row(engine=1, lease=lease, keys=[key], sizes=[size], slabs=array("I", [slab]), flags=bytes([flag]))
    body = one.pack(message)
    assert body == columns.pack(message)
    for data in (body, memoryview(bytearray(body))):
        assert one.unpack(data) == [1, lease, [key], (size,), (slab,), bytes([flag])]
        assert columns.unpack(data) == [1, lease, [key], array("Q", [size]), array("I", [slab]), bytes([flag])]


@given(U8, U64, st.integers(0, 65535), U32, st.floats(allow_nan=False))
def test_one_entry_without_a_key_too(flag: int, size: int, weight: int, wait: int, share: float) -> None:
    one, columns = BatchOfOne(COUNTED), by_columns(COUNTED)
    message = row(share=share, flags=bytearray([flag]), sizes=(size,), weight=weight, wait=wait)
    body = one.pack(message)
    assert body == columns.pack(message)
    assert one.unpack(body) == [share, bytes([flag]), (size,), weight, wait]
    assert columns.unpack(body) == [share, bytes([flag]), array("Q", [size]), weight, wait]


@pytest.mark.parametrize("keys", [[], [b"a", b"b"], [bytes(256)]])
def test_other_numbers_of_keys_and_keys_too_long_are_left_to_the_columns(keys: list[bytes]) -> None:
    count = len(keys)
    message = row(engine=0, lease=0, keys=keys, sizes=[5] * count, slabs=[6] * count, flags=bytes(count))
    assert BatchOfOne(KEYED).pack(message) is None


def test_a_number_that_fits_into_no_column_is_left_to_them(  # who say which
) -> None:
    message = row(engine=0, lease=0, keys=[b"k"], sizes=[-1], slabs=[0], flags=b"\0")
    assert BatchOfOne(KEYED).pack(message) is None
    with pytest.raises(OverflowError):
        Form(KEYED, ["engine", "lease", "keys", "sizes", "slabs", "flags"]).pack(message)


@pytest.mark.parametrize("keys", [[], [b"a", b"b"], [b"one", b"three"], [b""]])
def test_bodies_of_other_batches_are_not_read(keys: list[bytes]) -> None:
    count = len(keys)
    message = row(engine=0, lease=0, keys=keys, sizes=[5] * count, slabs=[6] * count, flags=bytes(count))
    assert BatchOfOne(KEYED).unpack(by_columns(KEYED).pack(message)) is None
    counted = row(share=0.5, flags=bytes(count), sizes=[7] * count, weight=1, wait=2)
    assert count == 1 or BatchOfOne(COUNTED).unpack(by_columns(COUNTED).pack(counted)) is None


@pytest.mark.parametrize("columns", [KEYED, COUNTED])
def test_bytes_of_another_form_are_not_read(columns: tuple[tuple[str, str], ...]) -> None:
    message = row(
        engine=0,
        lease=0,
        keys=[b"k"],
        sizes=[5],
        slabs=[6],
        flags=b"\1",
        share=0.0,
        weight=1,
        wait=2,  # of both forms
    )
    one = BatchOfOne(columns)
    body = one.pack(message)
    assert body is not None
    for wrong in [body[:end] for end in range(len(body))] + [body + b"\0"]:
        assert one.unpack(wrong) is None
        with pytest.raises(ProtocolError):
            by_columns(columns).unpack(wrong)
    at = body.index(struct.pack("<I", 1), 1)
    assert one.unpack(body[:at] + struct.pack("<I", 2) + body[at + 4 :]) is None


@given(st.binary(max_size=80))
def test_garbage_is_read_as_the_columns_read_it_or_not_at_all(garbage: bytes) -> None:
    for columns in (KEYED, COUNTED):
        values = BatchOfOne(columns).unpack(garbage)
        if values is not None:
            assert repr(plain(values)) == repr(plain(by_columns(columns).unpack(garbage)))


@pytest.mark.parametrize(
    "columns",
    [
        (("keys", "keys"),),
        (("name", "text"), ("keys", "keys")),
        (("keys", "keys"), ("parents", "parents")),
        (("a", "count"), ("a", "u8s"), ("b", "count"), ("b", "u8s")),
        (("value", "u64"), ("other", "u8")),
    ],
)
def test_forms_with_texts_or_several_batches_or_none_are_not_suited(columns: tuple[tuple[str, str], ...]) -> None:
    assert not BatchOfOne.suits(columns)
    assert BatchOfOne.suits(KEYED)
    assert BatchOfOne.suits(COUNTED)
