"""What a handler says by a session: answers, errors, and requests of its own."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvstore.protocol.errors import Denied, KVStoreError, Unavailable, typed
from kvstore.protocol.frames import SPREADS_READS, TAKES_TRACES
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Failure, Welcome
from kvstore.rpc.observing import Stopwatch
from kvstore.rpc.questions import Reply
from kvstore.rpc.speaking import Speaker
from kvstore.rpc.tracing import Span, TracedStopwatch

log = logging.getLogger("kvstore.transfer")


class Answering(ABC):
    """A part of Session, which makes what is named here."""

    is_open: bool
    traces: TracedStopwatch | None
    """Of requests that come by this connection; None: this daemon traces nothing."""
    _stopwatch: Stopwatch | None
    _speaker: Speaker

    @abstractmethod
    def _denied(self, error: Denied) -> None:
        """The peer's credential was refused, or does not allow what was asked."""

    @abstractmethod
    def _answered(self, request_id: int) -> None:
        """The request is about to have its answer."""

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
            self._speaker.say(message, request_id, 0, payload, on_sent, fds)
        elif on_sent is not None:
            on_sent()

    def welcome(self, request_id: int, message: Welcome, *, spreads_reads: bool = False) -> None:
        """Answer a Hello, and say what is done besides answering requests."""
        if self.is_open:
            self._answered(request_id)
            does = (TAKES_TRACES if self.traces is not None else 0) | (SPREADS_READS if spreads_reads else 0)
            self._speaker.say(message, request_id, does)

    def span(self, request_id: int) -> Span | None:
        """Of a request that has no answer yet, for what takes its time; None: it is not traced."""
        return self.traces.span(request_id) if self.traces is not None else None

    def send_now(self, frame: bytes) -> bytes:
        """Of a whole frame, the answer to a request that is served at once: send what the socket takes. What is left has to go by
        `send_whole` before the request's handler returns. Ends no connection, so that work that is half done may follow."""
        sent = self._speaker.outbox.send_now(frame)
        return frame[sent:] if sent else frame

    def send_whole(self, frame: bytes) -> None:
        """Send a frame, or what is left of it; one that is broken by now is closed."""
        if self.is_open:
            self._speaker.send(frame)

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
        if self.is_open:
            self._speaker.announce()
        if not self.is_open:
            on_reply(None, Unavailable("the connection is closed"))
            return
        self._speaker.ask(message, on_reply, deadline_s)
