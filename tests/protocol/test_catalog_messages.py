"""Promises of catalog_messages.py: the bytes of its messages, and that a batch's columns are as long as it."""

import pytest

from kvstore.protocol import catalog_messages
from kvstore.protocol.catalog_messages import Claim, Drop
from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.message import Message
from tests.protocol.samples import check_vector, kinds_of


@pytest.mark.parametrize("kind", kinds_of(catalog_messages), ids=lambda kind: kind.__name__)
def test_the_bytes_of_a_message_are_those_of_its_vector(kind: type[Message]) -> None:
    check_vector(kind)


def test_parents_that_are_not_as_many_as_the_keys_are_refused() -> None:
    with pytest.raises(ProtocolError, match="1 entries of a column for a batch of 2"):
        Claim.unpack(Claim(1, "t", "", [b"a", b"b"], [1, 2], [3, 4], [b""]).pack())


def test_a_drop_is_not_forced_unless_it_says_so() -> None:
    assert Drop.unpack(Drop(1, "t", [b"a"], [2]).pack()).force == 0
