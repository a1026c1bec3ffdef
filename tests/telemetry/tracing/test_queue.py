"""Promises of queue.py: nobody waits for a collector, no more spans wait than are allowed, and each is counted once."""

import logging
import threading
from collections.abc import Sequence

import pytest
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, get_value
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvstore.telemetry.tracing.config import TracingSettings
from kvstore.telemetry.tracing.queue import SpanQueue
from kvstore.transfer.testing.waiting import eventually

SOON = TracingSettings(flush_interval_s=0.001)
LATER = TracingSettings(flush_interval_s=3600, queue_spans=10, batch_spans=4)
PATIENT_S = 60.0


class Exporter(SpanExporter):
    """Takes each batch once it may; `takes` says whether it succeeds."""

    def __init__(self, *, takes: bool = True) -> None:
        self.takes = takes
        self.may = threading.Event()
        self.may.set()
        self.sizes: list[int] = []
        self.came = threading.Semaphore(0)
        self.began = threading.Semaphore(0)
        self.closed = 0
        self.suppressed: list[object] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.began.release()
        self.suppressed.append(get_value(_SUPPRESS_INSTRUMENTATION_KEY))
        assert self.may.wait(PATIENT_S)
        self.sizes.append(len(spans))
        self.came.release()
        return SpanExportResult.SUCCESS if self.takes else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self.closed += 1


def make(queue: SpanQueue, count: int) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(queue)
    tracer = provider.get_tracer("test")
    for number in range(count):
        tracer.start_span(f"span {number}").end()


def test_what_waits_is_sent_in_its_time_without_being_asked() -> None:
    exporter = Exporter()
    queue = SpanQueue(exporter, SOON)
    make(queue, 1)
    assert exporter.came.acquire(timeout=PATIENT_S)
    assert queue.force_flush()
    queue.shutdown()
    assert exporter.sizes == [1]
    assert exporter.suppressed == [True], "the way to the collector is not traced itself"
    assert queue.counts() == {"exported": 1, "failed": 0, "dropped": 0}


def test_a_whole_batch_is_sent_at_once_and_the_rest_at_the_end() -> None:
    exporter = Exporter()
    queue = SpanQueue(exporter, LATER)
    make(queue, 4)
    assert exporter.came.acquire(timeout=PATIENT_S)
    make(queue, 3)
    queue.shutdown()
    queue.shutdown()
    assert (exporter.sizes, exporter.closed) == ([4, 3], 1)
    assert queue.counts() == {"exported": 7, "failed": 0, "dropped": 0}


def test_a_collector_that_hangs_stops_nobody_and_what_has_no_room_is_dropped() -> None:
    exporter = Exporter()
    exporter.may.clear()
    queue = SpanQueue(exporter, LATER)
    make(queue, 4)
    assert exporter.began.acquire(timeout=PATIENT_S)
    make(queue, 15)
    assert queue.counts() == {"exported": 0, "failed": 0, "dropped": 5}
    exporter.may.set()
    queue.shutdown()
    make(queue, 1)
    assert queue.counts() == {"exported": 14, "failed": 0, "dropped": 6}, "after the end nothing is taken"


def test_a_collector_that_is_away_is_tried_once_at_the_end() -> None:
    exporter = Exporter(takes=False)
    queue = SpanQueue(exporter, TracingSettings(flush_interval_s=3600, batch_spans=4, queue_spans=100))
    make(queue, 3)
    queue.shutdown()
    assert queue.counts() == {"exported": 0, "failed": 3, "dropped": 0}
    assert exporter.sizes == [3]


def test_what_is_behind_a_batch_that_failed_waits_for_the_next_turn_and_is_dropped_at_the_end() -> None:
    exporter = Exporter(takes=False)
    exporter.may.clear()
    queue = SpanQueue(exporter, LATER)
    make(queue, 9)
    ending = threading.Thread(target=queue.shutdown)
    ending.start()
    exporter.may.set()
    ending.join()
    counts = queue.counts()
    assert counts["failed"] + counts["dropped"] == 9
    assert counts["failed"] >= 4


def test_without_a_span_there_is_no_thread() -> None:
    exporter = Exporter()
    queue = SpanQueue(exporter, SOON)
    assert "tracing" not in {thread.name for thread in threading.enumerate()}
    queue.shutdown()
    assert exporter.closed == 1


def test_a_span_without_a_thread_to_send_it_is_dropped_and_the_next_one_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = Exporter()
    queue = SpanQueue(exporter, LATER)

    really = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "tracing":
            raise RuntimeError("can't start new thread")
        really(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        make(queue, 1)
    make(queue, 4)
    queue.shutdown()
    assert exporter.sizes == [4]
    assert queue.counts() == {"exported": 4, "failed": 0, "dropped": 1}


def test_an_exporter_that_raises_has_failed_and_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    class Raises(Exporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            super().export(spans)
            if len(self.sizes) == 1:
                raise ValueError("no such thing")
            return SpanExportResult.SUCCESS

    exporter = Raises()
    queue = SpanQueue(exporter, LATER)
    with caplog.at_level(logging.ERROR):
        make(queue, 4)
        assert exporter.came.acquire(timeout=PATIENT_S)
        eventually(lambda: queue.counts()["failed"] == 4, "the batch has failed")
        make(queue, 4)
        assert exporter.came.acquire(timeout=PATIENT_S)
        queue.shutdown()
    assert queue.counts() == {"exported": 4, "failed": 4, "dropped": 0}
    assert "spans could not be sent" in caplog.text
