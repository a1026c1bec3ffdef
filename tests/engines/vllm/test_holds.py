"""A hold of a lookup lasts as long as one of its requests needs it."""

from kvstore.client.holds import Hold
from kvstore.engines.vllm.holds import RequestHolds

FIRST, SECOND = Hold(2, 1000), Hold(4, 1000)


def test_hold_ends_with_the_last_request() -> None:
    holds = RequestHolds()
    assert holds.take(FIRST, ["a", "b", "c"]) == []
    assert holds.end(["a", "unknown"]) == []
    assert holds.end(["a", "b"]) == []
    assert holds.end(["c"]) == [FIRST]
    assert holds.end(["c"]) == []
    assert len(holds) == 0


def test_later_lookup_replaces_a_hold() -> None:
    """Of a request that waits, once each interval."""
    holds = RequestHolds()
    holds.take(FIRST, ["a", "b"])
    assert holds.take(SECOND, ["a"]) == []
    assert len(holds) == 2
    assert holds.end(["b"]) == [FIRST]
    assert holds.end(["a"]) == [SECOND]
    holds.take(FIRST, ["a", "b"])
    assert holds.take(SECOND, ["a", "b"]) == [FIRST]
