"""Durations and traces of requests.

A session has a Stopwatch, which reports to an Observer how long each request takes. As a rule a request is answered before the next one is
looked at, which costs two looks at the clock; those that wait for something are kept by their ids meanwhile.

How a trace goes from whoever asks to whoever answers: a Trace message ahead of a request that is sampled, to peers that take it; an
entry of the metadata of gRPC calls.

A client's call that is sampled is a `SampledCall`, and so is what a daemon asks another one for the sake of traced
requests; whoever asks on its
behalf finds it by CALL. A daemon's session has a TracedStopwatch, which begins a span for each request that was announced so: below the
span that the first Trace ahead of it names, linked to those of the others. Who makes spans is a `Tracer`: this file knows none.
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
"""In metadata, as in HTTP."""
BROKEN: Final = "the connection broke"
MAX_UNANSWERED: Final = 4096
"""Requests of one peer that are observed while they wait for their answer."""
MAX_LINKS: Final = 63
"""Traced requests that one message is for, beside the first: those beyond are not named."""


class Observer(Protocol):
    """Is told what became of requests, in the reactor's thread."""

    @property
    def answered(self) -> Mapping[int, Callable[[int], None]]:
        """By the type of a request's message: to be called with the ns from there to its answer. Each request of a daemon pays for it."""

    @property
    def slow_ns(self) -> int:
        """Requests that took at least so long are reported to `slow`, too. Each request of a daemon pays for the look."""

    def slow(self, peer: "ObservedPeer", kind: int, elapsed_ns: int) -> None:
        """A request of that type took so long."""

    def refused(self, error: KVStoreError) -> None:
        """The answer was that error."""


class ObservedPeer(Protocol):
    """As much of a Session as an observer of its slow requests needs."""

    @property
    def context(self) -> Any:
        """The handler's own state for the connection."""

    def peer(self) -> str:
        """Its address."""


class Stopwatch:
    """Of one session. The reactor's thread is the only caller."""

    __slots__ = ("_answered", "_begun", "_unanswered", "observer")

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self._answered = observer.answered
        self._begun: tuple[int, int, int] | None = None
        """Of the request that is being served: its id, its type, and since when."""
        self._unanswered: dict[int, tuple[int, int, int]] = {}

    def begin(self, request_id: int, kind: int) -> None:
        """A request is there. The one before, if it has no answer yet, gets it later; one without an id never does."""
        begun = self._begun
        if begun is not None and len(self._unanswered) < MAX_UNANSWERED:
            self._unanswered[begun[0]] = begun
        self._begun = (request_id, kind, monotonic_ns()) if request_id else None

    def answered(self, request_id: int) -> tuple[int, int] | None:
        """The request has its answer. Its type and duration in ns, if it was slow."""
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
    """A part of a request's time. For one thread at a time."""

    @property
    def place(self) -> TraceParent:
        """Where it stands: the parent of what is asked for its sake."""

    def begin(self, name: str) -> "TraceSpan":
        """A part of this part."""

    def follow(self, name: str) -> "TraceSpan":
        """What it brought about, and does not wait for: below it, but with an end of its own."""

    def set(self, name: str, value: int | str) -> None:
        """An attribute: never a key, a value or a credential."""

    def end(self, error: str = "") -> None:
        """It is over, and with it those of its parts that are not; `error` names the kind of what went wrong. A second end is a no-op."""


class Tracer(Protocol):
    """Makes spans of requests."""

    def begin(self, kind: int, parent: TraceParent, links: Sequence[TraceParent] = ()) -> TraceSpan:
        """Of a request whose message has that type, asked for by that span, and for the sake of `links`, too."""


class SampledCall:
    """A sampled call of a client, or what a daemon asks for: under way, and what it has taken so far."""

    __slots__ = ("frame", "is_moved_by_engine", "parent", "requests")

    def __init__(self, parent: TraceParent, links: Sequence[TraceParent] = ()) -> None:
        """`parent`: the span that the requests of this call are parts of; `links`: those that they are for beside it."""
        self.parent = parent
        self.frame: Final = b"".join(map(_announcement, (parent, *links[:MAX_LINKS])))
        """What goes ahead of each request."""
        self.requests = 0
        self.is_moved_by_engine = False


CALL: Final[ContextVar[SampledCall | None]] = ContextVar("kvstore_call", default=None)
"""The call of this thread, or of this task, if it is sampled; of a loop, what it asks for at the moment."""


@contextmanager
def asking_for(span: TraceSpan) -> Iterator[None]:
    """What this thread, or this task, asks within is below that span."""
    token = CALL.set(SampledCall(span.place))
    try:
        yield
    finally:
        CALL.reset(token)


def on_behalf(spans: Sequence[TraceSpan], ask: Callable[..., T], *arguments: Any) -> T:
    """Call `ask` with these, for the sake of the spans: what it asks for is below the first of them, and linked to the others. Where there
    are none, it is just called."""
    if not spans:
        return ask(*arguments)
    parent, *links = [span.place for span in spans]
    token = CALL.set(SampledCall(parent, links))
    try:
        return ask(*arguments)
    finally:
        CALL.reset(token)


def _announcement(span: TraceParent) -> bytes:
    """The frame that says for whom the next request is."""
    body = Trace(span.text()).pack()
    return pack_header(Trace.TYPE, 0, len(body)) + body


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """For the `metadata` of a gRPC call: nothing where the call that asks is not sampled."""
    call = CALL.get()
    return ((TRACEPARENT, call.parent.text()),) if call is not None else ()


def parent_in(metadata: Iterable[Any]) -> TraceParent | None:
    """Whom the metadata of a gRPC call names; None: nobody, or what cannot be read."""
    found = [value for key, value in metadata if key == TRACEPARENT and isinstance(value, str)]
    return parse_traceparent(found[0]) if found else None


class Unobserved:
    """An observer for whoever only traces."""

    slow_ns: Final = 1 << 63

    def __init__(self) -> None:
        self.answered: Final = defaultdict[int, Callable[[int], None]](lambda: _not_observed)

    def slow(self, peer: ObservedPeer, kind: int, elapsed_ns: int) -> None:
        return

    def refused(self, error: KVStoreError) -> None:
        return


def _not_observed(_elapsed_ns: int) -> None:
    """Nobody wants to know."""


class TracedStopwatch(Stopwatch):
    """Of one session, whose requests may be announced by a Trace. At most MAX_UNANSWERED spans of it are open. The reactor's thread is the
    only caller."""

    __slots__ = ("_announced", "_spans", "_tracer")

    def __init__(self, observer: Observer | None, tracer: Tracer) -> None:
        super().__init__(Unobserved() if observer is None else observer)
        self._tracer = tracer
        self._announced: list[TraceParent] = []
        self._spans: dict[int, TraceSpan] = {}

    def announced(self, body: memoryview) -> None:
        """The next request belongs to the trace that the Trace message with this body names; one that cannot be read is as none, and so is
        one after the first MAX_LINKS + 1."""
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
        """Of a request that has no answer yet; None: it is not traced."""
        return self._spans.get(request_id)

    def answered(self, request_id: int) -> tuple[int, int] | None:
        slow = super().answered(request_id)
        if self._spans and (span := self._spans.pop(request_id, None)) is not None:
            span.end()
        return slow

    def failed(self, request_id: int, error: KVStoreError) -> None:
        """The request is about to be answered with that error."""
        if (span := self._spans.pop(request_id, None)) is not None:
            span.end(type(error).__name__)

    def close(self) -> None:
        """The connection is gone; what was asked over it has no answer."""
        while self._spans:
            self._spans.popitem()[1].end(BROKEN)
