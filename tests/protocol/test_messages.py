"""Promises of messages.py: every message comes back as it was sent, from any bytes comes a message or ProtocolError, and the bytes
of protocol version 1 are those of vectors.json."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.frames import MAX_BATCH, VERSION
from kvstore.protocol.messages import MESSAGES, REPLIES, Blocks, Exists, Flags, Hello, Locations, Lookup, Message, NodeTable

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
KINDS = list(MESSAGES.values())
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)

INTEGERS = {"u8": st.integers(0, 255), "u32": st.integers(0, 2**32 - 1), "u64": st.integers(0, 2**64 - 1)}
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


def columns(kind: str, count: int) -> st.SearchStrategy[Any]:
    def exactly(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(values, min_size=count, max_size=count)

    return {
        "keys": exactly(st.binary(min_size=1, max_size=40)),
        "parents": exactly(st.binary(max_size=40)),
        "labels": exactly(TEXT),
        "u8s": st.binary(min_size=count, max_size=count),
        "u32s": exactly(INTEGERS["u32"]).map(lambda values: array("I", values)),
        "u64s": exactly(INTEGERS["u64"]).map(lambda values: array("Q", values)),
    }[kind]


@st.composite
def messages_of(draw: st.DrawFn, kind: type[Message]) -> Message:
    count = 0
    fields: dict[str, Any] = {}
    for name, column in kind.FORM:
        if column in ("count", "keys"):
            count = draw(st.integers(0, 5))
        if column == "text":
            fields[name] = draw(TEXT)
        elif column == "texts":
            fields[name] = draw(st.lists(TEXT, max_size=4))
        elif column != "count":
            fields[name] = draw(INTEGERS[column] if column in INTEGERS else columns(column, count))
    return kind(**fields)


ANY_MESSAGE = st.sampled_from(KINDS).flatmap(messages_of)


def sample(kind: type[Message]) -> Message:
    """One message of `kind` with a recognisable value in every field, for the vectors."""
    batch: dict[str, Any] = {
        "keys": [b"key-1", b"key-22"],
        "parents": [b"", b"key-1"],
        "labels": ["one", "two"],
        "u8s": b"\1\0",
        "u32s": array("I", [3, 0x01020304]),
        "u64s": array("Q", [5, 0x0102030405060708]),
    }
    alone = {"u8": 1, "u32": 0x0A0B0C0D, "u64": 0x1112131415161718, "text": "t\u00e9xt", "texts": ["a", "bcd"]}
    return kind(**{name: batch.get(column, alone.get(column)) for name, column in kind.FORM if column != "count"})


@given(ANY_MESSAGE)
@settings(max_examples=300)
def test_every_message_round_trips(message: Message) -> None:
    assert type(message).unpack(message.pack()) == message
    assert type(message).unpack(memoryview(bytearray(message.pack()))) == message


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


def test_a_full_batch_round_trips() -> None:
    keys = [index.to_bytes(16, "little") for index in range(MAX_BATCH)]
    assert Exists.unpack(Exists(keys).pack()).keys == keys


def test_a_full_batch_with_several_replicas_a_key_round_trips() -> None:
    zeros = array("Q", bytes(8 * MAX_BATCH))
    locations = Locations(bytes([3]) * MAX_BATCH, zeros, zeros, zeros, array("I", [1]) * (3 * MAX_BATCH), bytes(3 * MAX_BATCH))
    assert Locations.unpack(locations.pack()) == locations


def test_a_table_of_nodes_whose_columns_differ_in_length_is_refused() -> None:
    with pytest.raises(ProtocolError, match="1 entries of a column for a batch of 2"):
        NodeTable.unpack(NodeTable([1, 2], ["a", "b"], ["h", "h"], ["", ""], ["t"]).pack())


def test_columns_that_follow_a_batch_must_be_as_long() -> None:
    with pytest.raises(ProtocolError):
        Blocks.unpack(Blocks(0, 0, b"\1\1", [1, 2], [1], b"\1\1", [0, 0], [0, 0]).pack())


def test_defaults_are_sent_like_any_value() -> None:
    assert Hello.unpack(Hello(1).pack()) == Hello(1, "", "", "", 0)
    assert Lookup.unpack(Lookup([b"k"]).pack()) == Lookup([b"k"], 0)


def test_answers_and_requests_are_told_apart_by_type() -> None:
    assert set(MESSAGES) > REPLIES
    assert Flags.TYPE in REPLIES
    assert Exists.TYPE not in REPLIES


def test_type_numbers_are_unique_and_fit_a_byte() -> None:
    kinds = Message.__subclasses__()
    assert {kind.TYPE for kind in kinds} == set(MESSAGES)
    assert all(1 <= number <= 255 for number in MESSAGES)


def test_the_vectors_are_of_this_protocol_version_and_complete() -> None:
    assert VECTORS["protocol_version"] == VERSION
    assert set(VECTORS["bodies"]) == {kind.__name__ for kind in KINDS}


@EVERY_KIND
def test_the_bytes_of_a_message_are_those_of_its_vector(kind: type[Message]) -> None:
    """A change of these bytes is a change of the protocol: raise frames.VERSION, then write new vectors."""
    vector = VECTORS["bodies"][kind.__name__]
    assert (kind.TYPE, sample(kind).pack().hex()) == (vector["type"], vector["hex"])
    assert kind.unpack(bytes.fromhex(vector["hex"])) == sample(kind)
