"""Promises of message.py, on a message of the test's own: fields travel in the order of WIRE, and only a body of that
form is read.
"""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.message import U8, Keys, Message, U64s, message


@message
class Parcel(Message):
    """Its fields are in another order than its form."""

    TYPE = 250
    WIRE = ("weight", "names", "sizes")
    names: Keys
    sizes: U64s
    weight: U8 = 3


@message
class Empty(Message):
    TYPE = 251


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=20), st.integers(0, 2**64 - 1))), st.integers(0, 255))
def test_a_message_comes_back_as_it_was(rows: list[tuple[bytes, int]], weight: int) -> None:
    parcel = Parcel([name for name, _ in rows], array("Q", [size for _, size in rows]), weight)
    for body in (parcel.pack(), memoryview(bytearray(parcel.pack()))):
        found = Parcel.unpack(body)
        assert (found.names, list(found.sizes), found.weight) == (parcel.names, list(parcel.sizes), parcel.weight)


def test_fields_travel_in_the_order_of_the_form() -> None:
    assert Parcel([b"ab"], [7], 9).pack() == b"\x09" + b"\1\0\0\0\2\0ab" + b"\7" + bytes(7)


def test_defaults_are_sent_like_any_value() -> None:
    assert Parcel.unpack(Parcel([], []).pack()).weight == 3


def test_a_message_without_fields_has_no_bytes() -> None:
    assert Empty().pack() == b""
    assert Empty.unpack(b"") == Empty()


def test_messages_of_equal_fields_and_one_kind_are_equal() -> None:
    assert Parcel([b"ab"], [7], 9) == Parcel([b"ab"], [7], 9)
    assert Parcel([b"ab"], [7], 9) != Parcel([b"ab"], [8], 9)
    assert Parcel([], []) != Empty()


def test_a_message_shows_its_kind_and_its_fields() -> None:
    assert repr(Parcel([b"ab"], [7], 9)) == "Parcel(names=[b'ab'], sizes=[7], weight=9)"


@pytest.mark.parametrize("body", [b"", Parcel([b"ab"], [7]).pack()[:-1], Parcel([b"ab"], [7]).pack() + b"\0"])
def test_a_body_of_another_form_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        Parcel.unpack(body)
