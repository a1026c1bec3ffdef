"""Promises of frame_writer.py, over a real socket whose reader may stall; test_session.py has what holds on a
connection.
"""

import socket
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.frames import FrameHeader
from kvstore.rpc.frame_writer import MAX_VECTORS, TURN_BYTES, FrameWriter, OnSent, PendingRequests, SendLimits, advance
from kvstore.rpc.reactor import Reactor
from tests.rpc.wires import Clock


class Pair:
    def __init__(self) -> None:
        self.mine, self.peer = socket.socketpair()
        self.mine.setblocking(False)
        self.clock = Clock()
        self.reactor = Reactor(self.clock)
        self.reasons: list[str] = []
        self.sent: list[str] = []
        self.writer = FrameWriter(self.reactor, self.mine, SendLimits(timeout_s=5), hang_up=self.reasons.append, on_queued=lambda: None)

    def note(self, name: str) -> OnSent:
        return lambda: self.sent.append(name)

    def read(self, size: int) -> bytes:
        """`size` bytes, with the writer flushed as the socket gets room."""
        data = bytearray()
        while len(data) < size:
            self.writer.flush()
            data += self.peer.recv(size - len(data))
        return bytes(data)

    def close(self) -> None:
        self.writer.close()
        self.reactor.close()
        self.mine.close()
        self.peer.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def test_more_vectors_than_one_call_takes_are_sent_in_order(pair: Pair) -> None:
    parts = [index.to_bytes(2, "big") for index in range(3 * MAX_VECTORS)]
    pair.writer.send(b"head", parts, pair.note("all"))
    assert pair.sent == ["all"]
    assert pair.peer.recv(10_000) == b"head" + b"".join(parts)


def test_an_answer_given_while_one_ends_is_sent_after_it(pair: Pair) -> None:
    pair.writer.send(b"first", [bytes(1 << 20)], lambda: pair.writer.send(b"second", [], pair.note("second")))
    assert pair.read(5 + (1 << 20) + 6).endswith(b"\0second")
    assert pair.sent == ["second"]


def test_flush_sends_at_most_turn_bytes_to_a_fast_peer(pair: Pair) -> None:
    """Of a socket that would take all of it at once, where the system allows it so much."""
    pair.mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 20)
    pair.writer.send(b"head", [bytes(3 * TURN_BYTES)])
    before = pair.writer.queued_bytes
    assert before >= 2 * TURN_BYTES + 4
    pair.writer.flush()
    assert before - pair.writer.queued_bytes <= TURN_BYTES


@given(st.lists(st.binary(max_size=5), max_size=6), st.data())
def test_advance_drops_exactly_the_first_bytes(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    size = data.draw(st.integers(0, len(whole)))
    buffers = deque(memoryview(part) for part in parts)
    advance(buffers, size)
    assert b"".join(buffers) == whole[size:]
    assert not buffers or len(buffers[0]) > 0


def test_request_ids_wrap_and_malformed_answer_is_peers_error() -> None:
    pending = PendingRequests(Reactor())
    pending._next_id = 0xFFFFFFFF

    def fail(_header: FrameHeader | None, _answer: object) -> None:
        raise ProtocolError("what?")

    assert [pending.add(fail, 600.0), pending.add(fail, 600.0)] == [0xFFFFFFFF, 1]
    answer = FrameHeader(7, 1, 0, 0, 0)
    with pytest.raises(ProtocolError):
        pending.respond(answer, memoryview(b""), None)
    assert not pending.respond(answer, memoryview(b""), None), "it was answered"
