"""Promises of answering.py beside those of test_session.py: what is said of a connection that is gone."""

import socket

from kvstore.protocol.errors import Full
from kvstore.protocol.session_messages import SERVER_NODE, Ok, Welcome
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.session import Session
from tests.rpc.wires import Recorder, Replies, read_frame


def test_by_a_connection_that_is_gone_nothing_is_said_and_pins_are_let_go() -> None:
    mine, peer = socket.socketpair()
    reactor = Reactor()
    session = Session(reactor, mine, Recorder())
    session.reply(1, Ok())
    assert read_frame(peer)[0].request_id == 1
    session.fail(0, Full("nobody can be told"))
    session.close()
    let_go: list[int] = []
    session.reply(2, Ok(), on_sent=lambda: let_go.append(2))
    session.reply(3, Ok())
    session.welcome(4, Welcome(SERVER_NODE, "n"))
    session.fail(5, Full("no room"))
    session.send_whole(b"frame")
    replies = Replies()
    session.request(Ok(), replies, deadline_s=1)
    assert let_go == [2]
    assert [str(error) for error in replies.errors] == ["the connection is closed"]
    assert session.span(6) is None
    assert peer.recv(1) == b""
    peer.close()
    reactor.close()
