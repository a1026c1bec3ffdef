"""Promises of frame_writer.py, over a real socket whose reader may stall; test_session.py has what holds on a connection."""

import os
import socket
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.frames import Header
from kvstore.rpc.frame_writer import MAX_VECTORS, TURN_BYTES, FrameWriter, OnSent, PendingRequests, SendLimits, advance, first
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


def test_a_stalled_reader_gets_everything_in_order_later(pair: Pair) -> None:
    values = [os.urandom(1 << 20) for _ in range(3)]
    for index, value in enumerate(values):
        pair.writer.send(b"head", [value[:1000], value[1000:]], pair.note(str(index)))
    assert pair.sent == []
    assert 2 << 20 < pair.writer.queued_bytes < (3 << 20) + 12
    assert pair.read(3 * (4 + (1 << 20))) == b"".join(b"head" + value for value in values)
    assert pair.sent == ["0", "1", "2"]
    assert pair.writer.queued_bytes == 0


def test_an_answer_given_while_one_ends_is_sent_after_it(pair: Pair) -> None:
    pair.writer.send(b"first", [bytes(1 << 20)], lambda: pair.writer.send(b"second", [], pair.note("second")))
    assert pair.read(5 + (1 << 20) + 6).endswith(b"\0second")
    assert pair.sent == ["second"]


def test_a_broken_connection_is_hung_up_on_and_buffers_are_released_at_the_end(pair: Pair) -> None:
    pair.peer.close()
    pair.writer.send(b"head", [b"value"], pair.note("lost"))
    assert (len(pair.reasons), pair.sent) == (1, [])
    pair.writer.close()
    pair.writer.close()
    assert (pair.sent, pair.writer.queued_bytes) == (["lost"], 0)


def test_the_time_to_take_a_message_begins_when_it_is_sent(pair: Pair) -> None:
    pair.writer.send(b"head", [bytes(16 << 20)], pair.note("first"))
    pair.clock.now_ns = 3_000_000_000
    pair.writer.send(b"head", [bytes(16 << 20)])
    while not pair.sent:
        pair.peer.recv(1 << 20)
        pair.writer.flush()
    pair.clock.now_ns = 5_100_000_000
    pair.reactor.run_once(0)
    assert pair.reasons == [], "the first one was taken"
    pair.clock.now_ns = 8_100_000_000
    pair.reactor.run_once(0)
    assert pair.reasons == ["an answer was not taken within 5 s"]


def test_a_peer_that_reads_as_fast_as_it_is_written_to_gets_no_more_than_its_turn(pair: Pair) -> None:
    """Of a socket that would take all of it at once, where the system allows it so much."""
    pair.mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 20)
    pair.writer.send(b"head", [bytes(3 * TURN_BYTES)])
    before = pair.writer.queued_bytes
    assert before >= 2 * TURN_BYTES + 4
    pair.writer.flush()
    assert before - pair.writer.queued_bytes <= TURN_BYTES


def test_sent_now_is_what_the_socket_takes_and_nothing_is_queued(pair: Pair) -> None:
    data = bytes(64 << 20)
    sent = pair.writer.send_now(data)
    assert 0 < sent < len(data)
    assert (pair.writer.send_now(data), pair.writer.queued_bytes) == (0, 0)
    pair.read(sent)
    pair.writer.send(data)
    assert pair.writer.send_now(b"behind it") == 0


@given(st.lists(st.binary(max_size=5), max_size=6), st.data())
def test_advance_drops_exactly_the_first_bytes(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    size = data.draw(st.integers(0, len(whole)))
    buffers = deque(memoryview(part) for part in parts)
    advance(buffers, size)
    assert b"".join(buffers) == whole[size:]
    assert not buffers or len(buffers[0]) > 0


def test_the_first_of_a_vector_is_as_many_bytes_as_asked_in_as_many_parts_as_the_kernel_takes() -> None:
    parts = deque(memoryview(b"abc") for _ in range(MAX_VECTORS + 1))
    assert b"".join(first(parts, 7)) == b"abcabca"
    assert len(first(parts, 1 << 20)) == MAX_VECTORS
    assert first(deque(), 5) == []


def test_request_ids_begin_anew_and_an_answer_that_cannot_be_read_is_the_peers_fault() -> None:
    pending = PendingRequests(Reactor())
    pending._next_id = 0xFFFFFFFF

    def fail(_header: Header | None, _answer: object) -> None:
        raise ProtocolError("what?")

    assert [pending.add(fail, 600.0), pending.add(fail, 600.0)] == [0xFFFFFFFF, 1]
    answer = Header(7, 1, 0, 0, 0)
    with pytest.raises(ProtocolError):
        pending.respond(answer, memoryview(b""), None)
    assert not pending.respond(answer, memoryview(b""), None), "it was answered"
