"""Promises of tcp.py beyond the conformance of connections, with TLS and without."""

import os
import resource
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol.errors import Closed, ConfigError, DeadlineExceeded, ProtocolError, Unreachable
from kvstore.protocol.frames import HEADER_BYTES, pack_header, unpack_header
from kvstore.protocol.session_messages import Failure, Ok
from kvstore.protocol.transfers import JoinEngine, JoinReply, Notice
from kvstore.rpc.deadline import Deadline
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.subjects import NODE, CertificateSubject
from kvstore.testing.transfer.awaited import PATIENCE_S, SHORT_S, SOON_S, eventually, in_background, within
from kvstore.testing.transfer.connections import ConnectionConformance, is_readable
from kvstore.transfer.agent import Rail
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.region import Exports
from kvstore.transfer.streams.connection import Connection
from kvstore.transfer.streams.target import Target
from kvstore.transfer.streams.tcp import MAGIC, MAX_VECTORS, TLS_MAGIC, TcpConnection, TcpListener, TlsTransport
from tests.security.tls.certified import certificates, revoke, shared

PAUSES_S = 1.0
"""Less than all pauses of a peer that is slow, and far more than one of them, also on a busy machine."""
RAIL = Rail(address="127.0.0.1")


class TestTcp(ConnectionConformance):
    connection_class = TcpConnection
    rail = Rail(address="127.0.0.1")

    def test_a_short_deadline_of_before_is_not_taken_for_a_stall(self, near: TcpConnection, far: TcpConnection) -> None:
        """The kernel still has the earlier, shorter limit: a peer that is slower than that has not stalled yet."""
        near.stall_timeout_s = SOON_S
        far.send([b"a"], Deadline(PATIENCE_S))
        near.recv_into([memoryview(bytearray(1))], Deadline(SHORT_S / 4))
        late = bytearray(1)
        receiving = in_background(lambda: near.recv_into([memoryview(late)], Deadline(PATIENCE_S)))
        threading.Event().wait(SHORT_S)
        far.send([b"b"], Deadline(PATIENCE_S))
        receiving.result(PATIENCE_S)
        assert late == b"b"

    def test_a_later_deadline_is_met_after_an_earlier_timeout(self, near: TcpConnection, far: TcpConnection) -> None:
        far.send([b"a"], Deadline(PATIENCE_S))
        near.recv_into([memoryview(bytearray(1))], Deadline(SHORT_S / 4))
        deadline = Deadline(SHORT_S)
        with within(SHORT_S), pytest.raises(DeadlineExceeded):
            near.recv_into([memoryview(bytearray(1))], deadline)
        with pytest.raises(DeadlineExceeded):
            deadline.left_s()

    def test_a_send_goes_on_where_the_kernel_stopped(self, near: TcpConnection, far: TcpConnection) -> None:
        """More parts than one call takes, to a peer that is so slow that calls end in the middle of a part; but never stalls."""
        near.stall_timeout_s = PAUSES_S
        part = bytes(range(251)) * 64
        count = MAX_VECTORS * 2 + 5
        sending = in_background(lambda: near.send([part] * count, Deadline(PATIENCE_S)))
        received = memoryview(bytearray(len(part) * count))
        for number in range(10):
            threading.Event().wait(PAUSES_S / 8)
            far.recv_into([received[number << 20 : number + 1 << 20]], Deadline(PATIENCE_S))
        far.recv_into([received[10 << 20 :]], Deadline(PATIENCE_S))
        sending.result(PATIENCE_S)
        assert received == part * count

    def test_a_receive_goes_on_after_a_pause(self, near: TcpConnection, far: TcpConnection) -> None:
        """Longer than a stall in all, but never without a byte for as long."""
        near.stall_timeout_s = PAUSES_S
        parts = [bytearray(2), bytearray(3), bytearray(0), bytearray(4)]
        receiving = in_background(lambda: near.recv_into([memoryview(part) for part in parts], Deadline(PATIENCE_S)))
        for byte in b"123456789":
            threading.Event().wait(PAUSES_S / 8)
            far.send([bytes([byte])], Deadline(PATIENCE_S))
        receiving.result(PATIENCE_S)
        assert parts == [b"12", b"345", b"", b"6789"]

    def test_an_interrupted_call_closes_the_connection(self, near: TcpConnection) -> None:
        def interrupted(views: Sequence[memoryview]) -> int:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            near._move(interrupted, [b"x"], Deadline(PATIENCE_S), socket.SO_SNDTIMEO)
        with pytest.raises(Closed):
            near.send([b"x"], Deadline(PATIENCE_S))

    def test_the_descriptor_stays_until_the_last_thread_has_left(self, near: TcpConnection) -> None:
        """Else the next connection could get its number, and a thread that is still inside write to it."""
        entered, go_on = threading.Event(), threading.Event()

        def slow(views: Sequence[memoryview]) -> int:
            entered.set()
            assert go_on.wait(PATIENCE_S)
            return 0

        moving = in_background(lambda: near._move(slow, [b"x"], Deadline(PATIENCE_S), socket.SO_SNDTIMEO))
        assert entered.wait(PATIENCE_S)
        number = near.fileno()
        near.close()
        assert near.fileno() == number
        go_on.set()
        with pytest.raises(Closed):
            moving.result(PATIENCE_S)
        assert near.fileno() == -1

    def test_a_peer_that_reset_is_closed_without_complaint(self, near: TcpConnection, far: TcpConnection) -> None:
        far.send([b"unread"], Deadline(PATIENCE_S))
        assert is_readable(near, timeout_s=PATIENCE_S)
        far.close()
        with pytest.raises(Unreachable):
            while True:
                near.recv_into([memoryview(bytearray(6))], Deadline(PATIENCE_S))
        near.close()


