"""Promises of tls_socket.py, over real sockets: what a plain socket does, it does."""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from kvstore.protocol.errors import Untrusted
from kvstore.security.tls import authority
from kvstore.security.tls.config import TlsSettings
from kvstore.security.tls.subjects import MASTER, CertificateSubject
from kvstore.security.tls.tls_socket import READ, RECORD_BYTES, WRITE, TlsSocket
from kvstore.testing.transfer.awaited import PATIENCE_S, in_background
from tests.security.tls.certified import Cluster, certificates, past, shared

MIB = 1 << 20


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def ends() -> tuple[TlsSocket, TlsSocket]:
    """(client, server), the handshake still to come."""
    near, far = tcp_pair()
    client = certificates(shared().client("red")).begin_to(near, "127.0.0.1", (MASTER,))
    return client, certificates(shared().master()).begin_from(far)


@pytest.fixture
def pair() -> Iterator[tuple[TlsSocket, TlsSocket]]:
    """(client, server) that know one another and block, as a socket without a time limit does."""
    client, server = ends()
    serving = in_background(lambda: server.shake_hands(PATIENCE_S))
    client.shake_hands(PATIENCE_S)
    serving.result(PATIENCE_S)
    for end in (client, server):
        end.setblocking(True)
    yield client, server
    client.close()
    server.close()


def pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def limit(sock: socket.socket, option: int, seconds: float) -> None:
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))


@pytest.mark.parametrize("size", [1, RECORD_BYTES - 1, RECORD_BYTES, RECORD_BYTES + 1, 5 * MIB])
def test_what_is_sent_arrives(pair: tuple[TlsSocket, TlsSocket], size: int) -> None:
    client, server = pair
    data, room = pattern(size), bytearray(size)
    sending = in_background(lambda: client.send(data))
    assert server.recv_into(room, 0, socket.MSG_WAITALL) == size
    assert sending.result(PATIENCE_S) == size
    assert room == data


def test_receive_leaves_nothing_that_poll_does_not_report(pair: tuple[TlsSocket, TlsSocket]) -> None:
    client, server = pair
    client.send(pattern(RECORD_BYTES))
    client.send(b"more")
    room = bytearray(2 * RECORD_BYTES)
    got = server.recv_into(room)
    while got < RECORD_BYTES + 4:
        assert server.pending() == 0
        got += server.recv_into(memoryview(room)[got:])
    assert room[:got] == pattern(RECORD_BYTES) + b"more"
    client.send(b"abcdef")
    small = bytearray(2)
    assert server.recv_into(small) == 2
    assert (server.pending(), server.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)) == (4, b"\0")
    assert server.recv(10) == b"cdef"


def test_nothing_there_is_told_as_by_a_plain_socket(pair: tuple[TlsSocket, TlsSocket]) -> None:
    client, server = pair
    with pytest.raises(BlockingIOError):
        server.recv_into(bytearray(1), 0, socket.MSG_DONTWAIT)
    with pytest.raises(BlockingIOError):
        server.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    limit(server, socket.SO_RCVTIMEO, 0.01)
    with pytest.raises(BlockingIOError):
        server.recv(1)
    client.send(b"half")
    assert select.select([server], [], [], PATIENCE_S)[0]
    assert server.recv_into(bytearray(8), 0, socket.MSG_WAITALL) == 4  # its time was over
    server.settimeout(0.0)
    with pytest.raises(BlockingIOError):
        server.recv(1)


def test_send_resumes_after_a_peer_that_does_not_read(pair: tuple[TlsSocket, TlsSocket]) -> None:
    client, server = pair
    data = pattern(32 * MIB)
    limit(client, socket.SO_SNDTIMEO, 0.05)
    sent = client.send(data)
    assert 0 < sent < len(data)
    client.setblocking(False)
    with pytest.raises(BlockingIOError):  # at the latest when the kernel's buffers have grown to their limit
        while sent < len(data):
            sent += client.send(memoryview(data)[sent:])
    assert client.sends_on == WRITE
    room = bytearray(len(data))
    receiving = in_background(lambda: server.recv_into(room, 0, socket.MSG_WAITALL))
    poller = select.poll()
    poller.register(client.fileno(), select.POLLOUT)
    while sent < len(data):
        try:
            sent += client.send(memoryview(data)[sent:])
        except BlockingIOError:
            poller.poll(PATIENCE_S * 1000)
    assert receiving.result(PATIENCE_S) == len(data)
    assert room == data


