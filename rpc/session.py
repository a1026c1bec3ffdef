"""A frame session: one non-blocking connection of a daemon, either end of it.

Reads frames and hands them to a Handler, values going straight from the socket into the memory that the handler names; sends
answers and requests through its Outbox. It owns its socket and its buffers. It does not know what the messages mean.
"""

import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from kvstore.protocol.errors import KVStoreError, ProtocolError, Unavailable, Untrusted, typed
from kvstore.protocol.frames import MAX_DEADLINE_MS, OLDEST_VERSION, SPREADS_READS, TAKES_TRACES, VERSION, Header, pack_header
from kvstore.protocol.message import Message
from kvstore.protocol.messages import NO_REQUESTS
from kvstore.protocol.session_messages import Failure, Hello, Trace, Welcome
from kvstore.rpc.encrypted import Encrypted
from kvstore.rpc.incoming import Incoming
from kvstore.rpc.observing import Observer, Stopwatch
from kvstore.rpc.outbox import TURN_BYTES, Outbox, SendLimits, advance, first
from kvstore.rpc.questions import Questions, Reply
from kvstore.rpc.reactor import READABLE, WRITABLE, Reactor, Timer
from kvstore.rpc.tenant_loads import InFlight, TenantLoad
from kvstore.rpc.tracing import CALL, Call, Span, TracedStopwatch, Tracer
from kvstore.security.tls.subjects import CertifiedPeer
from kvstore.security.tls.tls_socket import TlsSocket

MAX_FRAMES_A_TURN: Final = 64
"""Frames served for one peer before the others have their turn."""
DISCARD_BYTES: Final = 256 << 10
MAX_QUEUED_FDS: Final = 256
"""Descriptors that wait for one peer to take them, beyond which its requests wait: a request of 600 bytes asks for 64 of them."""
DEFAULT_LIMITS: Final = SendLimits()

log = logging.getLogger("kvstore.transfer")