def open_pair(listener: TcpListener, rail: Rail) -> tuple[TcpConnection, TcpConnection]:
    accepting = in_background(lambda: listener.accept(PATIENCE_S))
    near = TcpConnection.connect(listener.metadata(), rail, Deadline(PATIENCE_S))
    far = accepting.result(PATIENCE_S)
    assert far is not None
    return near, far


def test_connections_leave_by_the_rails_address() -> None:
    listener = TcpListener("127.0.0.1", 0)
    near, far = open_pair(listener, Rail(address="127.0.0.7"))
    assert far._peer.startswith("127.0.0.7:")
    for end in (near, far, listener):
        end.close()


@pytest.mark.parametrize("metadata", [b"tcp1 ", b"tcp1 host:x", b"tcp1 h\xff:1", b"tcp2 127.0.0.1:1", MAGIC + b"x" * 300 + b":1"])
def test_metadata_that_names_no_address_is_refused(metadata: bytes) -> None:
    with pytest.raises(ProtocolError):
        TcpConnection.connect(metadata, Rail(), Deadline(PATIENCE_S))


def test_an_address_of_ipv6_is_one() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        listener = TcpListener("::1", 0)
    except ConfigError:
        pytest.skip("no loopback of IPv6")
    near, far = open_pair(listener, Rail())
    near.send([b"x"], Deadline(PATIENCE_S))
    far.recv_into([memoryview(bytearray(1))], Deadline(PATIENCE_S))
    for end in (near, far, listener):
        end.close()


def test_a_rail_that_cannot_reach_the_peer_is_unreachable() -> None:
    listener = TcpListener("127.0.0.1", 0)
    with pytest.raises(Unreachable, match="over lost0"):
        TcpConnection.connect(listener.metadata(), Rail(device="lost0", address="192.0.2.1"), Deadline(PATIENCE_S))
    listener.close()


