"""Promises of message.py, on a message of the test's own: fields travel in the order of FORM, and only a body of that form is read."""

from array import array
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.message import Ints, Message


@dataclass(slots=True)
class Parcel(Message):
    """Its fields are in another order than its form."""

    TYPE = 250
    FORM = (("weight", "u8"), ("names", "keys"), ("sizes", "u64s"))
    names: list[bytes]
    sizes: Ints
    weight: int = 3


@dataclass(slots=True)
class Grown(Message):
    """Since version 9 it says a colour, too."""

    TYPE = 252
    FORM = (("weight", "u8"), ("names", "keys"), ("colour", "text"))
    SINCE = 9
    FORMER_COLUMNS = ((9, 2),)
    names: list[bytes]
    weight: int = 3
    colour: str = "red"


@dataclass(slots=True)
class GrownTwice(Message):
    """Since version 7 it says a colour, since version 9 a size, too."""

    TYPE = 253
    FORM = (("weight", "u8"), ("colour", "text"), ("size", "u8"))
    SINCE = 9
    FORMER_COLUMNS = ((7, 1), (9, 2))
    weight: int
    colour: str = "red"
    size: int = 5


@dataclass(slots=True)
class Empty(Message):
    TYPE = 251


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=20), st.integers(0, 2**64 - 1))), st.integers(0, 255))
def test_a_message_comes_back_as_it_was(rows: list[tuple[bytes, int]], weight: int) -> None:
    parcel = Parcel([name for name, _ in rows], array("Q", [size for _, size in rows]), weight)
    for body in (parcel.pack(), memoryview(bytearray(parcel.pack()))):
        found = Parcel.unpack(body)
        assert (found.names, list(found.sizes), found.weight) == (parcel.names, list(parcel.sizes), parcel.weight)


def test_a_peer_of_an_older_version_gets_and_gives_the_form_that_it_knows() -> None:
    said = Grown([b"ab"], 7, "blue")
    assert said.pack_for(8) == b"\x07" + b"\1\0\0\0\2\0ab"
    assert said.pack_for(9) == said.pack() == said.pack_for(8) + b"\4\0\0\0blue"
    assert Grown.unpack_of(8, said.pack_for(8)) == Grown([b"ab"], 7, "red")
    assert Grown.unpack_of(9, said.pack()) == Grown.unpack_of(10, said.pack()) == said


def test_a_form_that_has_grown_more_than_once_is_known_in_each_of_its_forms() -> None:
    said = GrownTwice(7, "blue", 9)
    forms = {6: b"\x07", 7: b"\x07\4\0\0\0blue", 8: b"\x07\4\0\0\0blue", 9: b"\x07\4\0\0\0blue\x09"}
    assert {version: said.pack_for(version) for version in forms} == forms
    assert [GrownTwice.unpack_of(version, body) for version, body in forms.items()] == [
        GrownTwice(7),
        GrownTwice(7, "blue"),
        GrownTwice(7, "blue"),
        said,
    ]


def test_of_another_version_than_its_frames_a_body_is_refused() -> None:
    for version, body in ((8, Grown([b"ab"]).pack()), (9, Grown([b"ab"]).pack_for(8))):
        with pytest.raises(ProtocolError):
            Grown.unpack_of(version, body)


def test_what_never_changed_is_the_same_for_every_version() -> None:
    assert Empty().pack_for(0) == Empty().pack()
    assert Empty.unpack_of(0, b"") == Empty()


def test_fields_travel_in_the_order_of_the_form() -> None:
    assert Parcel([b"ab"], [7], 9).pack() == b"\x09" + b"\1\0\0\0\2\0ab" + b"\7" + bytes(7)


def test_defaults_are_sent_like_any_value() -> None:
    assert Parcel.unpack(Parcel([], []).pack()).weight == 3


def test_a_message_without_fields_has_no_bytes() -> None:
    assert Empty().pack() == b""
    assert Empty.unpack(b"") == Empty()


@pytest.mark.parametrize("body", [b"", Parcel([b"ab"], [7]).pack()[:-1], Parcel([b"ab"], [7]).pack() + b"\0"])
def test_a_body_of_another_form_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        Parcel.unpack(body)


def test_the_body_of_a_message_about_one_block_is_made_and_read_without_the_message() -> None:
    body = Parcel([b"ab"], [7], 9).pack()
    assert Parcel.pack_one(9, b"ab", 7) == body
    assert Parcel.unpack_one(body) == [9, b"ab", 7]
    assert Parcel.pack_one(256, b"ab", 7) is None
    assert Parcel.unpack_one(Parcel([b"ab", b"cd"], [7, 8]).pack()) is None
