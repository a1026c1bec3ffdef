"""A frame session: one non-blocking connection of a daemon, either end of it.

Reads frames and passes them to a Handler (frame_reader.py). Payloads go straight from the socket into the memory that the handler names.
Responses, and requests of this end, go through frame_writer.py. A session owns its socket and its buffers. It does not know what the
messages mean.
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
"""Frames served for one peer before the others have their turn."""
MAX_QUEUED_FDS: Final = 256
"""Descriptors that wait for one peer to take them, beyond which its requests wait: a request of 600 bytes asks for 64 of them."""
DEFAULT_LIMITS: Final = SendLimits()

log = logging.getLogger("kvstore.transfer")


AtOnce = Callable[["Session", memoryview], bool]
"""Serves a whole request that has come alone by the session, from its header to its last byte, and says so; else False, with nothing done.
It has answered it, or had the session `count` it."""


class Handler(Protocol):
    """All calls come from the reactor's thread.

    A KVStoreError raised by `frame` or `payload` is sent to the peer as Failure; anything else is a fault of ours: it is logged, and
    the peer told of an internal error.
    """

    def frame(self, session: "Session", header: FrameHeader, body: memoryview) -> None:
        """A whole request has arrived (its payload is in the memory that `payload` named). `body` is valid during the call only."""

    def payload(self, session: "Session", header: FrameHeader, body: memoryview) -> "list[memoryview] | None":
        """Where shall this request's payload go? Writable views that add up to it, or None: `session.accept_payload` will tell later,
        and `body` then is no longer valid; or the request has been served (`session.take_payload`). Raising refuses the request; its
        payload is read and thrown away."""

    def closed(self, session: "Session") -> None:
        """The connection is gone, for whatever reason; called once. Views given by `payload` are no longer used."""


class Session:
    """See the module. Not thread-safe: the reactor's thread is the only caller."""

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        handler: Handler,
        limits: SendLimits = DEFAULT_LIMITS,
        observer: Observer | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """With a `tracer` the peer is told that Trace messages are taken, and requests that it announces so have spans."""
        sock.setblocking(False)
        self.reactor = reactor
        self.is_local = sock.family == socket.AF_UNIX
        self.number = 0
        """Of an accepted connection, among those of its server."""
        self.requests = 0
        """That the peer made, where the handler counts them."""
        self.since_ns = reactor.now_ns()
        self.context: Any = None
        """The handler's own state for this connection."""
        self._in_flight = InFlight()
        self._sock = sock
        self._tls = TlsSession(sock) if isinstance(sock, TlsSocket) else None
        self._fd = sock.fileno()
        self._handler = handler
        self._reader = FrameReader()
        self._payload = PayloadReader()
        self._is_counted = False
        """What `at_once` was shown, by `count`."""
        self.at_once: AtOnce | None = None
        """Is shown what has arrived before it is cut into frames, where no request waits for its answer and no quota counts them."""
        self._is_due = False
        """What TLS has decrypted already is about to be read."""
        self._limits = limits
        self._writer = FrameWriter(reactor, sock, limits, hang_up=self.close, on_queued=self._update_events)
        self._pending = PendingRequests(reactor)
        self._takes_traces = False
        """The peer takes Trace messages."""
        self._events = READABLE
        self.traces = TracedStopwatch(observer, tracer) if tracer is not None else None
        """Of requests that come by this connection; None: this daemon traces nothing."""
        self._is_met = False
        self.on_denied: Callable[[Session, Denied], None] | None = None
        """Called when the peer shows a credential that is refused, or asks for what its own does not allow."""
        self._stopwatch = self.traces or (Stopwatch(observer) if observer is not None else None)
        self.is_open = True
        self._is_kept = False
        reactor.register(self._fd, self._on_ready if self._tls is None else self._on_tls_ready)
        if self._tls is not None:
            self._update_events()

    def local_host(self) -> str:
        """The host by which the peer reached this side; 127.0.0.1 over a Unix socket."""
        return "127.0.0.1" if self.is_local else str(self._sock.getsockname()[0])

    def peer(self) -> str:
        """Address of the peer: HOST:PORT, or `unix:uid 1000 pid 7` over a Unix socket; "" once it is gone."""
        try:
            if not self.is_local:
                return str(Address(*self._sock.getpeername()[:2]))
            pid, uid, _gid = struct.unpack("iII", self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:
            return ""
        return f"unix:uid {uid} pid {pid}"

    def limit_bodies(self, max_bytes: int) -> None:
        """What the peer says from now on has no more bytes than that, or it is hung up on."""
        self._reader.max_body_bytes = max_bytes

    def met(self, *, accepts_traces: bool) -> None:
        """This side has introduced itself, and the peer has answered: it is no stranger, and takes Trace messages or does not."""
        self._is_met, self._takes_traces = True, accepts_traces

    @property
    def certified(self) -> CertifiedPeer | None:
        """Who is there, as the certificate says that it showed; None: none, or no TLS."""
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
            self._say_last(error)
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
        """One recv, then every whole frame of it: the level-triggered epoll comes back for the rest."""
        if self._payload.is_coming:
            if not self._fill_destinations():
                return
        elif room := self._reader.recv_buffer():
            got = self._sock.recv_into(room)
            if not got:
                self.close("the peer closed the connection")
                return
            if self.at_once is not None and self._serve_at_once(self.at_once, room, got):
                return
            self._reader.received(got)
        self._serve()

    def _serve_at_once(self, at_once: AtOnce, room: memoryview, got: int) -> bool:
        """Whether that has been served by one call: nothing of it is kept. A fault of ours ends the connection, for who knows what has been
        answered."""
        if self._reader.unread_bytes or self._payload.is_waiting or not self._in_flight.is_uncounted or self.traces is not None:
            return False
        began_ns = monotonic_ns() if self._stopwatch is not None else 0
        try:
            if not at_once(self, room[:got]):
                return False
        except Exception as error:
            log.error("a request failed", exc_info=error)
            self.close("an internal error")
            return True
        if self._is_counted:  # and timed from there on, be it answered by now or not
            self._is_counted = False
        elif self._stopwatch is not None:
            observer, elapsed_ns = self._stopwatch.observer, monotonic_ns() - began_ns
            observer.answered[kind_of(room)](elapsed_ns)
            if elapsed_ns >= observer.slow_ns:
                observer.slow(self, kind_of(room), elapsed_ns)
        return True

    def count(self, header: FrameHeader) -> None:
        """Of a request that `at_once` is shown and that may get its answer later: it is counted and timed as any."""
        self._is_counted = True
        if self._stopwatch is not None:
            self._stopwatch.begin(header.request_id, header.type)
        self._begin(header)

    def _serve(self) -> None:
        """Serve the whole frames of what has arrived."""
        for _ in range(MAX_FRAMES_A_TURN):
            if not self.is_open or self._paused():
                return
            frame = self._reader.next_frame()
            if frame is None:
                return
            # It is taken out already: whatever the handler raises or calls, this frame is over.
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
                self._say_last(error)

    def _paused(self) -> bool:
        return self._payload.is_coming or not self._may_read()

    def _may_read(self) -> bool:
        """There is room for what would be read: the peer has taken enough of its answers, and enough of them are given."""
        writer = self._writer
        return not (
            self._payload.is_waiting
            or writer.queued_bytes > self._limits.queued_bytes
            or writer.queued_fds > MAX_QUEUED_FDS
            or self._in_flight.is_full
        )

    def _update_events(self) -> None:
        """Have epoll tell what can be used."""
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
            elif self.traces is not None and (self._is_met or self.context is not None):  # strangers begin no spans
                self.traces.announced(body)
            return
        if self._stopwatch is not None and not header.payload_bytes:
            self._stopwatch.begin(header.request_id, header.type)
        try:
            if self._tls is not None and header.type == Hello.TYPE:  # each of them: who is known already may say it again
                self._tls.check_hello(Hello.unpack(body))
            if not header.payload_bytes:
                self._begin(header)
            self._handler.frame(self, header, body)
        except Exception as error:
            self.fail(header.request_id, error)

    def _on_response(self, header: FrameHeader, body: memoryview) -> None:
        """Raises ProtocolError: it cannot be understood."""
        failure = Failure.unpack(body) if header.type == Failure.TYPE else None
        if not self._pending.respond(header, body, failure) and failure is not None and not header.request_id:
            self.close(failure.text)  # the peer could not read us and hangs up

    def _begin(self, header: FrameHeader) -> None:
        """Count a request. Raises QuotaExceeded."""
        self._in_flight.begin(header)
        if self._in_flight.is_full:
            self._update_events()

    def belongs_to(self, load: TenantLoad | None) -> None:
        """Whose connection it is: requests are counted there from now on. None: nobody's."""
        self._in_flight.belong_to(load)

    # --- payloads ---

    def _begin_payload(self, header: FrameHeader, body: memoryview) -> None:
        if header.type in NO_REQUESTS:
            raise ProtocolError(f"a message of type {header.type}, which is no request, carries values that nobody asked for")
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

    def arrived_payload(self) -> memoryview | None:
        """For a handler's `payload`: all of it, if it has come along with the message, until `take_payload` or the handler's end."""
        return self._reader.peek(self._payload.left_bytes)

    def take_payload(self) -> None:
        """The handler has served the request with what `arrived_payload` gave, and returns None: nothing is read any more."""
        self._reader.discard(self._payload.left_bytes)
        self._payload.over()

    def accept_payload(self, views: list[memoryview]) -> None:
        """The pending request's payload goes into `views`, which stay valid until its `frame` call or `closed`.

        After `closed` this does nothing: the views are not used.
        """
        if self.is_open:
            self._payload.accept(views)
            self._take_buffered()

    def refuse_payload(self, error: Exception) -> None:
        """The pending request fails with `error`, see `fail`; its payload is read and thrown away, so that the connection stays usable."""
        if self.is_open:
            self._payload.refuse(error)
            self._take_buffered()

    def divert_payload(self) -> None:
        """The views of `accept_payload` are used no more: what is still to come of the pending payload is read and thrown away, and the
        `frame` call comes then."""
        self._payload.divert()

    def _take_buffered(self) -> None:
        """Move what came with the body; the rest comes straight from the socket."""
        self._update_events()
        self._payload.take_from(self._reader)
        if self._payload.is_whole:
            self._end_payload()

    def _fill_destinations(self) -> bool:
        """Read from the socket into the destinations; True when the payload is whole."""
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
            # Frames behind the payload. When room came later nobody else goes on with them; otherwise this finds none.
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
        """Answer a request. `payload` byte views must not change before `on_sent`, which is called once, also if the connection breaks.

        `fds` go along as SCM_RIGHTS (Unix sockets only, at most 64) and stay the caller's to close, in `on_sent`.
        """
        if self.is_open:
            self._answered(request_id)
            self._writer.send_message(message, request_id, 0, payload, on_sent, fds)
        elif on_sent is not None:
            on_sent()

    def welcome(self, request_id: int, message: Welcome, *, makes_hot_copies: bool = False) -> None:
        """Answer a Hello, and say what is done besides answering requests."""
        if self.is_open:
            self._answered(request_id)
            does = (ACCEPTS_TRACES if self.traces is not None else 0) | (MAKES_HOT_COPIES if makes_hot_copies else 0)
            self._writer.send_message(message, request_id, does)

    def span(self, request_id: int) -> TraceSpan | None:
        """Of a request that has no answer yet, for what takes its time; None: it is not traced."""
        return self.traces.span(request_id) if self.traces is not None else None

    def send_now(self, frame: bytes) -> bytes:
        """Of a whole frame, the answer to a request that is served at once: send what the socket takes. What is left has to go by
        `send_whole` before the request's handler returns. Ends no connection, so that work that is half done may follow."""
        sent = self._writer.send_now(frame)
        return frame[sent:] if sent else frame

    def send_whole(self, frame: bytes) -> None:
        """Send a frame, or what is left of it; one that is broken by now is closed."""
        if self.is_open:
            self._writer.send(frame)

    def fail(self, request_id: int, error: Exception) -> None:
        """Answer a request with a typed error; a request without an id gets none. What is no KVStoreError is a fault of ours: it is logged,
        and the peer told of an internal error."""
        if not isinstance(error, KVStoreError):
            log.error("a request failed", exc_info=error)
        elif isinstance(error, Denied):
            self._denied(error)
        if request_id:
            told = typed(error)
            if self._stopwatch is not None:
                self._stopwatch.observer.refused(told)
            if self.traces is not None:
                self.traces.failed(request_id, told)
            self.reply(request_id, Failure(told.code, str(told)))

    def request(self, message: Message, on_reply: Reply, *, deadline_s: float) -> None:
        """Ask the peer, for the sake of the CALL that is traced, if any. `on_reply` is called exactly once: the answer, the peer's error,
        Unavailable, or DeadlineExceeded."""
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
            self.reactor.call_soon(self._resume)  # what has been read already

    def _on_writable(self) -> None:
        self._writer.flush()
        self._update_events()
        if self._reader.unread_bytes and not self._paused():
            self.reactor.call_soon(self._resume)  # requests that waited for the peer to read

    # --- the end ---

    def _say_last(self, error: ProtocolError) -> None:
        """Tell a peer that cannot be understood why, as far as its socket takes it now, and hang up."""
        log.warning("closing a connection: %s", error)
        self.reply(0, Failure(error.code, str(error)))
        self.close(str(error))

    def turn_away(self, error: KVStoreError) -> None:
        """Hang up on a peer that may come again. It is sent the error, as far as its socket takes it now; over TLS nothing."""
        if self._tls is None:
            self.reply(0, Failure(error.code, str(error)))
        self.close(str(error))

    def close(self, reason: str = "closed") -> None:
        """Hang up. Waiting requests get Unavailable, `on_sent` of unsent answers is called. A second close is a no-op.

        Nothing refers to the session from within any more: who waits for the collector waits long in a daemon (daemon.py), and each
        connection that came and went would hold its buffers until then.
        """
        if not self.is_open:
            return
        self.is_open = False
        self.reactor.unregister(self._fd)
        self.at_once = None
        self._reader.let_go()
        self._payload.let_go()
        self._writer.close()
        if self.traces is not None:
            self.traces.close()
        self.belongs_to(None)
        self._pending.close(Unavailable(f"the connection broke: {reason}"))
        try:
            self._handler.closed(self)
        finally:
            if not self._is_kept:
                self._sock.close()

    def keep_socket(self) -> socket.socket:
        """For a handler's `closed`: the socket, of which the caller is the owner from now on."""
        self._is_kept = True
        return self._sock
