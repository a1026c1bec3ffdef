"""OpenTelemetry spans of a daemon's requests and of a client's calls.

Imported only if tracing is configured: see config.py. Finished spans wait in a bounded queue, and a thread exports them
in batches. A slow collector thus neither blocks callers nor consumes memory. Every span's outcome is counted.
"""

import logging
import math
import random
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import Token
from typing import Final

from opentelemetry import context, trace
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, Context, attach, set_value
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags

from kvstore.protocol.traceparent import TraceParent
from kvstore.protocol.version import VERSION
from kvstore.rpc.tracing import CALL, SampledCall
from kvstore.telemetry.metrics.requests import OPERATIONS
from kvstore.telemetry.tracing.config import TracingSettings

QUEUE_SPANS: Final = 2048
"""Capacity of the queue, some MB; further spans are dropped and counted."""
BATCH_SPANS: Final = 512
"""Largest batch; a full batch is sent before its interval ends."""
TIMEOUT_S: Final = 2.0
"""Time for the collector to accept a batch, including retries, and for the remaining spans at shutdown."""
EXPORTED: Final = "exported"
FAILED: Final = "failed"
DROPPED: Final = "dropped"

log = logging.getLogger("kvstore.telemetry")

SCOPE: Final = "kvstore"
NEVER: Final = 1 << 62
"""Countdown to the next sampled call at a ratio of 0."""


class SpanQueue(SpanProcessor):
    """Queue of finished spans, and the thread that exports them; owns the exporter. Thread-safe. The thread starts with
    the first span."""

    def __init__(self, exporter: SpanExporter, flush_interval_s: float) -> None:
        self._exporter = exporter
        self._flush_interval_s = flush_interval_s
        self._lock = threading.Lock()
        self._waiting: deque[ReadableSpan] = deque()
        self._counts = {EXPORTED: 0, FAILED: 0, DROPPED: 0}
        self._due = threading.Event()
        """Set when a batch is full, or at shutdown."""
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        return

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            if self._is_closing or len(self._waiting) >= QUEUE_SPANS:
                self._counts[DROPPED] += 1
                return
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="tracing", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no thread available: the next span tries again
                    self._counts[DROPPED] += 1
                    return
                self._thread = thread
            self._waiting.append(span)
            if len(self._waiting) >= BATCH_SPANS:
                self._due.set()

    def counts(self) -> dict[str, int]:
        """Spans so far by outcome: EXPORTED, FAILED (refused by the collector), DROPPED (queue full)."""
        with self._lock:
            return dict(self._counts)

    def shutdown(self) -> None:
        """Export the remaining spans for up to TIMEOUT_S, and an attempt in progress for as long again; drop the rest.
        A second call is a no-op."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._due.set()
        if self._thread is not None:
            self._thread.join(TIMEOUT_S)
        self._exporter.shutdown()  # cancels the pause before a retry
        if self._thread is not None:
            self._thread.join(TIMEOUT_S)
        with self._lock:
            self._counts[DROPPED] += len(self._waiting)
            self._waiting.clear()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """No-op: callers do not wait for the collector."""
        return True

    def _run(self) -> None:
        attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))  # keeps exports out of the program's own traces
        while not self._is_closing:
            self._due.wait(self._flush_interval_s)
            self._due.clear()
            self._send()
        self._send()

    def _send(self) -> None:
        """Export what is queued, until the collector refuses a batch."""
        while batch := self._next():
            try:
                is_taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
            except Exception:
                log.exception("export of spans failed")
                is_taken = False
            with self._lock:
                self._counts[EXPORTED if is_taken else FAILED] += len(batch)
            if not is_taken:
                return

    def _next(self) -> list[ReadableSpan]:
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH_SPANS))]


class RecordedSpan:
    """An `rpc.tracing.Span`, with child spans."""

    __slots__ = ("_parts", "_span", "_tracer")

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._parts: list[RecordedSpan] = []

    @property
    def place(self) -> TraceParent:
        here = self._span.get_span_context()
        return TraceParent(here.trace_id, here.span_id)

    def begin(self, name: str) -> "RecordedSpan":
        part = self.follow(name)
        self._parts.append(part)
        return part

    def follow(self, name: str) -> "RecordedSpan":
        return RecordedSpan(self._tracer, self._tracer.start_span(name, trace.set_span_in_context(self._span)))

    def set(self, name: str, value: int | str) -> None:
        self._span.set_attribute(name, value)

    def end(self, error: str = "") -> None:
        if not self._span.is_recording():
            return
        for part in self._parts:
            part.end(error)
        if error:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()


class RecordedCall:
    """Span of a sampled client call: its requests, and the program's spans within it, are children."""

    def __init__(self, span: trace.Span) -> None:
        self.span = span
        there = span.get_span_context()
        self.call = SampledCall(TraceParent(there.trace_id, there.span_id))
        self._tokens: tuple[Token[SampledCall | None], object] | None = None

    def __enter__(self) -> "RecordedCall":
        self._tokens = CALL.set(self.call), context.attach(trace.set_span_in_context(self.span))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        assert self._tokens is not None
        call, attached = self._tokens
        CALL.reset(call)
        context.detach(attached)  # type: ignore[arg-type]
        if kind is not None:
            self.span.set_status(StatusCode.ERROR, kind.__name__)  # never the text, which may name a key
        self.span.end()


