"""Session: one non-blocking connection of a daemon, accepted or outgoing.

It reads frames (frame_reader.py) and passes them to a Handler. Payloads are read directly into the handler's memory.
Responses, and this end's requests, go through frame_writer.py. A session owns its socket and its buffers.
"""

import logging
import socket
import struct
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any, Final, Protocol

from kvstore.protocol.errors import Denied, KVStoreError, ProtocolError, Unavailable, Untrusted, typed
from kvstore.protocol.frames import ACCEPTS_TRACES, MAKES_HOT_COPIES, MAX_DEADLINE_MS, FrameHeader, kind_of, pack_header
from kvstore.protocol.message import Message
from kvstore.protocol.messages import NO_REQUESTS
from kvstore.protocol.session_messages import Failure, Hello, Trace, Welcome
from kvstore.rpc.address import Address
from kvstore.rpc.frame_reader import FrameReader, PayloadReader
from kvstore.rpc.frame_writer import FrameWriter, PendingRequests, Reply, SendLimits
from kvstore.rpc.reactor import READABLE, WRITABLE, Reactor
from kvstore.rpc.server.tenant_loads import InFlight, TenantLoad
from kvstore.rpc.server.tls_session import TlsSession
from kvstore.rpc.tracing import CALL, Observer, Stopwatch, TracedStopwatch, Tracer, TraceSpan
from kvstore.security.tls.subjects import CertifiedPeer
from kvstore.security.tls.tls_socket import TlsSocket

MAX_FRAMES_A_TURN: Final = 64
"""Frames of one peer in a round of the loop."""
MAX_QUEUED_FDS: Final = 256
"""Unsent descriptors of one peer beyond which its requests are not read: one of 600 bytes can request 64."""
DEFAULT_LIMITS: Final = SendLimits()

log = logging.getLogger("kvstore.transfer")


FastPath = Callable[["Session", memoryview], bool]
"""Serves received bytes that are exactly one whole request, and returns True; False: it did nothing. It has responded,
or called the session's `count` to respond later."""


class Handler(Protocol):
    """Server of a session's requests. Called from the reactor's thread.

    A KVStoreError raised by `frame` or `payload` is sent to the peer as Failure. Any other exception is logged, and the
    peer gets an internal error.
    """

    def frame(self, session: "Session", header: FrameHeader, body: memoryview) -> None:
        """Serve a complete request; its payload is in the views of `payload`. `body` is valid during the call only."""

    def payload(self, session: "Session", header: FrameHeader, body: memoryview) -> "list[memoryview] | None":
        """Return writable views for the request's payload, of exactly its size.

        None: `session.accept_payload` follows later, when `body` is invalid, or the request was served with
        `session.take_payload`. Raising refuses the request; its payload is read and discarded.
        """

    def closed(self, session: "Session") -> None:
        """Clean up after the connection ended; called once. Views returned by `payload` are no longer used."""


