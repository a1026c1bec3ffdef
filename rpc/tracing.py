"""Durations and trace propagation of requests.

- A session's Stopwatch reports each request's duration to an Observer. Usually a request is answered before the next
  one is read, which costs two clock reads; requests that wait are kept by id.
- A trace propagates by a Trace message ahead of a sampled request, to peers that accept it, and by gRPC metadata.
- A sampled call of a client is a `SampledCall`, as are a daemon's own requests on behalf of traced ones; CALL has the
  current one.
- A daemon's session has a TracedStopwatch, which begins a span for each traced request: child of the first Trace's
  span, linked to the others'. Spans come from a `Tracer` (telemetry/tracing).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic_ns
from typing import Any, Final, Protocol, TypeVar

from kvstore.protocol.errors import KVStoreError, ProtocolError
from kvstore.protocol.frames import pack_header
from kvstore.protocol.session_messages import Trace
from kvstore.protocol.traceparent import TraceParent, parse_traceparent

T = TypeVar("T")

TRACEPARENT: Final = "traceparent"
"""Metadata key, as in HTTP."""
BROKEN: Final = "the connection broke"
MAX_UNANSWERED: Final = 4096
"""Waiting requests of one peer that are observed."""
MAX_LINKS: Final = 63
"""Links of one message to further traced requests; the others are dropped."""


class Observer(Protocol):
    """Receiver of request durations and errors, in the reactor's thread."""

    @property
    def answered(self) -> Mapping[int, Callable[[int], None]]:
        """Callbacks by message type, called with the ns until the response. On the hot path of every request."""

    @property
    def slow_ns(self) -> int:
        """Duration from which on a request is also reported to `slow`. On the hot path of every request."""

    def slow(self, peer: "ObservedPeer", kind: int, elapsed_ns: int) -> None:
        """Record a slow request of message type `kind`."""

    def refused(self, error: KVStoreError) -> None:
        """Record a request that failed with `error`."""


class ObservedPeer(Protocol):
    """Part of a Session that an observer of slow requests uses."""

    @property
    def context(self) -> Any:
        """The handler's state for the connection."""

    def peer(self) -> str:
        """Return the peer's address."""


class Stopwatch:
    """Measures request durations of one session. Only the reactor's thread calls it."""

    __slots__ = ("_answered", "_begun", "_unanswered", "observer")

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self._answered = observer.answered
        self._begun: tuple[int, int, int] | None = None
        """The request that is being served: id, type, start in ns."""
        self._unanswered: dict[int, tuple[int, int, int]] = {}

    def begin(self, request_id: int, kind: int) -> None:
        """Start a request. A previous one without a response is kept as waiting; one without an id is not timed."""
        begun = self._begun
        if begun is not None and len(self._unanswered) < MAX_UNANSWERED:
            self._unanswered[begun[0]] = begun
        self._begun = (request_id, kind, monotonic_ns()) if request_id else None

    def answered(self, request_id: int) -> tuple[int, int] | None:
        """End a request. Return its type and duration in ns if it was slow."""
        begun = self._begun
        if begun is not None and begun[0] == request_id:
            self._begun = None
        else:
            begun = self._unanswered.pop(request_id, None)
            if begun is None:
                return None
        elapsed_ns = monotonic_ns() - begun[2]
        self._answered[begun[1]](elapsed_ns)
        return (begun[1], elapsed_ns) if elapsed_ns >= self.observer.slow_ns else None


class TraceSpan(Protocol):
    """Span of a trace. For one thread at a time."""

    @property
    def place(self) -> TraceParent:
        """Its traceparent: the parent of requests on its behalf."""

    def begin(self, name: str) -> "TraceSpan":
        """Begin a child span."""

    def follow(self, name: str) -> "TraceSpan":
        """Begin a child span that may outlive this one."""

    def set(self, name: str, value: int | str) -> None:
        """Set an attribute: never a key, a value or a credential."""

    def end(self, error: str = "") -> None:
        """End the span and its open children. `error`: kind of the error, if any. A second end is a no-op."""


class Tracer(Protocol):
    """Factory of spans for requests."""

    def begin(self, kind: int, parent: TraceParent, links: Sequence[TraceParent] = ()) -> TraceSpan:
        """Begin the span of a request of message type `kind`, child of `parent`, linked to `links`."""


