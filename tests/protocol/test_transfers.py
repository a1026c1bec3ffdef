"""Promises of transfers.py: the bytes of its messages, that each comes back as it was sent, and from any bytes one or ProtocolError."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.protocol import transfers
from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.message import Message
from kvstore.protocol.messages import MESSAGES
from kvstore.protocol.transfers import (
    MAX_NOTICE_BYTES,
    MAX_PIECE_BYTES,
    MAX_PIECES,
    MAX_TRANSFER_BODY_BYTES,
    Attach,
    Fetch,
    Notice,
    Store,
)
from tests.protocol.samples import check_vector, kinds_of, messages_of, said, sample

KINDS = kinds_of(transfers)
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@EVERY_KIND
def test_the_bytes_of_a_message_are_those_of_its_vector(kind: type[Message]) -> None:
    check_vector(kind)


@pytest.mark.no_cover
@given(st.sampled_from(KINDS).flatmap(messages_of))
@settings(max_examples=200)
def test_every_message_round_trips(message: Message) -> None:
    assert said(type(message).unpack(memoryview(bytearray(message.pack())))) == said(message)


@EVERY_KIND
def test_a_message_cut_anywhere_or_too_long_is_refused(kind: type[Message]) -> None:
    data = sample(kind).pack()
    for wrong in [data[:end] for end in range(len(data))] + [data + b"\0"]:
        with pytest.raises(ProtocolError):
            kind.unpack(wrong)


@given(st.sampled_from(KINDS), st.binary(max_size=200))
@settings(max_examples=300)
def test_garbage_gives_a_message_or_a_protocol_error(kind: type[Message], garbage: bytes) -> None:
    try:
        message = kind.unpack(garbage)
    except ProtocolError:
        return
    assert type(message) is kind


def test_numbers_are_their_own_and_none_of_the_stores() -> None:
    assert [kind.TYPE for kind in KINDS] == list(range(60, 67))
    assert not MESSAGES.keys() & {kind.TYPE for kind in KINDS}


def test_a_request_to_write_looks_like_one_to_read() -> None:
    columns = [array("Q", [number, 2**64 - 1]) for number in range(4)]
    assert Fetch(*columns).pack() == Store(*columns).pack()


def test_a_body_has_room_for_the_largest_request_and_notification() -> None:
    most = array("Q", [2**64 - 1]) * MAX_PIECES
    assert len(Fetch(most, most, most, most).pack()) <= MAX_TRANSFER_BODY_BYTES
    assert len(Notice(bytes(MAX_NOTICE_BYTES)).pack()) <= MAX_TRANSFER_BODY_BYTES


def test_a_piece_may_be_as_large_as_a_value() -> None:
    assert MAX_PIECE_BYTES >= MAX_VALUE_BYTES


def test_a_descriptor_is_asked_for_to_read_unless_said_otherwise() -> None:
    assert Attach.unpack(Attach(3, 4).pack()) == Attach(3, 4, writable=0)
