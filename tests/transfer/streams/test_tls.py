"""TLS over TCP is a Connection, and what only it does."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol.errors import ConfigError, ProtocolError, Unreachable
from kvstore.protocol.frames import HEADER_BYTES, pack_header, unpack_header
from kvstore.protocol.session_messages import Failure, Ok
from kvstore.protocol.transfers import Join, Joined, Notice
from kvstore.rpc.deadline import Deadline
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.subjects import NODE, Subject
from kvstore.transfer.agent import Rail
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.engine import TransferEngine
from kvstore.transfer.memory.exports import Exports
from kvstore.transfer.streams.connection import Connection
from kvstore.transfer.streams.target import Target
from kvstore.transfer.streams.tcp import TcpConnection
from kvstore.transfer.streams.tls import MAGIC, TlsTransport
from kvstore.transfer.testing.conformance import ConnectionConformance
from kvstore.transfer.testing.waiting import PATIENCE_S, eventually, in_background
from tests.security.tls.certified import certificates, revoke, shared

RAIL = Rail(address="127.0.0.1")


def node(name: str = "one") -> Certificates:
    """Its certificate names no host: it is known by what it is for."""
    return certificates(shared().server(Subject(NODE, name), hosts=("nowhere",)))


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


def test_only_the_node_that_was_described_is_connected_to() -> None:
    listener = transport(node("two")).listen(RAIL)
    text = listener.metadata()
    assert text.startswith(MAGIC + b"kvstore://node/two 127.0.0.1:")
    assert "is for kvstore://node/two, and kvstore://node/one was to be there" in refused(text.replace(b"two", b"one"), listener)
    listener.close()
    assert "Connection refused" in refused(text, None)


def test_each_side_says_of_the_other_that_it_speaks_no_tls_or_does() -> None:
    listener = TcpConnection.listen(RAIL)
    assert "does not speak TLS, and this one's does" in refused(listener.metadata(), None, ProtocolError)
    plain = listener.metadata().replace(b"tcp1 ", MAGIC + b"kvstore://node/one ")
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
        TcpConnection.connect(MAGIC + b"kvstore://node/one 127.0.0.1:1", RAIL, Deadline(PATIENCE_S))


@pytest.mark.parametrize(
    "metadata", [MAGIC, MAGIC + b"x", MAGIC + b"kvstore://node/one nowhere", MAGIC + b"\xff 127.0.0.1:1", MAGIC + b"x" * 5000]
)
def test_what_no_listener_said_is_refused(metadata: bytes) -> None:
    refused(metadata, None, ProtocolError)


def test_who_has_no_certificate_cannot_be_connected_to() -> None:
    with pytest.raises(ConfigError, match="needs tls_cert and tls_key"):
        transport(certificates(shared().client())).listen(RAIL)


def test_a_peer_whose_certificate_is_revoked_has_nothing_it_asks_by_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.security.tls.certificates.LOOK_INTERVAL_NS", 0)
    revoked = tmp_path / "revoked"
    revoke(revoked)
    settings = shared().server(Subject(NODE, "one"), hosts=("nowhere",))
    target = Target("target", Exports(), TransferSettings())
    listener = transport(certificates(replace(settings, tls_revoked=str(revoked)))).listen(RAIL)
    target.attach(listener)
    peers = [shared().server(Subject(NODE, name), hosts=("nowhere",)) for name in ("two", "three")]

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
        assert said(connection, Join("me", number)) == Joined.TYPE
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

    near.send([packed(Join("me", 1), 1), packed(Notice(b"a"), 2), packed(Notice(b"b"), 3)], Deadline(PATIENCE_S))
    kinds = []
    for _ in range(3):
        head = memoryview(bytearray(HEADER_BYTES))
        near.recv_into([head], Deadline(PATIENCE_S))
        header = unpack_header(head)
        near.recv_into([memoryview(bytearray(header.body_bytes))], Deadline(PATIENCE_S))
        kinds.append(header.type)
    assert kinds == [Joined.TYPE, Ok.TYPE, Ok.TYPE]
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


def test_nothing_goes_by_what_does_not_encrypt_unless_that_is_said() -> None:
    for names in ("ucx,tcp", "nixl", "module:Class"):
        with pytest.raises(ConfigError, match="which nothing encrypts, beside TLS: leave it out, or say allow_plaintext_rdma=true"):
            TransferEngine("x", TransferSettings(transports=names), tls=node())
