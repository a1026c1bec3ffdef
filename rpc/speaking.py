"""What one end of a session says: answers and requests as frames, through its Outbox, and its requests until they are answered.

It hangs up on a peer that does not take what it is sent: one timer a connection, and none while its peer reads. The socket is its
owner's, whom it tells when something has to wait for the socket, and when the connection is to end.
"""

import logging
import socket
from collections.abc import Callable, Sequence

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.frames import MAX_DEADLINE_MS, Header, pack_header
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Failure
from kvstore.rpc.outbox import Outbox, SendLimits
from kvstore.rpc.questions import Questions, Reply
from kvstore.rpc.reactor import Reactor, Timer
from kvstore.rpc.tracing import CALL

log = logging.getLogger("kvstore.transfer")


class Speaker:
    """See the module. The reactor's thread is the only caller."""

    __slots__ = ("_hang_up", "_has_queued", "_limits", "_questions", "_reactor", "_timer", "outbox", "takes_traces")

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        limits: SendLimits,
        *,
        hang_up: Callable[[str], None],
        has_queued: Callable[[], None],
    ) -> None:
        """`hang_up` is called with the reason, `has_queued` after bytes had to be queued."""
        self.takes_traces = False
        """The peer takes Trace messages."""
        self.outbox = Outbox(sock, reactor.guarded, reactor.now_ns)
        self._reactor = reactor
        self._limits = limits
        self._hang_up = hang_up
        self._has_queued = has_queued
        self._questions = Questions(reactor)
        self._timer: Timer | None = None

    def say(
        self,
        message: Message,
        request_id: int,
        deadline_ms: int = 0,
        payload: Sequence[memoryview | bytes] = (),
        on_sent: Callable[[], None] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        self.say_packed(message.TYPE, request_id, deadline_ms, message.pack(), payload, on_sent, fds)

    def say_packed(
        self,
        kind: int,
        request_id: int,
        deadline_ms: int,
        body: bytes,
        payload: Sequence[memoryview | bytes] = (),
        on_sent: Callable[[], None] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        head = pack_header(kind, request_id, len(body), sum(map(len, payload)), deadline_ms) + body
        self.send(head, payload, on_sent, fds)

    def send(
        self,
        head: bytes,
        payload: Sequence[memoryview | bytes] = (),
        on_sent: Callable[[], None] | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        """A frame's bytes, or the rest of them."""
        outbox = self.outbox
        try:
            outbox.send(head, payload, on_sent, fds)
        except OSError as error:
            self._hang_up(f"{error.strerror or error}")
        if outbox.queued_bytes:
            self._has_queued()
            self._watch()

    def ask(self, message: Message, on_reply: Reply, deadline_s: float) -> None:
        """A request. `on_reply` is called once, by `heard` or `closed` or when the time is over."""
        body = message.pack()
        request_id = self._questions.ask(on_reply, deadline_s)
        self.say_packed(message.TYPE, request_id, min(int(deadline_s * 1000) + 1, MAX_DEADLINE_MS), body)

    def announce(self) -> None:
        """For whom the request is that is asked next, where its call is traced and the peer takes that."""
        if self.takes_traces and (call := CALL.get()) is not None:
            try:
                self.outbox.send(call.frame, (), None, ())
            except OSError as error:
                self._hang_up(f"{error.strerror or error}")

    def heard(self, header: Header, body: memoryview) -> None:
        """The answer to a request. Raises ProtocolError: it cannot be understood."""
        failure = Failure.unpack(body) if header.type == Failure.TYPE else None
        if not self._questions.answered(header, body, failure) and failure is not None and not header.request_id:
            self._hang_up(failure.text)  # the peer could not read us and hangs up

    def _watch(self) -> None:
        """Look again when the time of what is next to be sent is over."""
        since_ns = self.outbox.oldest_ns
        if self._timer is None and since_ns is not None:
            self._timer = self._reactor.call_at(since_ns + int(self._limits.timeout_s * 1e9), self._look)

    def _look(self) -> None:
        self._timer, since_ns = None, self.outbox.oldest_ns
        if since_ns is not None and since_ns + int(self._limits.timeout_s * 1e9) <= self._reactor.now_ns():
            log.warning("hanging up: a peer has not taken an answer within %g s", self._limits.timeout_s)
            self._hang_up(f"an answer was not taken within {self._limits.timeout_s:g} s")
        else:
            self._watch()

    def let_go(self) -> None:
        """The connection is gone: what was not sent is over."""
        if self._timer is not None:
            self._timer.cancel()
        self.outbox.abandon()

    def close(self, error: KVStoreError) -> None:
        """Those who wait for answers get the error. The owner is told of nothing any more, and not referred to."""
        self._questions.close(error)
        self._hang_up, self._has_queued = _is_over, _is_over


def _is_over(*_: object) -> None:
    """Nobody is there to be told."""
