"""Send side of a session: frames to one non-blocking socket, and the requests that wait for the peer's responses.

Buffers are sent in order, as vectors, without copies. The connection of a peer that does not read is closed after a
timeout; one timer a connection, and none while the peer reads. The socket belongs to the session.
"""

import logging
import socket
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, ProtocolError, from_code
from kvstore.protocol.frames import FrameHeader, pack_header
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Failure
from kvstore.rpc.deadline import format_seconds
from kvstore.rpc.reactor import Reactor, Timer

MAX_VECTORS: Final = 512
"""Buffers in one sendmsg or recvmsg; the kernel takes at most 1,024."""
TURN_BYTES: Final = 1 << 20
"""Bytes of one connection a round of the loop, about 0.2 ms. Kernel buffers hold tens of MiB, and a fast peer could
otherwise monopolise the loop."""

OnSent = Callable[[], None]
Reply = Callable[["FrameHeader | None", "memoryview | KVStoreError"], None]
"""Called once with a response: (header, body) or (None, error). The body is valid during the call only."""

log = logging.getLogger("kvstore.transfer")


@dataclass(frozen=True, slots=True)
class SendLimits:
    """Limits for a peer that does not read.

    `queued_bytes`: unsent bytes beyond which its requests are not read. `timeout_s`: time to take a message; then the
    connection is closed.
    """

    queued_bytes: int = 64 << 20
    timeout_s: float = 30.0


@dataclass(slots=True)
class _QueuedFrame:
    buffers: deque[memoryview]
    on_sent: OnSent | None
    fds: Sequence[int]
    since_ns: int


