"""Promises of tracing.py: only a request that a Trace announced has a span, which ends with its answer whatever that is."""

import pytest

from kvstore.protocol.errors import Full
from kvstore.protocol.frames import HEADER_BYTES, unpack_header
from kvstore.protocol.master_messages import Exists, Lookup
from kvstore.protocol.session_messages import Trace
from kvstore.protocol.traceparent import TraceParent
from kvstore.rpc import tracing
from kvstore.rpc.tracing import BROKEN, Call, TracedStopwatch, parent_in, trace_metadata
from tests.rpc.test_observing import Noted
from tests.rpc.traced import Spans, sampled

PARENT = TraceParent(7, 11)
ANNOUNCED = memoryview(Trace(PARENT.text()).pack())


@pytest.fixture
def spans() -> Spans:
    return Spans()


def test_a_call_knows_what_goes_ahead_of_its_requests() -> None:
    frame = Call(PARENT).frame
    header = unpack_header(frame)
    assert (header.type, header.request_id, header.payload_bytes) == (Trace.TYPE, 0, 0)
    assert Trace.unpack(frame[HEADER_BYTES:]) == Trace(PARENT.text())


def test_metadata_name_the_call_that_is_sampled_and_only_one_that_can_be_read() -> None:
    assert trace_metadata() == ()
    with sampled() as call:
        shown = trace_metadata()
    assert parent_in([("kvstore-token-bin", b"t"), *shown]) == call.parent
    assert parent_in([]) is None
    assert parent_in([("traceparent", "garbage")]) is None
    assert parent_in([("traceparent", b"bytes")]) is None


def test_the_next_request_has_a_span_and_no_other(spans: Spans) -> None:
    noted = Noted()
    stopwatch = TracedStopwatch(noted, spans)
    stopwatch.begin(1, Exists.TYPE)
    stopwatch.announced(ANNOUNCED)
    stopwatch.begin(2, Lookup.TYPE)
    stopwatch.begin(3, Exists.TYPE)
    assert (stopwatch.span(1), stopwatch.span(3)) == (None, None)
    assert stopwatch.span(2) is not None
    for request_id in (1, 2, 3):
        stopwatch.answered(request_id)
    assert spans.told == [(Lookup.TYPE, PARENT, "")]
    assert noted.kinds == [Exists.TYPE, Lookup.TYPE, Exists.TYPE], "times are taken all the same"
    assert stopwatch.span(2) is None


def test_an_error_is_named_and_told_once(spans: Spans) -> None:
    stopwatch = TracedStopwatch(None, spans)
    stopwatch.announced(ANNOUNCED)
    stopwatch.begin(1, Lookup.TYPE)
    stopwatch.observer.refused(Full("no room for one secret key"))
    stopwatch.failed(1, Full("no room for one secret key"))
    stopwatch.failed(2, Full("of a request that is not traced"))
    stopwatch.answered(1)
    assert spans.told == [(Lookup.TYPE, PARENT, "Full")]


@pytest.mark.parametrize("body", [b"", b"\1\0\0\0\xff", Trace("garbage").pack(), Trace(PARENT.text()[:-1] + "0").pack()])
def test_what_cannot_be_read_is_as_nothing(spans: Spans, body: bytes) -> None:
    stopwatch = TracedStopwatch(None, spans)
    stopwatch.announced(ANNOUNCED)
    stopwatch.announced(memoryview(body))
    stopwatch.begin(1, Lookup.TYPE)
    assert stopwatch.span(1) is None


def test_a_message_without_an_answer_has_no_span_and_uses_the_announcement_up(spans: Spans) -> None:
    stopwatch = TracedStopwatch(None, spans)
    stopwatch.announced(ANNOUNCED)
    stopwatch.begin(0, Lookup.TYPE)
    stopwatch.begin(1, Lookup.TYPE)
    assert stopwatch.span(1) is None


def test_of_one_peer_only_so_many_spans_are_open_and_they_end_with_the_connection(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_UNANSWERED", 2)
    stopwatch = TracedStopwatch(None, spans)
    for request_id in (1, 2, 3):
        stopwatch.announced(ANNOUNCED)
        stopwatch.begin(request_id, Lookup.TYPE)
    assert stopwatch.span(3) is None
    stopwatch.close()
    stopwatch.close()
    assert spans.told == [(Lookup.TYPE, PARENT, BROKEN)] * 2
