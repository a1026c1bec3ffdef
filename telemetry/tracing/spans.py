"""OpenTelemetry's spans as the rest of kvstore makes them: of a daemon's requests, and of a client's calls.

Imported only where traces are wanted: see config.py. Spans that are over wait in a bounded queue, and a thread sends them in batches: a
slow collector neither stops a caller nor takes memory. What becomes of each span is counted.
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
"""Spans that wait to be sent, at most: some MB. Those beyond are dropped, and counted."""
BATCH_SPANS: Final = 512
"""Spans that are sent at once, at most. As many that wait are sent before their interval ends."""
TIMEOUT_S: Final = 2.0
"""Time for the collector to take a batch, retries included. The end of a program waits as long for what is left."""
EXPORTED: Final = "exported"
FAILED: Final = "failed"
DROPPED: Final = "dropped"

log = logging.getLogger("kvstore.telemetry")

SCOPE: Final = "kvstore"
NEVER: Final = 1 << 62
"""Calls until the next one that is sampled, where none is."""


class SpanQueue(SpanProcessor):
    """Owns the exporter. Threads may share it. Its thread begins with the first span: who has none pays for none."""

    def __init__(self, exporter: SpanExporter, flush_interval_s: float) -> None:
        self._exporter = exporter
        self._flush_interval_s = flush_interval_s
        self._lock = threading.Lock()
        self._waiting: deque[ReadableSpan] = deque()
        self._counts = {EXPORTED: 0, FAILED: 0, DROPPED: 0}
        self._due = threading.Event()
        """There is a batch, or it is the end."""
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
                except RuntimeError:  # there is none to be had; the next span tries again
                    self._counts[DROPPED] += 1
                    return
                self._thread = thread
            self._waiting.append(span)
            if len(self._waiting) >= BATCH_SPANS:
                self._due.set()

    def counts(self) -> dict[str, int]:
        """Spans so far, by what came of them: EXPORTED, FAILED (the collector did not take them), DROPPED (there was no room)."""
        with self._lock:
            return dict(self._counts)

    def shutdown(self) -> None:
        """Send what waits, for TIMEOUT_S, and a try that has begun then for as long again; what is left is dropped. A second call is a
        no-op."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._due.set()
        if self._thread is not None:
            self._thread.join(TIMEOUT_S)
        self._exporter.shutdown()  # ends the pause before another try
        if self._thread is not None:
            self._thread.join(TIMEOUT_S)
        with self._lock:
            self._counts[DROPPED] += len(self._waiting)
            self._waiting.clear()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nobody waits for the collector: it is sent in its time."""
        return True

    def _run(self) -> None:
        attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))  # where the program traces HTTP requests, these are none of its own
        while not self._is_closing:
            self._due.wait(self._flush_interval_s)
            self._due.clear()
            self._send()
        self._send()

    def _send(self) -> None:
        """All that waits, unless the collector does not take it."""
        while batch := self._next():
            try:
                is_taken = self._exporter.export(batch) is SpanExportResult.SUCCESS
            except Exception:
                log.exception("spans could not be sent")
                is_taken = False
            with self._lock:
                self._counts[EXPORTED if is_taken else FAILED] += len(batch)
            if not is_taken:
                return

    def _next(self) -> list[ReadableSpan]:
        with self._lock:
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH_SPANS))]


class RecordedSpan:
    """An `rpc.tracing.Span`."""

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
    """A client's call that is sampled: what it asks for meanwhile, and what the program does within it, are parts of its span."""

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
    """All spans of one daemon, or of one client, and the way to the collector. Threads may share it."""

    def __init__(self, settings: TracingSettings, *, role: str, instance: str) -> None:
        """`role`: "node", "master", "client", "router" or "sidecar"; `instance`: which of them."""
        self._role = role
        self._ratio = settings.sample_ratio
        self._until_next = self._draw()
        self.queue = SpanQueue(OTLPSpanExporter(endpoint=settings.endpoint, timeout=TIMEOUT_S), settings.flush_interval_s)
        about = {"service.name": f"kvstore-{role}", "service.instance.id": instance, "service.version": VERSION}
        provider = TracerProvider(sampler=ALWAYS_ON, resource=Resource.create(about), shutdown_on_exit=False)
        provider.add_span_processor(self.queue)
        self._tracer = provider.get_tracer(SCOPE, VERSION)

    def begin(self, kind: int, parent: TraceParent, links: Sequence[TraceParent] = ()) -> RecordedSpan:
        """Of a request to this daemon: see `rpc.tracing.Tracer`."""
        return self.begin_named(OPERATIONS.get(kind, "unknown"), parent, links)

    def begin_named(self, name: str, parent: TraceParent | None, links: Sequence[TraceParent] = ()) -> RecordedSpan:
        """Of a request of that name. Without a parent it begins a trace."""
        within = trace.set_span_in_context(NonRecordingSpan(_there(parent))) if parent is not None else None
        linked = [Link(_there(link)) for link in links]
        span = self._tracer.start_span(f"kvstore.{self._role}.{name}", within, kind=SpanKind.SERVER, links=linked)
        return RecordedSpan(self._tracer, span)

    def samples(self) -> bool:
        """Whether the call that begins is traced: as the program's own span is, where one is under way, else by chance. One look at the
        context and a countdown: chance is asked once a sampled call, for how many are not."""
        if context.get_current():  # empty as a rule; to look for a span in it takes three times as long
            there = trace.get_current_span().get_span_context()
            if there.is_valid:
                return there.trace_flags.sampled
        self._until_next -= 1
        if self._until_next >= 0:
            return False
        self._until_next = self._draw()
        return True

    def here(self) -> context.Context:
        """What this thread or task is within, to be taken along to another one."""
        return context.get_current()

    @contextmanager
    def within(self, there: context.Context) -> Iterator[None]:
        """What is called inside is within what `here` gave there, and nothing else."""
        token = context.attach(there)
        try:
            yield
        finally:
            context.detach(token)

    def begin_call(self, name: str) -> RecordedCall:
        """Of a call that is sampled; a context manager."""
        return RecordedCall(self._tracer.start_span(f"kvstore.{name}", kind=SpanKind.CLIENT))

    def close(self) -> None:
        """Send what waits, for TIMEOUT_S at most. A second close is a no-op."""
        self.queue.shutdown()

    def _draw(self) -> int:
        """Calls that are not sampled before one that is."""
        if self._ratio >= 1:
            return 0
        return int(math.log(1.0 - random.random()) / math.log1p(-self._ratio)) if self._ratio > 0 else NEVER


def _there(parent: TraceParent) -> SpanContext:
    """Another process's span."""
    return SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
