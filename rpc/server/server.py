"""Listening sockets of a daemon, TCP and Unix; each accepted connection becomes a Session with the daemon's handler."""

import contextlib
import errno
import itertools
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from kvstore.protocol.errors import ConfigError, Denied, KVStoreError, TooManyConnections, Unauthorized, Unavailable
from kvstore.protocol.frames import MAX_BATCH, MAX_BODY_BYTES, FrameHeader, pack_header
from kvstore.protocol.session_messages import Failure
from kvstore.rpc.address import Address, listening_socket
from kvstore.rpc.descriptors import RefusalLog, SpareDescriptor, max_accepted, max_open_files, open_files_limit
from kvstore.rpc.frame_writer import SendLimits
from kvstore.rpc.keepalive import PEER_TIMEOUT_S, enable_keepalive
from kvstore.rpc.reactor import READABLE, Reactor, Timer
from kvstore.rpc.server.session import DEFAULT_LIMITS, Handler, Session
from kvstore.rpc.tracing import Observer, Tracer
from kvstore.rpc.unix_socket import SocketAccess, remove_stale, remove_stale_sockets
from kvstore.security.tls.certificates import Certificates

BACKLOG: Final = 1024
ACCEPT_PAUSE_S: Final = 0.2
"""Pause of accepting after it failed for lack of descriptors."""
HELLO_TIMEOUT_S: Final = 10.0
REVOKED_INTERVAL_S: Final = 1.0
"""Interval of the check of open connections for revoked certificates; idle ones would not notice."""
OWNER_ONLY: Final = SocketAccess()
MAX_UNAUTHENTICATED: Final = 1024
"""The defaults of the settings `hello_timeout_s` and `max_unauthenticated`."""
MAX_HELLO_BYTES: Final = 8 * MAX_BATCH + (64 << 10)
"""Largest message of an unauthenticated peer: a Hello with a pass for a full batch of blocks."""
log = logging.getLogger("kvstore.transfer")


class ConnectionSettings(Protocol):
    """Settings of a daemon for its connections."""

    @property
    def max_connections(self) -> int: ...

    @property
    def hello_timeout_s(self) -> float: ...

    @property
    def max_unauthenticated(self) -> int: ...

    @property
    def peer_timeout_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """ConnectionSettings of a server without settings."""

    max_connections: int
    hello_timeout_s: float = HELLO_TIMEOUT_S
    max_unauthenticated: int = MAX_UNAUTHENTICATED
    peer_timeout_s: float = PEER_TIMEOUT_S


