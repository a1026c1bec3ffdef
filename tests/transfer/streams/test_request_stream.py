"""One stream of requests: how far ahead it sends, in which order, and which requests fail when its connection breaks."""

import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import pytest

from kvstore.protocol.errors import (
    Cancelled,
    Closed,
    DeadlineExceeded,
    KVStoreError,
    StaleHandle,
    Unreachable,
)
from kvstore.protocol.frames import HEADER_BYTES, FrameHeader, unpack_header
from kvstore.protocol.session_messages import Failure, Ok
from kvstore.protocol.transfers import Fence, JoinEngine, Notice, ReadRegions, WriteRegions
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import PATIENCE_S, POLL_S
from kvstore.transfer.agent import AgentRequest, Direction, Rail
from kvstore.transfer.memory.region import Piece
from kvstore.transfer.streams.request_stream import MAX_AHEAD_PIECES, NoticeRequest, PeerConnection, RequestStream
from kvstore.transfer.streams.tcp import TcpConnection
from tests.rpc.raw_peers import RawAnswerer, frame, make_region, outcome, read, shown

WINDOW = 3
SIZE = 10
READ, WRITE = Direction.READ, Direction.WRITE


@pytest.fixture
def stream() -> RequestStream:
    return RequestStream(threading.Lock(), WINDOW)


def a_request(direction: Direction = READ, *, pieces: int = 1, timeout_s: float = PATIENCE_S, fences: Sequence[int] = ()) -> AgentRequest:
    ours, theirs = make_region(SIZE), make_region(SIZE)
    piece = Piece(ours, 0, shown(theirs), 0, SIZE if pieces == 1 else 1)
    return AgentRequest(direction, "peer", [piece] * pieces, Deadline(timeout_s), fences=fences)


def a_notice(message: bytes = b"hello") -> NoticeRequest:
    request = NoticeRequest(WRITE, "peer", (), Deadline(PATIENCE_S))
    request.message = message
    return request


