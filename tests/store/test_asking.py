"""Promises of asking.py: one answer a question, typed, also when the link breaks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.protocol.catalog_messages import Hold
from kvstore.protocol.errors import KVStoreError, ProtocolError, TierFailed, Unavailable
from kvstore.protocol.frames import pack_header
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Count, Failure, Flags
from kvstore.store.asking import ask
from tests.rpc.wires import frame, read_frame
from tests.store.served import TIMEOUT_S, Served, served, until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as node:
        yield node


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (Flags(b"\1"), Flags(b"\1")),
        (Failure(TierFailed.code, "out of order"), TierFailed("out of order")),
        (Count(1), ProtocolError("the master answered a Hold with something else")),
        (None, Unavailable("the connection broke: the peer closed the connection")),
    ],
    ids=["the answer", "an error", "another message", "hangs up"],
)
def test_a_question_is_answered_once(node: Served, answer: Message | None, expected: Message | KVStoreError) -> None:
    master = node.link()
    master.settimeout(TIMEOUT_S)
    answers: list[Flags | KVStoreError] = []
    session = node.service.links.get(0)
    assert session is not None
    node.call(lambda: ask(session, Hold(1, "red", [b"k"]), Flags, answers.append))
    assert read_frame(master)[0].type == Hold.TYPE
    if answer is not None:
        master.sendall(frame(answer))
        until(node, lambda: bool(answers))
    master.close()
    until(node, lambda: not session.is_open)
    assert [(type(one), str(one)) for one in answers] == [(type(expected), str(expected))]


def test_an_answer_that_cannot_be_read_is_one_and_ends_the_link(node: Served) -> None:
    master = node.link()
    answers: list[Flags | KVStoreError] = []
    session = node.service.links.get(0)
    assert session is not None
    node.call(lambda: ask(session, Hold(1, "red", [b"k"]), Flags, answers.append))
    request_id = read_frame(master)[0].request_id
    master.sendall(pack_header(Flags.TYPE, request_id, 1) + b"\xff")
    until(node, lambda: not session.is_open)
    assert [type(one) for one in answers] == [ProtocolError]
    master.close()
