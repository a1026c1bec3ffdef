"""The passive side: who is served by what, how a connection is fenced off, and that nothing is left after close."""

import logging
import socket
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from kvstore.protocol.errors import (
    Closed,
    ConfigError,
    Denied,
    ProtocolError,
    Unauthorized,
    Unavailable,
    Unreachable,
)
from kvstore.protocol.frames import HEADER, MAGIC, VERSION
from kvstore.protocol.session_messages import Ok
from kvstore.protocol.transfers import Fence, JoinEngine, JoinReply, Notice, ReadRegions, WriteRegions
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import PATIENCE_S, SOON_S, eventually, in_background, within
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.region import Exports, Region
from kvstore.transfer.streams import responder as answering
from kvstore.transfer.streams import server_threads as servers_module
from kvstore.transfer.streams import target as target_module
from kvstore.transfer.streams.connection import Connection
from kvstore.transfer.streams.target import Target
from kvstore.transfer.streams.tcp import TcpConnection, TcpListener
from kvstore.transfer.streams.unauthenticated import MAX_DISCARDED_BYTES, HandshakeState
from tests.ports import free_ports
from tests.rpc.raw_peers import RawAsker, a_target, fetch, make_region, shown, store

SIZE = 100_000
CLOSE_S = SOON_S


@pytest.fixture
def exports() -> Exports:
    return Exports()


@pytest.fixture
def region(exports: Exports) -> Region:
    region = make_region(SIZE, b"ours")
    exports.add(region)
    return region


@pytest.fixture
def served(exports: Exports) -> Iterator[tuple[Target, bytes]]:
    with a_target(exports, stall_timeout_s=PATIENCE_S) as (target, metadata):
        yield target, metadata


@pytest.fixture
def target(served: tuple[Target, bytes]) -> Target:
    return served[0]


@pytest.fixture
def metadata(served: tuple[Target, bytes]) -> bytes:
    return served[1]


@pytest.fixture
def raw(metadata: bytes) -> Iterator[RawAsker]:
    with RawAsker(metadata) as raw:
        raw.join()
        yield raw


@pytest.mark.promise("authentication")
def test_join_requires_the_secret(exports: Exports, region: Region) -> None:
    with a_target(exports, b"the secret", stall_timeout_s=PATIENCE_S) as (target, metadata):
        for shows in (b"", b"the secre", b"the secret!", b"x" * 1000):
            with RawAsker(metadata) as stranger:
                stranger.send(JoinEngine("stranger", 1, shows))
                assert isinstance(stranger.failure(), Unauthorized)
                stranger.send(fetch([(shown(region), 0, 3)]))
                stranger.send(Notice(b"kept?"))
                assert stranger.is_refused()
        assert target.notices() == []
        assert target.served_bytes == 0
        eventually(lambda: not target._peers, "none has a place")
        with RawAsker(metadata) as known:
            known.send(JoinEngine("known", 1, b"the secret"))
            assert known.answer()[0].type == JoinReply.TYPE
            assert known.works()


