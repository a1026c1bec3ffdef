"""UCX is a Connection, and what only it does."""

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvstore.protocol.errors import Closed, DeadlineExceeded, ProtocolError, Unreachable
from kvstore.rpc.deadline import Deadline
from kvstore.testing.transfer.awaited import SHORT_S, SOON_S, eventually, in_background, within
from kvstore.testing.transfer.connections import ConnectionConformance
from kvstore.transfer.agent import Rail
from kvstore.transfer.streams.connection import Connection, Listener
from kvstore.transfer.ucx import connection
from kvstore.transfer.ucx.connection import PART_BITS, UcxConnection
from kvstore.transfer.ucx.worker import TaggedMessage, UcxOperation, UcxWorker
from tests.transfer.ucx.peer import FLOOD_BYTES, PATIENCE_S, process

pytest.importorskip("ucxx")
HELLO = struct.Struct("!4sBHQ")


class TestUcx(ConnectionConformance):
    connection_class = UcxConnection
    rail = Rail(device="lo", address="127.0.0.1")


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = UcxConnection.listen(Rail())
    yield listener
    listener.close()


def connect(listener: Listener, deadline_s: float = PATIENCE_S) -> UcxConnection:
    return UcxConnection.connect(listener.metadata(), Rail(), Deadline(deadline_s))


def pair(listener: Listener) -> tuple[UcxConnection, Connection]:
    accepting = in_background(lambda: listener.accept(PATIENCE_S))
    near, far = connect(listener), accepting.result(PATIENCE_S)
    assert far is not None
    return near, far


def exchange(connection: Connection, data: bytes) -> bytes:
    """Reply of the echo."""
    answer = bytearray(len(data))
    connection.send([len(data).to_bytes(8), data], Deadline(PATIENCE_S))
    connection.recv_into([memoryview(answer)], Deadline(PATIENCE_S))
    return bytes(answer)


def test_another_process_is_at_the_other_end(listener: Listener) -> None:
    with process("echo", listener) as (_, connection):
        for size_bytes in (1, 4096, 100_000, 9 << 20):
            data = os.urandom(size_bytes)
            assert exchange(connection, data) == data


def test_a_peer_that_is_killed_is_unreachable_at_once(listener: Listener) -> None:
    with process("quiet", listener) as (child, connection):
        assert isinstance(connection, UcxConnection)
        receiving = in_background(lambda: connection.recv_into([memoryview(bytearray(1))], Deadline(PATIENCE_S)))
        sending = in_background(lambda: connection.send([bytes(8 << 20)], Deadline(PATIENCE_S)))
        operations = connection._operations
        eventually(lambda: len(operations) == 2, "both are under way: who comes later finds it closed")
        child.kill()
        with pytest.raises(Unreachable):
            receiving.result(SOON_S)
        with pytest.raises(Unreachable):
            sending.result(SOON_S)
        assert not connection.is_open


def test_a_killed_peer_does_not_harm_others(listener: Listener) -> None:
    with process("echo", listener) as (_, other):
        with process("flood", listener) as (child, connection):
            part = bytearray(FLOOD_BYTES)
            connection.recv_into([memoryview(part)], Deadline(PATIENCE_S))
            child.kill()
            with within(SOON_S), pytest.raises(Unreachable):
                while True:
                    connection.recv_into([memoryview(part)], Deadline(PATIENCE_S))
        assert exchange(other, b"well") == b"well"


def test_a_peer_stopped_within_a_part_writes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """If UCX does not return the receive, the worker is abandoned; a new one takes its place."""
    monkeypatch.setenv("UCX_RNDV_SCHEME", "am")  # the peer copies, piece by piece
    listener = UcxConnection.listen(Rail())
    with process("flood", listener) as (child, connection):
        part = bytearray(FLOOD_BYTES)
        receiving = in_background(lambda: connection.recv_into([memoryview(part)], Deadline(PATIENCE_S)))
        eventually(lambda: part[0] != 0, "the part begins to arrive")
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        connection.close()
        with pytest.raises(Closed):
            receiving.result(SOON_S)
        before = bytes(part)
        child.send_signal(signal.SIGCONT)
        child.wait(PATIENCE_S)
        assert part == before
    other = UcxConnection.listen(Rail())
    with process("echo", other) as (_, connection):
        assert exchange(connection, b"new") == b"new"
    other.close()
    listener.close()


def test_a_part_of_another_size_is_not_taken_for_the_one_awaited(listener: Listener) -> None:
    near, far = pair(listener)
    near.send([b"four"], Deadline(PATIENCE_S))
    part = bytearray(5)
    with pytest.raises(DeadlineExceeded):
        far.recv_into([memoryview(part)], Deadline(SHORT_S))
    assert part == bytes(5)
    near.close()