class Watched(TcpConnection):
    """Signals when the stream waits for a reply: it sends no more ahead then."""

    def recv_into(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        if len(parts) == 1 and len(parts[0]) == HEADER_BYTES:
            self.waits.set()
        super().recv_into(parts, deadline)

    @cached_property
    def waits(self) -> threading.Event:
        return threading.Event()


@contextmanager
def an_endpoint(play: Callable[[socket.socket], None]) -> Iterator[PeerConnection]:
    with RawAnswerer(play) as answerer:
        connection = Watched.connect(answerer.metadata.removeprefix(b"kvagent1 tcp "), Rail(), Deadline(PATIENCE_S))
        assert isinstance(connection, Watched)
        if isinstance(play, Recorder):
            play.asker = connection.waits
        yield PeerConnection(connection, 7)
        connection.close()


class Recorder:
    """Replies to each request once the client sends no more ahead. `ahead` lists, for each reply, the requests received by then."""

    def __init__(self) -> None:
        self.ahead: list[list[str]] = []
        self.bodies: list[bytes] = []
        self.asker: threading.Event

    def __call__(self, sock: socket.socket) -> None:
        waiting: list[tuple[FrameHeader, bytes]] = []
        names = {kind.TYPE: kind.__name__ for kind in (ReadRegions, WriteRegions, Fence, Notice, JoinEngine)}
        while True:
            while self._is_more_to_come(sock) if waiting else select.select([sock], [], [], PATIENCE_S)[0]:
                header = unpack_header(read(sock, HEADER_BYTES))
                waiting.append((header, read(sock, header.body_bytes)))
                self.bodies.append(waiting[-1][1])
                read(sock, header.payload_bytes)
            self.ahead.append([names[header.type] for header, _ in waiting])
            header, body = waiting.pop(0)
            payload = bytes([header.request_id % 256]) * sum(ReadRegions.unpack(body).sizes) if header.type == ReadRegions.TYPE else b""
            self.asker.clear()
            sock.sendall(frame(Ok(), header.request_id, payload=payload))

    def _is_more_to_come(self, sock: socket.socket) -> bool:
        while not self.asker.wait(POLL_S):
            if select.select([sock], [], [], 0)[0]:
                return True
        return bool(select.select([sock], [], [], POLL_S)[0])


def run(stream: RequestStream, endpoint: PeerConnection, requests: Sequence[AgentRequest]) -> None:
    """Until all are over."""
    for request in requests:
        stream.add(request)
    while stream.queue or stream.sent:
        stream.step(endpoint, may_send=True)
    assert [outcome(request) for request in requests] == [None] * len(requests)
    assert stream.queued_bytes == 0
    assert stream.is_proven


def test_requests_are_sent_ahead_up_to_the_window(stream: RequestStream) -> None:
    recorder = Recorder()
    with an_endpoint(recorder) as endpoint:
        requests = [a_request() for _ in range(WINDOW + 1)]
        run(stream, endpoint, requests)
    assert [len(ahead) for ahead in recorder.ahead] == [3, 3, 2, 1]
    assert [bytes(request.pieces[0].local.memory) for request in requests] == [bytes([number]) * SIZE for number in (1, 2, 3, 4)]


def test_only_one_direction_is_under_way_at_a_time(stream: RequestStream) -> None:
    recorder = Recorder()
    with an_endpoint(recorder) as endpoint:
        run(stream, endpoint, [a_request(READ), a_request(WRITE), a_request(WRITE), a_request(READ)])
    assert recorder.ahead == [["ReadRegions"], ["WriteRegions", "WriteRegions"], ["WriteRegions"], ["ReadRegions"]]


def test_notices_and_fenced_writes_wait_for_requests_in_flight(stream: RequestStream) -> None:
    recorder = Recorder()
    with an_endpoint(recorder) as endpoint:
        run(stream, endpoint, [a_request(WRITE), a_notice(), a_request(WRITE), a_request(WRITE, fences=(5, 6)), a_request(WRITE)])
    assert recorder.ahead == [
        ["WriteRegions"],
        ["Notice", "WriteRegions"],
        ["WriteRegions"],
        ["Fence"],
        ["WriteRegions", "WriteRegions"],
        ["WriteRegions"],
    ]
    assert Notice.unpack(recorder.bodies[1]).message == b"hello"
    assert list(Fence.unpack(recorder.bodies[3]).connections) == [5, 6]


def test_read_ahead_is_bounded_by_pieces(stream: RequestStream) -> None:
    """The peer sends and does not receive meanwhile: with more than its socket takes, each would wait for the other."""
    half, full = MAX_AHEAD_PIECES // 2, MAX_AHEAD_PIECES
    recorder = Recorder()
    with an_endpoint(recorder) as endpoint:
        run(stream, endpoint, [a_request(pieces=count) for count in (half, half, half, full + 1, full, 1)])
    assert [len(ahead) for ahead in recorder.ahead] == [3, 2, 1, 2, 2, 1]


def test_a_draining_stream_receives_and_sends_no_more(stream: RequestStream) -> None:
    recorder = Recorder()
    with an_endpoint(recorder) as endpoint:
        for _ in range(5):
            stream.add(a_request())
        stream.step(endpoint, may_send=True)
        while stream.sent:
            stream.step(endpoint, may_send=False)
        stream.step(endpoint, may_send=False)
    assert len(stream.queue) == 2
    assert [len(ahead) for ahead in recorder.ahead] == [3, 2, 1]


def answers(*make: Callable[[int], bytes]) -> Callable[[socket.socket], None]:
    """Answers request after request with these bytes, made from its id."""

    def play(sock: socket.socket) -> None:
        for one in make:
            header = unpack_header(read(sock, HEADER_BYTES))
            read(sock, header.body_bytes + header.payload_bytes)
            sock.sendall(one(header.request_id))
        sock.recv(1)

    return play


def right(number: int) -> bytes:
    return frame(Ok(), number, payload=bytes(SIZE))


def test_a_typed_error_ends_one_request_alone(stream: RequestStream) -> None:
    with an_endpoint(answers(lambda number: frame(Failure(StaleHandle.code, "gone"), number), right)) as endpoint:
        requests = [a_request(), a_request()]
        for request in requests:
            stream.add(request)
        stream.step(endpoint, may_send=True)
        stream.step(endpoint, may_send=True)
    assert [type(outcome(request)) for request in requests] == [StaleHandle, type(None)]


def test_a_request_that_is_not_asked_for_yet_can_be_taken_back(stream: RequestStream) -> None:
    one, other = a_request(), a_request()
    stream.add(one)
    stream.add(other)
    assert stream.remove(one)
    assert not stream.remove(one)
    assert list(stream.queue) == [other]
    assert stream.queued_bytes == SIZE


# --- who fails when the connection breaks ---


def broken(stream: RequestStream, error: KVStoreError, *, has_link: bool = True) -> list[tuple[AgentRequest, type[KVStoreError]]]:
    with an_endpoint(lambda sock: None) as endpoint:
        return [(request, type(reason)) for request, reason in stream.on_broken(endpoint if has_link else None, error)]


def under_way(stream: RequestStream, *requests: AgentRequest) -> None:
    """These have been sent."""
    for request in requests:
        stream.add(request)
        stream.sent.append(stream.queue.popleft())


def test_one_that_was_open_before_and_is_dead_fails_none(stream: RequestStream) -> None:
    """They are sent again in the same order, the writes after a fence."""
    one, other, third = a_request(WRITE, fences=(1,)), a_request(WRITE), a_request()
    under_way(stream, one, other)
    stream.add(third)
    stream._step_ns = Deadline(0).at_ns
    assert broken(stream, Unreachable("")) == []
    assert list(stream.queue) == [one, other, third]
    assert [request.fences for request in (one, other, third)] == [(1, 7), (7,), ()]
    assert one.unsettled == ()
    assert stream.queued_bytes == 3 * SIZE


def test_one_that_was_open_before_and_stalls_fails_all(stream: RequestStream) -> None:
    request = a_request()
    under_way(stream, request)
    with an_endpoint(lambda sock: None) as endpoint:
        endpoint.connection.stall_timeout_s = 0.0
        assert [failed for failed, _ in stream.on_broken(endpoint, Unreachable(""))] == [request]


@pytest.mark.parametrize("proven", [False, True])
def test_a_request_that_ends_by_itself_is_no_fault_of_the_others(stream: RequestStream, proven: bool) -> None:
    late, cancelled, innocent, queued = a_request(timeout_s=0), a_request(), a_request(), a_request(timeout_s=0)
    under_way(stream, late, cancelled, innocent)
    stream.add(queued)
    stream.is_proven = proven
    cancelled.is_cancelled = True
    assert broken(stream, Closed("")) == [(late, DeadlineExceeded), (cancelled, Cancelled), (queued, DeadlineExceeded)]
    assert list(stream.queue) == [innocent]