def test_nothing_that_was_to_be_sent_is_held_after_the_end(pair: tuple[TlsSocket, TlsSocket]) -> None:
    client, _ = pair
    memory = bytearray(32 * MIB)
    client.setblocking(False)
    sent = 0
    with memoryview(memory) as view, pytest.raises(BlockingIOError):
        while sent < len(view):
            sent += client.send(view[sent:])
    with pytest.raises(BufferError):
        memory.clear()  # a part of it is begun
    client.close()
    memory.clear()


def test_one_thread_sends_while_another_receives(pair: tuple[TlsSocket, TlsSocket]) -> None:
    client, server = pair
    there, back = pattern(4 * MIB), pattern(4 * MIB)[::-1]
    rooms = bytearray(len(there)), bytearray(len(back))
    work = [
        in_background(lambda: client.send(there)),
        in_background(lambda: server.send(back)),
        in_background(lambda: server.recv_into(rooms[0], 0, socket.MSG_WAITALL)),
        in_background(lambda: client.recv_into(rooms[1], 0, socket.MSG_WAITALL)),
    ]
    assert [each.result(PATIENCE_S) for each in work] == [4 * MIB] * 4
    assert rooms[0] == there
    assert rooms[1] == back


def test_end_of_stream_is_no_error_and_shutdown_wakes_waiters(pair: tuple[TlsSocket, TlsSocket]) -> None:
    client, server = pair
    began = threading.Event()

    def receive() -> bytes:
        began.set()
        return server.recv(10)

    receiving = in_background(receive)
    began.wait(PATIENCE_S)
    server.shutdown(socket.SHUT_RDWR)
    assert receiving.result(PATIENCE_S) == b""
    assert client.recv(10) == b""
    assert client.recv_into(bytearray(10), 0, socket.MSG_WAITALL) == 0
    with pytest.raises(OSError):  # noqa: PT011  # reset, or a broken pipe
        for _ in range(1000):
            client.send(pattern(RECORD_BYTES))


def test_first_call_runs_the_handshake_and_reports_events() -> None:
    client, server = ends()
    with pytest.raises(BlockingIOError):
        server.recv(1)
    assert server.reads_on == READ
    with pytest.raises(BlockingIOError):
        client.send(b"hello")
    assert client.sends_on == READ
    serving = in_background(lambda: server.shake_hands(PATIENCE_S))
    client.shake_hands(PATIENCE_S)
    serving.result(PATIENCE_S)
    assert (client.sends_on, client.reads_on) == (WRITE, READ)
    client.send(b"hello")
    server.setblocking(True)
    assert server.recv(5) == b"hello"
    client.close()
    server.close()


@pytest.mark.parametrize("why", ["subject", "expired"])
def test_a_server_that_is_not_meant_gets_nothing(why: str) -> None:
    near, far = tcp_pair()
    settings = shared().node("one") if why == "subject" else shared().expired(CertificateSubject(MASTER), valid=past())
    server = certificates(settings).begin_from(far)
    client = certificates(shared().client()).begin_to(near, "127.0.0.1", (MASTER,))
    serving = in_background(lambda: server.shake_hands(PATIENCE_S))
    text = "is for kvstore://node/one, and kvstore://master is required" if why == "subject" else "has expired"
    with pytest.raises(Untrusted, match=text):
        client.shake_hands(PATIENCE_S)
    with pytest.raises(Untrusted, match=text):
        client.send(b"a token")
    client.close()
    with contextlib.suppress(OSError):  # the client has said why, or has just gone
        serving.result(PATIENCE_S)
    server.close()


def test_a_certificate_with_names_that_are_no_text_is_refused(tmp_path: Path) -> None:
    """Of our own authority, which signs more than it should."""
    cluster = Cluster(tmp_path)
    signer, signer_key = authority._authority(tmp_path)
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.UnrecognizedExtension(x509.SubjectAlternativeName.oid, b"\x30\x03\x86\x01\xff")  # a URI of one byte
    whole = authority._builder(signer.subject, x509.Name([]), key, authority.ValidityPeriod.from_now(1)).add_extension(
        names, critical=False
    )
    cert, private = tmp_path / "odd.pem", tmp_path / "odd.key"
    authority._write_pair(cert, whole.sign(signer_key, hashes.SHA256()), private, key)
    odd = TlsSettings(tls_ca=str(tmp_path / "ca.pem"), tls_cert=str(cert), tls_key=str(private))
    near, far = tcp_pair()
    client = certificates(odd).begin_to(near, "127.0.0.1", (MASTER,))
    server = certificates(cluster.master()).begin_from(far)
    serving = in_background(lambda: server.shake_hands(PATIENCE_S))
    client.shake_hands(PATIENCE_S)
    with pytest.raises(Untrusted, match="has names that are not text: create another one"):
        serving.result(PATIENCE_S)
    client.close()
    server.close()