class Server:
    """Owns the listening sockets and the set of live sessions.

    Not thread-safe: the reactor's thread is the only caller.

    A session is unauthenticated until the handler, upon one of its frames, gives it a context. It is closed after
    `hello_timeout_s`. The oldest unauthenticated one is closed when there are more than `max_unauthenticated` (at most
    half of `max_connections`), or when a peer connects and no connection is left; so they cannot use up the
    connections. A TCP connection whose peer's host has vanished is closed after about `peer_timeout_s`.
    """

    def __init__(
        self,
        reactor: Reactor,
        handler: Handler,
        settings: ConnectionSettings,
        *,
        send_limits: SendLimits = DEFAULT_LIMITS,
        tls: Certificates | None = None,
        observer: Observer | None = None,
    ) -> None:
        """`tls`: certificates for TCP connections, if they serve; a peer in the handshake is unauthenticated.

        `observer`: of all requests.
        """
        self._tls = tls if tls is not None and tls.serves else None
        self._reactor = reactor
        self._observer = observer
        self.tracer: Tracer | None = None
        """Makes spans of traced requests; may be set before the reactor runs."""
        self.handler = handler
        """Serves new connections; may be replaced before the reactor runs."""
        self.handler_of: Callable[[Session], Handler] = lambda _session: self.handler
        """Returns the handler of a session once it is authenticated."""
        self.on_denied: Callable[[Session, Denied], None] = lambda _session, _error: None
        """Called with each session that sent a refused credential, or a request that its own does not permit."""
        self._max_connections = min(settings.max_connections, max_accepted())
        bound = "max_connections" if self._max_connections == settings.max_connections else f"half of the {open_files_limit()}"
        self._full = f"the server has all its {self._max_connections} connections in use ({bound})"
        self._refusals = RefusalLog()
        self._spare = SpareDescriptor()
        self._send_limits = send_limits
        self._hello_timeout_s = settings.hello_timeout_s
        self._max_unauthenticated = min(settings.max_unauthenticated, max(1, self._max_connections // 2))
        self._peer_timeout_s = settings.peer_timeout_s
        self._listeners: list[socket.socket] = []
        self._unix_paths: list[Path] = []
        self.sessions: set[Session] = set()
        self._numbers = itertools.count(1)
        self._unauthenticated: dict[Session, Timer] = {}
        """Oldest first; the timer closes the session."""
        if self._tls is not None and self._tls.revokes:
            reactor.every(REVOKED_INTERVAL_S, self._close_revoked)

    def listen_tcp(self, host: str, port: int) -> str:
        """Listen on `host:port` (port 0: any free one) and return the address as `host:port`.

        Raises ConfigError: the port is in use or not permitted, or the host is not this machine's.
        """
        if not 0 <= port <= 65535:
            raise ConfigError(f"port {port} is not a port: they are 0 to 65535")
        try:
            listener = listening_socket(host, port, backlog=BACKLOG)
        except UnicodeError as error:
            raise ConfigError(f"{host!r} is not a host name: {error}") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(f"port {port} of {host} is in use: stop its owner or choose another port") from None
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        self._add(listener)
        bound = listener.getsockname()
        return str(Address(bound[0], bound[1]))

    def listen_unix(self, path: Path, access: SocketAccess = OWNER_ONLY) -> str:
        """Listen on the Unix socket `path`, with the permissions of `access`.

        A new folder is private but for its search permission.

        A stale socket file is replaced. Raises ConfigError: the path is too long (107 bytes), a live process listens
        there, the folder cannot be used, or this user may not grant the access.
        """
        if len(os.fsencode(path)) > 107:
            raise ConfigError(f"the Unix socket path {path} is longer than 107 bytes: choose a shorter folder")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            remove_stale(path)
            remove_stale_sockets(path.parent)
            listener.bind(str(path))
            _give(path, access)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from None
        except ConfigError:
            listener.close()
            raise
        self._unix_paths.append(path)
        self._add(listener, access)
        return str(path)

    def _add(self, listener: socket.socket, access: SocketAccess | None = None) -> None:
        """`access`: permissions of a Unix socket."""
        listener.setblocking(False)
        self._listeners.append(listener)
        self._reactor.register(listener.fileno(), lambda _events: self._accept(listener, access))

    def _accept(self, listener: socket.socket, access: SocketAccess | None) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._refuse_without_descriptor(listener, error)
            return
        if len(self.sessions) >= self._max_connections and self._unauthenticated:
            next(iter(self._unauthenticated)).reject(TooManyConnections("closed in favour of a newer connection: Hello was not sent"))
        if len(self.sessions) >= self._max_connections:
            self._refuse_connection(sock, self._full)
            return
        if access is not None and not access.admits(sock):
            log.warning("refusing a connection: another user connected to a Unix socket for %s", access)
            _refuse(sock, Unauthorized(f"this Unix socket is for its owner, root and {access}: see socket_group (docs/sharing.md)"))
            return
        if access is None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        enable_keepalive(sock, self._peer_timeout_s, limit_unacknowledged=True)
        if self._tls is not None and sock.family != socket.AF_UNIX:
            try:
                sock = self._tls.begin_from(sock)
            except OSError:  # closed already
                return
        try:
            session = Session(self._reactor, sock, _TrackedSession(self), self._send_limits, self._observer, self.tracer)
        except (MemoryError, OSError):
            self._refuse_connection(sock, "the server has no memory for another connection")
            return
        session.on_denied = self.on_denied
        session.number = next(self._numbers)
        session.limit_bodies(MAX_HELLO_BYTES)
        self.sessions.add(session)
        self._track_unauthenticated(session)

    def _refuse_without_descriptor(self, listener: socket.socket, error: OSError) -> None:
        """Accept the peer on the spare descriptor and refuse it.

        If that fails too, pause: epoll would report the backlog in a loop.
        """
        reason = f"the server has no descriptor left ({error.strerror}): it has used the {open_files_limit()}"
        with self._spare.given_up():
            try:
                sock, _ = listener.accept()
            except OSError:
                self._log_refusal(reason)
                self._reactor.modify(listener.fileno(), 0)
                self._reactor.call_later(ACCEPT_PAUSE_S, lambda: self._listen_again(listener))
            else:
                self._refuse_connection(sock, reason)

    def _refuse_connection(self, sock: socket.socket, reason: str) -> None:
        self._log_refusal(reason)
        if self._tls is not None and sock.family != socket.AF_UNIX:
            sock.close()  # an error could only be sent after a handshake
        else:
            _refuse(sock, TooManyConnections(reason))

    def _log_refusal(self, reason: str) -> None:
        if line := self._refusals.count(reason, self._reactor.now_ns()):
            log.warning("%s", line)

    def counts(self) -> dict[str, int]:
        """Return counts of open and of refused connections, and the limits of connections and open files."""
        limits = {"max_connections": self._max_connections, "max_open_files": max_open_files()}
        return {"connections": len(self.sessions), "refused_connections": self._refusals.total, **limits}

    def _track_unauthenticated(self, session: Session) -> None:
        reason = f"no Hello within {self._hello_timeout_s:g} s (hello_timeout_s)"
        self._unauthenticated[session] = self._reactor.call_later(self._hello_timeout_s, lambda: session.close(reason))
        if len(self._unauthenticated) > self._max_unauthenticated:
            reason = f"more than {self._max_unauthenticated} unauthenticated connections (max_unauthenticated): send Hello"
            next(iter(self._unauthenticated)).reject(TooManyConnections(reason))

    def mark_authenticated(self, session: Session) -> None:
        """Stop tracking a session as unauthenticated: it has authenticated, or is closed."""
        self._unauthenticated.pop(session).cancel()
        session.limit_bodies(MAX_BODY_BYTES)

    def _listen_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._reactor.modify(listener.fileno(), READABLE)

    def close(self) -> None:
        """Stop listening and close all sessions. A second close is a no-op."""
        for listener in self._listeners:
            self._reactor.unregister(listener.fileno())
            listener.close()
        self._listeners.clear()
        for path in self._unix_paths:
            path.unlink(missing_ok=True)
        self._unix_paths.clear()
        self._spare.close()
        self.hang_up("the server stops")

    def _close_revoked(self) -> None:
        assert self._tls is not None
        for session in [session for session in self.sessions if self._tls.is_revoked(session.certified)]:
            log.info("closing a connection: the certificate of %s has been revoked", session.certified)
            session.close("its certificate has been revoked")

    def hang_up(self, reason: str) -> None:
        """Close all current sessions."""
        for session in list(self.sessions):
            session.close(reason)


class NullHandler:
    """Handler of a server that listens before its daemon is complete; connections wait in the backlog meanwhile."""

    def frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        raise Unavailable("this server is starting")

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> list[memoryview] | None:
        raise Unavailable("this server is starting")

    def closed(self, session: Session) -> None:
        return


class _TrackedSession:
    """Handler of one session that tracks its authentication in the server.

    Later frames go directly to the daemon's handler.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._is_unauthenticated = True
        self.frame: Callable[[Session, FrameHeader, memoryview], None] = self._first_frame
        self.payload = server.handler.payload

    def _first_frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        self._server.handler.frame(session, header, body)
        if session.context is not None and self._is_unauthenticated:
            self.frame = self._server.handler_of(session).frame
            self._mark_authenticated(session)

    def _mark_authenticated(self, session: Session) -> None:
        self._is_unauthenticated = False
        self._server.mark_authenticated(session)

    def closed(self, session: Session) -> None:
        self._server.sessions.discard(session)
        if self._is_unauthenticated:
            self.frame = self._server.handler.frame  # no reference to itself
            self._mark_authenticated(session)
        self._server.handler.closed(session)


def _refuse(sock: socket.socket, error: KVStoreError) -> None:
    body = Failure(error.code, str(error)).pack()
    with sock, contextlib.suppress(OSError):
        sock.setblocking(False)
        sock.send(pack_header(Failure.TYPE, 0, len(body)) + body)


def _give(path: Path, access: SocketAccess) -> None:
    """Apply `access` to the new socket file, or unlink it. Raises ConfigError."""
    try:
        access.open_folder(path.parent)
        access.give(path)
    except (OSError, ConfigError) as error:
        path.unlink()
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot open {path} to {access}: {error.strerror}: run as a member of that group, or as root") from None


def default_run_dir() -> Path:
    """Return a folder that only this user can write: in XDG_RUNTIME_DIR, else in /tmp, where it is created and checked.

    Another user may have created it first in /tmp. Raises ConfigError: it is another user's, or writable by others.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime, "kvstore")
    folder = Path(tempfile.gettempdir(), f"kvstore-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}: choose a run_dir") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(f"{folder} is not a folder that only this user may write: remove it, or choose a run_dir")
    return folder
