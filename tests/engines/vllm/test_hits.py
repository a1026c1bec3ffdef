"""Requests and tokens count once, whatever becomes of them."""

from kvstore.engines.vllm.counters import Counters
from kvstore.engines.vllm.hits import HitCounter
from kvstore.engines.vllm.waiting_requests import Found

TABLE = list(range(100, 110))
"""Blocks of a request; of the first two the engine had."""
FOUND = Found(8, 32, 24)
COUNTED = Counters(requests=1, queried_tokens=32, found_tokens=24)


def admitted(request_id: str = "a", external: int = 24) -> HitCounter:
    hits = HitCounter(4)
    hits.admitted(request_id, FOUND, TABLE, external)
    return hits


def loaded(tokens: int) -> Counters:
    counters = Counters(loaded_tokens=tokens)
    counters.add(COUNTED)
    return counters


def test_load_counts_when_it_is_over() -> None:
    hits = admitted()
    assert hits.counters.take() == COUNTED
    hits.loaded(["other"])
    assert hits.counters == Counters()
    hits.loaded(["a"])
    assert hits.counters.take() == Counters(loaded_tokens=24)
    hits.loaded(["a"])
    assert hits.counters == Counters()


def test_preempted_request_counts_once() -> None:
    hits = admitted()
    hits.loaded(["a"])
    hits.admitted("a", FOUND, TABLE, 24)
    hits.loaded(["a"])
    assert hits.counters == loaded(24)
    hits.ended("a")
    hits.admitted("a", FOUND, TABLE, 24)
    assert hits.counters.requests == 2, "another one of that name"


def test_tokens_before_a_failed_block_count() -> None:
    hits = admitted()
    hits.failed({105, 107}, [])
    hits.failed({104}, [])
    hits.failed({106}, [])
    hits.failed({1}, [])
    hits.loaded(["a"])
    assert hits.counters == loaded(8), "blocks 102 and 103"


def test_failed_or_ended_request_loaded_nothing() -> None:
    hits = admitted()
    hits.failed((), ["a", "other"])
    hits.loaded(["a"])
    assert hits.counters.take() == COUNTED
    hits = admitted()
    hits.ended("a")
    hits.loaded(["a"])
    assert hits.counters == COUNTED


def test_request_that_was_not_looked_up_does_not_count() -> None:
    hits = HitCounter(4)
    hits.admitted("a", Found(8), TABLE, 0)
    assert hits.counters == Counters()
    hits.admitted("a", Found(0, 32, 0), TABLE, 0)
    hits.loaded(["a"])
    assert hits.counters == Counters(requests=1, queried_tokens=32)