def test_a_peer_that_lies_about_a_size_is_a_protocol_error(listener: Listener) -> None:
    near, far = pair(listener)
    assert isinstance(far, UcxConnection)
    lie = UcxOperation([TaggedMessage(far._endpoint.tag_send, b"longer", near._connection_id << PART_BITS | 1)])
    far._worker.post(lie)
    with pytest.raises(ProtocolError):
        near.recv_into([memoryview(bytearray(1))], Deadline(PATIENCE_S))
    far.close()


def test_an_introduction_that_is_reset_is_a_hang_up(listener: Listener) -> None:
    worker = UcxWorker.acquire("")
    with socket.create_connection(("127.0.0.1", int(listener.metadata().rpartition(b":")[2]))) as peer:
        peer.sendall(HELLO.pack(b"kvUX", 1, len(worker.address), 1) + worker.address)
        connection = listener.accept(PATIENCE_S)
        assert connection is not None
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    eventually(lambda: not connection.is_open, "the reset is noticed")
    connection.close()
    worker.release()


def test_a_peer_that_ucx_cannot_reach_is_refused(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_way(self: UcxWorker, address: bytes) -> None:
        raise Unreachable("no way")

    monkeypatch.setattr(UcxWorker, "endpoint", no_way)
    accepting = in_background(lambda: listener.accept(SHORT_S))
    with pytest.raises(Unreachable):
        connect(listener)
    assert accepting.result(SOON_S) is None


def test_what_broke_an_idle_connection_is_told_once(listener: Listener) -> None:
    near, far = pair(listener)
    far.close()
    eventually(lambda: not near.is_open, "the hang-up is noticed")
    with pytest.raises(Unreachable):
        near.send([b"x"], Deadline(PATIENCE_S))
    with pytest.raises(Closed):
        near.send([b"x"], Deadline(PATIENCE_S))


GARBLED = [
    HELLO.pack(b"HTTP", 1, 1, 1) + b"x",
    HELLO.pack(b"kvUX", 2, 1, 1) + b"x",
    HELLO.pack(b"kvUX", 1, 0, 1),
    HELLO.pack(b"kvUX", 1, 0xFFFF, 1),
    HELLO.pack(b"kvUX", 1, 1, 0) + b"x",
    HELLO.pack(b"kvUX", 1, 1, 1 << 60) + b"x",
]


@pytest.mark.parametrize("answer", GARBLED, ids=range(len(GARBLED)))
def test_a_listener_that_is_another_program_is_a_protocol_error(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        metadata = f"ucx1 127.0.0.1:{server.getsockname()[1]}".encode()
        connecting = in_background(lambda: UcxConnection.connect(metadata, Rail(), Deadline(PATIENCE_S)))
        with server.accept()[0] as sock:
            sock.sendall(answer)
            with pytest.raises(ProtocolError):
                connecting.result(SOON_S)


@pytest.mark.parametrize("hello", GARBLED, ids=range(len(GARBLED)))
def test_strangers_do_not_keep_peers_out(listener: Listener, hello: bytes) -> None:
    port = int(listener.metadata().rpartition(b":")[2])
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(hello)
        assert listener.accept(SHORT_S) is None
        near, far = pair(listener)
        near.close()
        far.close()


@pytest.mark.promise("authentication")
def test_partial_handshakes_do_not_delay_others(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_S", 3600.0)
    monkeypatch.setattr(listener._handshakes, "_max_pending", 4)  # type: ignore[attr-defined]
    port, hello = int(listener.metadata().rpartition(b":")[2]), HELLO.pack(b"kvUX", 1, 100, 1)
    with ExitStack() as opened:
        strangers = [opened.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_S)) for _ in range(6)]
        for number, stranger in enumerate(strangers):
            stranger.sendall((hello + bytes(10))[: 1 + 5 * number])
        assert listener.accept(SHORT_S) is None
        near, far = pair(listener)
        near.close()
        far.close()
        gone = [stranger for stranger in strangers if is_gone(stranger)]
        assert len(gone) >= 2, "of more than there may be"


@pytest.mark.promise("authentication")
def test_a_slow_handshake_is_closed(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HANDSHAKE_S", 0.01)
    with socket.create_connection(("127.0.0.1", int(listener.metadata().rpartition(b":")[2])), PATIENCE_S) as stranger:
        stranger.sendall(b"k")
        while not is_gone(stranger):
            assert listener.accept(SHORT_S) is None


def is_gone(sock: socket.socket) -> bool:
    """The other side has closed."""
    sock.setblocking(False)
    try:
        return not sock.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_program_may_end_with_connections_open() -> None:
    code = """
from kvstore.transfer.agent import Rail
from kvstore.testing.transfer.awaited import in_background
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.ucx.connection import UcxConnection
listener = UcxConnection.listen(Rail())
accepting = in_background(lambda: listener.accept(10))
near = UcxConnection.connect(listener.metadata(), Rail(), Deadline(10))
far = accepting.result(10)
receiving = in_background(lambda: near.recv_into([memoryview(bytearray(1))], Deadline(10)))
near.send([b"x"], Deadline(10))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
