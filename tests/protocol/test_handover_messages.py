"""Promises of handover_messages.py: the bytes of its messages, whole request ids, and numbers that are nobody else's."""

import pytest

from kvstore.protocol import handover_messages, transfers
from kvstore.protocol.frames import MAX_BLOB_BYTES
from kvstore.protocol.handover_messages import MAX_REQUEST_ID_BYTES, PULL, PUSH, STREAM, Ask, Part, Show
from kvstore.protocol.message import Message
from kvstore.protocol.messages import REPLIES
from tests.protocol.samples import check_vector, kinds_of

KINDS = kinds_of(handover_messages)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_bytes_of_a_message_are_those_of_its_vector(kind: type[Message]) -> None:
    check_vector(kind)


def test_numbers_are_none_of_the_transfer_engine_and_none_of_an_answer() -> None:
    numbers = {kind.TYPE for kind in KINDS}
    assert numbers == set(range(70, 78))
    assert not numbers & ({kind.TYPE for kind in kinds_of(transfers)} | REPLIES)


def test_the_longest_request_id_travels_whole() -> None:
    request_id = bytes(range(MAX_REQUEST_ID_BYTES))
    assert Part.unpack(Part(request_id, 1, 2, 3, 4, 5).pack()).request_id == request_id


def test_an_ask_says_of_what_it_does_not_use_that_there_is_none() -> None:
    ask = Ask.unpack(Ask(b"r", 100, 16, [7, 8], STREAM, []).pack())
    assert (ask.part_bytes, ask.slots, ask.dp, ask.ticket, list(ask.blocks)) == (0, 0, 0, b"", [7, 8])
    assert len({PUSH, PULL, STREAM}) == 3


def test_a_region_that_an_engine_describes_fits() -> None:
    shown = Show.unpack(Show(b"r", [bytes(MAX_BLOB_BYTES)], [3]).pack())
    assert [len(region) for region in shown.regions] == [MAX_BLOB_BYTES]
