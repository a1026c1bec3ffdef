"""Promises of outbox.py, over a real socket whose reader may stall."""

import os
import socket
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.rpc.outbox import MAX_VECTORS, TURN_BYTES, OnSent, Outbox, advance, first


class Pair:
    def __init__(self) -> None:
        mine, self.peer = socket.socketpair()
        mine.setblocking(False)
        self.mine = mine
        self.now_ns = 0
        self.outbox = Outbox(mine, self.call, lambda: self.now_ns)
        self.sent: list[str] = []

    def call(self, on_sent: OnSent) -> None:
        on_sent()

    def note(self, name: str) -> OnSent:
        return lambda: self.sent.append(name)

    def read(self, size: int) -> bytes:
        """`size` bytes, with the outbox flushed as the socket gets room."""
        data = bytearray()
        while len(data) < size:
            self.outbox.flush()
            data += self.peer.recv(size - len(data))
        return bytes(data)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.mine.close()
    pair.peer.close()


def test_what_the_socket_takes_is_sent_at_once(pair: Pair) -> None:
    pair.outbox.send(b"head", [], None, ())
    pair.outbox.send(b"head", [b"a", memoryview(b""), b"bc"], pair.note("values"), ())
    assert pair.sent == ["values"]
    assert pair.outbox.queued_bytes == 0
    assert pair.peer.recv(100) == b"headheadabc"


def test_it_tells_since_when_the_next_message_waits(pair: Pair) -> None:
    assert pair.outbox.oldest_ns is None
    for pair.now_ns in (5, 7):
        pair.outbox.send(b"head", [bytes(8 << 20)], None, ())
    assert pair.outbox.oldest_ns == 5
    pair.read(4 + (8 << 20))
    assert pair.outbox.oldest_ns == 7
    pair.outbox.abandon()
    assert pair.outbox.oldest_ns is None


def test_more_vectors_than_one_call_takes_are_sent_in_order(pair: Pair) -> None:
    parts = [index.to_bytes(2, "big") for index in range(3 * MAX_VECTORS)]
    pair.outbox.send(b"head", parts, pair.note("all"), ())
    assert pair.sent == ["all"]
    assert pair.peer.recv(10_000) == b"head" + b"".join(parts)


def test_a_stalled_reader_gets_everything_in_order_later(pair: Pair) -> None:
    values = [os.urandom(1 << 20) for _ in range(3)]
    for index, value in enumerate(values):
        pair.outbox.send(b"head", [value[:1000], value[1000:]], pair.note(str(index)), ())
    assert pair.sent == []
    assert 2 << 20 < pair.outbox.queued_bytes < (3 << 20) + 12
    assert pair.read(3 * (4 + (1 << 20))) == b"".join(b"head" + value for value in values)
    assert pair.sent == ["0", "1", "2"]
    assert pair.outbox.queued_bytes == 0


def test_a_full_socket_queues_the_whole_answer(pair: Pair) -> None:
    pair.outbox.send(b"x" * (1 << 20), [], None, ())
    pair.outbox.send(b"tail", [], None, ())
    assert pair.read((1 << 20) + 4).endswith(b"xtail")


def test_descriptors_go_with_the_first_byte_of_their_answer(pair: Pair) -> None:
    read_end, write_end = os.pipe()
    pair.outbox.send(b"head", [b"value"], pair.note("fds"), [read_end])
    data, fds, _, _ = socket.recv_fds(pair.peer, 100, 4)
    assert data == b"headvalue"
    assert pair.sent == ["fds"]
    for fd in (read_end, write_end, *fds):
        os.close(fd)
    assert len(fds) == 1


def test_a_broken_socket_raises_and_what_was_given_is_let_go_by_abandon(pair: Pair) -> None:
    pair.peer.close()
    with pytest.raises(BrokenPipeError):
        pair.outbox.send(b"head", [b"value"], pair.note("lost"), ())
    assert pair.sent == []
    pair.outbox.send(b"head", [], None, ())
    pair.outbox.abandon()
    pair.outbox.abandon()
    assert pair.sent == ["lost"]
    assert pair.outbox.queued_bytes == 0


def test_an_answer_given_while_one_ends_is_sent_after_it(pair: Pair) -> None:
    def more() -> None:
        pair.outbox.send(b"second", [], pair.note("second"), ())

    pair.outbox.send(b"first", [bytes(1 << 20)], more, ())
    assert pair.read(5 + (1 << 20) + 6).endswith(b"\0second")
    assert pair.sent == ["second"]


@given(st.lists(st.binary(max_size=5), max_size=6), st.data())
def test_advance_drops_exactly_the_first_bytes(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    size = data.draw(st.integers(0, len(whole)))
    buffers = deque(memoryview(part) for part in parts)
    advance(buffers, size)
    assert b"".join(buffers) == whole[size:]
    assert not buffers or len(buffers[0]) > 0


def test_a_peer_that_reads_as_fast_as_it_is_written_to_gets_no_more_than_its_turn() -> None:
    """Of a socket that would take all of it at once, where the system allows it so much."""
    mine, peer = socket.socketpair()
    mine.setblocking(False)
    mine.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 20)
    outbox, value = Outbox(mine, lambda on_sent: on_sent(), lambda: 0), os.urandom(3 * TURN_BYTES)
    outbox.send(b"head", [value], None, ())
    before = outbox.queued_bytes
    assert before >= 2 * TURN_BYTES + 4
    outbox.flush()
    assert before - outbox.queued_bytes <= TURN_BYTES
    outbox.abandon()
    mine.close()
    peer.close()


def test_the_first_of_a_vector_is_as_many_bytes_as_asked_in_as_many_parts_as_the_kernel_takes() -> None:
    parts = deque(memoryview(b"abc") for _ in range(MAX_VECTORS + 1))
    assert b"".join(first(parts, 7)) == b"abcabca"
    assert b"".join(first(parts, 6)) == b"abcabc"
    assert len(first(parts, 1 << 20)) == MAX_VECTORS
    assert first(deque(), 5) == []


def test_sent_now_is_what_the_socket_takes_and_nothing_is_queued(pair: Pair) -> None:
    assert pair.outbox.send_now(b"whole") == 5
    assert pair.peer.recv(100) == b"whole"
    data = bytes(64 << 20)
    sent = pair.outbox.send_now(data)
    assert 0 < sent < len(data)
    assert pair.outbox.send_now(data) == 0
    assert pair.outbox.queued_bytes == 0
    pair.read(sent)
    pair.outbox.send(data, [], None, ())
    assert pair.outbox.send_now(b"behind it") == 0
    pair.peer.close()
    pair.outbox.abandon()
    assert pair.outbox.send_now(b"to nobody") == 0
