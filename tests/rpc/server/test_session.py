"""Promises of session.py, over real sockets; only its timers run on a clock of the test."""

import array
import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.protocol.errors import Closed, DeadlineExceeded, Full, KVStoreError, ProtocolError, QuotaExceeded, StaleEpoch, Unavailable
from kvstore.protocol.frames import ACCEPTS_TRACES, HEADER_BYTES, MAKES_HOT_COPIES, VERSION, FrameHeader
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.message import Message
from kvstore.protocol.node_messages import Put, ReleaseLeases
from kvstore.protocol.session_messages import SERVER_NODE, Count, Failure, Flags, Ok, Trace, Welcome
from kvstore.protocol.traceparent import TraceParent
from kvstore.rpc.frame_writer import SendLimits
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server import tenant_loads
from kvstore.rpc.server.session import DEFAULT_LIMITS, MAX_FRAMES_A_TURN, MAX_QUEUED_FDS, Session
from kvstore.rpc.server.tenant_loads import MAX_UNANSWERED, TenantLoad, TenantLoads
from kvstore.rpc.tracing import BROKEN, ObservedPeer, Stopwatch, Tracer, within_span
from kvstore.security.quotas.quota import Quota, Quotas
from tests.garbage import assert_no_garbage
from tests.rpc.encrypted_pair import tls_pair
from tests.rpc.traced import Part, Spans
from tests.rpc.wires import Clock, Recorder, Replies, frame, pump, read_frame


class Line:
    """A session on one end of a socket pair; the test holds the other."""

    def __init__(
        self,
        ends: "tuple[socket.socket, socket.socket] | None" = None,
        handler: Recorder | None = None,
        limits: SendLimits = DEFAULT_LIMITS,
        tracer: Tracer | None = None,
    ) -> None:
        self.clock = Clock()
        self.reactor = Reactor(self.clock)
        self.peer, mine = ends or socket.socketpair()
        self.peer.settimeout(10)
        self.handler = handler or Recorder()
        self.session = Session(self.reactor, mine, self.handler, limits, tracer=tracer)

    def send(self, data: bytes) -> None:
        self.peer.sendall(data)
        self.settle()

    def settle(self) -> None:
        """Let the session take in all that has been sent, without waiting for more."""
        for _ in range(200):
            self.reactor.run_once(0)

    def close(self) -> None:
        self.session.close()
        self.reactor.close()
        self.peer.close()


@pytest.fixture(params=["plain", "tls"])
def either(request: pytest.FixtureRequest) -> Iterator[Line]:
    """For what the socket's kind could break."""
    line = Line(tls_pair() if request.param == "tls" else None)
    yield line
    line.close()


@pytest.fixture
def line() -> Iterator[Line]:
    line = Line()
    yield line
    line.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def put(*values: bytes, request_id: int = 1) -> bytes:
    keys = [b"key-%d" % index for index in range(len(values))]
    sizes = [len(value) for value in values]
    zeros = [0] * len(values)
    return frame(Put("", keys, sizes, zeros, zeros, [b""] * len(values)), request_id, b"".join(values))


EXISTS = Exists([b"some key"])


# --- reading ---


def test_a_frame_that_comes_byte_by_byte_arrives_whole_and_once(either: Line) -> None:
    line = either
    data = frame(EXISTS, 7)
    for byte in data:
        assert line.handler.frames == []
        line.peer.sendall(bytes([byte]))
        line.settle()
    assert line.handler.frames == [(Exists.TYPE, 7, EXISTS.pack(), b"")]


@given(st.lists(st.integers(1, 400), max_size=8), st.lists(st.integers(1, 60), max_size=4), st.sampled_from(["now", "later"]))
@settings(max_examples=60)
def test_a_payload_cut_anywhere_into_any_views_arrives_unchanged(cuts: list[int], parts: list[int], room: str) -> None:
    line = Line(handler=Recorder(room=room, parts=tuple(sorted(parts))))
    value = bytes(range(256))[:77]
    data = frame(EXISTS, 1) + put(value, request_id=2) + frame(EXISTS, 3) + put(value[::-1], request_id=4) + frame(EXISTS, 5)
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    for start, end in itertools.pairwise(edges):
        line.send(data[start:end])
        while line.handler.waiting:
            line.handler.waiting.pop().accept_payload(line.handler.views())
            line.settle()
    assert [(request_id, payload) for _, request_id, _, payload in line.handler.frames] == [
        (1, b""), (2, value), (3, b""), (4, value[::-1]), (5, b""),
    ]  # fmt: skip
    line.close()


