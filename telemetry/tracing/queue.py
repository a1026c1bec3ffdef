"""Spans that are over and wait to be sent: bounded, sent in batches by a thread, so that a collector that is slow or away neither stops
anybody nor takes memory. What comes of each span is counted.
"""

import logging
import threading
from collections import deque
from typing import Final

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, Context, attach, set_value
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvstore.telemetry.tracing.config import TracingSettings

EXPORTED: Final = "exported"
FAILED: Final = "failed"
DROPPED: Final = "dropped"

log = logging.getLogger("kvstore.telemetry")


class SpanQueue(SpanProcessor):
    """Owns the exporter. Threads may share it. Its thread begins with the first span: who has none pays for none."""

    def __init__(self, exporter: SpanExporter, settings: TracingSettings) -> None:
        self._exporter = exporter
        self._settings = settings
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
            if self._is_closing or len(self._waiting) >= self._settings.queue_spans:
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
            if len(self._waiting) >= self._settings.batch_spans:
                self._due.set()

    def counts(self) -> dict[str, int]:
        """Spans so far, by what came of them: EXPORTED, FAILED (the collector did not take them), DROPPED (there was no room)."""
        with self._lock:
            return dict(self._counts)

    def shutdown(self) -> None:
        """Send what waits, for `timeout_s`, and a try that has begun then for as long again; what is left is dropped. A second call is a
        no-op."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            self._due.set()
        if self._thread is not None:
            self._thread.join(self._settings.timeout_s)
        self._exporter.shutdown()  # ends the pause before another try
        if self._thread is not None:
            self._thread.join(self._settings.timeout_s)
        with self._lock:
            self._counts[DROPPED] += len(self._waiting)
            self._waiting.clear()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Nobody waits for the collector: it is sent in its time."""
        return True

    def _run(self) -> None:
        attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))  # where the program traces HTTP requests, these are none of its own
        while not self._is_closing:
            self._due.wait(self._settings.flush_interval_s)
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
            return [self._waiting.popleft() for _ in range(min(len(self._waiting), self._settings.batch_spans))]