@pytest.mark.promise("memory-bounded")
def test_what_is_refused_is_not_held_however_long_it_is(raw: RawAsker, region: Region) -> None:
    size = 64 << 20
    part = bytes(1 << 20)
    tracemalloc.start()
    try:
        raw.send(store([(shown(region)._replace(key=1), 0, size)]), payload_bytes=size)
        for _ in range(size // len(part)):
            raw.socket.sendall(part)
        assert isinstance(raw.failure(), Denied)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert raw.works()


# --- fencing ---


def test_a_fenced_connection_is_closed_whatever_it_does(target: Target, metadata: bytes, region: Region) -> None:
    """Idle, or in the middle of a payload: when the fence is answered, nothing of it is written any more."""
    with RawAsker(metadata) as idle, RawAsker(metadata) as busy, RawAsker(metadata) as asker:
        idle.join("raw", 1)
        busy.join("raw", 2)
        asker.join("raw", 3)
        eventually(lambda: len(target._parked) == 3, "they are idle")
        busy.send(store([(shown(region), 0, SIZE)]), b"x" * 10, payload_bytes=SIZE)
        eventually(lambda: region.users == 1, "its payload is awaited")
        asker.send(Fence([1, 2, 4]))
        assert asker.answer()[0].type == Ok.TYPE
        eventually(lambda: region.users == 0, "the region is released")
        assert target.connections == 1
        assert idle.is_refused()
        assert busy.is_refused()


def test_a_queued_connection_can_be_fenced(exports: Exports, region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are not written, neither now nor once a thread is free."""
    monkeypatch.setattr(servers_module, "EXTRA_THREAD_DELAY_NS", 1 << 50)  # no extra thread is started for it
    with a_target(exports, serve_threads=1, stall_timeout_s=PATIENCE_S) as (target, metadata):
        with RawAsker(metadata) as old, RawAsker(metadata) as asker:
            old.join("raw", 1)
            asker.join("raw", 2)
            eventually(lambda: len(target._parked) == 2, "both are idle")
            asker.socket.sendall(HEADER.pack(MAGIC, VERSION, Fence.TYPE, 9, 0, 12, 0))
            eventually(lambda: len(target._parked) == 1, "the thread waits for the body")
            old.send(store([(shown(region), 0, 5)]), b"stale")
            eventually(lambda: not target._parked, "the other one waits for the thread")
            asker.socket.sendall(Fence([1]).pack())
            with within(CLOSE_S):
                assert asker.answer()[0].request_id == 9
            assert old.is_refused()
            assert asker.works()
            assert bytes(region.memory[:5]) == b"ourso"


# --- transports without a descriptor, and listeners at fault ---


class WithoutDescriptor(TcpConnection):
    def fileno(self) -> int:
        return -1


class Stubborn(WithoutDescriptor):
    """Keeps its thread when it is closed, against the contract, until it is let go."""

    go_on = threading.Event()

    def recv_into(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        try:
            super().recv_into(parts, deadline)
        except Closed:
            assert self.go_on.wait(PATIENCE_S)
            raise


class Wrapping(TcpListener):
    """Its connections are of another class; `accept` fails the given number of times. Counts timeouts of `accept`."""

    def __init__(self, kind: type[TcpConnection], *, failures: int = 0) -> None:
        super().__init__("127.0.0.1", 0)
        self._kind = kind
        self.failures = failures
        self.empty = 0

    def accept(self, timeout_s: float) -> TcpConnection | None:
        if self.failures:
            self.failures -= 1
            raise Unreachable("out of descriptors")
        connection = super().accept(timeout_s)
        if connection is None:
            self.empty += 1
            return None
        return self._kind(socket.socket(fileno=connection._sock.detach()), "peer")


def test_a_connection_without_descriptor_has_its_own_thread(target: Target, exports: Exports, region: Region) -> None:
    listener = Wrapping(WithoutDescriptor)
    target.attach(listener)
    with RawAsker(listener.metadata()) as raw:
        raw.join()
        raw.send(fetch([(shown(region), 0, 4)]))
        assert raw.answer()[1] == b"ours"
        assert raw.works()
        target.close()
        assert raw.is_refused()
    assert target.connections == 0


def test_refused_messages_are_discarded_up_to_a_slice(target: Target, region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "MAX_DISCARDED_PIECE_BYTES", 8)
    listener, wrong = Wrapping(WithoutDescriptor), shown(region)._replace(key=1)
    target.attach(listener)
    with RawAsker(listener.metadata()) as raw:
        raw.join()
        raw.send(store([(wrong, 0, 8), (wrong, 8, 3)]), b"12345678901")
        assert isinstance(raw.failure(), Denied)
        assert raw.works()
        raw.send(store([(wrong, 0, 9)]), b"123456789")
        assert isinstance(raw.failure(), ProtocolError)
        assert raw.is_refused()


def test_a_fence_that_cannot_be_kept_is_not_promised(target: Target, metadata: bytes) -> None:
    Stubborn.go_on.clear()
    listener = Wrapping(Stubborn)
    target.attach(listener)
    with RawAsker(listener.metadata()) as old, RawAsker(metadata) as asker:
        old.join("raw", 1)
        asker.join("raw", 2)
        asker.send(Fence([1]), deadline_ms=50)
        assert isinstance(asker.failure(), Unavailable)
        Stubborn.go_on.set()
        asker.send(Fence([1]))
        assert asker.answer()[0].type == Ok.TYPE


@pytest.mark.parametrize("lacking", ["kvstore-parked", "kvstore-accept"])
def test_a_listener_without_a_thread_is_closed(exports: Exports, lacking: str) -> None:
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == lacking:
            raise RuntimeError("can't start new thread")
        start(thread)

    target = Target("serving", exports, TransferSettings())
    port = free_ports(1)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_or_fail)
        with pytest.raises(ConfigError, match="can't start new thread"):
            target.attach(TcpListener("127.0.0.1", port))
    listener = TcpListener("127.0.0.1", port)
    target.attach(listener)
    with RawAsker(listener.metadata()) as raw:
        raw.join()
    target.close()


def test_a_failed_handshake_does_not_affect_others(
    target: Target, metadata: bytes, raw: RawAsker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receive, failures = HandshakeState.receive, [MemoryError("no memory")]

    def hear_or_fail(self: HandshakeState, connection: Connection) -> JoinEngine | None:
        if failures:
            raise failures.pop()
        return receive(self, connection)

    monkeypatch.setattr(HandshakeState, "receive", hear_or_fail)
    with RawAsker(metadata) as other:
        other.socket.sendall(b"x")
        assert other.is_refused()
    assert "MemoryError" in caplog.text
    assert raw.works()
    with RawAsker(metadata) as other:
        other.join(number=2)
    eventually(lambda: target.connections == 1, "the others have left")


class FaultyExports(Exports):
    def hold(self, request: ReadRegions | WriteRegions) -> tuple[list[memoryview], Sequence[Region]]:
        raise ZeroDivisionError


def test_a_fault_of_this_side_ends_one_connection_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with a_target(FaultyExports()) as (_, metadata):
        with RawAsker(metadata) as raw:
            raw.join()
            raw.send(ReadRegions([], [], [], []))
            assert raw.is_refused()
        with RawAsker(metadata) as raw:
            raw.join(number=2)
    assert "ZeroDivisionError" in caplog.text


# --- limits and the end ---


# --- handshakes ---

THREADS = 2
HELLO = HEADER.pack(MAGIC, VERSION, JoinEngine.TYPE, 1, 0, 100, 0)


@pytest.mark.promise("authentication")
def test_slow_handshakes_hold_no_thread(exports: Exports) -> None:
    """Each has sent all of a message but its last byte, with a deadline of its own choice: a day."""
    with a_target(exports, serve_threads=THREADS, stall_timeout_s=PATIENCE_S) as (target, metadata), ExitStack() as stack:
        strangers = [stack.enter_context(RawAsker(metadata)) for _ in range(8 * THREADS)]
        for number, stranger in enumerate(strangers):
            stranger.socket.sendall(HELLO[: len(HELLO) - number % 2] + b"x" * (99 * (1 - number % 2)))
        eventually(lambda: target.connections == len(strangers), "they are all there")
        with RawAsker(metadata) as peer:
            with within(0):
                peer.join()
                assert peer.works()
            for stranger in strangers:
                stranger.socket.sendall(b"x")
            assert peer.works()


@pytest.mark.promise("authentication")
def test_a_handshake_timeout_closes_only_that_connection(exports: Exports) -> None:
    with a_target(exports, handshake_timeout_s=0.5) as (target, metadata), RawAsker(metadata) as peer:  # which has as long to join
        peer.join()
        with RawAsker(metadata) as silent, RawAsker(metadata) as slow:
            slow.socket.sendall(HELLO)
            assert silent.is_refused()
            assert slow.is_refused()
        eventually(lambda: target.connections == 1, "the peer alone is left")
        assert peer.works()


@pytest.mark.promise("authentication")
def test_a_surplus_handshake_displaces_the_oldest(exports: Exports) -> None:
    with a_target(exports, max_connections=2, max_handshakes=2, handshake_timeout_s=PATIENCE_S) as (target, metadata):
        with RawAsker(metadata) as peer, ExitStack() as stack:
            peer.join()
            strangers = []
            for count in range(2, 7):
                strangers.append(stack.enter_context(RawAsker(metadata)))
                eventually(lambda count=count: target.connections == min(count, 3), "it is there")  # type: ignore[misc]
                if count > 3:
                    assert strangers[count - 4].is_refused()
            strangers[-1].join(number=2)
            assert strangers[-1].works()
            assert peer.works()


def test_a_stranger_that_floods_after_it_was_refused_is_closed(metadata: bytes) -> None:
    with RawAsker(metadata) as raw, pytest.raises(OSError, match=r"reset|Broken pipe"):
        for _ in range(1000):
            raw.socket.sendall(b"x" * MAX_DISCARDED_BYTES)


def test_a_stranger_without_descriptor_is_closed_in_time(exports: Exports) -> None:
    with a_target(exports, handshake_timeout_s=0.5) as (target, _):
        listener = Wrapping(WithoutDescriptor)
        target.attach(listener)
        with RawAsker(listener.metadata()) as raw:
            raw.socket.sendall(HELLO)
            assert raw.is_refused()


class ByteByByte(TcpConnection):
    """A plug-in with a descriptor that inherits `recv_arrived`."""

    recv_arrived = Connection.recv_arrived


def test_recv_arrived_defaults_to_single_bytes(target: Target) -> None:
    listener = Wrapping(ByteByByte)
    target.attach(listener)
    with RawAsker(listener.metadata()) as raw:
        raw.join()
        assert raw.works()


def test_more_askers_than_threads_are_served_without_delay(
    exports: Exports, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that lingers for its peer's next request parks at once when another peer needs it."""
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(target_module, "LINGER_MS", 1000 * PATIENCE_S)
    with a_target(exports, serve_threads=2) as (_, metadata), ExitStack() as stack:
        crowd = [stack.enter_context(RawAsker(metadata)) for _ in range(8)]
        for number, raw in enumerate(crowd):
            raw.join("crowd", number)

        def ask() -> None:
            for _ in range(25):
                assert all(raw.works() for raw in crowd)

        in_background(ask).result(PATIENCE_S)


def test_readers_that_trickle_keep_nobody_else_waiting(exports: Exports) -> None:
    """They hold more threads than are usual; others are served long before they would take this side for dead."""
    large = make_region(1 << 20, b"ours")
    exports.add(large)
    with a_target(exports, serve_threads=1, stall_timeout_s=PATIENCE_S) as (_, metadata), ExitStack() as stack:
        tricklers = [stack.enter_context(RawAsker(metadata)) for _ in range(4)]
        for number, trickler in enumerate(tricklers):
            trickler.join("trickler", number)
            trickler.send(fetch([(shown(large), 0, 1 << 20)] * 256))  # more than sockets hold
            trickler.socket.recv(1)
        with RawAsker(metadata) as other:
            other.join("other")
            assert other.works()
        for trickler in tricklers:
            assert trickler.socket.recv(1), "and they still are, too"


def test_close_hangs_up_on_everyone_quickly(exports: Exports, region: Region) -> None:
    with a_target(exports, stall_timeout_s=PATIENCE_S) as (target, metadata), ExitStack() as stack:
        idle, busy, unread = (stack.enter_context(RawAsker(metadata)) for _ in range(3))
        for number, raw in enumerate((idle, busy, unread)):
            raw.join("raw", number)
        busy.send(store([(shown(region), 0, SIZE)]), b"x", payload_bytes=SIZE)
        unread.send(fetch([(shown(region), 0, SIZE)] * 1000))
        eventually(lambda: region.users == 2, "two are under way")
        closing = in_background(target.close)
        closing.result(CLOSE_S)
        eventually(lambda: region.users == 0, "the region is released")
        assert idle.is_refused()
        assert busy.is_refused()
        with pytest.raises(OSError, match="refused"):
            RawAsker(metadata)


def test_a_dropped_connection_is_not_parked(target: Target) -> None:
    """Its descriptor may be another connection's by then."""
    listener = TcpListener("127.0.0.1", 0)
    with RawAsker(listener.metadata()) as raw:
        connection = listener.accept(PATIENCE_S)
        assert connection is not None
        peer = target_module._InboundConnection(connection)
        target._drop(peer)
        target._park(peer)
        assert peer.finished.is_set()
        assert not target._parked
        assert raw.is_refused()
    listener.close()
