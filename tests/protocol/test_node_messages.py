"""Promises of node_messages.py: the bytes of its messages, and that a batch's columns are as long as it."""

import pytest

from kvstore.protocol import node_messages
from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import Blocks, Slabs
from tests.protocol.samples import check_vector, kinds_of


@pytest.mark.parametrize("kind", kinds_of(node_messages), ids=lambda kind: kind.__name__)
def test_the_bytes_of_a_message_are_those_of_its_vector(kind: type[Message]) -> None:
    check_vector(kind)


def test_columns_that_follow_a_batch_must_be_as_long() -> None:
    with pytest.raises(ProtocolError):
        Blocks.unpack(Blocks(0, 0, 0, b"\1\1", [1, 2], [1], b"\1\1", [0, 0], [0, 0]).pack())


def test_slabs_are_read_only_unless_asked_for_otherwise() -> None:
    assert Slabs.unpack(Slabs([1]).pack()).writable == 0
