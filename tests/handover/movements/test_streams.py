"""Promises of streams.py: parts in their order over one connection that shows its ticket; each move ends once, however the stream does."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing

import pytest

from kvstore.handover.movements import streams
from kvstore.handover.movements.streams import Move, Stream, StreamListener, StreamTransport
from kvstore.protocol.errors import Cancelled, Closed, Full, KVStoreError, Unreachable
from kvstore.protocol.handover_messages import TICKET_BYTES
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.waiting import assert_nothing_is_left, eventually
from kvstore.transfer.agent import Rail
from kvstore.transfer.streams.connection import Connection, Listener
from kvstore.transfer.streams.tcp import TcpConnection

TICKET = bytes(range(TICKET_BYTES))
End = Future[KVStoreError | None]


def put(stream: Stream, move: Move) -> End:
    """A move whose end can be waited for."""
    ended = End()
    stream.put(move, ended.set_result)
    return ended


def sending(data: bytes) -> Move:
    return lambda connection: connection.send([data], Deadline(10))


def receiving(into: bytearray) -> Move:
    return lambda connection: connection.recv_into([memoryview(into)], Deadline(10))


@pytest.fixture
def listener() -> Iterator[StreamListener]:
    with ExitStack() as stack:
        made = StreamListener(TcpConnection.listen(Rail()))
        stack.callback(made.close)
        yield made


def connected(listener: StreamListener, ticket: bytes = TICKET) -> Stream:
    """The sender's end."""
    stream = Stream()
    stream.connect(StreamTransport(TcpConnection), listener.metadata(), ticket, deadline_s=10)
    return stream


def test_parts_arrive_in_their_order(listener: StreamListener) -> None:
    theirs = listener.expect(TICKET)
    parts = [bytearray(3) for _ in range(5)]
    taken = [put(theirs, receiving(part)) for part in parts]  # before it is connected
    ours = connected(listener)
    given = [put(ours, sending(bytes([number] * 3))) for number in range(5)]
    assert [ended.result(10) for ended in given + taken] == [None] * 10
    assert parts == [bytes([number] * 3) for number in range(5)]
    for stream in (ours, theirs):
        stream.close()
        stream.close()


def test_to_close_ends_the_move_under_way_and_those_that_wait(listener: StreamListener) -> None:
    theirs = listener.expect(TICKET)
    ours = connected(listener)
    began = threading.Event()

    def hang(connection: Connection) -> None:
        began.set()
        receiving(bytearray(1))(connection)

    under_way, waiting = put(theirs, hang), put(theirs, sending(b""))
    assert began.wait(10)
    theirs.close()
    assert all(isinstance(ended.result(10), Cancelled) for ended in (under_way, waiting, put(theirs, sending(b""))))
    ours.close()


def test_a_move_that_fails_ends_those_behind_it_with_its_error(listener: StreamListener) -> None:
    theirs = listener.expect(TICKET)
    ends = [put(theirs, receiving(bytearray(1))) for _ in range(2)]
    ours = connected(listener)
    assert put(ours, sending(b"x")).result(10) is None
    assert ends[0].result(10) is None
    ours.close()
    assert isinstance(ends[1].result(10), Unreachable)
    assert isinstance(put(theirs, sending(b"")).result(10), Unreachable)


def wrong(connection: Connection) -> None:
    raise ValueError("a mistake")


def leave(connection: Connection) -> None:
    raise SystemExit


@pytest.mark.parametrize(("move", "text"), [(wrong, "internal error: ValueError: a mistake"), (leave, "internal error: SystemExit: ")])
def test_whatever_a_move_raises_ends_its_stream_and_no_other(listener: StreamListener, move: Move, text: str) -> None:
    theirs, others = listener.expect(TICKET), listener.expect(bytes(TICKET_BYTES))
    ours, more = connected(listener), connected(listener, bytes(TICKET_BYTES))
    ends = [put(theirs, move), put(theirs, receiving(bytearray(1)))]
    for ended in ends:
        error = ended.result(10)
        assert (type(error), str(error)) == (KVStoreError, text)
    assert str(put(theirs, receiving(bytearray(1))).result(10)) == text
    assert isinstance(put(ours, receiving(bytearray(1))).result(10), Unreachable)
    taken = put(others, receiving(bytearray(1)))
    assert put(more, sending(b"x")).result(10) is None
    assert taken.result(10) is None
    more.close()
    others.close()


class Wrong(TcpConnection):
    """A plug-in with a mistake in it."""

    made: "list[Wrong]" = []  # noqa: RUF012  (of one test)

    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        self.made.append(self)
        raise ZeroDivisionError("a mistake")


def test_a_plugin_that_cannot_open_a_stream_ends_its_moves_and_leaves_no_connection(listener: StreamListener) -> None:
    stream = Stream()
    ended = put(stream, sending(b"x"))
    stream.connect(StreamTransport(Wrong), listener.metadata(), TICKET, deadline_s=10)
    assert str(ended.result(10)) == "internal error: ZeroDivisionError: a mistake"
    assert [connection.is_open for connection in Wrong.made] == [False]


