"""A client's request as a part of the trace that its header `traceparent` names, and its parts: what the scheduler says, what engines do.

The header goes on to the engines: naming the router's own span where there is one, else as it came. Source: W3C Trace Context,
https://www.w3.org/TR/trace-context/. Of one event loop; each request is a context of its own.
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
"""What other tracers say to their like: it goes along with a traceparent, unread."""
TRACED: Final = MappingProxyType(
    {
        "/v1/completions": "completions",
        "/v1/chat/completions": "chat_completions",
        "/v1/embeddings": "embeddings",
        "/v1/responses": "responses",
    }
)
"""Paths whose requests have spans, and what they are called."""
NOTHING: Final[Mapping[str, str]] = MappingProxyType({})

_SPAN: Final[ContextVar[TraceSpan | None]] = ContextVar("kvstore_request", default=None)
_PASSED: Final[ContextVar[Mapping[str, str]]] = ContextVar("kvstore_passed", default=NOTHING)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestTraces:
    """Begins a span for each request whose header says that it is traced, and by chance for those without such a header."""

    def __init__(self, tracing: "Tracing | None") -> None:
        """None: nothing is traced here; headers go on."""
        self._tracing = tracing

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """To be the outermost of an application's."""
        came = _headers(request)
        span = self._begin(request, came)
        if span is None and not came:
            return await handler(request)
        passed, here = _PASSED.set(came), _SPAN.set(span)
        try:
            return await (handler(request) if span is None else _followed(span, request, handler))
        finally:
            _PASSED.reset(passed)
            _SPAN.reset(here)

    def _begin(self, request: web.Request, came: Mapping[str, str]) -> TraceSpan | None:
        name = TRACED.get(request.path)
        if self._tracing is None or name is None:
            return None
        parent = parse_traceparent(came.get(TRACEPARENT, ""))
        if parent is None and (came or not self._tracing.samples()):
            return None
        return self._tracing.begin_named(name, parent)


async def _followed(span: TraceSpan, request: web.Request, handler: Handler) -> web.StreamResponse:
    """What the handler gives; the span ends with it."""
    try:
        response = await handler(request)
    except BaseException as error:
        span.end(type(error).__name__)
        raise
    span.set("http.response.status_code", response.status)
    span.end(str(response.status) if response.status >= 500 else "")
    return response


def _headers(request: web.Request) -> Mapping[str, str]:
    """Of the trace that the request belongs to; nothing where it names none that can be read."""
    traceparent = request.headers.get(TRACEPARENT)
    if traceparent is None or is_sampled(traceparent) is None:
        return NOTHING
    tracestate = request.headers.getall(TRACESTATE, [])
    return {TRACEPARENT: traceparent} | ({TRACESTATE: ",".join(tracestate)} if tracestate else {})


def trace_headers() -> Mapping[str, str]:
    """For what is sent to an engine now."""
    return _PASSED.get()


def tell(name: str, value: int | str) -> None:
    """An attribute of the request's span, if it has one."""
    span = _SPAN.get()
    if span is not None:
        span.set(name, value)


def fail(error: Exception) -> None:
    """What went wrong after the answer's head was sent."""
    span = _SPAN.get()
    if span is not None:
        span.end(type(error).__name__)


@contextmanager
def step(name: str, *, instance: str = "", lasts: bool = False) -> Iterator[TraceSpan | None]:
    """A part of the request's span, if it has one: what is asked for inside, of the scheduler or of the engine `instance`, is below it. It
    ends with the block, or, if it `lasts`, only where that raises: else by who gets it, or with the request."""
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