# --- payloads ---


def test_socket_is_not_read_while_a_destination_is_awaited(either: Line) -> None:
    line = either
    line.handler.room = "later"
    value = bytes(300_000)
    line.peer.setblocking(False)
    sent = line.peer.send(put(value))
    line.settle()
    assert line.handler.waiting == [line.session]
    assert line.reactor._epoll.poll(0) == []
    line.session.accept_payload(line.handler.views())
    line.peer.settimeout(10)
    data = put(value)
    while sent < len(data):
        line.settle()
        sent += line.peer.send(data[sent : sent + 50_000])
    line.settle()
    assert line.handler.frames[0][3] == value


@pytest.mark.parametrize("room", [Full("no room"), "later"])
@pytest.mark.parametrize("size", [5, 1 << 20])
def test_refused_payload_is_discarded_and_session_stays_usable(either: Line, room: str | Exception, size: int) -> None:
    line = either
    line.handler.room = room
    data = put(bytes(size), request_id=3) + frame(EXISTS, 4)
    line.peer.setblocking(False)
    while data:
        with contextlib.suppress(BlockingIOError):
            data = data[line.peer.send(data) :]
        line.settle()
        if line.handler.waiting:
            line.handler.waiting.pop().refuse_payload(Full("no room"))
    line.peer.settimeout(10)
    line.settle()
    header, failure, _ = read_frame(line.peer)
    assert (header.request_id, failure) == (3, Failure(Full.code, "no room"))
    assert [request_id for _, request_id, _, _ in line.handler.frames] == [4]


class Taking(Recorder):
    """A handler that serves what has come along with its message at once."""

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> list[memoryview] | None:
        value = session.buffered_payload()
        if value is None:
            return super().payload(session, header, body)
        self.frames.append((-header.type, header.request_id, bytes(body), bytes(value)))
        session.take_payload()
        session.reply(header.request_id, Count(len(self.frames)))
        return None


def test_buffered_payload_is_served_at_once_in_order() -> None:
    line = Line(handler=Taking())
    line.send(put(b"abc", request_id=1) + frame(EXISTS, 2) + put(b"de", b"f", request_id=3) + put(b"0123456789", request_id=4)[:-1])
    assert [(kind, request_id, payload) for kind, request_id, _, payload in line.handler.frames] == [
        (-Put.TYPE, 1, b"abc"),
        (Exists.TYPE, 2, b""),
        (-Put.TYPE, 3, b"def"),
    ]
    assert [read_frame(line.peer)[0].request_id for _ in range(2)] == [1, 3]
    line.send(put(b"0123456789", request_id=4)[-1:])
    assert line.handler.frames[-1][::3] == (Put.TYPE, b"0123456789"), "in two parts it goes where the handler says"
    line.close()
    line.session.reply(5, Count(1))


class AtOnce:
    """A session's `fast_path` that serves bytes with a given beginning, and records every call."""

    def __init__(self, line: Line, serves: bytes) -> None:
        self.line = line
        self.serves = serves
        self.shown: list[bytes] = []
        self.fault: Exception | None = None
        line.session.set_tenant_load(TenantLoads().enter("a", "red"))
        line.session.fast_path = self

    def __call__(self, session: Session, frame: memoryview) -> bool:
        assert session is self.line.session
        self.shown.append(bytes(frame))
        if self.fault is not None:
            raise self.fault
        if bytes(frame) != self.serves:
            return False
        answer = answered(7)
        if unsent := self.line.session.send_now(answer):
            self.line.session.send_whole(unsent)
        return True


def answered(request_id: int) -> bytes:
    return frame(Ok(), request_id)


