"""Promises of master_messages.py: the bytes of its messages, and batches as large as a message may be."""

from array import array

import pytest

from kvstore.protocol import master_messages
from kvstore.protocol.errors import InvalidArgument, ProtocolError
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.master_messages import MAX_PATTERN_BYTES, Exists, Locations, Lookup, NodeTable, check_pattern
from kvstore.protocol.message import Message
from tests.protocol.samples import check_vector, kinds_of


@pytest.mark.parametrize("kind", kinds_of(master_messages), ids=lambda kind: kind.__name__)
def test_the_bytes_of_a_message_are_those_of_its_vector(kind: type[Message]) -> None:
    check_vector(kind)


def test_a_full_batch_round_trips() -> None:
    keys = [index.to_bytes(16, "little") for index in range(MAX_BATCH)]
    assert Exists.unpack(Exists(keys).pack()).keys == keys


def test_a_full_batch_with_several_replicas_a_key_round_trips() -> None:
    zeros = array("Q", bytes(8 * MAX_BATCH))
    locations = Locations(bytes([3]) * MAX_BATCH, zeros, zeros, zeros, array("I", [1]) * (3 * MAX_BATCH), bytes(3 * MAX_BATCH))
    assert Locations.unpack(locations.pack()) == locations


def test_a_table_of_nodes_whose_columns_differ_in_length_is_refused() -> None:
    with pytest.raises(ProtocolError, match="1 entries of a column for a batch of 2"):
        NodeTable.unpack(NodeTable([1, 2], ["a", "b"], ["h", "h"], ["", ""], ["t"], [1, 2], [b"", b""]).pack())


def test_defaults_are_sent_like_any_value() -> None:
    assert Lookup.unpack(Lookup([b"k"]).pack()) == Lookup([b"k"], 0)


def test_a_pattern_has_a_longest_length() -> None:
    check_pattern("\u00e9" * (MAX_PATTERN_BYTES // 2))
    with pytest.raises(InvalidArgument, match="1024 bytes long, not 1026"):
        check_pattern("\u00e9" * (MAX_PATTERN_BYTES // 2 + 1))
