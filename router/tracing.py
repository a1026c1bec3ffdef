"""Trace spans of clients' requests, with child spans for the scheduler and for engines, by the header `traceparent`.

Engines get the header with the router's own span, or unchanged if the request has no span. Source: W3C Trace Context,
https://www.w3.org/TR/trace-context/. Runs in one event loop; each request has its own context.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from aiohttp import web

from kvstore.protocol.traceparent import is_sampled, parse_traceparent
from kvstore.rpc.tracing import TRACEPARENT, TraceSpan, within_span

if TYPE_CHECKING:
    from kvstore.telemetry.tracing.spans import Tracing

TRACESTATE: Final = "tracestate"
"""Vendor-specific header that is passed on with traceparent, unread."""
TRACED: Final = MappingProxyType(
    {
        "/v1/completions": "completions",
        "/v1/chat/completions": "chat_completions",
        "/v1/embeddings": "embeddings",
        "/v1/responses": "responses",
    }
)
"""Path -> name of its requests' spans."""
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

_SPAN: Final[ContextVar[TraceSpan | None]] = ContextVar("kvstore_request", default=None)
_PASSED: Final[ContextVar[Mapping[str, str]]] = ContextVar("kvstore_passed", default=NOTHING)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestTraces:
    """Middleware that begins a span for each request with a sampled traceparent, and for a sample of those without one."""

    def __init__(self, tracing: "Tracing | None") -> None:
        """None: no spans; headers are still passed on."""
        self._tracing = tracing

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Must be the outermost middleware."""
        received = _headers(request)
        span = self._begin(request, received)
        if span is None and not received:
            return await handler(request)
        passed, current = _PASSED.set(received), _SPAN.set(span)
        try:
            return await (handler(request) if span is None else _traced(span, request, handler))
        finally:
            _PASSED.reset(passed)
            _SPAN.reset(current)

    def _begin(self, request: web.Request, received: Mapping[str, str]) -> TraceSpan | None:
        name = TRACED.get(request.path)
        if self._tracing is None or name is None:
            return None
        parent = parse_traceparent(received.get(TRACEPARENT, ""))
        if parent is None and (received or not self._tracing.samples()):
            return None
        return self._tracing.begin_named(name, parent)


async def _traced(span: TraceSpan, request: web.Request, handler: Handler) -> web.StreamResponse:
    """Run the handler; the span ends with it."""
    try:
        response = await handler(request)
    except BaseException as error:
        span.end(type(error).__name__)
        raise
    span.set("http.response.status_code", response.status)
    span.end(str(response.status) if response.status >= 500 else "")
    return response


def _headers(request: web.Request) -> Mapping[str, str]:
    """Trace headers of the request; empty without a valid traceparent."""
    traceparent = request.headers.get(TRACEPARENT)
    if traceparent is None or is_sampled(traceparent) is None:
        return NOTHING
    tracestate = request.headers.getall(TRACESTATE, [])
    return {TRACEPARENT: traceparent} | ({TRACESTATE: ",".join(tracestate)} if tracestate else {})


def trace_headers() -> Mapping[str, str]:
    """Return the trace headers for a request to an engine."""
    return _PASSED.get()


def set_attribute(name: str, value: int | str) -> None:
    """Set an attribute of the request's span, if it has one."""
    span = _SPAN.get()
    if span is not None:
        span.set(name, value)


def fail(error: Exception) -> None:
    """End the request's span with an error that occurred after the response's head was sent."""
    span = _SPAN.get()
    if span is not None:
        span.end(type(error).__name__)


@contextmanager
def step(name: str, *, instance: str = "", lasts: bool = False) -> Iterator[TraceSpan | None]:
    """Begin a child span of the request's span, if it has one, for requests to the scheduler or the engine `instance`.

    The span ends with the block. With `lasts` it ends there only on an error; otherwise the receiver of the span ends it.
    """
    span = _SPAN.get()
    if span is None:
        yield None
        return
    part = span.begin(f"kvstore.router.{name}")
    if instance:
        part.set("kvstore.instance", instance)
    passed = _PASSED.set({**_PASSED.get(), TRACEPARENT: part.place.text()})
    try:
        with within_span(part):
            yield part
    except BaseException as error:
        part.end(type(error).__name__)
        raise
    finally:
        _PASSED.reset(passed)
    if not lasts:
        part.end()