def test_fast_path_serves_a_lone_request_others_are_parsed(either: Line) -> None:
    line = either
    fast_path = AtOnce(line, put(b"value", request_id=7))
    line.send(put(b"value", request_id=7))
    assert read_frame(line.peer)[0].request_id == 7
    assert (line.handler.frames, len(fast_path.shown)) == ([], 1)
    line.send(frame(EXISTS, 8))
    assert [request_id for _, request_id, _, _ in line.handler.frames] == [8]
    assert len(fast_path.shown) == 2
    line.send(put(b"value", request_id=7))
    assert len(line.handler.frames) == 2, "one waits for its answer: this is counted, too"
    assert len(fast_path.shown) == 2
    line.session.reply(8, Ok())
    line.session.reply(7, Ok())
    assert [read_frame(line.peer)[0].request_id for _ in range(2)] == [8, 7]
    line.send(put(b"value", request_id=7))
    assert read_frame(line.peer)[0].request_id == 7
    assert len(line.handler.frames) == 2


def test_fast_path_is_not_tried_on_the_rest_of_a_frame(line: Line) -> None:
    fast_path = AtOnce(line, b"")
    data = put(b"value", request_id=7)
    line.send(data[:10])
    line.send(data[10:-2])
    line.send(data[-2:])
    assert fast_path.shown == [data[:10]]
    assert line.handler.frames[0][1::2] == (7, b"value")


def test_fast_path_is_not_tried_with_quota_or_without_tenant(line: Line) -> None:
    fast_path = AtOnce(line, put(b"value", request_id=7))
    line.session.set_tenant_load(None)
    line.send(put(b"value", request_id=7))
    loads = TenantLoads()
    loads.set_quotas(Quotas(Quota(requests_in_flight=5)))
    line.session.set_tenant_load(loads.enter("a", "red"))
    line.send(put(b"value", request_id=7))
    assert (len(fast_path.shown), len(line.handler.frames)) == (0, 2)


