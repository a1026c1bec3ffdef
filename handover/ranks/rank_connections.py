"""Control connections between ranks: opened on demand, with a notification when they break.

Both ends of a connection may send requests. A connection begins with RankHello, which identifies the sender and the run
of the receiver that it means. `MessageHandler` processes messages.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Callable
from typing import Any, Final, Protocol

from kvstore.handover.config import HandoverSettings
from kvstore.handover.description import RankInfo, unpack
from kvstore.protocol.errors import KVStoreError, ProtocolError, StaleHandle, Unavailable, Unreachable, Untrusted
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.handover_messages import (
    CancelRequest,
    ExportRegions,
    PartReady,
    RankHello,
    RankReport,
    ReadsDone,
    RequestCache,
    RequestEnded,
)
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Ok
from kvstore.rpc.address import ResolvedAddresses, resolve
from kvstore.rpc.keepalive import enable_keepalive
from kvstore.rpc.reactor import WRITABLE, Reactor, Timer
from kvstore.rpc.server.server import Server
from kvstore.rpc.server.session import Session
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.subjects import CertifiedPeer

KINDS: Final[dict[int, type[Message]]] = {
    kind.TYPE: kind for kind in (RequestCache, ExportRegions, PartReady, ReadsDone, CancelRequest, RankReport, RequestEnded)
}
Answer = Callable[[KVStoreError | None], None]
"""Called once, with the error, or None for Ok."""


class MessageHandler(Protocol):
    """Processes messages of other ranks. Called in the reactor's thread."""

    def received(self, peer: RankInfo, message: Message, header: FrameHeader, answer: Answer) -> None:
        """Handle a request of a peer. Call `answer` once; a raised KVStoreError is the reply."""

    def lost(self, peer: RankInfo, error: KVStoreError) -> None:
        """No connection to this peer is left."""


