"""Connection over TCP, with or without TLS: blocking sockets, vectored calls for whole batches, large parts received in
place.

Blocking calls with MSG_WAITALL move a slice with one or two system calls and without the GIL; a non-blocking socket
needs one per fill of the kernel's buffer (benchmarks/RESULTS.md).

With TLS a listener's metadata includes the subjects of its certificate (kvstore://node/NAME). A connecting peer got the
metadata from the node or from the master and accepts no other certificate, so certificates need not list the addresses
of all rails.
"""

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvstore.protocol.errors import Closed, ConfigError, KVStoreError, ProtocolError, Unreachable, Untrusted
from kvstore.rpc.address import Address, connect, parse_address
from kvstore.rpc.deadline import Deadline
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.subjects import CertifiedPeer, peer_of
from kvstore.security.tls.tls_socket import TlsSocket
from kvstore.transfer.agent import Rail
from kvstore.transfer.streams.connection import Connection, Listener

MAGIC: Final = b"tcp1 "
"""Metadata: this, then HOST:PORT in ASCII."""
MAX_VECTORS: Final = 1024
"""Linux's limit (IOV_MAX)."""
BACKLOG: Final = 256
HOST_BUFFER_BYTES: Final = 256 << 10
"""Socket buffers within this host: data in flight stays in the processor's cache, which gains a sixth over the kernel's
megabytes. Between hosts the kernel adapts them to the path.
"""
KEEPALIVE_S: Final = 60
LOOPBACK: Final = "127.0.0.1"
SLACK: Final = 1.0625
"""Timeouts are accurate to 1/16: changing the kernel's setting costs a system call."""
_TIMEVAL: Final = struct.Struct("@ll")
_RESET: Final = struct.pack("@ii", 1, 0)
"""SO_LINGER: close drops unsent bytes."""
TLS_MAGIC: Final = b"tls1 "
"""Metadata: this, URIs of the certificate's subjects joined by commas, a space, then HOST:PORT; all in ASCII."""
MAX_TLS_METADATA_BYTES: Final = 4096