def test_a_listener_with_a_full_queue_does_not_hold_up_its_peer() -> None:
    """Connecting waits for a reply that never arrives: until the deadline and no longer."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.create_connection(full.getsockname()) for _ in range(1)]
        with within(SHORT_S), pytest.raises(DeadlineExceeded):
            while True:
                connection = TcpConnection.connect(MAGIC + b"127.0.0.1:%d" % full.getsockname()[1], Rail(), Deadline(SHORT_S))
                waiting.append(connection._sock)
        for sock in waiting:
            sock.close()


def test_accept_recovers_after_running_out_of_descriptors() -> None:
    listener = TcpListener("127.0.0.1", 0)
    near = TcpConnection.connect(listener.metadata(), Rail(), Deadline(PATIENCE_S))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        with pytest.raises(Unreachable, match="accept"):
            listener.accept(PATIENCE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    far = listener.accept(PATIENCE_S)
    assert far is not None
    for end in (near, far, listener):
        end.close()


def test_a_vanished_peer_is_looked_for() -> None:
    listener = TcpListener("127.0.0.1", 0)
    near, far = open_pair(listener, Rail())
    assert far._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert all(end._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for end in (near, far))
    for end in (near, far, listener):
        end.close()


def node(name: str = "one") -> Certificates:
    """Its certificate names no host: it is known by what it is for."""
    return certificates(shared().server(CertificateSubject(NODE, name), hosts=("nowhere",)))


def transport(tls: Certificates | None = None) -> Any:
    return TlsTransport(tls or node())


class TestTls(ConnectionConformance):
    connection_class = transport()
    rail = RAIL

    def open(self, listener: Any) -> tuple[Connection, Connection]:
        """The handshake of the far end is its first call."""
        accepting = in_background(lambda: shaken(listener.accept(PATIENCE_S)))
        near = self.connection_class.connect(listener.metadata(), self.rail, Deadline(PATIENCE_S))
        return near, accepting.result(PATIENCE_S)


def shaken(connection: Any) -> Connection:
    try:
        connection._sock.shake_hands(PATIENCE_S)
    except BaseException:
        connection.close()
        raise
    return connection  # type: ignore[no-any-return]


def refused(metadata: bytes, listener: Any, kind: type[Exception] = Unreachable) -> str:
    serving = in_background(lambda: shaken(listener.accept(PATIENCE_S))) if listener is not None else None
    with pytest.raises(kind) as caught:
        transport().connect(metadata, RAIL, Deadline(PATIENCE_S))
    if serving is not None and serving.exception(PATIENCE_S) is None:  # that side had nothing against this one
        serving.result().close()
    return str(caught.value)


@pytest.mark.promise("tls-everywhere")
def test_only_the_node_that_was_described_is_connected_to() -> None:
    listener = transport(node("two")).listen(RAIL)
    text = listener.metadata()
    assert text.startswith(TLS_MAGIC + b"kvstore://node/two 127.0.0.1:")
    assert "is for kvstore://node/two, expected kvstore://node/one" in refused(text.replace(b"two", b"one"), listener)
    listener.close()
    assert "Connection refused" in refused(text, None)


def test_a_tls_mismatch_is_reported_by_both_sides() -> None:
    listener = TcpConnection.listen(RAIL)
    assert "does not speak TLS, and this one's does" in refused(listener.metadata(), None, ProtocolError)
    plain = listener.metadata().replace(b"tcp1 ", TLS_MAGIC + b"kvstore://node/one ")
    serving = in_background(lambda: listener.accept(PATIENCE_S))
    accepted = in_background(lambda: serving.result(PATIENCE_S).send([b"kV is no TLS"], Deadline(PATIENCE_S)))  # type: ignore[union-attr]
    with pytest.raises(Unreachable, match="does not speak TLS: give it tls_cert and tls_key"):
        transport().connect(plain, RAIL, Deadline(PATIENCE_S))
    accepted.result(PATIENCE_S)
    found = serving.result(PATIENCE_S)
    assert found is not None
    found.close()
    listener.close()
    with pytest.raises(ProtocolError, match="the peer's transfer engine speaks TLS, and this one's does not"):
        TcpConnection.connect(TLS_MAGIC + b"kvstore://node/one 127.0.0.1:1", RAIL, Deadline(PATIENCE_S))


@pytest.mark.parametrize(
    "metadata",
    [TLS_MAGIC, TLS_MAGIC + b"x", TLS_MAGIC + b"kvstore://node/one nowhere", TLS_MAGIC + b"\xff 127.0.0.1:1", TLS_MAGIC + b"x" * 5000],
)
def test_what_no_listener_said_is_refused(metadata: bytes) -> None:
    refused(metadata, None, ProtocolError)


def test_who_has_no_certificate_cannot_be_connected_to() -> None:
    with pytest.raises(ConfigError, match="needs tls_cert and tls_key"):
        transport(certificates(shared().client())).listen(RAIL)


@pytest.mark.promise("tls-everywhere")
def test_a_revoked_certificate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.security.tls.certificates.LOOK_INTERVAL_NS", 0)
    revoked = tmp_path / "revoked"
    revoke(revoked)
    settings = shared().server(CertificateSubject(NODE, "one"), hosts=("nowhere",))
    target = Target("target", Exports(), TransferSettings())
    listener = transport(certificates(replace(settings, tls_revoked=str(revoked)))).listen(RAIL)
    target.attach(listener)
    peers = [shared().server(CertificateSubject(NODE, name), hosts=("nowhere",)) for name in ("two", "three")]

    def said(connection: Connection, message: Any) -> int:
        """The type of the answer."""
        body = message.pack()
        connection.send([pack_header(message.TYPE, 1, len(body), 0, 60_000), body], Deadline(PATIENCE_S))
        head = memoryview(bytearray(HEADER_BYTES))
        connection.recv_into([head], Deadline(PATIENCE_S))
        header = unpack_header(head)
        connection.recv_into([memoryview(bytearray(header.body_bytes))], Deadline(PATIENCE_S))
        return header.type

    near = [transport(certificates(peer)).connect(listener.metadata(), RAIL, Deadline(PATIENCE_S)) for peer in peers]
    for number, connection in enumerate(near):
        connection.stall_timeout_s = PATIENCE_S
        assert said(connection, JoinEngine("me", number)) == JoinReply.TYPE
    revoke(revoked, peers[0])
    with pytest.raises(Unreachable):
        said(near[0], Notice(b"a"))
    assert said(near[1], Notice(b"b")) == Ok.TYPE
    assert target.notices() == [("me", b"b")]
    for connection in near:
        connection.close()
    target.close()


def test_two_requests_in_one_record_are_both_answered() -> None:
    target = Target("target", Exports(), TransferSettings())
    listener = transport().listen(RAIL)
    target.attach(listener)
    near = transport().connect(listener.metadata(), RAIL, Deadline(PATIENCE_S))

    def packed(message: Any, number: int) -> bytes:
        body: bytes = message.pack()
        return pack_header(message.TYPE, number, len(body), 0, 60_000) + body

    near.send([packed(JoinEngine("me", 1), 1), packed(Notice(b"a"), 2), packed(Notice(b"b"), 3)], Deadline(PATIENCE_S))
    kinds = []
    for _ in range(3):
        head = memoryview(bytearray(HEADER_BYTES))
        near.recv_into([head], Deadline(PATIENCE_S))
        header = unpack_header(head)
        near.recv_into([memoryview(bytearray(header.body_bytes))], Deadline(PATIENCE_S))
        kinds.append(header.type)
    assert kinds == [JoinReply.TYPE, Ok.TYPE, Ok.TYPE]
    assert Failure.TYPE not in kinds
    near.close()
    eventually(lambda: not target.connections, "the connection is gone")
    target.close()


@pytest.fixture
def make() -> Any:
    made: list[TransferEngine] = []

    def make(name: str, **settings: Any) -> TransferEngine:
        made.append(TransferEngine(name, TransferSettings(transports="tcp", rails="lo"), **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def test_engines_move_bytes_both_ways(make: Callable[..., TransferEngine]) -> None:
    near, far = make("near", tls=certificates(shared().client()), serves=False), make("far", tls=node())
    size = 9 << 20
    memory = bytearray(os.urandom(size))
    region = far.register(memory)
    peer = near.connect(far.describe())
    remote = near.import_region(peer, far.export(region, writable=True))
    copy = bytearray(size)
    near.transfer([(remote, copy, size)])
    assert copy == memory
    near.transfer([(bytearray(size), remote, size)])
    assert memory == bytearray(size)
    near.notify(peer, b"done")
    assert far.notifications() == [("near", b"done")]
    region.close()


def test_an_engine_without_tls_reads_nothing_of_one_with_it(make: Callable[..., TransferEngine]) -> None:
    near, far = make("near", serves=False), make("far", tls=node())
    memory = bytearray(b"secret" * 1000)
    region = far.register(memory)
    peer = near.connect(far.describe())
    remote = near.import_region(peer, far.export(region))
    with pytest.raises(Exception, match="speaks TLS, and this one's does not"):
        near.transfer([(remote, bytearray(len(memory)), len(memory))])
    region.close()


@pytest.mark.promise("tls-everywhere")
def test_unencrypted_transports_are_refused_with_tls() -> None:
    for names in ("ucx,tcp", "nixl", "module:Class"):
        with pytest.raises(ConfigError, match="which nothing encrypts, beside TLS: leave it out, or set allow_plaintext_rdma=true"):
            TransferEngine("x", TransferSettings(transports=names), tls=node())
