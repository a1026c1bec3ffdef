"""Promises of server.py, with real listeners; timers run on a clock of the test."""

import contextlib
import os
import resource
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol.errors import ConfigError, TooManyConnections
from kvstore.protocol.frames import HEADER_BYTES, MAX_BATCH, FrameHeader
from kvstore.protocol.master_messages import Exists
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, Failure, Hello, Ok
from kvstore.rpc.keepalive import PEER_TIMEOUT_S
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.server import (
    ACCEPT_PAUSE_S,
    HELLO_TIMEOUT_S,
    MAX_HELLO_BYTES,
    ConnectionLimits,
    NullHandler,
    Server,
    default_run_dir,
)
from kvstore.rpc.server.session import Session
from kvstore.security.tickets.ticket import PASS, Ticket, seal
from tests.rpc.wires import Clock, Recorder, frame, pump, read_frame


class Daemon:
    """Answers everything with Ok, and authenticates each peer that sends Hello."""

    def __init__(self, max_connections: int = 10, **options: Any) -> None:
        self.clock = Clock()
        self.answer: Message = Ok()
        self.reactor = Reactor(self.clock)
        self.handler = Recorder(on_frame=self._answer)
        self.server = Server(self.reactor, self.handler, ConnectionLimits(max_connections, **options))

    def _answer(self, session: Session, header: FrameHeader, body: bytes) -> None:
        if header.type == Hello.TYPE:
            session.context = Hello.unpack(memoryview(body)).name
        session.reply(header.request_id, self.answer)

    def connect(self, address: str) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX) if "/" in address else socket.socket()
        sock.settimeout(10)
        host, _, port = address.rpartition(":")
        sock.connect(address if "/" in address else (host, int(port)))
        for _ in range(20):
            self.reactor.run_once(0)
        return sock

    def ask(self, sock: socket.socket, message: Message | None = None) -> None:
        sock.sendall(frame(message or Exists([b"key"])))
        asked = len(self.handler.frames)
        pump(self.reactor, lambda: len(self.handler.frames) > asked)
        assert read_frame(sock)[1] == Ok()

    def close(self) -> None:
        self.server.close()
        self.reactor.close()

    def __enter__(self) -> "Daemon":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon(max_connections=4) as daemon:
        yield daemon


def test_requests_over_tcp_and_unix_are_served(daemon: Daemon, tmp_path: Path) -> None:
    for address in (daemon.server.listen_tcp("127.0.0.1", 0), daemon.server.listen_unix(tmp_path / "new" / "node.sock")):
        with daemon.connect(address) as sock:
            daemon.ask(sock)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new" / "node.sock").stat().st_mode & 0o777 == 0o600


def test_a_peer_whose_host_vanishes_is_noticed(daemon: Daemon) -> None:
    with daemon.connect(daemon.server.listen_tcp("127.0.0.1", 0)):
        (session,) = daemon.server.sessions
        assert session._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert session._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == PEER_TIMEOUT_S * 1000


@pytest.mark.promise("peers-vanish")
def test_unauthenticated_session_is_closed_after_its_timeout(daemon: Daemon) -> None:
    address = daemon.server.listen_tcp("127.0.0.1", 0)
    with daemon.connect(address) as known, daemon.connect(address) as stranger:
        daemon.ask(known, Hello(ROLE_CLIENT, name="known"))
        daemon.ask(stranger)
        daemon.clock.now_ns = int(HELLO_TIMEOUT_S * 1e9) - 1
        daemon.ask(stranger)
        daemon.clock.now_ns += 1
        daemon.reactor.run_once(0)
        assert stranger.recv(1) == b""
        daemon.ask(known)
        assert len(daemon.server.sessions) == 1
    pump(daemon.reactor, lambda: daemon.handler.closed_count == 2)


def assert_turned_away(sock: socket.socket) -> None:
    """Refused with TooManyConnections, and closed."""
    header, failure, _ = read_frame(sock)
    assert header.request_id == 0
    assert isinstance(failure, Failure)
    assert failure.code == TooManyConnections.code
    assert sock.recv(1) == b""