class FrameWriter:
    """Send queue of one session. Only the reactor's thread calls it.

    It holds references to unsent buffers. `on_sent` of a frame is called exactly once: when the kernel has its last
    byte, or when the connection is closed.
    """

    __slots__ = ("_entries", "_hang_up", "_limits", "_on_queued", "_reactor", "_sock", "_timer", "queued_bytes", "queued_fds")

    def __init__(
        self, reactor: Reactor, sock: socket.socket, limits: SendLimits, *, hang_up: Callable[[str], None], on_queued: Callable[[], None]
    ) -> None:
        """`hang_up` is called with the reason, `on_queued` after bytes had to be queued."""
        self._reactor = reactor
        self._sock = sock
        self._limits = limits
        self._hang_up = hang_up
        self._on_queued = on_queued
        self._timer: Timer | None = None
        self._entries: deque[_QueuedFrame] = deque()
        self.queued_bytes = 0
        self.queued_fds = 0
        """Descriptors that wait to be sent."""

    def send_message(
        self,
        message: Message,
        request_id: int,
        deadline_ms: int = 0,
        payload: Sequence[memoryview | bytes] = (),
        on_sent: OnSent | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        body = message.pack()
        head = pack_header(message.TYPE, request_id, len(body), sum(map(len, payload)), deadline_ms) + body
        self.send(head, payload, on_sent, fds)

    def send(self, head: bytes, payload: Sequence[memoryview | bytes] = (), on_sent: OnSent | None = None, fds: Sequence[int] = ()) -> None:
        """Send what the socket takes of a frame, or of the rest of one, and queue what is left.

        A broken connection is closed.
        """
        sent, size = 0, len(head) + sum(map(len, payload))
        if not self._entries and not fds and size <= TURN_BYTES:
            try:
                sent = self._sock.sendmsg([head, *payload[: MAX_VECTORS - 1]]) if payload else self._sock.send(head)
            except OSError:
                sent = 0  # full or broken: `flush` meets the error again, with the frame in the queue
            if sent == size:
                if on_sent is not None:
                    self._reactor.guarded(on_sent)
                return
        buffers = deque(memoryview(part) for part in (head, *payload))
        advance(buffers, sent)
        self._entries.append(_QueuedFrame(buffers, on_sent, fds, self._reactor.now_ns()))
        self.queued_bytes += sum(map(len, buffers))
        self.queued_fds += len(fds)
        if len(self._entries) == 1:
            try:
                self.flush()
            except OSError as error:
                self._hang_up(f"{error.strerror or error}")
        if self.queued_bytes:
            self._on_queued()
            self._watch()

    def send_now(self, data: bytes) -> int:
        """Send what the socket takes now and queue nothing. Return how many bytes; 0 on a broken connection."""
        if self._entries:
            return 0
        try:
            return self._sock.send(data)
        except OSError:
            return 0

    def flush(self) -> None:
        """Send what the socket takes now, at most TURN_BYTES. Raises OSError if the connection is broken."""
        left_bytes = TURN_BYTES
        while self._entries and left_bytes:
            entry = self._entries[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", entry.fds))] if entry.fds else []
            try:
                sent = self._sock.sendmsg(first(entry.buffers, left_bytes), ancillary)
            except BlockingIOError:
                return
            self.queued_fds -= len(entry.fds)
            entry.fds = ()
            left_bytes -= sent
            self.queued_bytes -= sent
            advance(entry.buffers, sent)
            if not entry.buffers:
                self._entries.popleft()
                if entry.on_sent is not None:
                    self._reactor.guarded(entry.on_sent)

    def close(self) -> None:
        """Drop unsent frames, calling their `on_sent`, and all references to the session."""
        if self._timer is not None:
            self._timer.cancel()
        entries, self._entries = self._entries, deque()
        self.queued_bytes = self.queued_fds = 0
        self._hang_up, self._on_queued = _is_over, _is_over
        for entry in entries:
            if entry.on_sent is not None:
                self._reactor.guarded(entry.on_sent)

    def _watch(self) -> None:
        """Set the timer for the first queued entry."""
        if self._timer is None and self._entries:
            self._timer = self._reactor.call_at(self._entries[0].since_ns + int(self._limits.timeout_s * 1e9), self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self._entries and self._entries[0].since_ns + int(self._limits.timeout_s * 1e9) <= self._reactor.now_ns():
            log.warning("closing a connection: the peer has not read a response within %g s", self._limits.timeout_s)
            self._hang_up(f"a response was not read within {self._limits.timeout_s:g} s")
        else:
            self._watch()


class PendingRequests:
    """Requests to the peer by id, until the response arrives, the deadline passes or the connection ends.

    Sans-I/O. Only the reactor's thread calls it.
    """

    def __init__(self, reactor: Reactor) -> None:
        self._reactor = reactor
        self._pending: dict[int, tuple[Reply, Timer]] = {}
        self._next_id = 1

    def add(self, on_reply: Reply, deadline_s: float) -> int:
        """Return the id of a new request. `on_reply` gets DeadlineExceeded if nothing else arrives in time."""
        number = self._next_id
        self._next_id = number % 0xFFFFFFFF + 1

        def expire() -> None:
            self._pending.pop(number, None)
            on_reply(None, DeadlineExceeded(f"the peer did not answer within {format_seconds(deadline_s)}"))

        self._pending[number] = (on_reply, self._reactor.call_later(deadline_s, expire))
        return number

    def respond(self, header: FrameHeader, body: memoryview, failure: Failure | None) -> bool:
        """Pass the response to the request's `on_reply`.

        False: no such request is pending. Raises ProtocolError: it is malformed.
        """
        pending = self._pending.pop(header.request_id, None)
        if pending is None:
            return False
        on_reply, timer = pending
        timer.cancel()
        try:
            if failure is not None:
                on_reply(None, from_code(failure.code, failure.text))
            else:
                on_reply(header, body)
        except ProtocolError:
            raise
        except Exception:
            log.exception("the callback for a response of type %d failed", header.type)
        return True

    def close(self, error: KVStoreError) -> None:
        """Fail all pending requests with `error`."""
        pending, self._pending = self._pending, {}
        for on_reply, timer in pending.values():
            timer.cancel()
            self._reactor.guarded(on_reply, None, error)


def first(buffers: deque[memoryview], limit_bytes: int) -> list[memoryview]:
    """Return the beginning of a vector: at most `limit_bytes`, in at most MAX_VECTORS parts."""
    found = []
    for part in islice(buffers, MAX_VECTORS):
        found.append(part[:limit_bytes])
        limit_bytes -= len(found[-1])
        if not limit_bytes:
            break
    return found


def advance(buffers: deque[memoryview], size: int) -> None:
    """Drop the first `size` bytes of a vector, and empty buffers after them."""
    while buffers and size >= len(buffers[0]):
        size -= len(buffers.popleft())
    if size:
        buffers[0] = buffers[0][size:]


def _is_over(*_: object) -> None:
    """Stand-in for the session's callbacks after the connection was closed."""
