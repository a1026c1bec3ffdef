"""Tests of tracing.py: each request's duration is reported once, with its response; only one with a Trace has a span."""

from functools import partial

import pytest

from kvstore.protocol.catalog_messages import Publish
from kvstore.protocol.errors import Full, KVStoreError
from kvstore.protocol.master_messages import Lookup
from kvstore.protocol.session_messages import Trace
from kvstore.protocol.traceparent import TraceParent
from kvstore.rpc import tracing
from kvstore.rpc.tracing import (
    BROKEN,
    CALL,
    MAX_LINKS,
    ObservedPeer,
    SampledCall,
    Stopwatch,
    TracedStopwatch,
    call_within_spans,
    parent_in,
    trace_metadata,
    within_span,
)
from tests.rpc.traced import Part, Spans, sampled

PARENT = TraceParent(7, 11)
ANNOUNCED = memoryview(Trace(PARENT.text()).pack())


class Noted:
    slow_ns = 1 << 63

    def __init__(self) -> None:
        self.kinds: list[int] = []
        self.answered = {kind: partial(self._note, kind) for kind in range(256)}

    def _note(self, kind: int, elapsed_ns: int) -> None:
        assert elapsed_ns >= 0
        self.kinds.append(kind)

    def refused(self, error: KVStoreError) -> None:
        raise AssertionError

    def slow(self, peer: ObservedPeer, kind: int, elapsed_ns: int) -> None:
        raise AssertionError


def test_answers_in_order_and_out_of_order() -> None:
    noted = Noted()
    stopwatch = Stopwatch(noted)
    stopwatch.begin(1, 11)
    stopwatch.answered(1)
    for request in (2, 3, 4):
        stopwatch.begin(request, 10 + request)
    for request in (3, 4, 2):
        stopwatch.answered(request)
    assert noted.kinds == [11, 13, 14, 12]


def test_of_one_peer_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_UNANSWERED", 2)
    noted = Noted()
    stopwatch = Stopwatch(noted)
    for request in range(1, 6):
        stopwatch.begin(request, request)
    for request in range(1, 6):
        stopwatch.answered(request)
    assert noted.kinds == [1, 2, 5]


@pytest.fixture
def spans() -> Spans:
    return Spans()


def test_metadata_has_the_sampled_call_and_ignores_bad_ones() -> None:
    assert trace_metadata() == ()
    with sampled() as call:
        shown = trace_metadata()
    assert parent_in([("kvstore-token-bin", b"t"), *shown]) == call.parent
    assert parent_in([]) is None
    assert parent_in([("traceparent", "garbage")]) is None
    assert parent_in([("traceparent", b"bytes")]) is None


def announcement(span_id: int) -> memoryview:
    return memoryview(Trace(TraceParent(7, span_id).text()).pack())


def test_message_for_several_is_child_of_first_linked_to_rest(spans: Spans) -> None:
    stopwatch = TracedStopwatch(None, spans)
    for span_id in range(1, MAX_LINKS + 10):
        stopwatch.announced(announcement(span_id))
    stopwatch.begin(1, Publish.TYPE)
    stopwatch.begin(2, Publish.TYPE)
    stopwatch.answered(1)
    stopwatch.answered(2)
    assert spans.told == [(Publish.TYPE, TraceParent(7, 1), "")]
    assert spans.linked == [tuple(TraceParent(7, span_id) for span_id in range(2, MAX_LINKS + 2))]


def test_what_is_asked_on_behalf_of_spans_announces_each_of_them(spans: Spans) -> None:
    asked = list[SampledCall | None]()

    def ask(number: int) -> int:
        asked.append(CALL.get())
        return number

    assert call_within_spans((), ask, 1) == 1
    assert asked == [None]
    one, other = (Part(spans, "", place=TraceParent(7, span_id)) for span_id in (1, 2))
    assert call_within_spans([one, other], ask, 2) == 2
    call = asked[1]
    assert call is not None
    assert call.parent == TraceParent(7, 1)
    assert call.frame == SampledCall(one.place).frame + SampledCall(other.place).frame
    assert CALL.get() is None
    with pytest.raises(Full):
        call_within_spans([one], full)
    with within_span(other):
        assert trace_metadata() == (("traceparent", other.place.text()),)
    assert CALL.get() is None


def full() -> None:
    raise Full("no room")


def test_open_spans_are_limited_and_end_with_the_connection(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_UNANSWERED", 2)
    stopwatch = TracedStopwatch(None, spans)
    for request_id in (1, 2, 3):
        stopwatch.announced(ANNOUNCED)
        stopwatch.begin(request_id, Lookup.TYPE)
    assert stopwatch.span(3) is None
    stopwatch.close()
    stopwatch.close()
    assert spans.told == [(Lookup.TYPE, PARENT, BROKEN)] * 2
