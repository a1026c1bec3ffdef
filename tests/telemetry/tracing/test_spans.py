"""telemetry/tracing/spans.py: parents of spans, sampling of calls, and errors reported by kind only. With a real
collector."""

import threading
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry import trace
from opentelemetry.baggage import set_baggage
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, detach, get_value
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from kvstore.protocol.master_messages import Lookup
from kvstore.protocol.traceparent import TraceParent
from kvstore.rpc.tracing import CALL
from kvstore.telemetry.tracing import spans
from kvstore.telemetry.tracing.config import TracingSettings
from kvstore.telemetry.tracing.spans import SpanQueue, Tracing
from tests.telemetry.tracing.collector import Collector, collecting

PARENT = TraceParent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0xF067AA0BA902B7)

SOON = 0.001
DEFERRED = 3600.0
PATIENT_S = 60.0


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


def to(endpoint: str, *, sample_ratio: float = 1.0) -> Tracing:
    return Tracing(TracingSettings(endpoint=endpoint, sample_ratio=sample_ratio), role="node", instance="n1")


def nowhere(sample_ratio: float) -> Tracing:
    return to("http://127.0.0.1:9/v1/traces", sample_ratio=sample_ratio)


def test_request_span_has_parent_and_children(collector: Collector) -> None:
    tracing = to(collector.endpoint)
    span = tracing.begin(Lookup.TYPE, PARENT)
    part = span.begin("kvstore.node.wait")
    part.end()
    span.begin("kvstore.node.fetch")
    span.set("kvstore.tiers", "dram")
    span.end("Full")
    tracing.begin(255, PARENT).end()
    tracing.close()
    span.end("Closed")
    spans = collector.spans("kvstore.node.lookup", "kvstore.node.wait", "kvstore.node.fetch", "kvstore.node.unknown")
    served = spans["kvstore.node.lookup"]
    assert (served.service, served.trace_id) == ("kvstore-node", f"{PARENT.trace_id:032x}")
    assert (served.parent_id, served.error, served.attributes) == (f"{PARENT.span_id:016x}", "Full", {"kvstore.tiers": "dram"})
    assert (spans["kvstore.node.wait"].parent_id, spans["kvstore.node.wait"].error) == (served.span_id, "")
    assert (spans["kvstore.node.fetch"].parent_id, spans["kvstore.node.fetch"].error) == (served.span_id, "Full"), "it ended with the whole"
    assert tracing.queue.counts() == {"exported": 4, "failed": 0, "dropped": 0}


def test_call_span_covers_its_requests(collector: Collector) -> None:
    tracing = to(collector.endpoint)
    with tracing.begin_call("get") as recorded:
        assert CALL.get() is recorded.call
        there = trace.get_current_span().get_span_context()
        assert recorded.call.parent == TraceParent(there.trace_id, there.span_id)
    assert CALL.get() is None
    assert not trace.get_current_span().get_span_context().is_valid
    with pytest.raises(ValueError, match="secret"), tracing.begin_call("put"):
        raise ValueError("one secret key")
    assert CALL.get() is None
    tracing.close()
    spans = collector.spans("kvstore.get", "kvstore.put")
    assert (spans["kvstore.get"].parent_id, spans["kvstore.get"].error) == ("", "")
    assert spans["kvstore.put"].error == "ValueError"
    assert "secret" not in repr(collector.all())


def test_what_a_thread_is_within_can_be_taken_to_another_one(collector: Collector) -> None:
    tracing = to(collector.endpoint)
    with tracing.begin_call("get"):
        there = tracing.here()

    def elsewhere() -> None:
        with pytest.raises(ValueError, match="fails"), tracing.within(there):
            tracing.begin_call("put").__enter__().__exit__(None, None, None)
            raise ValueError("fails")
        assert not tracing.here()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    tracing.close()
    spans = collector.spans("kvstore.get", "kvstore.put")
    assert spans["kvstore.put"].parent_id == spans["kvstore.get"].span_id


@pytest.mark.parametrize(("ratio", "least", "most"), [(0.0, 0, 0), (1.0, 1000, 1000), (0.25, 1, 999)])
def test_chance_decides_where_the_program_has_no_span(ratio: float, least: int, most: int) -> None:
    tracing = nowhere(ratio)
    assert least <= sum(tracing.samples() for _ in range(1000)) <= most
    tracing.close()


def test_the_programs_own_span_decides_where_there_is_one() -> None:
    for sampler, ratio in ((ALWAYS_ON, 0.0), (ALWAYS_OFF, 1.0)):
        tracing = nowhere(ratio)
        with TracerProvider(sampler=sampler, shutdown_on_exit=False).get_tracer("engine").start_as_current_span("step"):
            assert tracing.samples() is (sampler is ALWAYS_ON)
        token = attach(set_baggage("request", "r1"))
        assert tracing.samples() is (ratio == 1.0), "a context without a span decides nothing"
        detach(token)
        tracing.close()


def test_following_spans_outlast_the_request_and_link(collector: Collector) -> None:
    tracing, other = to(collector.endpoint), TraceParent(7, 11)
    span = tracing.begin(Lookup.TYPE, PARENT, [other])
    after = span.follow("kvstore.node.after")
    span.end("Full")
    after.end()
    assert span.place.trace_id == PARENT.trace_id
    tracing.begin_named("alone", None).end()
    tracing.close()
    spans = collector.spans("kvstore.node.lookup", "kvstore.node.after", "kvstore.node.alone")
    assert spans["kvstore.node.lookup"].links == (f"{other.span_id:016x}",)
    assert spans["kvstore.node.lookup"].span_id == f"{span.place.span_id:016x}"
    assert (spans["kvstore.node.after"].parent_id, spans["kvstore.node.after"].error) == (f"{span.place.span_id:016x}", "")
    assert spans["kvstore.node.alone"].parent_id == ""


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


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "QUEUE_SPANS", 10)
    monkeypatch.setattr(spans, "BATCH_SPANS", 4)


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


@pytest.mark.usefixtures("few")
def test_a_whole_batch_is_sent_at_once_and_the_rest_at_the_end() -> None:
    exporter = Exporter()
    queue = SpanQueue(exporter, DEFERRED)
    make(queue, 4)
    assert exporter.came.acquire(timeout=PATIENT_S)
    make(queue, 3)
    queue.shutdown()
    queue.shutdown()
    assert (exporter.sizes, exporter.closed) == ([4, 3], 1)
    assert queue.counts() == {"exported": 7, "failed": 0, "dropped": 0}


@pytest.mark.promise("tracing-free")
@pytest.mark.usefixtures("few")
def test_hanging_collector_drops_spans() -> None:
    exporter = Exporter()
    exporter.may.clear()
    queue = SpanQueue(exporter, DEFERRED)
    make(queue, 4)
    assert exporter.began.acquire(timeout=PATIENT_S)
    make(queue, 15)
    assert queue.counts() == {"exported": 0, "failed": 0, "dropped": 5}
    exporter.may.set()
    queue.shutdown()
    make(queue, 1)
    assert queue.counts() == {"exported": 14, "failed": 0, "dropped": 6}, "after the end nothing is taken"


def test_without_a_span_there_is_no_thread() -> None:
    exporter = Exporter()
    queue = SpanQueue(exporter, SOON)
    assert "tracing" not in {thread.name for thread in threading.enumerate()}
    queue.shutdown()
    assert exporter.closed == 1