@pytest.mark.promise("peers-vanish")
def test_oldest_unauthenticated_session_is_closed_over_limit() -> None:
    with Daemon(max_unauthenticated=2) as daemon:
        address = daemon.server.listen_tcp("127.0.0.1", 0)
        socks = [daemon.connect(address) for _ in range(2)]
        daemon.ask(socks[1], Hello(ROLE_CLIENT, name="known"))
        socks += [daemon.connect(address) for _ in range(2)]
        assert_turned_away(socks[0])
        for sock in socks[1:]:
            daemon.ask(sock)
        socks[2].close()
        pump(daemon.reactor, lambda: daemon.handler.closed_count == 2)
        socks.append(daemon.connect(address))
        for sock in (socks[1], socks[3], socks[4]):
            daemon.ask(sock)
        for sock in socks:
            sock.close()


@pytest.mark.promise("peers-vanish")
def test_strangers_have_half_of_the_connections_at_most() -> None:
    with Daemon(max_connections=4) as daemon:
        address = daemon.server.listen_tcp("127.0.0.1", 0)
        socks = [daemon.connect(address) for _ in range(3)]
        assert_turned_away(socks[0])
        assert len(daemon.server.sessions) == 2
        for sock in socks:
            sock.close()


@pytest.mark.promise("peers-vanish")
def test_unauthenticated_session_gives_way_at_max_connections() -> None:
    with Daemon(max_connections=4) as daemon:
        address = daemon.server.listen_tcp("127.0.0.1", 0)
        with daemon.connect(address) as stranger, contextlib.ExitStack() as stack:
            known = [stack.enter_context(daemon.connect(address))]
            daemon.ask(known[0], Hello(ROLE_CLIENT, name="known"))
            for _ in range(3):
                known.append(stack.enter_context(daemon.connect(address)))
                assert len(daemon.server.sessions) == min(1 + len(known), 4)
                daemon.ask(known[-1], Hello(ROLE_CLIENT, name="known"))
            assert_turned_away(stranger)
            for sock in known:
                daemon.ask(sock)


@pytest.mark.promise("peers-vanish")
def test_unauthenticated_message_is_limited_to_a_hello(daemon: Daemon) -> None:
    address = daemon.server.listen_tcp("127.0.0.1", 0)
    long = Exists([bytes(250)] * 4096)
    assert len(long.pack()) > MAX_HELLO_BYTES
    with daemon.connect(address) as stranger, daemon.connect(address) as known:
        stranger.sendall(frame(long)[:HEADER_BYTES])
        pump(daemon.reactor, lambda: daemon.handler.closed_count == 1)
        assert "before Hello: send it first" in str(read_frame(stranger)[1])
        ticket = Ticket(1, 1, 1, PASS, 0, bytes(16), "t" * 128, frozenset(range(MAX_BATCH)))
        daemon.ask(known, Hello(ROLE_NODE, "t" * 128, "", "n" * 255, 1, seal(ticket, bytes(32))))
        daemon.ask(known, long)


def test_connection_over_the_limit_is_refused_until_one_is_free(daemon: Daemon) -> None:
    address = daemon.server.listen_tcp("127.0.0.1", 0)
    socks = [daemon.connect(address) for _ in range(2)]
    for sock in socks:
        daemon.ask(sock, Hello(ROLE_CLIENT, name="known"))
    socks += [daemon.connect(address) for _ in range(2)]
    for sock in socks[2:]:
        daemon.ask(sock, Hello(ROLE_CLIENT, name="known"))
    first, second, *others = socks
    with daemon.connect(address) as third:
        header, failure, _ = read_frame(third)
        assert (header.request_id, failure) == (
            0,
            Failure(TooManyConnections.code, "the server has all its 4 connections in use (max_connections)"),
        )
        assert third.recv(1) == b""
    second.close()
    pump(daemon.reactor, lambda: len(daemon.server.sessions) == 3)
    with daemon.connect(address) as fourth:
        daemon.ask(fourth)
    for sock in (first, *others):
        daemon.ask(sock)
        sock.close()


def test_a_port_in_use_is_a_config_error(daemon: Daemon) -> None:
    host, _, port = daemon.server.listen_tcp("127.0.0.1", 0).rpartition(":")
    with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"):
        daemon.server.listen_tcp(host, int(port))