class Session:
    """One connection of a daemon. Not thread-safe: only the reactor's thread calls it."""

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        handler: Handler,
        limits: SendLimits = DEFAULT_LIMITS,
        observer: Observer | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """With a `tracer` the session accepts Trace messages, and traced requests get spans."""
        sock.setblocking(False)
        self.reactor = reactor
        self.is_local = sock.family == socket.AF_UNIX
        self.number = 0
        """Number of an accepted connection, unique in its server."""
        self.requests = 0
        """Requests of the peer, if the handler counts them."""
        self.since_ns = reactor.now_ns()
        self.context: Any = None
        """The handler's state for this connection."""
        self._in_flight = InFlight()
        self._sock = sock
        self._tls = TlsSession(sock) if isinstance(sock, TlsSocket) else None
        self._fd = sock.fileno()
        self._handler = handler
        self._reader = FrameReader()
        self._payload = PayloadReader()
        self._is_counted = False
        """True if `fast_path` has called `count` for the current request."""
        self.fast_path: FastPath | None = None
        """Tried on received bytes before they are parsed, if no request waits for its response and no quota counts
        requests."""
        self._is_due = False
        """True if a read of decrypted bytes is scheduled."""
        self._limits = limits
        self._writer = FrameWriter(reactor, sock, limits, hang_up=self.close, on_queued=self._update_events)
        self._pending = PendingRequests(reactor)
        self._takes_traces = False
        """True if the peer accepts Trace messages."""
        self._events = READABLE
        self.traces = TracedStopwatch(observer, tracer) if tracer is not None else None
        """Spans of the peer's requests; None: this daemon does not trace."""
        self._is_authenticated = False
        self.on_denied: Callable[[Session, Denied], None] | None = None
        """Called when the peer sends a refused credential, or a request that its own does not permit."""
        self._stopwatch = self.traces or (Stopwatch(observer) if observer is not None else None)
        self.is_open = True
        self._is_kept = False
        reactor.register(self._fd, self._on_ready if self._tls is None else self._on_tls_ready)
        if self._tls is not None:
            self._update_events()

    def local_host(self) -> str:
        """Return the local address of the connection; 127.0.0.1 over a Unix socket."""
        return "127.0.0.1" if self.is_local else str(self._sock.getsockname()[0])

    def peer(self) -> str:
        """Return the peer's address: HOST:PORT, or `unix:uid 1000 pid 7` over a Unix socket; "" after the connection
        ended.
        """
        try:
            if not self.is_local:
                return str(Address(*self._sock.getpeername()[:2]))
            pid, uid, _gid = struct.unpack("iII", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return ""
        return f"unix:uid {uid} pid {pid}"

    def limit_bodies(self, max_bytes: int) -> None:
        """Limit the body of further messages; a longer one closes the connection."""
        self._reader.max_body_bytes = max_bytes

    def mark_authenticated(self, *, accepts_traces: bool) -> None:
        """Record that this side's handshake with the peer is complete, and whether the peer accepts Trace messages."""
        self._is_authenticated, self._takes_traces = True, accepts_traces

    @property
    def certified(self) -> CertifiedPeer | None:
        """Identity of the peer's certificate; None without one, or without TLS."""
        return self._tls.certified if self._tls is not None else None

    # --- reading ---

    def _on_ready(self, events: int) -> None:
        try:
            if events & WRITABLE:
                self._on_writable()
            if events & READABLE and self.is_open:
                self._read()
            elif events & ~WRITABLE:
                self.close("the peer closed the connection")
        except ProtocolError as error:
            self._fail_and_close(error)
        except BlockingIOError:
            return
        except Untrusted as error:
            self._denied(error)
            self._refuse(error)
        except OSError as error:
            self.close(f"{error.strerror or error}")

    def _on_tls_ready(self, events: int) -> None:
        tls = self._tls
        assert tls is not None
        if not tls.is_refused:
            self._on_ready(tls.turned(events, has_unsent=bool(self._writer.queued_bytes)))
            self._update_events()
        elif tls.is_over():
            self.close("it was refused")

    def _denied(self, error: Denied) -> None:
        if self.on_denied is not None:
            self.on_denied(self, error)

    def _refuse(self, error: Untrusted) -> None:
        assert self._tls is not None
        if reason := self._tls.refuse(error):
            self.close(reason)

    def _read(self) -> None:
        """Receive once and serve every complete frame; the level-triggered epoll reports the rest again."""
        if self._payload.is_receiving:
            if not self._fill_destinations():
                return
        elif buffer := self._reader.recv_buffer():
            got = self._sock.recv_into(buffer)
            if not got:
                self.close("the peer closed the connection")
                return
            if self.fast_path is not None and self._serve_fast_path(self.fast_path, buffer, got):
                return
            self._reader.received(got)
        self._serve()

    def _serve_fast_path(self, fast_path: FastPath, buffer: memoryview, got: int) -> bool:
        """Try the fast path on `got` bytes. True: served, and the bytes are used up.

        An internal error closes the connection, because the response may be half sent.
        """
        if self._reader.unread_bytes or self._payload.is_waiting or not self._in_flight.is_uncounted or self.traces is not None:
            return False
        began_ns = monotonic_ns() if self._stopwatch is not None else 0
        try:
            if not fast_path(self, buffer[:got]):
                return False
        except Exception as error:
            log.error("a request failed", exc_info=error)
            self.close("an internal error")
            return True
        if self._is_counted:  # `count` has started its timing
            self._is_counted = False
        elif self._stopwatch is not None:
            observer, elapsed_ns = self._stopwatch.observer, monotonic_ns() - began_ns
            observer.answered[kind_of(buffer)](elapsed_ns)
            if elapsed_ns >= observer.slow_ns:
                observer.slow(self, kind_of(buffer), elapsed_ns)
        return True

    def count(self, header: FrameHeader) -> None:
        """Count and time a request of `fast_path` whose response may come later."""
        self._is_counted = True
        if self._stopwatch is not None:
            self._stopwatch.begin(header.request_id, header.type)
        self._begin(header)

    def _serve(self) -> None:
        """Serve the complete frames that were received."""
        for _ in range(MAX_FRAMES_A_TURN):
            if not self.is_open or self._paused():
                return
            frame = self._reader.next_frame()
            if frame is None:
                return
            # Taken from the reader already, so that it is not served again after an error of the handler.
            header, body = frame
            if header.type not in NO_REQUESTS:
                self._in_flight.check(header)
            if header.payload_bytes:
                self._begin_payload(header, body)
            else:
                self._dispatch(header, body)
        self.reactor.call_soon(self._resume)

    def _resume(self) -> None:
        if self.is_open:
            try:
                self._serve()
            except ProtocolError as error:
                self._fail_and_close(error)

    def _paused(self) -> bool:
        return self._payload.is_receiving or not self._may_read()

    def _may_read(self) -> bool:
        """Return True if requests may be read.

        Unsent responses, unsent descriptors and waiting requests then are within their limits.
        """
        writer = self._writer
        return not (
            self._payload.is_waiting
            or writer.queued_bytes > self._limits.queued_bytes
            or writer.queued_fds > MAX_QUEUED_FDS
            or self._in_flight.is_full
        )

    def _update_events(self) -> None:
        """Register with epoll for the events that can be handled now."""
        events = (READABLE if self._may_read() else 0) | (WRITABLE if self._writer.queued_bytes else 0)
        if self._tls is not None:
            if events & READABLE and self.is_open and self._tls.has_unread() and not self._is_due:
                self._is_due = True
                self.reactor.call_soon(self._read_pending)
            events = self._tls.wanted(events)
        if self.is_open and events != self._events:
            self._events = events
            self.reactor.modify(self._fd, events)

    def _read_pending(self) -> None:
        self._is_due = False
        if self.is_open and self._may_read():
            self._on_tls_ready(READABLE)

    def _dispatch(self, header: FrameHeader, body: memoryview) -> None:
        if header.type in NO_REQUESTS:
            if header.type != Trace.TYPE:
                self._on_response(header, body)
            elif self.traces is not None and (self._is_authenticated or self.context is not None):  # no spans before authentication
                self.traces.announced(body)
            return
        if self._stopwatch is not None and not header.payload_bytes:
            self._stopwatch.begin(header.request_id, header.type)
        try:
            if self._tls is not None and header.type == Hello.TYPE:  # each one: an authenticated peer may send it again
                self._tls.check_hello(Hello.unpack(body))
            if not header.payload_bytes:
                self._begin(header)
            self._handler.frame(self, header, body)
        except Exception as error:
            self.fail(header.request_id, error)

    def _on_response(self, header: FrameHeader, body: memoryview) -> None:
        """Pass a response to its request. Raises ProtocolError: it is malformed."""
        failure = Failure.unpack(body) if header.type == Failure.TYPE else None
        if not self._pending.respond(header, body, failure) and failure is not None and not header.request_id:
            self.close(failure.text)  # the peer rejects the connection

    def _begin(self, header: FrameHeader) -> None:
        """Count a request. Raises QuotaExceeded."""
        self._in_flight.begin(header)
        if self._in_flight.is_full:
            self._update_events()

    def set_tenant_load(self, load: TenantLoad | None) -> None:
        """Count further requests to this tenant; None: to none."""
        self._in_flight.belong_to(load)

    # --- payloads ---

    def _begin_payload(self, header: FrameHeader, body: memoryview) -> None:
        if header.type in NO_REQUESTS:
            raise ProtocolError(f"a message of type {header.type} has a payload, which only requests may have")
        pending = self._payload
        pending.begin(header, bytes(body))
        if self._stopwatch is not None:
            self._stopwatch.begin(header.request_id, header.type)
        try:
            self._begin(header)
            views = self._handler.payload(self, header, memoryview(pending.body))
        except Exception as error:
            self.refuse_payload(error)
        else:
            if views is not None:
                self.accept_payload(views)
            elif pending.is_waiting:
                self._update_events()

    def buffered_payload(self) -> memoryview | None:
        """For a handler's `payload`: return the payload if it was received with the message; valid until `take_payload`
        or the end.
        """
        return self._reader.peek(self._payload.left_bytes)

    def take_payload(self) -> None:
        """For a handler's `payload` that has served the request with `buffered_payload` and returns None: discard the
        payload.
        """
        self._reader.discard(self._payload.left_bytes)
        self._payload.over()

    def accept_payload(self, views: list[memoryview]) -> None:
        """Read the pending request's payload into `views`, which must stay valid until its `frame` call or `closed`.

        A no-op after `closed`.
        """
        if self.is_open:
            self._payload.accept(views)
            self._take_buffered()

    def refuse_payload(self, error: Exception) -> None:
        """Fail the pending request with `error`; its payload is read and discarded, so that the connection stays
        usable.
        """
        if self.is_open:
            self._payload.refuse(error)
            self._take_buffered()

    def discard_payload(self) -> None:
        """Stop using the views of `accept_payload`: the rest of the payload is read and discarded, then `frame` is
        called.
        """
        self._payload.divert()

    def _take_buffered(self) -> None:
        """Move the bytes that were received with the body; the rest is read directly from the socket."""
        self._update_events()
        self._payload.take_from(self._reader)
        if self._payload.is_whole:
            self._end_payload()

    def _fill_destinations(self) -> bool:
        """Read from the socket into the destination. Return True when the payload is complete."""
        if not self._payload.read_from(self._sock):
            self.close("the peer closed the connection within a payload")
            return False
        if not self._payload.is_whole:
            return False
        self._end_payload()
        return True

    def _end_payload(self) -> None:
        header, body, refusal = self._payload.header, self._payload.body, self._payload.refusal
        assert header is not None
        self._payload.over()
        if refusal is not None:
            self.fail(header.request_id, refusal)
        else:
            self._dispatch(header, memoryview(body))
        if self._reader.unread_bytes:
            # Frames after the payload: after a late `accept_payload` no other call serves them; otherwise this finds none.
            self.reactor.call_soon(self._resume)

    # --- writing ---

    def reply(
        self,
        request_id: int,
        message: Message,
        payload: Sequence[memoryview | bytes] = (),
        *,
        on_sent: Callable[[], None] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        """Respond to a request.

        `payload` views must not change before `on_sent`, which is called once, even if the connection breaks.

        `fds` are sent as SCM_RIGHTS (Unix sockets only, at most 64); the caller closes them in `on_sent`.
        """
        if self.is_open:
            self._answered(request_id)
            self._writer.send_message(message, request_id, 0, payload, on_sent, fds)
        elif on_sent is not None:
            on_sent()

    def welcome(self, request_id: int, message: Welcome, *, makes_hot_copies: bool = False) -> None:
        """Respond to a Hello, with this side's feature bits."""
        if self.is_open:
            self._answered(request_id)
            features = (ACCEPTS_TRACES if self.traces is not None else 0) | (MAKES_HOT_COPIES if makes_hot_copies else 0)
            self._writer.send_message(message, request_id, features)

    def span(self, request_id: int) -> TraceSpan | None:
        """Of a request that has no answer yet, for what takes its time; None: it is not traced."""
        return self.traces.span(request_id) if self.traces is not None else None

    def send_now(self, frame: bytes) -> bytes:
        """Send what the socket takes of a whole frame, and return the rest, for `send_whole` before the handler
        returns.

        Never closes the session, so that the handler can finish its work first.
        """
        sent = self._writer.send_now(frame)
        return frame[sent:] if sent else frame

    def send_whole(self, frame: bytes) -> None:
        """Send a frame, or the rest of one; a broken connection is closed."""
        if self.is_open:
            self._writer.send(frame)

    def fail(self, request_id: int, error: Exception) -> None:
        """Respond with a typed error; a request without an id gets no response.

        A foreign exception is logged and becomes an internal error.
        """
        if not isinstance(error, KVStoreError):
            log.error("a request failed", exc_info=error)
        elif isinstance(error, Denied):
            self._denied(error)
        if request_id:
            sent = typed(error)
            if self._stopwatch is not None:
                self._stopwatch.observer.refused(sent)
            if self.traces is not None:
                self.traces.failed(request_id, sent)
            self.reply(request_id, Failure(sent.code, str(sent)))

    def request(self, message: Message, on_reply: Reply, *, deadline_s: float) -> None:
        """Send a request to the peer, as part of the sampled CALL, if any.

        `on_reply` is called exactly once: with the response, the peer's error, Unavailable, or DeadlineExceeded.
        """
        if self.is_open and self._takes_traces and (call := CALL.get()) is not None:
            self._writer.send(call.frame)
        if not self.is_open:
            on_reply(None, Unavailable("the connection is closed"))
            return
        body = message.pack()
        request_id = self._pending.add(on_reply, deadline_s)
        self._writer.send(pack_header(message.TYPE, request_id, len(body), 0, min(int(deadline_s * 1000) + 1, MAX_DEADLINE_MS)) + body)

    def _answered(self, request_id: int) -> None:
        if self._stopwatch is not None:
            slow = self._stopwatch.answered(request_id)
            if slow is not None:
                self._stopwatch.observer.slow(self, *slow)
        if self._in_flight.end(request_id):
            self._update_events()
            self.reactor.call_soon(self._resume)  # frames that are buffered

    def _on_writable(self) -> None:
        self._writer.flush()
        self._update_events()
        if self._reader.unread_bytes and not self._paused():
            self.reactor.call_soon(self._resume)  # frames that waited for the peer to read

    # --- the end ---

    def _fail_and_close(self, error: ProtocolError) -> None:
        """Send a Failure to a peer with a malformed message, as far as its socket takes it now, and close the
        connection.
        """
        log.warning("closing a connection: %s", error)
        self.reply(0, Failure(error.code, str(error)))
        self.close(str(error))

    def reject(self, error: KVStoreError) -> None:
        """Close the connection of a peer that may retry.

        It is sent the error, if the socket takes it now and there is no TLS.
        """
        if self._tls is None:
            self.reply(0, Failure(error.code, str(error)))
        self.close(str(error))

    def close(self, reason: str = "closed") -> None:
        """Close the connection.

        Waiting requests get Unavailable, `on_sent` of unsent responses is called. A second close is a no-op.

        It breaks the session's reference cycles: the garbage collector runs rarely in a daemon (daemon.py), and closed
        sessions would hold their buffers until then.
        """
        if not self.is_open:
            return
        self.is_open = False
        self.reactor.unregister(self._fd)
        self.fast_path = None
        self._reader.close()
        self._payload.close()
        self._writer.close()
        if self.traces is not None:
            self.traces.close()
        self.set_tenant_load(None)
        self._pending.close(Unavailable(f"the connection broke: {reason}"))
        try:
            self._handler.closed(self)
        finally:
            if not self._is_kept:
                self._sock.close()

    def detach_socket(self) -> socket.socket:
        """For a handler's `closed`: return the socket, which the caller then owns."""
        self._is_kept = True
        return self._sock
