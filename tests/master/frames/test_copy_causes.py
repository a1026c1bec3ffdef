"""Promises of copy_causes.py: an order is for the requests that want its blocks, for a while."""

from kvstore.master.frames.copy_causes import MAX_REQUESTS, TTL_NS, CopyCauses
from tests.rpc.traced import Part, Spans


def test_an_order_is_for_the_requests_of_its_tenant_that_want_any_of_its_blocks_until_they_are_old() -> None:
    causes, spans = CopyCauses(), Spans()
    assert not causes
    one, other = Part(spans, "one"), Part(spans, "other")
    causes.note("red", [b"a", b"b"], one, 0)
    causes.note("red", [b"b"], other, 10)
    assert causes
    assert causes.of("red", [b"a", b"c"], 10) == [one]
    assert causes.of("red", [b"b"], TTL_NS - 1) == [one, other]
    assert causes.of("blue", [b"b"], TTL_NS - 1) == []
    assert causes.of("red", [b"c"], TTL_NS - 1) == []
    assert causes.of("red", [b"b"], TTL_NS) == [other]
    assert causes.of("red", [b"b"], TTL_NS + 10) == []
    assert not causes


def test_only_the_latest_requests_are_known() -> None:
    causes, spans = CopyCauses(), Spans()
    wanting = [Part(spans, str(number)) for number in range(MAX_REQUESTS + 1)]
    for part in wanting:
        causes.note("red", [b"a"], part, 0)
    assert causes.of("red", [b"a"], 0) == wanting[1:]