@pytest.mark.parametrize(
    ("host", "port", "why"),
    [
        ("192.0.2.1", 0, "cannot listen on 192.0.2.1:0"),
        ("no such host", 0, "cannot listen on no such host:0"),
        ("a" * 64, 0, "not a host name"),
        ("127.0.0.1", 65536, "port 65536 is not a port"),
        ("127.0.0.1", -1, "port -1 is not a port"),
    ],
)
def test_an_address_that_is_not_ours_is_a_config_error(daemon: Daemon, host: str, port: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        daemon.server.listen_tcp(host, port)


def test_the_socket_file_of_a_dead_owner_is_replaced(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    with daemon.connect(daemon.server.listen_unix(path)) as sock:
        daemon.ask(sock)


def test_the_socket_of_a_live_owner_is_refused_and_left_alone(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(path))
        alive.listen()
        with pytest.raises(ConfigError, match=r"listens there: stop it, or give this one another folder \(--run-dir\)"):
            daemon.server.listen_unix(path)
        assert path.is_socket()


def test_close_hangs_up_and_leaves_neither_files_nor_descriptors(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    daemon = Daemon()
    path = tmp_path / "node.sock"
    address = daemon.server.listen_unix(path)
    with daemon.connect(address) as sock:
        daemon.server.close()
        daemon.server.close()
        assert sock.recv(1) == b""
    assert not path.exists()
    assert daemon.handler.closed_count == 1
    daemon.close()
    assert len(os.listdir("/proc/self/fd")) == before


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """All descriptors of this process are in use."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def unconnected() -> socket.socket:
    """A socket, taken while there is a descriptor for it."""
    sock = socket.socket()
    sock.settimeout(10)
    return sock


@pytest.mark.promise("failures-typed")
def test_peer_is_refused_with_cause_without_descriptors(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    host, _, port = daemon.server.listen_tcp("127.0.0.1", 0).rpartition(":")
    peers = [unconnected() for _ in range(3)]
    with no_descriptor_left():
        for peer in peers:
            peer.connect((host, int(port)))
            daemon.reactor.run_once(0)
        for peer in peers:
            failure = read_frame(peer)[1]
            assert isinstance(failure, Failure)
            assert failure.code == TooManyConnections.code
            assert "raise ulimit -n" in failure.text
    lines = [record.message for record in caplog.records if "refusing connections" in record.message]
    assert len(lines) == 1
    assert daemon.server.counts()["refused_connections"] == 3
    for peer in peers:
        peer.close()


def test_accept_pauses_without_descriptors_and_does_not_spin(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    """Another thread has taken the spare descriptor, too."""
    host, _, port = daemon.server.listen_tcp("127.0.0.1", 0).rpartition(":")
    waiting = unconnected()
    with daemon.server._spare.given_up(), no_descriptor_left():
        waiting.connect((host, int(port)))
        for _ in range(50):
            daemon.reactor.run_once(0)
    assert daemon.server.counts()["refused_connections"] == 1
    daemon.clock.now_ns += int(ACCEPT_PAUSE_S * 1e9)
    daemon.ask(waiting)
    waiting.close()


def test_sockets_lie_where_only_this_user_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert default_run_dir() == tmp_path / "kvstore"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(2):
        folder = default_run_dir()
        assert folder == tmp_path / f"kvstore-{os.getuid()}"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o711)
    assert default_run_dir() == folder, "opened for whom socket_mode lets in"


def make_writable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def make_anothers(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, os.getuid() + 1, -1)


def make_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to("elsewhere")


@pytest.mark.promise("least-privilege")
@pytest.mark.parametrize(
    "make",
    [
        make_writable,
        make_link,
        Path.touch,
        pytest.param(make_anothers, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root may")),
    ],
)
def test_run_dir_in_tmp_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: Callable[[Path], None]) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make(tmp_path / f"kvstore-{os.getuid()}")
    with pytest.raises(ConfigError, match="choose a run_dir"):
        default_run_dir()


def test_connections_wait_for_a_server_with_null_handler(daemon: Daemon) -> None:
    server = Server(daemon.reactor, NullHandler(), ConnectionLimits(2))
    address = server.listen_tcp("127.0.0.1", 0)
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        server.handler = daemon.handler
        daemon.ask(sock)
    server.close()


def test_no_more_connections_are_accepted_than_descriptors_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them are for slabs, files and the daemon's own connections."""
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (4, 4))
    with Daemon() as daemon:
        address = daemon.server.listen_tcp("127.0.0.1", 0)
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                daemon.ask(stack.enter_context(daemon.connect(address)), Hello(ROLE_CLIENT, name="known"))
            assert_turned_away(stack.enter_context(daemon.connect(address)))
