"""Promises of session_messages.py: the bytes of its messages, and that what is left out is sent as its default."""

import pytest

from kvstore.protocol import session_messages
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import ROLE_CLIENT, SERVER_NODE, Hello, Welcome
from tests.protocol.samples import check_vector, kinds_of


@pytest.mark.parametrize("kind", kinds_of(session_messages), ids=lambda kind: kind.__name__)
def test_the_bytes_of_a_message_are_those_of_its_vector(kind: type[Message]) -> None:
    check_vector(kind)


def test_defaults_are_sent_like_any_value() -> None:
    assert Hello.unpack(Hello(ROLE_CLIENT).pack()) == Hello(ROLE_CLIENT, "", "", "", 0)
    assert Welcome.unpack(Welcome(SERVER_NODE, "node-1").pack()) == Welcome(SERVER_NODE, "node-1", 0, 0, "", "", "", "")