class SampledCall:
    """A sampled call of a client, or of a daemon on behalf of a traced request, with counts of its requests."""

    __slots__ = ("frame", "is_moved_by_engine", "parent", "requests")

    def __init__(self, parent: TraceParent, links: Sequence[TraceParent] = ()) -> None:
        """`parent`: parent span of the call's requests; `links`: further spans on whose behalf they are sent."""
        self.parent = parent
        self.frame: Final = b"".join(map(_announcement, (parent, *links[:MAX_LINKS])))
        """Trace frames to send ahead of each request."""
        self.requests = 0
        self.is_moved_by_engine = False


CALL: Final[ContextVar[SampledCall | None]] = ContextVar("kvstore_call", default=None)
"""The sampled call of the current thread or task, or of the current callback of a loop; None: not sampled."""


@contextmanager
def within_span(span: TraceSpan) -> Iterator[None]:
    """Context manager: requests of this thread or task inside the block are children of `span`."""
    token = CALL.set(SampledCall(span.place))
    try:
        yield
    finally:
        CALL.reset(token)


def call_within_spans(spans: Sequence[TraceSpan], ask: Callable[..., T], *arguments: Any) -> T:
    """Call `ask`: its requests are children of the first span and linked to the others. Without spans, just call it."""
    if not spans:
        return ask(*arguments)
    parent, *links = [span.place for span in spans]
    token = CALL.set(SampledCall(parent, links))
    try:
        return ask(*arguments)
    finally:
        CALL.reset(token)


def _announcement(span: TraceParent) -> bytes:
    """Return the Trace frame of a span."""
    body = Trace(span.text()).pack()
    return pack_header(Trace.TYPE, 0, len(body)) + body


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Return the `metadata` of a gRPC call; empty if the current call is not sampled."""
    call = CALL.get()
    return ((TRACEPARENT, call.parent.text()),) if call is not None else ()


def parent_in(metadata: Iterable[Any]) -> TraceParent | None:
    """Return the parent span in a gRPC call's metadata; None: absent or malformed."""
    found = [value for key, value in metadata if key == TRACEPARENT and isinstance(value, str)]
    return parse_traceparent(found[0]) if found else None


class Unobserved:
    """Observer that ignores everything, for sessions that only trace."""

    slow_ns: Final = 1 << 63

    def __init__(self) -> None:
        self.answered: Final = defaultdict[int, Callable[[int], None]](lambda: _not_observed)

    def slow(self, peer: ObservedPeer, kind: int, elapsed_ns: int) -> None:
        return

    def refused(self, error: KVStoreError) -> None:
        return


def _not_observed(_elapsed_ns: int) -> None:
    """Ignore a duration."""


class TracedStopwatch(Stopwatch):
    """Stopwatch that also keeps spans of requests with a Trace, at most MAX_UNANSWERED.

    Only the reactor's thread calls it.
    """

    __slots__ = ("_announced", "_spans", "_tracer")

    def __init__(self, observer: Observer | None, tracer: Tracer) -> None:
        super().__init__(Unobserved() if observer is None else observer)
        self._tracer = tracer
        self._announced: list[TraceParent] = []
        self._spans: dict[int, TraceSpan] = {}

    def announced(self, body: memoryview) -> None:
        """Take the body of a Trace message for the next request.

        Malformed ones, and those after MAX_LINKS + 1, are ignored.
        """
        try:
            parent = parse_traceparent(Trace.unpack(body).traceparent)
        except ProtocolError:
            return
        if parent is not None and len(self._announced) <= MAX_LINKS:
            self._announced.append(parent)

    def begin(self, request_id: int, kind: int) -> None:
        super().begin(request_id, kind)
        if self._announced:
            (parent, *links), self._announced = self._announced, []
            if request_id and len(self._spans) < MAX_UNANSWERED:
                self._spans[request_id] = self._tracer.begin(kind, parent, links)

    def span(self, request_id: int) -> TraceSpan | None:
        """Return the span of a waiting request; None: it is not traced."""
        return self._spans.get(request_id)

    def answered(self, request_id: int) -> tuple[int, int] | None:
        slow = super().answered(request_id)
        if self._spans and (span := self._spans.pop(request_id, None)) is not None:
            span.end()
        return slow

    def failed(self, request_id: int, error: KVStoreError) -> None:
        """End the request's span with `error`."""
        if (span := self._spans.pop(request_id, None)) is not None:
            span.end(type(error).__name__)

    def close(self) -> None:
        """End all spans, after the connection ended."""
        while self._spans:
            self._spans.popitem()[1].end(BROKEN)