class TcpConnection(Connection):
    """Connection over a TCP or TLS socket. The socket is closed when the last thread has left it, so that its
    descriptor is not reused meanwhile.
    """

    transport = "tcp"

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.settimeout(None)
        if _is_within_host(sock):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, HOST_BUFFER_BYTES)
        self._sock = sock
        self._peer = peer
        self._lock = threading.Lock()
        self._users = 0
        self._has_failed = False
        """Failed or closed, permanently."""
        self._armed_s = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}

    @classmethod
    def listen(cls, rail: Rail) -> "TcpListener":
        return TcpListener(rail.address or LOOPBACK, rail.port)

    @classmethod
    def connect(cls, metadata: bytes, rail: Rail, deadline: Deadline) -> "TcpConnection":
        """Connects from the rail's address, if it has one."""
        address = _parse(metadata)
        try:
            sock = connect(address, timeout_s=deadline.left_s(), source=rail.address)
        except TimeoutError:
            raise deadline.exceeded() from None
        except OSError as error:
            raise Unreachable(f"cannot connect to {address} over {rail.device or 'the loopback'}: {error.strerror or error}") from None
        return cls(sock, str(address))

    def send(self, parts: Sequence[memoryview | bytes], deadline: Deadline) -> None:
        if len(parts) > 1:
            self._move(self._sock.sendmsg, parts, deadline, socket.SO_SNDTIMEO)
        elif parts:
            self._move(lambda views: self._sock.send(views[0]), parts, deadline, socket.SO_SNDTIMEO)

    def recv_into(self, parts: Sequence[memoryview], deadline: Deadline) -> None:
        if len(parts) == 1:
            self._move(lambda views: self._sock.recv_into(views[0], 0, socket.MSG_WAITALL), parts, deadline, socket.SO_RCVTIMEO)
        else:
            self._move(lambda views: self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0], parts, deadline, socket.SO_RCVTIMEO)

    def recv_arrived(self, part: memoryview) -> int:
        self._enter()
        try:
            got_bytes = self._sock.recv_into(part, 0, socket.MSG_DONTWAIT)
            if not got_bytes:
                raise ConnectionResetError(0, "the peer closed the connection")
            return got_bytes
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._fail(Unreachable(f"the connection to {self._peer} broke: {error.strerror or error}")) from None
        finally:
            self._leave()

    def _move(self, step: Callable[[Any], int], parts: Sequence[Any], deadline: Deadline, option: int) -> None:
        """Call `step` until every byte of `parts` has moved. Any error closes the connection."""
        self._enter()
        try:
            begin, skip = 0, 0
            while begin < len(parts):
                views = parts[begin : begin + MAX_VECTORS] if begin or len(parts) > MAX_VECTORS else parts
                if skip:
                    views = [memoryview(views[0])[skip:], *views[1:]]
                total = sum(map(len, views))
                moved = self._step(step, views, deadline, option) if total else 0
                if moved == total:
                    begin, skip = begin + len(views), 0
                    continue
                moved += skip
                while moved >= len(parts[begin]):
                    moved -= len(parts[begin])
                    begin += 1
                skip = moved
        except KVStoreError as error:
            raise self._fail(error) from None
        except OSError as error:
            raise self._fail(Unreachable(f"the connection to {self._peer} broke: {error.strerror or error}")) from None
        except BaseException as error:
            self._fail(Closed(f"the connection to {self._peer} was given up: {error!r}"))
            raise
        finally:
            self._leave()

    def _step(self, step: Callable[[Any], int], views: Sequence[Any], deadline: Deadline, option: int) -> int:
        """Move at least one byte. Raises OSError, DeadlineExceeded or Unreachable."""
        while True:
            self._arm(deadline, option)
            try:
                moved = step(views)
            except BlockingIOError:  # nothing moved within the socket's timeout, which may be an earlier step's
                waited_s, self._armed_s[option] = self._armed_s[option], 0.0
                deadline.left_s()
                if waited_s >= self.stall_timeout_s:
                    raise Unreachable(f"{self._peer} has stalled: no byte for {self.stall_timeout_s:g} s") from None
                continue
            if not moved:
                raise ConnectionResetError(0, "the peer closed the connection")
            return moved

    def _arm(self, deadline: Deadline, option: int) -> None:
        """Set the socket's timeout near the deadline or a stall, possibly early: an earlier setting is kept if it is
        not later.
        """
        limit_s = deadline.left_s()
        if limit_s * SLACK >= self.stall_timeout_s:
            limit_s = self.stall_timeout_s
        if not 0.0 < self._armed_s[option] <= limit_s * SLACK + 0.001:
            seconds, rest = divmod(limit_s, 1.0)
            self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), max(int(rest * 1e6), 1000)))
            self._armed_s[option] = limit_s

    def _enter(self) -> None:
        with self._lock:
            if self._has_failed:
                raise self._closed()
            self._users += 1

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._has_failed and not self._users:
                self._sock.close()

    def _fail(self, error: KVStoreError) -> KVStoreError:
        """Close permanently. Returns the error to raise: this one, or Closed if this side closed the connection before."""
        with self._lock:
            if self._has_failed:
                return self._closed()
            self._has_failed = True
            self._shut_down()
        return error

    def _closed(self) -> Closed:
        return Closed(f"the connection to {self._peer} is closed")

    def close(self) -> None:
        with self._lock:
            if not self._has_failed:
                self._has_failed = True
                self._shut_down()
                if not self._users:
                    self._sock.close()

    def _shut_down(self) -> None:
        """Wake the threads inside. Unsent bytes must not arrive after the caller saw a failure."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        with contextlib.suppress(OSError):  # the peer may have closed before
            self._sock.shutdown(socket.SHUT_RDWR)

    @property
    def is_open(self) -> bool:
        return not self._has_failed

    def fileno(self) -> int:
        return self._sock.fileno()

    def has_unread(self) -> bool:
        return isinstance(self._sock, TlsSocket) and self._sock.pending() > 0


class TcpListener(Listener):
    """Listener over TCP."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"the transfer engine cannot listen on {host}:{port}: {error.strerror or error}") from None
        self.address = Address(host=host, port=self._sock.getsockname()[1])
        self._is_closed = False

    def metadata(self) -> bytes:
        return MAGIC + str(self.address).encode()

    def accept(self, timeout_s: float) -> TcpConnection | None:
        try:
            self._sock.settimeout(timeout_s)
            sock, peer = self._sock.accept()
        except (TimeoutError, ConnectionAbortedError):
            return None
        except OSError as error:
            if self._is_closed:
                raise Closed("the listener is closed") from None
            raise Unreachable(f"cannot accept a connection: {error.strerror or error}") from None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Detects a peer that died without closing.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        return self._made(sock, f"{peer[0]}:{peer[1]}")

    def _made(self, sock: socket.socket, peer: str) -> TcpConnection | None:
        """Return a connection over the accepted socket, or None if its peer has disconnected."""
        return TcpConnection(sock, peer)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            try:
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
            finally:
                self._sock.close()


