"""Promises of blocking_socket.py: test_channel.py has the rest, which hold for every call of a channel."""

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.protocol.errors import DeadlineExceeded
from kvstore.rpc.client.blocking_socket import BlockingSocket
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.gil_contention import HELD_WAIT_MS, LATE_NS
from kvstore.testing.transfer.awaited import eventually
from tests.rpc.wires import Looks, read_exactly


class Ended(ConnectionResetError):
    pass


Ends = tuple[BlockingSocket, socket.socket]


@pytest.fixture(params=["sleeps", "looks", "keeps the GIL"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    mine, peer = socket.socketpair()
    peer.settimeout(10)
    busy = None if request.param == "sleeps" else Looks(1000, is_on=request.param == "looks")
    if busy is not None and request.param == "keeps the GIL":
        busy.gil.copied(LATE_NS)
    yield BlockingSocket(mine, busy, Ended), peer
    mine.close()
    peer.close()


def test_what_a_full_socket_takes_later_is_sent_whole(ends: Ends) -> None:
    mine, peer = ends
    mine.sock.setblocking(False)
    filled = 0
    while True:
        try:
            filled += mine.sock.send(bytes(65536))
        except BlockingIOError:
            break
    mine.sock.setblocking(True)
    value, got = os.urandom(1 << 20), bytearray()

    def read() -> None:
        read_exactly(peer, filled)
        got.extend(read_exactly(peer, 4 + len(value)))

    reader = threading.Thread(target=read)
    reader.start()
    mine.send_two(b"head", value, Deadline(10))
    reader.join(10)
    assert got == b"head" + value


def test_send_two_ends_at_deadline_if_peer_does_not_read(ends: Ends) -> None:
    with pytest.raises(DeadlineExceeded):
        ends[0].send_two(b"head", bytes(64 << 20), Deadline(0.1))


def test_a_stream_that_ends_is_the_owners_error(ends: Ends) -> None:
    mine, peer = ends
    peer.sendall(b"last")
    peer.close()
    room = memoryview(bytearray(10))
    assert mine.take((room,)) == 4
    with pytest.raises(Ended):
        mine.receive_soon(room, Deadline(10))
    with pytest.raises(Ended):
        mine.receive((room,), Deadline(10))
    with pytest.raises(Ended):
        mine.take((room,))


def test_while_one_thread_waits_the_others_keep_no_gil() -> None:
    mine, peer = socket.socketpair()
    busy = Looks(1000, is_on=False)
    with mine, peer, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(BlockingSocket(mine, busy, Ended).receive_soon, memoryview(bytearray(8)), Deadline(10))
        eventually(lambda: bool(busy.gil.waiting), "the thread waits")
        busy.gil.copied(LATE_NS)
        assert not busy.gil.holds()
        peer.send(b"answer")
        assert waiting.result() == 6
        assert busy.gil.holds()


def test_long_wait_releases_the_gil() -> None:
    mine, peer = socket.socketpair()
    with mine, peer:
        busy = Looks(1000, is_on=False)
        busy.gil.copied(LATE_NS)
        ours, room = BlockingSocket(mine, busy, Ended), bytearray(10)
        peer.sendall(b"soon")
        assert ours.receive_soon(memoryview(room), Deadline(10)) == 4
        assert busy.gil.is_on
        late = threading.Timer(10 * HELD_WAIT_MS / 1000, peer.sendall, (b"later",))
        late.start()
        assert ours.receive_soon(memoryview(room), Deadline(10)) == 5
        late.join()
        assert room[:5] == b"later"
        assert not busy.gil.is_on