def test_internal_error_in_fast_path_closes_the_session(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    AtOnce(line, b"").fault = ZeroDivisionError("oops")
    line.send(put(b"value"))
    assert not line.session.is_open
    assert line.handler.closed_count == 1
    assert "ZeroDivisionError" in caplog.text


def test_answer_is_sent_later_if_the_socket_is_full(line: Line) -> None:
    frame_of = frame(EXISTS, 1, bytes(8 << 20))
    left = line.session.send_now(frame_of)
    assert 0 < len(left) < len(frame_of)
    assert line.session.send_now(b"more") == b"more"
    line.session.send_whole(left)
    got = bytearray()
    while len(got) < len(frame_of):
        got += line.peer.recv(1 << 20)
        line.settle()
    assert got == frame_of
    line.session.close()
    line.session.send_whole(b"after the end")


def test_what_is_served_at_once_is_timed(line: Line) -> None:
    class Times:
        def __init__(self) -> None:
            self.taken_ns: list[int] = []
            self.answered = {Put.TYPE: self.taken_ns.append}
            self.slow_ns = 0
            self.slow_kinds: list[int] = []

        def slow(self, peer: ObservedPeer, kind: int, elapsed_ns: int) -> None:
            assert elapsed_ns == self.taken_ns[-1]
            self.slow_kinds.append(kind)

        def refused(self, error: KVStoreError) -> None:
            raise AssertionError(error)

    times = Times()
    mine, peer = socket.socketpair()
    line = Line((peer, mine))
    line.session._stopwatch = Stopwatch(times)
    fast_path = AtOnce(line, put(b"value", request_id=7))
    line.send(put(b"value", request_id=7))
    assert len(times.taken_ns) == 1
    assert times.taken_ns[0] > 0

    def counted(session: Session, frame: memoryview) -> bool:
        session.count(FrameHeader(Put.TYPE, 8, 0, 4, 5))
        session.reply(8, Ok())
        return True

    line.session.fast_path = counted
    line.send(put(b"value", request_id=8))
    assert len(times.taken_ns) == 2, "what is counted and answered in one go is timed once"
    line.session.fast_path = fast_path
    line.send(put(b"value", request_id=7))
    assert len(times.taken_ns) == 3
    assert times.slow_kinds == [Put.TYPE] * 3
    line.close()


def test_response_with_a_payload_closes_the_session(line: Line) -> None:
    line.send(frame(Ok(), 1, b"value"))
    assert "has a payload, which only requests may have" in str(read_frame(line.peer)[1])
    assert line.handler.closed_count == 1


def test_room_given_or_refused_after_the_end_is_ignored(line: Line) -> None:
    line.handler.room = "later"
    line.send(put(b"value"))
    line.session.close()
    line.session.accept_payload(line.handler.views())
    line.session.refuse_payload(Full("late"))
    line.settle()
    assert line.handler.frames == []
    assert bytes(line.handler.memory) == bytes(5)


# --- the peer goes away ---


@pytest.mark.parametrize("pair", [socket.socketpair, tcp_pair])
@pytest.mark.parametrize("room", ["now", "later", Full("no room")])
def test_session_ends_once_whenever_the_peer_disconnects(pair: "object", room: str | Exception) -> None:
    data = frame(EXISTS, 1) + put(b"12345678")
    for sent in range(0, len(data) + 1, 3):
        line = Line(pair(), Recorder(room=room))  # type: ignore[operator]
        line.peer.sendall(data[:sent])
        line.peer.close()
        for _ in range(20):
            line.reactor.run_once(0)
            while line.handler.waiting:
                line.handler.waiting.pop().accept_payload(line.handler.views())
        pump(line.reactor, lambda line=line: line.handler.closed_count > 0)  # type: ignore[misc]
        assert line.handler.closed_count == 1
        assert not line.session.is_open
        line.close()


def test_local_peers_death_is_noticed_while_awaiting_a_buffer(line: Line) -> None:
    line.handler.room = "later"
    line.send(put(b"value")[:-1])
    line.peer.close()
    line.settle()
    assert line.handler.closed_count == 1


def test_a_peer_that_resets_the_connection_ends_the_session() -> None:
    line = Line(tcp_pair())
    line.peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    line.peer.close()
    pump(line.reactor, lambda: line.handler.closed_count == 1)
    line.close()


@pytest.mark.parametrize("ends", [socket.socketpair, tls_pair])
@pytest.mark.parametrize("is_closed_within", [False, True], ids=["between requests", "within one that is refused"])
def test_sessions_that_are_over_leave_nothing_to_the_collector(
    ends: "Callable[[], tuple[socket.socket, socket.socket]]", is_closed_within: bool
) -> None:
    reactors: list[Reactor] = []

    def come_and_go() -> None:
        line = Line(ends())
        reactors.append(line.reactor)
        line.session.fast_path = AtOnce(line, b"")
        line.send(frame(EXISTS))
        line.session.request(EXISTS, lambda _header, _body: None, deadline_s=1.0)
        if is_closed_within:
            line.handler.room = Full("no room")
            line.send(put(b"value")[:-1])
        line.close()

    assert_no_garbage(come_and_go)


# --- peers that do not speak the protocol ---


def test_garbage_is_told_so_and_hung_up_on(either: Line) -> None:
    line = either
    line.send(b"GET / HTTP/1.1\r\nHost: kvstore\r\n\r\n")
    header, failure, _ = read_frame(line.peer)
    assert (header.type, header.request_id) == (Failure.TYPE, 0)
    assert isinstance(failure, Failure)
    assert failure.code == ProtocolError.code
    assert "not a kvstore frame" in failure.text
    assert line.peer.recv(1) == b""
    assert line.handler.closed_count == 1


def test_another_protocol_version_is_told_both(line: Line) -> None:
    data = bytearray(frame(EXISTS))
    data[2] = VERSION + 1
    line.send(bytes(data))
    failure = read_frame(line.peer)[1]
    assert f"version {VERSION + 1}, this side {VERSION}" in str(failure)


def test_garbage_after_a_full_round_of_frames_closes_session(line: Line) -> None:
    line.send(frame(EXISTS) * MAX_FRAMES_A_TURN + bytes(HEADER_BYTES))
    assert len(line.handler.frames) == MAX_FRAMES_A_TURN
    assert line.handler.closed_count == 1


@pytest.mark.promise("no-leaks")
@given(st.binary(min_size=1, max_size=200))
@settings(max_examples=50)
def test_no_bytes_of_a_peer_disturb_the_reactor(garbage: bytes) -> None:
    line = Line()
    line.send(garbage)
    line.peer.close()
    line.settle()
    assert line.handler.closed_count == 1
    line.close()


# --- answers ---


def test_handler_error_is_answered_and_next_request_served(line: Line) -> None:
    errors: list[Exception] = [StaleEpoch("too old"), ValueError("oops")]

    def fail(_session: Session, _header: FrameHeader, _body: bytes) -> None:
        raise errors.pop(0)

    line.handler.on_frame = fail
    line.send(frame(EXISTS, 1) + frame(EXISTS, 2))
    assert read_frame(line.peer)[1] == Failure(StaleEpoch.code, "too old")
    assert read_frame(line.peer)[1] == Failure(KVStoreError.code, "internal error: ValueError: oops")


def test_a_message_without_an_id_gets_no_answer_even_if_it_fails(line: Line) -> None:
    def fail(session: Session, _header: FrameHeader, _body: bytes) -> None:
        raise Closed("no")

    line.handler.on_frame = fail
    line.send(frame(ReleaseLeases([1]), 0))
    line.peer.setblocking(False)
    with pytest.raises(BlockingIOError):
        line.peer.recv(1)


@pytest.fixture
def narrow() -> Iterator[Line]:
    """A mebibyte may wait for the peer, and for 10 seconds."""
    line = Line(limits=SendLimits(1 << 20, 10.0))
    yield line
    line.close()


def test_peer_that_does_not_read_is_not_read_from(narrow: Line) -> None:
    line = narrow
    value = bytes(600_000)
    sent: list[int] = []

    def answer(session: Session, header: FrameHeader, _body: bytes) -> None:
        session.reply(header.request_id, Ok(), [value], on_sent=lambda: sent.append(header.request_id))

    line.handler.on_frame = answer
    line.send(b"".join(frame(EXISTS, request_id) for request_id in range(1, 11)))
    line.peer.sendall(frame(EXISTS, 11))
    line.settle()
    served = len(line.handler.frames)
    assert served < 5, "requests of a peer that does not read must wait"
    assert line.reactor._epoll.poll(0) == [], "and must not wake the loop"
    for request_id in range(1, 12):
        collected = bytearray()
        expected = HEADER_BYTES + len(value)
        while len(collected) < expected:
            line.reactor.run_once(0)
            collected += line.peer.recv(min(1 << 20, expected - len(collected)))
        assert collected[4] == request_id
    line.settle()
    assert sent == list(range(1, 12))


@pytest.mark.promise("memory-bounded")
def test_peer_that_takes_no_answer_in_time_is_closed(narrow: Line) -> None:
    """Taking a little of it does not help; having taken the one before does."""
    line = narrow
    done: list[int] = []
    line.session.reply(1, Ok(), [bytes(4 << 20)], on_sent=lambda: done.append(1))
    line.clock.now_ns = 4 * 10**9
    line.session.reply(2, Ok(), [bytes(4 << 20)], on_sent=lambda: done.append(2))
    line.clock.now_ns = 8 * 10**9
    collected = 0
    while collected < HEADER_BYTES + (4 << 20):
        collected += len(line.peer.recv(HEADER_BYTES + (4 << 20) - collected))
        line.settle()
    assert done == [1]
    line.clock.now_ns = 14 * 10**9 - 1
    line.peer.recv(1000)
    line.settle()
    assert line.session.is_open
    line.clock.now_ns += 1
    line.settle()
    assert (line.session.is_open, done, line.handler.closed_count) == (False, [1, 2], 1)


@pytest.mark.promise("memory-bounded")
def test_queued_answers_pause_a_slow_reader_at_the_limit(narrow: Line) -> None:
    line = narrow
    for _ in range(8):
        line.session.reply(1, Ok(), [bytes(400_000)])
    line.peer.sendall(frame(EXISTS))
    line.settle()
    assert line.reactor._epoll.poll(0) == []
    assert line.handler.frames == []


def test_values_are_let_go_once_whether_sent_or_not(either: Line) -> None:
    line = either
    done: list[str] = []
    line.session.reply(1, Ok(), on_sent=lambda: done.append("small"))
    line.session.reply(2, Ok(), [bytes(8 << 20)], on_sent=lambda: done.append("cut off"))
    line.session.reply(3, Ok(), on_sent=lambda: done.append("never begun"))
    assert done == ["small"]
    line.session.close()
    line.session.close()
    line.session.reply(4, Ok(), on_sent=lambda: done.append("after the end"))
    assert done == ["small", "cut off", "never begun", "after the end"]
    assert line.handler.closed_count == 1


def test_failing_on_sent_does_not_stop_the_others(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def fail() -> None:
        raise RuntimeError("oops")

    line.session.reply(1, Ok(), on_sent=fail)
    line.session.reply(2, Ok(), [bytes(8 << 20)], on_sent=fail)
    line.session.reply(3, Ok(), on_sent=lambda: done.append(3))
    line.session.close()
    assert done == [3]
    assert line.handler.closed_count == 1
    assert len(caplog.records) == 2


def test_descriptors_are_sent_with_their_frame_and_stay_open(line: Line, tmp_path: Path) -> None:
    (tmp_path / "slab").write_bytes(b"slab")
    fd = os.open(tmp_path / "slab", os.O_RDONLY)
    before = len(os.listdir("/proc/self/fd"))
    line.session.reply(1, Ok())
    line.session.reply(2, Count(5), fds=[fd])
    line.session.reply(3, Ok())
    os.close(fd)
    received: list[tuple[bytes, list[int]]] = []
    while sum(len(data) for data, _ in received) < 3 * HEADER_BYTES + 8:
        data, fds, _, _ = socket.recv_fds(line.peer, 4096, 8)
        received.append((data, fds))
    with_fds = next(data for data, fds in received if fds)
    assert with_fds.endswith(frame(Count(5), 2))
    (copy,) = [fd for _, fds in received for fd in fds]
    assert os.read(copy, 10) == b"slab"
    os.close(copy)
    assert len(os.listdir("/proc/self/fd")) == before - 1


# --- requests of this side ---


def asked(line: Line, message: Message = EXISTS, deadline_s: float = 1.0) -> Replies:
    replies = Replies()
    line.session.request(message, replies, deadline_s=deadline_s)
    return replies


def test_both_ends_ask_and_answers_find_their_questions(line: Line) -> None:
    replies = [asked(line), asked(line)]
    first, second = read_frame(line.peer)[0], read_frame(line.peer)[0]
    assert first.request_id != second.request_id
    assert first.deadline_ms == 1001
    line.send(frame(Count(2), second.request_id) + frame(EXISTS, 1) + frame(Count(1), first.request_id))
    assert [reply.bodies for reply in replies] == [[Count(1).pack()], [Count(2).pack()]]
    assert len(line.handler.frames) == 1


def test_request_ends_at_deadline_and_ignores_late_answer(line: Line) -> None:
    replies = asked(line, deadline_s=2)
    line.clock.now_ns = 2_000_000_000
    line.settle()
    assert [type(error) for error in replies.errors] == [DeadlineExceeded]
    line.send(frame(Ok(), read_frame(line.peer)[0].request_id))
    assert (len(replies.errors), replies.bodies, line.session.is_open) == (1, [], True)


def test_a_broken_connection_answers_every_request_once(either: Line) -> None:
    line = either
    replies = [asked(line), asked(line)]
    line.peer.close()
    line.settle()
    replies.append(asked(line))
    assert [[type(error) for error in reply.errors] for reply in replies] == [[Unavailable]] * 3


def test_a_peer_that_could_not_read_us_says_why(line: Line) -> None:
    replies = asked(line)
    line.send(frame(Failure(ProtocolError.code, "speaks version 2"), 0))
    assert "speaks version 2" in str(replies.errors[0])
    assert not line.session.is_open


def test_answer_unreadable_for_its_receiver_closes_session(line: Line) -> None:
    line.session.request(EXISTS, lambda _header, body: Flags.unpack(bytes(body)) and None, deadline_s=1)  # type: ignore[arg-type]
    line.send(frame(Count(1), read_frame(line.peer)[0].request_id))
    assert line.handler.closed_count == 1


def test_failing_answer_callback_does_not_block_the_next(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_header: object, _body: object) -> None:
        raise RuntimeError("oops")

    line.session.request(EXISTS, fail, deadline_s=1)
    line.send(frame(Ok(), read_frame(line.peer)[0].request_id) + frame(EXISTS, 5))
    assert len(line.handler.frames) == 1
    assert "oops" in caplog.text


# --- traces ---

PARENT = TraceParent(7, 11)
TRACE = frame(Trace(PARENT.text()), 0)


@pytest.fixture
def traced() -> Iterator[tuple[Line, Spans]]:
    """A session that traces, whose peer has introduced itself; requests are answered at once."""
    spans = Spans()
    line = Line(handler=Recorder(on_frame=lambda session, header, _body: session.reply(header.request_id, Ok())), tracer=spans)
    line.session.context = "known"
    yield line, spans
    line.close()


def test_traced_request_has_a_span_with_and_without_values(traced: tuple[Line, Spans]) -> None:
    line, spans = traced
    line.send(TRACE + frame(EXISTS, 1) + frame(EXISTS, 2) + TRACE + put(b"value", request_id=3))
    assert [read_frame(line.peer)[0].request_id for _ in range(3)] == [1, 2, 3]
    assert spans.told == [(Exists.TYPE, PARENT, ""), (Put.TYPE, PARENT, "")]
    assert [request_id for _, request_id, _, _ in line.handler.frames] == [1, 2, 3], "the handler sees no Trace"


def test_unauthenticated_peer_has_no_span_bad_trace_is_ignored(traced: tuple[Line, Spans]) -> None:
    line, spans = traced
    line.send(frame(Trace("garbage"), 0) + frame(EXISTS, 1))
    line.session.context = None
    line.send(TRACE + frame(EXISTS, 2))
    assert [read_frame(line.peer)[0].type for _ in range(2)] == [Ok.TYPE] * 2
    assert spans.told == []


def test_a_span_ends_with_the_error_or_with_the_connection(traced: tuple[Line, Spans]) -> None:
    line, spans = traced

    def refuse(session: Session, header: FrameHeader, body: bytes) -> None:
        if header.request_id == 1:
            raise Full("no room for one secret key")
        span = session.span(header.request_id)
        assert span is not None
        span.set("kvstore.tiers", "dram")

    line.handler.on_frame = refuse
    line.send(TRACE + frame(EXISTS, 1) + TRACE + frame(EXISTS, 2))
    line.session.close()
    assert spans.told == [(Exists.TYPE, PARENT, "Full"), (Exists.TYPE, PARENT, BROKEN)]


@pytest.mark.parametrize("makes_hot_copies", [False, True])
@pytest.mark.parametrize("tracer", [None, Spans()], ids=["plain", "traced"])
def test_welcome_has_feature_bits(tracer: Spans | None, makes_hot_copies: bool) -> None:
    line = Line(tracer=tracer)
    line.session.welcome(1, Welcome(SERVER_NODE, "n"), makes_hot_copies=makes_hot_copies)
    header, message, _ = read_frame(line.peer)
    does = (ACCEPTS_TRACES if tracer else 0) + (MAKES_HOT_COPIES if makes_hot_copies else 0)
    assert (header.request_id, header.deadline_ms, message) == (1, does, Welcome(SERVER_NODE, "n"))
    line.close()
    line.session.welcome(2, Welcome(SERVER_NODE, "n"))  # no peer is left to receive it


@pytest.mark.promise("tenant-quotas")
@pytest.mark.parametrize("has_payload", [False, True])
def test_requests_over_quota_are_refused_connection_stays(line: Line, has_payload: bool) -> None:
    load = TenantLoad("red", 2)
    line.session.set_tenant_load(load)
    for request_id in (1, 2, 3):
        line.send(put(b"value", request_id=request_id) if has_payload else frame(Exists([b"k"]), request_id))
    header, answer, _ = read_frame(line.peer)
    assert header.request_id == 3
    assert isinstance(answer, Failure)
    assert answer.code == QuotaExceeded.code
    assert (load.requests, load.refused) == (2, 1)
    line.session.reply(1, Ok())
    line.session.reply(1, Ok())
    line.session.reply(2, Ok())
    assert load.requests == 0
    line.send(frame(Exists([b"k"]), 4))
    assert load.requests == 1
    line.session.close()
    assert load.requests == 0


@pytest.mark.promise("peers-vanish")
def test_connection_is_not_read_while_many_requests_wait(either: Line) -> None:
    line = either
    line.session.set_tenant_load(TenantLoad("red", None))
    for number in range(1, MAX_UNANSWERED + 3):
        line.send(frame(EXISTS, number))
    line.send(frame(ReleaseLeases([1]), 0))
    assert len(line.handler.frames) == MAX_UNANSWERED
    assert line.reactor._epoll.poll(0) == [], "nobody looks at it again and again"
    line.session.reply(5, Ok())
    line.settle()
    assert [number for _, number, _, _ in line.handler.frames[MAX_UNANSWERED:]] == [MAX_UNANSWERED + 1]
    line.session.reply(6, Ok())
    line.session.reply(7, Ok())
    line.settle()
    assert [number for _, number, _, _ in line.handler.frames[MAX_UNANSWERED + 1 :]] == [MAX_UNANSWERED + 2, 0]
    assert line.session.is_open


@pytest.mark.promise("peers-vanish")
def test_waiting_messages_of_a_connection_are_limited_in_bytes(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_loads, "MAX_HELD_BYTES", 1 << 20)
    line.session.set_tenant_load(TenantLoad("red", None))
    asked = Exists([bytes(255)] * 1200)
    assert 3 < (1 << 20) / len(asked.pack()) < 4
    sender = threading.Thread(target=line.peer.sendall, args=(b"".join(frame(asked, number) for number in range(1, 7)),))
    sender.start()
    pump(line.reactor, lambda: len(line.handler.frames) == 4)
    line.settle()
    assert len(line.handler.frames) == 4
    line.session.reply(1, Ok())
    pump(line.reactor, lambda: len(line.handler.frames) == 5)
    line.session.reply(2, Ok())
    pump(line.reactor, lambda: len(line.handler.frames) == 6)
    sender.join()


@pytest.mark.promise("peers-vanish")
@pytest.mark.parametrize("number", [0, 1])
def test_request_id_zero_or_in_use_closes_the_session(line: Line, number: int) -> None:
    line.session.set_tenant_load(TenantLoad("red", None))
    line.send(frame(EXISTS, 1) + frame(EXISTS, number))
    assert f"request id {number} is 0 or in use" in str(read_frame(line.peer)[1])
    assert not line.session.is_open
    assert len(line.handler.frames) == 1


@pytest.mark.promise("peers-vanish")
def test_peer_that_takes_no_descriptors_is_not_read_from(line: Line, tmp_path: Path) -> None:
    """Each request of 600 bytes would have 64 of them opened."""
    opened = [os.open(tmp_path, os.O_RDONLY) for _ in range(64)]

    def answer(session: Session, header: FrameHeader, _body: bytes) -> None:
        session.reply(header.request_id, Ok(), fds=opened)

    line.handler.on_frame = answer
    line.session.reply(1, Ok(), [bytes(8 << 20)])  # what the peer has not read is before it
    for number in range(2, 40):
        line.send(frame(EXISTS, number))
    assert len(line.handler.frames) == MAX_QUEUED_FDS // 64 + 1
    line.peer.settimeout(0.01)
    taken = array.array("i")
    while len(line.handler.frames) < 38 or line.session._writer.queued_bytes:
        with contextlib.suppress(TimeoutError):
            _, ancillary, _, _ = line.peer.recvmsg(1 << 20, socket.CMSG_SPACE(253 * 4))
            for _, _, content in ancillary:
                taken.frombytes(content)
        line.settle()
    assert line.session._writer.queued_fds == 0
    for fd in (*opened, *taken):
        os.close(fd)


def test_request_within_span_sends_trace_to_accepting_peer(traced: tuple[Line, Spans]) -> None:
    line, spans = traced
    plain = len(asked_by(line))
    with within_span(Part(spans, "", place=PARENT)):
        assert len(asked_by(line)) == plain, "the peer takes no traces"
        line.session.mark_authenticated(accepts_traces=True)
        assert asked_by(line)[: len(TRACE)] == TRACE
    assert len(asked_by(line)) == plain, "it is for nobody's sake"
    line.session.close()
    errors = list[object]()
    with within_span(Part(spans, "", place=PARENT)):
        line.session.request(EXISTS, lambda _header, error: errors.append(error), deadline_s=5)
    assert [type(error) for error in errors] == [Unavailable]


def asked_by(line: Line) -> bytes:
    """Return the bytes of a request on the wire."""
    line.session.request(EXISTS, lambda _header, _body: None, deadline_s=5)
    return line.peer.recv(4096)