def _is_within_host(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:  # the peer has disconnected, which the first use reports
        return False


def _parse(metadata: bytes) -> Address:
    """Raises ProtocolError for bytes that no TcpListener made."""
    if metadata.startswith(b"tls1 "):
        raise ProtocolError("the peer's transfer engine speaks TLS, and this one's does not: set tls_ca, tls_cert and tls_key")
    if not metadata.startswith(MAGIC) or len(metadata) > 300:
        raise ProtocolError("malformed metadata of a TCP listener")
    try:
        return parse_address(metadata[len(MAGIC) :].decode("ascii"))
    except (ValueError, KVStoreError):
        raise ProtocolError("malformed metadata of a TCP listener") from None


class TlsTransport:
    """Transport that makes TcpConnections over TLS."""

    def __init__(self, tls: Certificates) -> None:
        self.transport = TcpConnection.transport  # routes and rails do not distinguish them
        self._tls = tls

    def listen(self, rail: Rail) -> "TlsListener":
        """As Connection.listen. Also raises ConfigError if this program has no server certificate."""
        if not self._tls.serves:
            raise ConfigError("an engine that serves peers with TLS needs tls_cert and tls_key")
        return TlsListener(rail.address or LOOPBACK, rail.port, self._tls)

    def connect(self, metadata: bytes, rail: Rail, deadline: Deadline) -> TcpConnection:
        """As Connection.connect. A certificate refused by either side is Unreachable: another rail may lead to the
        peer.
        """
        meant, address = _parse_tls(metadata)
        try:
            sock = connect(address, timeout_s=deadline.left_s(), source=rail.address)
            made = self._tls.begin_to_subject(sock, str(address), lambda found: _check(found, meant, address))
            try:
                made.shake_hands(deadline.left_s())
            except BaseException:
                made.close()
                raise
        except Untrusted as error:
            raise Unreachable(f"cannot connect to {address} over {rail.device or 'the loopback'}: {error}") from None
        except KVStoreError:
            raise
        except TimeoutError:
            raise deadline.exceeded() from None
        except OSError as error:
            raise Unreachable(f"cannot connect to {address} over {rail.device or 'the loopback'}: {error.strerror or error}") from None
        return TcpConnection(made, str(address))


class TlsListener(TcpListener):
    """Listener over TLS. `accept` does not wait for the TLS handshake, which the connection performs."""

    def __init__(self, host: str, port: int, tls: Certificates) -> None:
        super().__init__(host, port)
        self._tls = tls

    def metadata(self) -> bytes:
        subjects = ",".join(subject.uri() for subject in self._tls.subjects)
        return TLS_MAGIC + f"{subjects} {self.address}".encode()

    def _made(self, sock: socket.socket, peer: str) -> TcpConnection | None:
        try:
            return TcpConnection(self._tls.begin_from(sock), peer)
        except OSError:  # the peer has disconnected
            return None


def _check(found: CertifiedPeer | None, meant: CertifiedPeer, address: Address) -> None:
    """Raises Untrusted unless the certificate has one of the expected subjects."""
    if found is None or not set(found.subjects) & set(meant.subjects):
        raise Untrusted(f"the certificate of {address} is for {found}, expected {meant}")


def _parse_tls(metadata: bytes) -> tuple[CertifiedPeer, Address]:
    """Raises ProtocolError for bytes that no TlsListener made."""
    subjects, space, address = metadata.removeprefix(TLS_MAGIC).partition(b" ")
    if not metadata.startswith(TLS_MAGIC) or not space or len(metadata) > MAX_TLS_METADATA_BYTES:
        raise ProtocolError("the peer's transfer engine does not speak TLS, and this one's does: give both tls_ca, tls_cert and tls_key")
    try:
        return peer_of(subjects.decode("ascii").split(",")), parse_address(address.decode("ascii"))
    except (ValueError, KVStoreError):
        raise ProtocolError("malformed metadata of a TLS listener") from None
