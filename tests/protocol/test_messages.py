"""Promises of messages.py and of the modules that it collects: every message is there under its number, its bytes are
those of its vector, it comes back as it was sent, and from any bytes comes a message or ProtocolError.
"""

from array import array

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
from kvstore.protocol.errors import InvalidArgument, ProtocolError
from kvstore.protocol.event_messages import EventBatch
from kvstore.protocol.frames import MAX_BATCH, MAX_BLOB_BYTES, MAX_BODY_BYTES, MAX_KEY_BYTES, VERSION
from kvstore.protocol.handover_messages import MAX_REQUEST_ID_BYTES, ExportRegions, PartReady
from kvstore.protocol.master_messages import MAX_PATTERN_BYTES, Exists, Locations, NodeTable, check_pattern
from kvstore.protocol.message import Message
from kvstore.protocol.messages import MESSAGES, NO_REQUESTS, REPLIES
from kvstore.protocol.session_messages import Flags, Trace
from tests.protocol.samples import VECTORS, check_vector, kinds_of, messages_of, said, sample

MODULES = (session_messages, master_messages, catalog_messages, node_messages, event_messages, handover_messages)
KINDS = [*MESSAGES.values(), *kinds_of(transfers)]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
ANY_MESSAGE = st.sampled_from(KINDS).flatmap(messages_of)


@given(ANY_MESSAGE)
@settings(max_examples=300)
def test_every_message_round_trips(message: Message) -> None:
    assert said(type(message).unpack(message.pack())) == said(message)
    assert said(type(message).unpack(memoryview(bytearray(message.pack())))) == said(message)


@EVERY_KIND
def test_the_bytes_of_a_message_are_those_of_its_vector(kind: type[Message]) -> None:
    check_vector(kind)


@EVERY_KIND
def test_a_message_cut_anywhere_or_too_long_is_refused(kind: type[Message]) -> None:
    data = sample(kind).pack()
    has_rest = kind.FORM[-1:] and kind.FORM[-1][1] == "rest"
    length = len(data) - len(getattr(sample(kind), kind.FORM[-1][0])) if has_rest else len(data)
    for wrong in [data[:end] for end in range(length)] + [data + b"\0"] * (not has_rest):
        with pytest.raises(ProtocolError):
            kind.unpack(wrong)


@given(st.sampled_from(KINDS), st.binary(max_size=200))
@settings(max_examples=500)
def test_garbage_gives_a_message_or_a_protocol_error(kind: type[Message], garbage: bytes) -> None:
    try:
        message = kind.unpack(garbage)
    except ProtocolError:
        return
    assert type(message) is kind


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


def test_every_message_has_a_unique_type_number() -> None:
    kinds = [kind for module in MODULES for kind in kinds_of(module)]
    assert sorted(MESSAGES) == sorted(kind.TYPE for kind in kinds)
    assert set(MESSAGES.values()) == set(kinds)
    assert not set(MESSAGES) & {kind.TYPE for kind in kinds_of(transfers)}
    assert all(1 <= number <= 255 for number in MESSAGES)


def test_answers_and_requests_are_told_apart_by_type() -> None:
    assert set(MESSAGES) > REPLIES
    assert Flags.TYPE in REPLIES
    assert Exists.TYPE not in NO_REQUESTS
    assert NO_REQUESTS - REPLIES == {Trace.TYPE}


def test_the_vectors_are_of_this_protocol_version_and_complete() -> None:
    assert VECTORS["protocol_version"] == VERSION
    assert set(VECTORS["bodies"]) == {kind.__name__ for kind in KINDS}


def test_columns_that_are_not_as_long_as_their_batch_are_refused() -> None:
    for message in (
        NodeTable([1, 2], ["a", "b"], ["h", "h"], ["", ""], ["t"], [1, 2], [b"", b""]),
        EventBatch(1, 0, b"\1", [5], [2], [b"a", b"b"], [1, 2], [b""]),
    ):
        with pytest.raises(ProtocolError, match="1 entries of a column for a batch of 2"):
            type(message).unpack(message.pack())


def test_the_longest_messages_travel_whole() -> None:
    zeros = array("Q", bytes(8 * MAX_BATCH))
    locations = Locations(bytes([3]) * MAX_BATCH, zeros, zeros, zeros, array("I", [1]) * (3 * MAX_BATCH), bytes(3 * MAX_BATCH))
    assert Locations.unpack(locations.pack()) == locations
    key, count = b"k" * MAX_KEY_BYTES, MAX_BATCH
    batch = EventBatch(1, 0, bytes(count), [0] * count, [1] * count, [key] * count, [1] * count, [key] * count)
    assert len(batch.pack()) <= MAX_BODY_BYTES
    request_id = bytes(range(MAX_REQUEST_ID_BYTES))
    assert PartReady.unpack(PartReady(request_id, 1, 2, 3, 4, 5).pack()).request_id == request_id
    assert [len(region) for region in ExportRegions.unpack(ExportRegions(b"r", [bytes(MAX_BLOB_BYTES)], [3]).pack()).regions] == [
        MAX_BLOB_BYTES
    ]


def test_a_pattern_has_a_longest_length() -> None:
    check_pattern("\u00e9" * (MAX_PATTERN_BYTES // 2))
    with pytest.raises(InvalidArgument, match="1024 bytes long, not 1026"):
        check_pattern("\u00e9" * (MAX_PATTERN_BYTES // 2 + 1))