class Handler(Protocol):
    """What a daemon does with its sessions; all calls come from the reactor's thread.

    A KVStoreError raised by `frame` or `payload` is sent to the peer as Failure; anything else is a fault of ours: it is logged, and
    the peer told of an internal error.
    """

    def frame(self, session: "Session", header: Header, body: memoryview) -> None:
        """A whole request has arrived (its payload is in the memory that `payload` named). `body` is valid during the call only."""

    def payload(self, session: "Session", header: Header, body: memoryview) -> "list[memoryview] | None":
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
        self.context: Any = None
        """The handler's own state for this connection."""
        self.peer_version = VERSION
        """The protocol version that the peer speaks."""
        self._in_flight = InFlight()
        self._sock = sock
        self._tls = Encrypted(sock) if isinstance(sock, TlsSocket) else None
        self._fd = sock.fileno()
        self._handler = handler
        self._incoming = Incoming()
        self._header: Header | None = None
        self._body: bytes = b""
        self._destinations: deque[memoryview] | None = None
        self._left_bytes = 0
        self._waiting_for_room = False
        self._refusal: Exception | None = None
        self._is_due = False
        """What TLS has decrypted already is about to be read."""
        self._limits = limits
        self._outbox = Outbox(sock, reactor.guarded, reactor.now_ns)
        self._send_timer: Timer | None = None
        self._events = READABLE
        self._questions = Questions(reactor)
        self.traces = TracedStopwatch(observer, tracer) if tracer is not None else None
        """Of requests that come by this connection; None: this daemon traces nothing."""
        self.takes_traces = False
        """The peer takes Trace messages."""
        self._is_met = False
        self._stopwatch = self.traces or (Stopwatch(observer) if observer is not None else None)
        self.is_open = True
        reactor.register(self._fd, self._on_ready if self._tls is None else self._on_tls_ready)
        if self._tls is not None:
            self._update_events()

    def local_host(self) -> str:
        """The host by which the peer reached this side; 127.0.0.1 over a Unix socket."""
        return "127.0.0.1" if self.is_local else str(self._sock.getsockname()[0])

    def limit_bodies(self, max_bytes: int) -> None:
        """What the peer says from now on has no more bytes than that, or it is hung up on."""
        self._incoming.max_body_bytes = max_bytes

    def met(self, *, takes_traces: bool) -> None:
        """This side has introduced itself, and the peer has answered: it is no stranger, and takes Trace messages or does not."""
        self._is_met, self.takes_traces = True, takes_traces

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
            self._refuse(error)
        except OSError as error:
            self.close(f"{error.strerror or error}")

    def _on_tls_ready(self, events: int) -> None:
        tls = self._tls
        assert tls is not None
        if not tls.is_refused:
            self._on_ready(tls.turned(events, has_unsent=bool(self._outbox.queued_bytes)))
            self._update_events()
        elif tls.is_over():
            self.close("it was refused")

    def _refuse(self, error: Untrusted) -> None:
        assert self._tls is not None
        if reason := self._tls.refuse(error):
            self.close(reason)

    def _read(self) -> None:
        """One recv, then every whole frame of it: the level-triggered epoll comes back for the rest."""
        if self._destinations is not None:
            if not self._fill_destinations():
                return
        elif room := self._incoming.room():
            got = self._sock.recv_into(room)
            if not got:
                self.close("the peer closed the connection")
                return
            self._incoming.received(got)
        self._serve()

    def _serve(self) -> None:
        """Serve the whole frames of what has arrived."""
        for _ in range(MAX_FRAMES_A_TURN):
            if not self.is_open or self._paused():
                return
            frame = self._incoming.next_frame()
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
        return self._destinations is not None or not self._may_read()

    def _may_read(self) -> bool:
        """There is room for what would be read: the peer has taken enough of its answers, and enough of them are given."""
        outbox = self._outbox
        return not (
            self._waiting_for_room
            or outbox.queued_bytes > self._limits.queued_bytes
            or outbox.queued_fds > MAX_QUEUED_FDS
            or self._in_flight.is_full
        )

    def _update_events(self) -> None:
        """Have epoll tell what can be used."""
        events = (READABLE if self._may_read() else 0) | (WRITABLE if self._outbox.queued_bytes else 0)
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

    def _dispatch(self, header: Header, body: memoryview) -> None:
        if header.type in NO_REQUESTS:
            if header.type != Trace.TYPE:
                self._on_reply(header, body)
            elif self.traces is not None and (self._is_met or self.context is not None):  # strangers begin no spans
                self.traces.announced(body)
            return
        if self._stopwatch is not None and not header.payload_bytes:
            self._stopwatch.begin(header.request_id, header.type)
        try:
            if self._tls is not None and header.type == Hello.TYPE:  # each of them: who is known already may say it again
                self._tls.check_hello(Hello.unpack_of(header.version, body))
            if not header.payload_bytes:
                self._begin(header)
            self._handler.frame(self, header, body)
        except Exception as error:
            self.fail(header.request_id, error)

    def _begin(self, header: Header) -> None:
        """Count a request. Raises QuotaExceeded."""
        self._in_flight.begin(header)
        if self._in_flight.is_full:
            self._update_events()

    def belongs_to(self, load: TenantLoad | None) -> None:
        """Whose connection it is: requests are counted there from now on. None: nobody's."""
        self._in_flight.belong_to(load)

    # --- payloads ---

    def _begin_payload(self, header: Header, body: memoryview) -> None:
        if header.type in NO_REQUESTS:
            raise ProtocolError(f"a message of type {header.type}, which is no request, carries values that nobody asked for")
        self._header, self._body, self._left_bytes = header, bytes(body), header.payload_bytes
        self._waiting_for_room = True
        if self._stopwatch is not None:
            self._stopwatch.begin(header.request_id, header.type)
        try:
            self._begin(header)
            views = self._handler.payload(self, header, memoryview(self._body))
        except Exception as error:
            self.refuse_payload(error)
        else:
            if views is not None:
                self.accept_payload(views)
            elif self._waiting_for_room:
                self._update_events()

    def arrived_payload(self) -> memoryview | None:
        """For a handler's `payload`: all of it, if it has come along with the message, until `take_payload` or the handler's end."""
        return self._incoming.peek(self._left_bytes)

    def take_payload(self) -> None:
        """The handler has served the request with what `arrived_payload` gave, and returns None: nothing is read any more."""
        self._incoming.discard(self._left_bytes)
        self._header, self._body, self._left_bytes, self._waiting_for_room = None, b"", 0, False

    def accept_payload(self, views: list[memoryview]) -> None:
        """The pending request's payload goes into `views`, which stay valid until its `frame` call or `closed`.

        After `closed` this does nothing: the views are not used.
        """
        if not self.is_open:
            return
        assert self._waiting_for_room, "no request waits for room"
        assert sum(map(len, views)) == self._left_bytes, "the views do not add up to the payload"
        self._waiting_for_room = False
        self._destinations = deque(filter(len, views))
        self._update_events()
        self._take_buffered()

    def refuse_payload(self, error: Exception) -> None:
        """The pending request fails with `error`, see `fail`; its payload is read and thrown away, so that the connection stays usable."""
        if not self.is_open:
            return
        assert self._waiting_for_room, "no request waits for room"
        self._waiting_for_room = False
        self._refusal = error
        self._destinations = deque()
        self._update_events()
        self._take_buffered()

    def _take_buffered(self) -> None:
        """Move what came with the body; the rest comes straight from the socket."""
        assert self._destinations is not None
        incoming, left_bytes = self._incoming, self._left_bytes
        self._left_bytes -= incoming.move_into(self._destinations) if self._refusal is None else incoming.discard(left_bytes)
        if not self._left_bytes:
            self._end_payload()

    def _fill_destinations(self) -> bool:
        """Read from the socket into the destinations, no more than TURN_BYTES; True when the payload is whole."""
        destinations = self._destinations
        assert destinations is not None
        if self._refusal is not None:
            got = self._sock.recv_into(bytearray(min(self._left_bytes, DISCARD_BYTES)))
        else:
            got = self._sock.recvmsg_into(first(destinations, TURN_BYTES))[0]
        if not got:
            self.close("the peer closed the connection within a payload")
            return False
        self._left_bytes -= got
        if self._refusal is None:
            advance(destinations, got)
        if self._left_bytes:
            return False
        self._end_payload()
        return True

    def _end_payload(self) -> None:
        header, body, refusal = self._header, self._body, self._refusal
        assert header is not None
        self._header, self._body, self._destinations, self._refusal = None, b"", None, None
        if refusal is not None:
            self.fail(header.request_id, refusal)
        else:
            self._dispatch(header, memoryview(body))
        if self._incoming.unread_bytes:
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
            version = min(message.SINCE, self.peer_version)
            self._send(message.TYPE, request_id, 0, message.pack_for(version), payload, on_sent, fds, version)
        elif on_sent is not None:
            on_sent()

    def welcome(self, request_id: int, message: Welcome, *, spreads_reads: bool = False) -> None:
        """Answer a Hello, and say what is done besides answering requests."""
        if self.is_open:
            self._answered(request_id)
            version = min(message.SINCE, self.peer_version)
            does = (TAKES_TRACES if self.traces is not None else 0) | (SPREADS_READS if spreads_reads else 0)
            self._send(message.TYPE, request_id, does, message.pack_for(version), version=version)

    def span(self, request_id: int) -> Span | None:
        """Of a request that has no answer yet, for what takes its time; None: it is not traced."""
        return self.traces.span(request_id) if self.traces is not None else None

    def _answered(self, request_id: int) -> None:
        if self._stopwatch is not None:
            self._stopwatch.answered(request_id)
        if self._in_flight.end(request_id):
            self._update_events()
            self.reactor.call_soon(self._resume)  # what has been read already

    def reply_packed(self, request_id: int, kind: int, body: bytes) -> None:
        """As `reply`, with a message of that type that has been packed before."""
        if self.is_open:
            self._answered(request_id)
            self._send(kind, request_id, 0, body)

    def fail(self, request_id: int, error: Exception) -> None:
        """Answer a request with a typed error; a request without an id gets none. What is no KVStoreError is a fault of ours: it is logged,
        and the peer told of an internal error."""
        if not isinstance(error, KVStoreError):
            log.error("a request failed", exc_info=error)
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
        if self.takes_traces and (call := CALL.get()) is not None:
            self._announce(call)
        if not self.is_open:
            on_reply(None, Unavailable("the connection is closed"))
            return
        version = min(message.SINCE, self.peer_version)
        body = message.pack_for(version)
        request_id = self._questions.ask(on_reply, deadline_s)
        self._send(message.TYPE, request_id, min(int(deadline_s * 1000) + 1, MAX_DEADLINE_MS), body, version=version)

    def _announce(self, call: Call) -> None:
        """For whom the request is that is sent next."""
        if self.is_open:
            try:
                self._outbox.send(call.frame, (), None, ())
            except OSError as error:
                self.close(f"{error.strerror or error}")

    def _on_reply(self, header: Header, body: memoryview) -> None:
        failure = Failure.unpack(body) if header.type == Failure.TYPE else None
        if not self._questions.answered(header, body, failure) and failure is not None and not header.request_id:
            self.close(failure.text)  # the peer could not read us and hangs up

    def _send(
        self,
        kind: int,
        request_id: int,
        deadline_ms: int,
        body: bytes,
        payload: Sequence[memoryview | bytes] = (),
        on_sent: Callable[[], None] | None = None,
        fds: Sequence[int] = (),
        version: int = OLDEST_VERSION,
    ) -> None:
        head = pack_header(kind, request_id, len(body), sum(map(len, payload)), deadline_ms, version) + body
        try:
            self._outbox.send(head, payload, on_sent, fds)
        except OSError as error:
            self.close(f"{error.strerror or error}")
        if self._outbox.queued_bytes:
            self._update_events()
            self._watch_sending()

    def _watch_sending(self) -> None:
        """Look again when the time of what is next to be sent is over. One timer a connection, and none while its peer reads."""
        since_ns = self._outbox.oldest_ns
        if self._send_timer is None and since_ns is not None:
            self._send_timer = self.reactor.call_at(since_ns + int(self._limits.timeout_s * 1e9), self._look_at_sending)

    def _look_at_sending(self) -> None:
        self._send_timer, since_ns = None, self._outbox.oldest_ns
        if since_ns is not None and since_ns + int(self._limits.timeout_s * 1e9) <= self.reactor.now_ns():
            log.warning("hanging up: a peer has not taken an answer within %g s", self._limits.timeout_s)
            self.close(f"an answer was not taken within {self._limits.timeout_s:g} s")
        else:
            self._watch_sending()

    def _on_writable(self) -> None:
        self._outbox.flush()
        self._update_events()
        if self._incoming.unread_bytes and not self._paused():
            self.reactor.call_soon(self._resume)  # requests that waited for the peer to read

    # --- the end ---

    def _say_last(self, error: ProtocolError) -> None:
        """Tell a peer that cannot be understood why, as far as its socket takes it now, and hang up."""
        log.warning("closing a connection: %s", error)
        self.reply(0, Failure(error.code, str(error)))
        self.close(str(error))

    def close(self, reason: str = "closed") -> None:
        """Hang up. Waiting requests get Unavailable, `on_sent` of unsent answers is called. A second close is a no-op."""
        if not self.is_open:
            return
        self.is_open = False
        self.reactor.unregister(self._fd)
        self._sock.close()
        if self._send_timer is not None:
            self._send_timer.cancel()
        self._destinations = None
        self._outbox.abandon()
        if self.traces is not None:
            self.traces.close()
        self.belongs_to(None)
        self._questions.close(Unavailable(f"the connection broke: {reason}"))
        self._handler.closed(self)