def test_a_thread_that_cannot_be_had_ends_the_moves(listener: StreamListener, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    stream = Stream()
    ended = put(stream, sending(b"x"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        stream.connect(StreamTransport(TcpConnection), listener.metadata(), TICKET, deadline_s=10)
        assert isinstance(ended.result(0), Full)
        with pytest.raises(Unreachable):
            TcpConnection.connect(listener.metadata(), Rail(), Deadline(10)).recv_into([memoryview(bytearray(1))], Deadline(10))
    theirs = listener.expect(TICKET)
    ours = connected(listener)
    assert put(ours, sending(b"x")).result(10) is None
    theirs.close()


def test_a_wrong_ticket_or_one_that_is_used_or_forgotten_is_hung_up_on(listener: StreamListener) -> None:
    theirs = listener.expect(TICKET)
    listener.expect(b"forgotten" + bytes(7))
    listener.forget(b"forgotten" + bytes(7))
    part = bytearray(2)
    taken = put(theirs, receiving(part))
    first = connected(listener)
    assert put(first, sending(b"ok")).result(10) is None
    assert taken.result(10) is None
    for ticket in (TICKET, bytes(TICKET_BYTES), b"forgotten" + bytes(7)):
        other = connected(listener, ticket)
        assert isinstance(put(other, receiving(bytearray(1))).result(10), Unreachable)
    first.close()
    theirs.close()


def test_a_connection_that_never_says_whose_it_is_is_closed(listener: StreamListener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "TICKET_TIMEOUT_S", 0.01)
    connection = TcpConnection.connect(listener.metadata(), Rail(), Deadline(10))
    with pytest.raises(Unreachable):
        connection.recv_into([memoryview(bytearray(1))], Deadline(10))


def test_of_too_many_strangers_the_oldest_is_closed() -> None:
    with closing(StreamListener(TcpConnection.listen(Rail()), max_strangers=1)) as listener:
        first = TcpConnection.connect(listener.metadata(), Rail(), Deadline(10))
        eventually(lambda: bool(listener.arriving), "the first arrives")
        theirs, ours = listener.expect(TICKET), connected(listener)
        with pytest.raises(Unreachable):
            first.recv_into([memoryview(bytearray(1))], Deadline(1))
        assert put(ours, sending(b"x")).result(10) is None
        assert put(theirs, receiving(bytearray(1))).result(10) is None
        assert not listener.arriving
        for stream in (ours, theirs):
            stream.close()


def test_close_hangs_up_on_who_is_arriving_and_leaves_nothing() -> None:
    def use() -> None:
        listener = StreamListener(TcpConnection.listen(Rail()))
        connection = TcpConnection.connect(listener.metadata(), Rail(), Deadline(10))
        eventually(lambda: bool(listener.arriving), "the connection arrives")
        listener.close()
        with pytest.raises(Unreachable):
            connection.recv_into([memoryview(bytearray(1))], Deadline(10))

    assert_nothing_is_left(use)


class Odd(Listener):
    """Fails, has nobody, fails otherwise, and then a connection that comes too late."""

    def __init__(self) -> None:
        self.steps = 0
        self.may_close = threading.Event()
        self.late = TcpListenerPair()

    def metadata(self) -> bytes:
        return b""

    def accept(self, timeout_s: float) -> Connection | None:
        self.steps += 1
        if self.steps == 1:
            raise Unreachable("no descriptor")
        if self.steps == 2:
            return None
        if self.steps == 3:
            raise ZeroDivisionError("a mistake")
        if self.steps == 4:
            self.may_close.wait(10)
            return self.late.accepted
        raise Closed("closed")

    def close(self) -> None:
        self.may_close.set()


class One(Odd):
    """Has one connection, whose receiving is a mistake."""

    def accept(self, timeout_s: float) -> Connection | None:
        self.steps += 1
        if self.steps > 1:
            self.may_close.wait(10)
            raise Closed("closed")
        return self.late.accepted


def test_who_cannot_be_asked_for_a_ticket_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    one = One()
    monkeypatch.setattr(one.late.accepted, "recv_into", lambda parts, deadline: 1 // 0)
    with closing(StreamListener(one)) as listener:
        with pytest.raises(Unreachable):
            one.late.connected.recv_into([memoryview(bytearray(1))], Deadline(10))
        eventually(lambda: not listener.arriving, "it is forgotten")


class TcpListenerPair:
    """Two ends of one connection."""

    def __init__(self) -> None:
        listener = TcpConnection.listen(Rail())
        self.connected = TcpConnection.connect(listener.metadata(), Rail(), Deadline(10))
        accepted = listener.accept(10)
        assert accepted is not None
        self.accepted = accepted
        listener.close()


def test_failures_to_accept_are_survived_and_late_comers_hung_up_on() -> None:
    odd = Odd()
    listener = StreamListener(odd)
    eventually(lambda: odd.steps == 4, "it goes on after each failure")
    listener.close()
    eventually(lambda: not odd.late.accepted.is_open, "the late connection is closed")
    odd.late.connected.close()