class Tracing:
    """Tracer of one daemon or client, with its connection to the collector. Thread-safe."""

    def __init__(self, settings: TracingSettings, *, role: str, instance: str) -> None:
        """`role`: "node", "master", "client", "router" or "sidecar"; `instance`: its name."""
        self._role = role
        self._ratio = settings.sample_ratio
        self._until_next = self._draw()
        self.queue = SpanQueue(OTLPSpanExporter(endpoint=settings.endpoint, timeout=TIMEOUT_S), settings.flush_interval_s)
        about = {"service.name": f"kvstore-{role}", "service.instance.id": instance, "service.version": VERSION}
        provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create(about), shutdown_on_exit=False)
        provider.add_span_processor(self.queue)
        self._tracer = provider.get_tracer(SCOPE, VERSION)

    def begin(self, kind: int, parent: TraceParent, links: Sequence[TraceParent] = ()) -> RecordedSpan:
        """Begin the span of a request to this daemon: see `rpc.tracing.Tracer`."""
        return self.begin_named(OPERATIONS.get(kind, "unknown"), parent, links)

    def begin_named(self, name: str, parent: TraceParent | None, links: Sequence[TraceParent] = ()) -> RecordedSpan:
        """Begin the span of a request of that name; without a parent, a new trace."""
        within = trace.set_span_in_context(NonRecordingSpan(_there(parent))) if parent is not None else None
        linked = [Link(_there(link)) for link in links]
        span = self._tracer.start_span(f"kvstore.{self._role}.{name}", within, kind=SpanKind.SERVER, links=linked)
        return RecordedSpan(self._tracer, span)

    def samples(self) -> bool:
        """Return whether the call that begins is traced: as the program's current span, if any, else by chance.

        Costs one context lookup and a countdown: the random draw happens once per sampled call, for the number of calls
        to skip.
        """
        if context.get_current():  # usually empty; getting a span from it takes three times as long
            there = trace.get_current_span().get_span_context()
            if there.is_valid:
                return there.trace_flags.sampled
        self._until_next -= 1
        if self._until_next >= 0:
            return False
        self._until_next = self._draw()
        return True

    def here(self) -> context.Context:
        """Current trace context, to carry to another thread or task."""
        return context.get_current()

    @contextmanager
    def within(self, there: context.Context) -> Iterator[None]:
        """Run the block in a context from `here`."""
        token = context.attach(there)
        try:
            yield
        finally:
            context.detach(token)

    def begin_call(self, name: str) -> RecordedCall:
        """Begin the span of a sampled call; a context manager."""
        return RecordedCall(self._tracer.start_span(f"kvstore.{name}", kind=SpanKind.CLIENT))

    def close(self) -> None:
        """Export the remaining spans, for TIMEOUT_S at most. A second close is a no-op."""
        self.queue.shutdown()

    def _draw(self) -> int:
        """Number of calls to skip before the next sampled one."""
        if self._ratio >= 1:
            return 0
        return int(math.log(1.0 - random.random()) / math.log1p(-self._ratio)) if self._ratio > 0 else NEVER


def _there(parent: TraceParent) -> SpanContext:
    """Context of a span in another process."""
    return SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
