"""Promises of messages.py: it has every message under its number, each of them comes back as it was sent, and from any bytes comes a
message or ProtocolError."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.protocol import (
    catalog_messages,
    event_messages,
    handover_messages,
    master_messages,
    node_messages,
    session_messages,
    transfers,
)
from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.frames import VERSION
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.message import Message
from kvstore.protocol.messages import MESSAGES, NO_REQUESTS, REPLIES
from kvstore.protocol.session_messages import Flags, Trace
from tests.protocol.samples import VECTORS, kinds_of, messages_of, said, sample

KINDS = list(MESSAGES.values())
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
ANY_MESSAGE = st.sampled_from(KINDS).flatmap(messages_of)


@pytest.mark.no_cover
@given(ANY_MESSAGE)
@settings(max_examples=300)
def test_every_message_round_trips(message: Message) -> None:
    assert said(type(message).unpack(message.pack())) == said(message)
    assert said(type(message).unpack(memoryview(bytearray(message.pack())))) == said(message)


@EVERY_KIND
def test_a_message_cut_anywhere_is_refused(kind: type[Message]) -> None:
    data = sample(kind).pack()
    for end in range(len(data)):
        with pytest.raises(ProtocolError):
            kind.unpack(data[:end])


@EVERY_KIND
def test_a_message_with_more_bytes_than_its_form_is_refused(kind: type[Message]) -> None:
    with pytest.raises(ProtocolError, match="more than its form"):
        kind.unpack(sample(kind).pack() + b"\0")


@given(st.sampled_from(KINDS), st.binary(max_size=200))
@settings(max_examples=500)
def test_garbage_gives_a_message_or_a_protocol_error(kind: type[Message], garbage: bytes) -> None:
    try:
        message = kind.unpack(garbage)
    except ProtocolError:
        return
    assert type(message) is kind


@pytest.mark.no_cover
@given(ANY_MESSAGE, st.data())
@settings(max_examples=300)
def test_one_changed_byte_gives_a_message_or_a_protocol_error(message: Message, data: st.DataObject) -> None:
    body = bytearray(message.pack())
    if body:
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        try:
            type(message).unpack(body)
        except ProtocolError:
            return


def test_every_message_of_every_plane_is_there_under_a_number_of_its_own() -> None:
    modules = (session_messages, master_messages, catalog_messages, node_messages, event_messages, handover_messages)
    kinds = [kind for module in modules for kind in kinds_of(module)]
    assert KINDS == kinds
    assert [kind.TYPE for kind in kinds] == list(MESSAGES)
    assert all(1 <= number <= 255 for number in MESSAGES)


def test_answers_and_requests_are_told_apart_by_type() -> None:
    assert set(MESSAGES) > REPLIES
    assert Flags.TYPE in REPLIES
    assert Exists.TYPE not in NO_REQUESTS
    assert NO_REQUESTS - REPLIES == {Trace.TYPE}


def test_the_vectors_are_of_this_protocol_version_and_complete() -> None:
    assert VECTORS["protocol_version"] == VERSION
    assert set(VECTORS["bodies"]) == {kind.__name__ for kind in KINDS + kinds_of(transfers)}
