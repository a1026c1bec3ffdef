"""Promises of arriving.py; test_session.py has what holds on a connection."""

import socket
from collections.abc import Iterator

import pytest

from kvstore.protocol.errors import Full
from kvstore.protocol.frames import Header
from kvstore.rpc.arriving import DISCARD_BYTES, Arriving
from kvstore.rpc.incoming import Incoming
from kvstore.rpc.outbox import TURN_BYTES

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    mine, peer = socket.socketpair()
    yield mine, peer
    mine.close()
    peer.close()


def arriving(payload_bytes: int) -> Arriving:
    one = Arriving()
    one.begin(Header(40, 7, 0, 4, payload_bytes), b"body")
    return one


def came_along(data: bytes) -> Incoming:
    incoming = Incoming()
    incoming.room()[: len(data)] = data
    incoming.received(len(data))
    return incoming


def test_bytes_go_where_they_belong_first_those_that_came_along(ends: Ends) -> None:
    one, memory = arriving(9), bytearray(9)
    assert (one.is_waiting, one.is_coming) == (True, False)
    one.accept([memoryview(memory)[:4], memoryview(memory)[4:4], memoryview(memory)[4:]])
    assert (one.is_waiting, one.is_coming) == (False, True)
    one.take_from(came_along(b"abcdef"))
    assert not one.is_whole
    ends[1].sendall(b"ghiNEXT")
    assert one.read_from(ends[0]) == 3
    assert one.is_whole
    assert memory == b"abcdefghi"
    assert ends[0].recv(10) == b"NEXT"
    assert one.header is not None
    assert (one.header.request_id, one.body) == (7, b"body")
    one.over()
    assert (one.header, one.is_coming, one.is_whole) == (None, False, True)


def test_what_is_refused_is_thrown_away_and_nothing_of_what_follows(ends: Ends) -> None:
    one = arriving(5 + DISCARD_BYTES)
    one.refuse(Full("no room"))
    incoming = came_along(b"abcde")
    one.take_from(incoming)
    assert incoming.unread_bytes == 0
    ends[1].sendall(bytes(1000))
    assert one.read_from(ends[0]) == 1000
    assert one.left_bytes == DISCARD_BYTES - 1000
    assert isinstance(one.refusal, Full)
    one.over()
    assert one.refusal is None


def test_what_is_diverted_reaches_its_place_no_more_and_the_request_goes_on(ends: Ends) -> None:
    one, memory = arriving(9), bytearray(9)
    with pytest.raises(AssertionError, match="on its way"):
        one.divert()
    one.accept([memoryview(memory)])
    one.take_from(came_along(b"abc"))
    one.divert()
    one.divert()
    ends[1].sendall(b"defghiNEXT")
    assert one.read_from(ends[0]) == 6
    assert (one.is_whole, one.refusal, one.body) == (True, None, b"body")
    assert memory == b"abc" + bytes(6)
    assert ends[0].recv(10) == b"NEXT"


def test_a_stream_that_ends_reads_as_nothing(ends: Ends) -> None:
    ends[1].close()
    accepted, refused = arriving(5), arriving(5)
    accepted.accept([memoryview(bytearray(5))])
    refused.refuse(Full(""))
    for one in (accepted, refused):
        assert one.read_from(ends[0]) == 0
        assert not one.is_whole


def test_one_connection_reads_so_much_before_others_have_their_turn(ends: Ends) -> None:
    size = TURN_BYTES + 10
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * size)
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * size)
    one = arriving(size)
    one.accept([memoryview(bytearray(size))])
    ends[1].setblocking(False)
    ends[1].send(bytes(size))
    assert 0 < one.read_from(ends[0]) <= TURN_BYTES


def test_a_request_is_told_once_where_its_bytes_go_and_all_of_them() -> None:
    one = arriving(5)
    with pytest.raises(AssertionError, match="add up"):
        one.accept([memoryview(bytearray(4))])
    one.accept([memoryview(bytearray(5))])
    with pytest.raises(AssertionError, match="waits for room"):
        one.accept([memoryview(bytearray(5))])
    with pytest.raises(AssertionError, match="waits for room"):
        one.refuse(Full(""))


def test_once_the_connection_is_gone_nothing_is_written() -> None:
    one = arriving(5)
    one.accept([memoryview(bytearray(5))])
    one.let_go()
    assert not one.is_coming
