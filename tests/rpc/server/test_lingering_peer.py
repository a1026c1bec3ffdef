"""Tests of lingering_peer.py: a peer is watched until it closes its end."""

import socket
from collections.abc import Iterator

import pytest

from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.lingering_peer import MAX_READS, READ_BYTES, LingeringPeer


class Ended:
    """This side of a connection that it ends; `gone` are the peers that have closed their end."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        self.ours, self.theirs = socket.socketpair()
        self.gone: list[LingeringPeer] = []

    def linger(self) -> LingeringPeer:
        return LingeringPeer(self.reactor, self.ours, self.gone.append)

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()
        self.reactor.close()


@pytest.fixture
def ended() -> Iterator[Ended]:
    made = Ended()
    yield made
    made.close()


@pytest.mark.promise("slots-not-reused-early")
def test_peer_is_told_of_the_end_and_awaited_until_it_closes(ended: Ended) -> None:
    peer = ended.linger()
    assert ended.theirs.recv(1) == b""
    ended.theirs.sendall(b"of a request that is not served any more")
    ended.reactor.run_once(0)
    assert (peer.is_awaited, ended.gone) == (True, [])
    ended.theirs.close()
    ended.reactor.run_once(0)
    assert (peer.is_awaited, ended.gone, ended.ours.fileno()) == (False, [peer], -1)


def test_peer_that_has_closed_its_end_is_gone_at_once(ended: Ended) -> None:
    ended.theirs.sendall(b"unread")
    ended.theirs.close()
    peer = ended.linger()
    assert (peer.is_awaited, ended.gone, ended.ours.fileno()) == (False, [peer], -1)


def test_peer_that_sends_without_end_gets_a_share_of_each_turn(ended: Ended) -> None:
    ended.ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * MAX_READS * READ_BYTES)
    ended.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MAX_READS * READ_BYTES)
    ended.theirs.setblocking(False)
    sent = 0
    while sent <= (MAX_READS + 1) * 100:
        sent += ended.theirs.send(b"x" * 100)
    peer = ended.linger()
    ended.theirs.close()
    while not ended.gone:
        ended.reactor.run_once(0)
    assert not peer.is_awaited


def test_peer_is_waited_for_no_more_once_closed(ended: Ended) -> None:
    peer = ended.linger()
    peer.close()
    peer.close()
    ended.theirs.close()
    ended.reactor.run_once(0)
    assert ended.gone == []
