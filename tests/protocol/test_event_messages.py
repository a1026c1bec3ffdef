"""Promises of event_messages.py: the bytes of its messages, and that a batch's columns are as long as it."""

import pytest

from kvstore.protocol import event_messages
from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.event_messages import MAX_ANSWER_EVENTS, EventBatch, Events
from kvstore.protocol.frames import MAX_BODY_BYTES, MAX_KEY_BYTES
from kvstore.protocol.message import Message
from tests.protocol.samples import check_vector, kinds_of


@pytest.mark.parametrize("kind", kinds_of(event_messages), ids=lambda kind: kind.__name__)
def test_the_bytes_of_a_message_are_those_of_its_vector(kind: type[Message]) -> None:
    check_vector(kind)


def test_a_question_asks_for_a_full_answer_unless_it_says_less() -> None:
    assert Events.unpack(Events(7).pack()) == Events(7, MAX_ANSWER_EVENTS)


def test_an_answer_without_events_is_one() -> None:
    nothing = EventBatch(9, 3, b"", [], [], [], [], [])
    assert list(EventBatch.unpack(nothing.pack()).keys) == []


def test_parents_that_are_not_as_many_as_the_keys_are_refused() -> None:
    with pytest.raises(ProtocolError, match="1 entries of a column for a batch of 2"):
        EventBatch.unpack(EventBatch(1, 0, b"\1", [5], [2], [b"a", b"b"], [1, 2], [b""]).pack())


def test_a_full_answer_of_the_longest_keys_fits_a_body() -> None:
    key, count = b"k" * MAX_KEY_BYTES, 65_536
    batch = EventBatch(1, 0, bytes(count), [0] * count, [1] * count, [key] * count, [1] * count, [key] * count)
    assert len(batch.pack()) <= MAX_BODY_BYTES
