"""Tests of frame_reader.py: frames and values are unchanged for any segmentation of the bytes."""

import random
import socket
import tracemalloc
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.frames import VERSION, FrameHeader, pack_header
from kvstore.rpc.frame_reader import BUFFER_BYTES, FrameReader, PayloadReader
from kvstore.rpc.frame_writer import TURN_BYTES

KIND = 7


@dataclass(frozen=True, slots=True)
class Sent:
    """One frame as its sender knows it."""

    body: bytes
    payload: bytes = b""

    def packed(self, request_id: int) -> bytes:
        return pack_header(KIND, request_id, len(self.body), len(self.payload)) + self.body + self.payload


def feed(reader: FrameReader, data: bytes) -> int:
    """As one recv would: as much as there is room for. Returns how much that was."""
    room = reader.recv_buffer()
    size = min(len(room), len(data))
    room[:size] = data[:size]
    reader.received(size)
    return size


class Receiver:
    """Reads frames and their values, into views of at most `view_bytes`, as the owner of a connection does."""

    def __init__(self, view_bytes: int) -> None:
        self.reader = FrameReader()
        self.received: list[Sent] = []
        self.request_ids: list[int] = []
        self._view_bytes = view_bytes
        self._views: deque[memoryview] = deque()
        self._body = b""
        self._value = bytearray()

    def step(self) -> bool:
        if self._views:
            self.reader.move_into(self._views)
            if self._views:
                return False
            self.received.append(Sent(self._body, bytes(self._value)))
        frame = self.reader.next_frame()
        if frame is None:
            return False
        header, body = frame
        assert header.type == KIND
        self.request_ids.append(header.request_id)
        if header.payload_bytes:
            self._body, self._value = bytes(body), bytearray(header.payload_bytes)
            whole = memoryview(self._value)
            self._views.extend(whole[at : at + self._view_bytes] for at in range(0, len(whole), self._view_bytes))
        else:
            self.received.append(Sent(bytes(body)))
        return True


def noise(size: int) -> bytes:
    """The same bytes every time, so that a failure can be played again."""
    return random.Random(size).randbytes(size)


SIZES = st.one_of(st.integers(0, 40), st.integers(0, 3 * BUFFER_BYTES))
FRAMES = st.lists(st.builds(lambda body, payload: Sent(noise(body), noise(payload)), SIZES, SIZES), max_size=8)


@given(FRAMES, st.lists(st.one_of(st.integers(1, 30), st.integers(1, 100_000)), min_size=1, max_size=8), st.integers(1, 50_000))
def test_frames_and_values_survive_any_cuts(frames: list[Sent], cuts: list[int], view_bytes: int) -> None:
    receiver = Receiver(max(view_bytes, 100))
    data = b"".join(sent.packed(index) for index, sent in enumerate(frames))
    at = turn = 0
    while at < len(data):
        at += feed(receiver.reader, data[at : at + max(cuts[turn % len(cuts)], len(data) // 500)])
        turn += 1
        while receiver.step():
            pass
    assert receiver.received == frames
    assert receiver.request_ids == list(range(len(frames)))
    assert receiver.reader.unread_bytes == 0


def test_an_announced_length_takes_no_memory() -> None:
    reader = FrameReader()
    feed(reader, pack_header(KIND, 1, 32 << 20))
    tracemalloc.start()
    try:
        for _ in range(100):
            assert reader.next_frame() is None
            feed(reader, bytes(100))
        assert tracemalloc.get_traced_memory()[1] < BUFFER_BYTES
    finally:
        tracemalloc.stop()


def test_bytes_that_are_no_frame_are_refused() -> None:
    for data, why in (
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not a kvstore frame"),
        (Sent(b"").packed(1)[:2] + bytes([VERSION + 1]) + Sent(b"").packed(1)[3:], "run the same release on both"),
        (pack_header(KIND, 1, 1 << 31), "over the limit"),
    ):
        reader = FrameReader()
        feed(reader, data)
        with pytest.raises(ProtocolError, match=why):
            reader.next_frame()


def test_a_body_beyond_what_is_taken_of_this_peer_is_refused() -> None:
    reader = FrameReader()
    reader.max_body_bytes = 99
    data = pack_header(1, 1, 100)
    reader.recv_buffer()[: len(data)] = data
    reader.received(len(data))
    with pytest.raises(ProtocolError, match="a body of 100 bytes is over the limit of 99 before Hello"):
        reader.next_frame()


def test_peek_returns_complete_bytes_behind_a_frame() -> None:
    reader = FrameReader()
    feed(reader, Sent(b"body", b"value").packed(1)[:-1])
    assert reader.next_frame() is not None
    assert reader.peek(5) is None
    seen = reader.peek(4)
    assert seen is not None
    assert (bytes(seen), reader.unread_bytes) == (b"valu", 4), "it stays there"
    feed(reader, b"e")
    seen = reader.peek(5)
    assert seen is not None
    assert bytes(seen) == b"value"


Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    mine, peer = socket.socketpair()
    yield mine, peer
    mine.close()
    peer.close()


def payload_of(payload_bytes: int) -> PayloadReader:
    one = PayloadReader()
    one.begin(FrameHeader(40, 7, 0, 4, payload_bytes), b"body")
    return one


def came_along(data: bytes) -> FrameReader:
    reader = FrameReader()
    reader.recv_buffer()[: len(data)] = data
    reader.received(len(data))
    return reader


def test_bytes_go_where_they_belong_first_those_that_came_along(ends: Ends) -> None:
    one, memory = payload_of(9), bytearray(9)
    assert (one.is_waiting, one.is_receiving) == (True, False)
    one.accept([memoryview(memory)[:4], memoryview(memory)[4:4], memoryview(memory)[4:]])
    assert (one.is_waiting, one.is_receiving) == (False, True)
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
    assert (one.header, one.is_receiving, one.is_whole) == (None, False, True)


def test_diverted_payload_is_discarded_and_request_is_served(ends: Ends) -> None:
    one, memory = payload_of(9), bytearray(9)
    with pytest.raises(AssertionError, match="no payload is being received"):
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


def test_connection_reads_a_limited_amount_each_round(ends: Ends) -> None:
    size = TURN_BYTES + 10
    ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * size)
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * size)
    one = payload_of(size)
    one.accept([memoryview(bytearray(size))])
    ends[1].setblocking(False)
    ends[1].send(bytes(size))
    assert 0 < one.read_from(ends[0]) <= TURN_BYTES
