"""Promises of incoming.py, against the bytes themselves: whatever the cuts, frames and values come out as they went in."""

import random
import tracemalloc
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.frames import HEADER_BYTES, VERSION, pack_header
from kvstore.rpc.incoming import BUFFER_BYTES, Incoming

KIND = 7


@dataclass(frozen=True, slots=True)
class Sent:
    """One frame as its sender knows it."""

    body: bytes
    payload: bytes = b""

    def packed(self, request_id: int) -> bytes:
        return pack_header(KIND, request_id, len(self.body), len(self.payload)) + self.body + self.payload


def feed(incoming: Incoming, data: bytes) -> int:
    """As one recv would: as much as there is room for. Returns how much that was."""
    room = incoming.room()
    size = min(len(room), len(data))
    room[:size] = data[:size]
    incoming.received(size)
    return size


def feed_all(incoming: Incoming, data: bytes) -> list[bytes]:
    """Feed everything, and return the bodies of the frames in it, which have no payload."""
    bodies = []
    while data:
        data = data[feed(incoming, data) :]
        while (frame := incoming.next_frame()) is not None:
            bodies.append(bytes(frame[1]))
    return bodies


class Receiver:
    """Reads frames and their values, into views of at most `view_bytes`, as whoever owns a connection does."""

    def __init__(self, view_bytes: int) -> None:
        self.incoming = Incoming()
        self.received: list[Sent] = []
        self.request_ids: list[int] = []
        self._view_bytes = view_bytes
        self._views: deque[memoryview] = deque()
        self._body = b""
        self._value = bytearray()

    def step(self) -> bool:
        if self._views:
            self.incoming.move_into(self._views)
            if self._views:
                return False
            self.received.append(Sent(self._body, bytes(self._value)))
        frame = self.incoming.next_frame()
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
def test_frames_and_values_come_out_as_they_went_in_whatever_the_cuts(frames: list[Sent], cuts: list[int], view_bytes: int) -> None:
    receiver = Receiver(max(view_bytes, 100))
    data = b"".join(sent.packed(index) for index, sent in enumerate(frames))
    at = turn = 0
    while at < len(data):
        at += feed(receiver.incoming, data[at : at + max(cuts[turn % len(cuts)], len(data) // 500)])
        turn += 1
        while receiver.step():
            pass
    assert receiver.received == frames
    assert receiver.request_ids == list(range(len(frames)))
    assert receiver.incoming.unread_bytes == 0


def test_a_frame_is_none_until_its_last_byte() -> None:
    incoming = Incoming()
    data = Sent(b"body").packed(3)
    for at in range(len(data)):
        assert incoming.next_frame() is None
        assert incoming.unread_bytes == at
        feed(incoming, data[at : at + 1])
    frame = incoming.next_frame()
    assert frame is not None
    assert (frame[0].request_id, bytes(frame[1])) == (3, b"body")


def test_there_is_always_room_after_no_frame_was_found() -> None:
    incoming = Incoming()
    small = Sent(bytes(1000)).packed(1)
    data = small * 63 + Sent(bytes(300_000)).packed(2) + small * 2 + small[:10]
    while data:
        assert incoming.next_frame() is not None or len(incoming.room())
        data = data[feed(incoming, data) :]
        while incoming.next_frame() is not None:
            pass
        assert len(incoming.room())


def test_a_frame_that_begins_at_the_buffers_end_is_moved_to_its_start() -> None:
    incoming = Incoming()
    first, second = Sent(noise(BUFFER_BYTES - 2 * HEADER_BYTES - 5)), Sent(noise(100))
    data = first.packed(1) + second.packed(2)
    assert feed_all(incoming, data) == [first.body, second.body]
    assert len(incoming.room()) == BUFFER_BYTES


def test_a_header_cut_at_the_buffers_end_gets_room() -> None:
    incoming = Incoming()
    first, second = Sent(bytes(BUFFER_BYTES - HEADER_BYTES - 10)), Sent(b"second")
    assert feed_all(incoming, first.packed(1) + second.packed(2)) == [first.body, second.body]


def test_a_large_frame_gets_a_buffer_of_its_own_for_as_long_as_it_is_parsed() -> None:
    incoming = Incoming()
    large = Sent(noise(1 << 20))
    assert feed_all(incoming, large.packed(1)) == [large.body]
    assert len(incoming.room()) == BUFFER_BYTES
    large_first = large.packed(1) + Sent(b"small").packed(2)
    assert feed_all(incoming, large_first) == [large.body, b"small"]
    assert len(incoming.room()) == BUFFER_BYTES


def test_an_announced_length_takes_no_memory() -> None:
    incoming = Incoming()
    feed(incoming, pack_header(KIND, 1, 32 << 20))
    tracemalloc.start()
    try:
        for _ in range(100):
            assert incoming.next_frame() is None
            feed(incoming, bytes(100))
        assert tracemalloc.get_traced_memory()[1] < BUFFER_BYTES
    finally:
        tracemalloc.stop()


def test_room_for_a_large_frame_at_most_doubles() -> None:
    incoming = Incoming()
    arrived = feed(incoming, pack_header(KIND, 1, 32 << 20))
    while arrived < 4 << 20:
        assert incoming.next_frame() is None
        assert len(incoming.room()) <= max(arrived, BUFFER_BYTES)
        arrived += feed(incoming, bytes(100_000))


def test_room_for_a_large_frame_ends_with_it() -> None:
    incoming = Incoming()
    data = Sent(noise(100_000)).packed(1)
    left = data[feed(incoming, data) :]
    assert incoming.next_frame() is None
    assert len(incoming.room()) == len(left)


def test_what_overlaps_its_new_place_is_moved_whole() -> None:
    incoming = Incoming()
    first, second = Sent(noise(100)), Sent(noise(BUFFER_BYTES - HEADER_BYTES))
    assert feed_all(incoming, first.packed(1) + second.packed(2)) == [first.body, second.body]


def test_bytes_that_are_no_frame_are_refused() -> None:
    for data, why in (
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not a kvstore frame"),
        (Sent(b"").packed(1)[:2] + bytes([VERSION + 1]) + Sent(b"").packed(1)[3:], "run one release on both"),
        (pack_header(KIND, 1, 1 << 31), "over the limit"),
    ):
        incoming = Incoming()
        feed(incoming, data)
        with pytest.raises(ProtocolError, match=why):
            incoming.next_frame()


def test_a_body_beyond_what_is_taken_of_this_peer_is_refused() -> None:
    incoming = Incoming()
    incoming.max_body_bytes = 99
    data = pack_header(1, 1, 100)
    incoming.room()[: len(data)] = data
    incoming.received(len(data))
    with pytest.raises(ProtocolError, match="say Hello first: until then a message has at most 99 bytes, not 100"):
        incoming.next_frame()


def test_values_fill_views_in_order_and_what_is_behind_stays() -> None:
    incoming = Incoming()
    feed(incoming, b"abcdef" + b"rest")
    memory = bytearray(6)
    views = deque([memoryview(memory)[:1], memoryview(memory)[1:1], memoryview(memory)[1:]])
    assert incoming.move_into(views) == 6
    assert (bytes(memory), len(views), incoming.unread_bytes) == (b"abcdef", 0, 4)


def test_a_view_that_is_not_full_stays_with_what_it_lacks() -> None:
    incoming = Incoming()
    feed(incoming, b"abc")
    memory = bytearray(8)
    views = deque([memoryview(memory)[:2], memoryview(memory)[2:]])
    assert incoming.move_into(views) == 3
    assert [len(view) for view in views] == [5]
    feed(incoming, b"defgh")
    assert incoming.move_into(views) == 5
    assert memory == b"abcdefgh"


def test_what_lies_behind_a_frame_can_be_looked_at_where_it_is_whole() -> None:
    incoming = Incoming()
    feed(incoming, Sent(b"body", b"value").packed(1)[:-1])
    assert incoming.next_frame() is not None
    assert incoming.peek(5) is None
    seen = incoming.peek(4)
    assert seen is not None
    assert (bytes(seen), incoming.unread_bytes) == (b"valu", 4), "it stays there"
    feed(incoming, b"e")
    seen = incoming.peek(5)
    assert seen is not None
    assert bytes(seen) == b"value"


def test_values_that_nobody_wants_are_thrown_away_and_no_more() -> None:
    incoming = Incoming()
    feed(incoming, b"values" + Sent(b"next").packed(2))
    assert incoming.discard(6) == 6
    frame = incoming.next_frame()
    assert frame is not None
    assert bytes(frame[1]) == b"next"
    feed(incoming, b"value")
    assert incoming.discard(100) == 5
    assert incoming.discard(95) == 0


def test_of_a_connection_that_is_gone_no_memory_is_kept() -> None:
    incoming = Incoming()
    feed(incoming, Sent(b"body", b"value").packed(1))
    assert incoming.next_frame() is not None
    incoming.let_go()
    assert (incoming.unread_bytes, len(incoming.room()), incoming.next_frame()) == (0, 0, None)