class _PendingConnection:
    """Connection being established, with the requests that wait for it."""

    def __init__(self, info: RankInfo) -> None:
        self.info = info
        self.timer: Timer | None = None
        self.socket: socket.socket | None = None
        self.session: Session | None = None
        self.waiting: list[tuple[Message, int, Answer]] = []

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class RankConnections:
    """Connections of a rank to other ranks. The reactor's thread only."""

    def __init__(
        self, reactor: Reactor, settings: HandoverSettings, instance: bytes, handler: MessageHandler, tls: Certificates | None = None
    ) -> None:
        """Create it without connections. `tls`: connections use TLS, with ranks whose certificate shares a subject
        with this rank's."""
        self._tls = tls
        self._reactor = reactor
        self._settings = settings
        self._instance = instance
        self._handler = handler
        self.description = b""
        """This rank's description; set before the first `send_request`."""
        self.server = Server(reactor, self, settings, tls=tls)
        self._sessions: dict[bytes, Session] = {}
        """Authenticated sessions, by the peer's instance."""
        self._opening: dict[bytes, _PendingConnection] = {}
        self._sockets: set[socket.socket] = set()
        self._own: set[Session] = set()
        """Sessions opened by this rank; the server has the others."""
        self._is_closed = False

    # --- requests ---

    def send_request(self, info: RankInfo, message: Message, *, deadline_s: float, on_answer: Answer) -> None:
        """Send a request to a rank, over a new connection if there is none. `on_answer` receives the peer's error,
        Unreachable, DeadlineExceeded or None."""
        session = self._sessions.get(info.instance)
        if session is not None:
            session.request(message, _plain(info, on_answer), deadline_s=max(deadline_s, 0.001))
            return
        pending = self._opening.get(info.instance)
        if pending is None:
            pending = self._opening[info.instance] = _PendingConnection(info)
            self._connect(pending)
        pending.waiting.append((message, self._reactor.now_ns() + int(deadline_s * 1e9), on_answer))

    def open(self, info: RankInfo) -> None:
        """Connect to this rank, to be notified when it becomes unreachable."""
        if info.instance not in self._sessions and info.instance not in self._opening:
            pending = self._opening[info.instance] = _PendingConnection(info)
            self._connect(pending)

    def _connect(self, pending: _PendingConnection) -> None:
        timeout_s = self._settings.connect_timeout_s
        pending.timer = self._reactor.call_later(timeout_s, lambda: self._not_connected(pending, f"no answer within {timeout_s:g} s"))
        resolve(self._reactor, pending.info.control, lambda found: self._found(pending, found))

    def _found(self, pending: _PendingConnection, found: ResolvedAddresses | OSError) -> None:
        if not self._is_pending(pending):
            return
        try:
            if isinstance(found, OSError):
                raise found
            self._begin(pending, *found[0])
        except OSError as error:
            reason = error.strerror or str(error)
            self._reactor.call_soon(lambda: self._not_connected(pending, reason))  # after the first request was queued

    def _begin(self, pending: _PendingConnection, family: int, name: Any) -> None:
        sock = pending.socket = socket.socket(family, socket.SOCK_STREAM)
        self._sockets.add(sock)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(name)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
        self._reactor.register(sock.fileno(), lambda _events: self._connected(pending, sock), WRITABLE)

    def _is_pending(self, pending: _PendingConnection) -> bool:
        return not self._is_closed and pending.session is None and self._opening.get(pending.info.instance) is pending

    def _not_connected(self, pending: _PendingConnection, reason: str) -> None:
        if self._is_pending(pending):
            pending.stop_timer()
            if pending.socket is not None:
                self._sockets.discard(pending.socket)
                self._reactor.unregister(pending.socket.fileno())
                pending.socket.close()
            self._give_up(pending, Unreachable(f"cannot connect to rank {pending.info.rank} at {pending.info.control}: {reason}"))

    def _connected(self, pending: _PendingConnection, sock: socket.socket) -> None:
        if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._not_connected(pending, os.strerror(code))
            return
        pending.stop_timer()
        self._sockets.discard(sock)
        self._reactor.unregister(sock.fileno())
        enable_keepalive(sock, self._settings.peer_timeout_s, limit_unacknowledged=True)
        if self._tls is not None:
            try:
                sock = self._tls.begin_to_subject(sock, str(pending.info.control), self._check)
            except OSError as error:  # disconnected already
                self._not_connected(pending, error.strerror or str(error))
                return
        session = pending.session = Session(self._reactor, sock, self)
        self._own.add(session)
        greet = RankHello(pending.info.instance, self.description)
        session.request(
            greet, _plain(pending.info, lambda error: self._greeted(pending, session, error)), deadline_s=self._settings.connect_timeout_s
        )

    def _greeted(self, pending: _PendingConnection, session: Session, error: KVStoreError | None) -> None:
        if error is not None:
            self._give_up(pending, error)
            session.close(str(error))
            return
        session.context = pending.info
        self._opening.pop(pending.info.instance, None)
        self._sessions.setdefault(pending.info.instance, session)
        self._send_waiting(pending)

    def _send_waiting(self, pending: _PendingConnection) -> None:
        """Send the queued requests over the connection to their peer."""
        waiting, pending.waiting = pending.waiting, []
        for message, deadline_ns, on_answer in waiting:
            self.send_request(pending.info, message, deadline_s=(deadline_ns - self._reactor.now_ns()) / 1e9, on_answer=on_answer)

    def _give_up(self, pending: _PendingConnection, error: KVStoreError) -> None:
        if self._opening.get(pending.info.instance) is pending:
            del self._opening[pending.info.instance]
        if pending.info.instance in self._sessions:  # opened by the peer, equivalent
            return
        waiting, pending.waiting = pending.waiting, []
        for _, _, on_answer in waiting:
            self._reactor.guarded(on_answer, error)
        if not self._is_closed:
            self._handler.lost(pending.info, error)

    # --- the handler of sessions ---

    def frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        if header.type == RankHello.TYPE:
            self._greet(session, header, RankHello.unpack(body))
            return
        if session.context is None:
            raise ProtocolError("a connection must begin with RankHello")
        kind = KINDS.get(header.type)
        if kind is None:
            raise ProtocolError(f"a rank accepts no message of type {header.type}")

        def answer(error: KVStoreError | None) -> None:
            if error is None:
                session.reply(header.request_id, Ok())
            else:
                session.fail(header.request_id, error)

        self._handler.received(session.context, kind.unpack(body), header, answer)

    def _greet(self, session: Session, header: FrameHeader, message: RankHello) -> None:
        if message.instance != self._instance:
            raise StaleHandle("the description is of another rank or an earlier run: describe and connect again")
        self._check(session.certified)
        found = unpack(message.description)
        if session.context is not None and session.context.instance != found.instance:  # `closed` would only report the last one
            raise ProtocolError("a connection cannot change its rank")
        session.context = found
        self._sessions.setdefault(found.instance, session)
        session.reply(header.request_id, Ok())
        if (pending := self._opening.get(found.instance)) is not None:
            self._send_waiting(pending)

    def _check(self, found: CertifiedPeer | None) -> None:
        """Check a peer's certificate. Raises Untrusted: it shares no subject with this rank's."""
        if self._tls is not None and (found is None or not set(found.subjects) & set(self._tls.subjects)):
            raise Untrusted(f"a rank's certificate is for {found}, this rank's for another subject: issue both for one tenant")

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> list[memoryview] | None:
        raise ProtocolError(f"a message of type {header.type} has no payload")

    def closed(self, session: Session) -> None:
        self._own.discard(session)
        info: RankInfo | None = session.context
        if info is not None and self._sessions.get(info.instance) is session:
            del self._sessions[info.instance]
            if not self._is_closed:
                self._handler.lost(info, Unreachable(f"the connection to rank {info.rank} at {info.control} broke"))

    # --- the end ---

    @property
    def count(self) -> int:
        """Number of connections."""
        return len(self._own) + len(self.server.sessions)

    def close(self) -> None:
        """Close all connections. A second close is a no-op."""
        self._is_closed = True
        for sock in self._sockets:
            self._reactor.unregister(sock.fileno())
            with contextlib.suppress(OSError):
                sock.close()
        self._sockets.clear()
        for session in list(self._own):
            session.close("the transceiver is closed")
        self.server.close()


def _plain(info: RankInfo, on_answer: Answer) -> Callable[[FrameHeader | None, memoryview | KVStoreError], None]:
    def on_reply(header: FrameHeader | None, body: memoryview | KVStoreError) -> None:
        error = body if isinstance(body, KVStoreError) else None
        # A session reports Unavailable when its connection breaks.
        on_answer(Unreachable(f"rank {info.rank} at {info.control}: {error}") if type(error) is Unavailable else error)

    return on_reply
