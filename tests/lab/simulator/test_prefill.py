"""Promises of prefill.py. A new token takes 1/1024 s, loading a cached one 1/16384 s, of which a quarter shows."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvstore.lab.simulator.job import EventQueue, SimulatedJob
from kvstore.lab.simulator.prefill import LocalCache, PrefillServer
from kvstore.scheduler.prefix_index import PrefixIndex
from kvstore.tiers.policies.lru import LRU
from tests.lab.simulator.parts import cache, job, machine


def make(blocks: int) -> tuple[LocalCache, PrefixIndex[Any]]:
    index: PrefixIndex[Any] = PrefixIndex()
    return LocalCache(1, blocks, LRU(), index), index


def test_a_match_ends_at_the_first_block_that_is_not_there() -> None:
    cache, _ = make(10)
    cache.insert([1, 2, 3], first=0)
    assert cache.match([1, 2, 9, 3]) == 2
    assert cache.match([1, 2]) == 2
    assert cache.match([]) == 0


def test_the_policy_says_which_leaves_and_the_index_hears_of_it() -> None:
    cache, index = make(3)
    cache.insert([1, 2, 3], first=0)
    cache.touch([1])
    cache.insert([4], first=0)
    assert [cache.match([key]) for key in (1, 2, 3, 4)] == [1, 0, 1, 1]
    assert [index.match([key], 2)[1] for key in (1, 2, 3, 4)] == [1, 0, 1, 1]
    # One that is there already is a use of it.
    cache.insert([3, 5], first=0)
    assert [cache.match([key]) for key in (1, 3, 4, 5)] == [0, 1, 1, 1]


@given(st.integers(1, 5), st.lists(st.tuples(st.lists(st.integers(0, 8), unique=True), st.integers(0, 3))))
def test_index_and_cache_hold_the_same_and_never_too_much(blocks: int, prompts: list[tuple[list[int], int]]) -> None:
    cache, index = make(blocks)
    for keys, first in prompts:
        cache.insert(keys, first=first)
        held = [key for key in range(9) if cache.match([key])]
        assert [key for key in range(9) if index.match([key], 2)[1]] == held
        assert len(index) == len(held) <= blocks


class Served:
    """A server and what it told."""

    def __init__(self) -> None:
        self.events = EventQueue()
        self.started: list[tuple[int, float, float]] = []
        self.ended: list[tuple[int, float]] = []
        self.server = PrefillServer(machine(), self.events, cache(), on_start=self._start, on_end=self._end)

    def _start(self, found: SimulatedJob, end_s: float) -> None:
        self.started.append((found.number, self.events.now_s, end_s))

    def _end(self, found: SimulatedJob) -> None:
        assert found.first_token_s == self.events.now_s
        self.ended.append((found.number, self.events.now_s))


def test_one_prompt_at_a_time_in_the_order_they_came() -> None:
    served = Served()
    for number, tokens in enumerate((1024, 2048, 512)):
        served.server.enqueue(job(number, tokens=tokens, expected_s=tokens / 1024))
    assert served.server.queue_s() == 3.5
    served.events.at(1.5, lambda: served.started.append((-1, served.server.queue_s(), 0.0)))
    served.events.run()
    assert served.started == [(0, 0.0, 1.0), (1, 1.0, 3.0), (-1, 2.0, 0.0), (2, 3.0, 3.5)]
    assert served.ended == [(0, 1.0), (1, 3.0), (2, 3.5)]
    assert (served.server.busy_s, served.server.flops, served.server.queue_s()) == (3.5, 3_584_000.0, 0.0)


def test_prefill_caches_blocks_and_loads_cached_prefix() -> None:
    served = Served()
    first, second = job(0, keys=[1, 2], tokens=1024), job(1, keys=[1, 2, 3], tokens=1536)
    served.server.enqueue(first)
    served.server.enqueue(second)
    served.events.run()
    assert (first.prefix_blocks, first.prefix_tokens, first.load_s, first.queue_s) == (0, 0, 0.0, 0.0)
    assert (second.prefix_blocks, second.prefix_tokens, second.queue_s) == (2, 1024, 1.0)
    assert (second.prefill_s, second.load_s) == (0.5, 1 / 64)
    assert served.ended == [(0, 1.0), (1, 1.5 + 1 / 64)]
    assert served.server.cache.match([1, 2, 3]) == 3


def test_prefill_queue_waits_for_fetched_blocks() -> None:
    served = Served()
    first, second = job(0, expected_s=1.0), job(1, expected_s=1.0)
    first.ready_s = 4.0
    served.server.enqueue(first)
    served.server.enqueue(second)
    assert served.server.queue_s() == 6.0
    served.events.at(2.0, served.server.wake)
    served.events.at(4.0, served.server.wake)
    served.events.run()
    assert served.ended == [(0, 5.0), (1, 6.0)]
    assert (first.fetch_s, first.queue_s, second.fetch_s, second.queue_s) == (4.0, 0.0, 0.0, 5.0)


def test_prefill_queue_estimate_follows_actual_times() -> None:
    served = Served()
    served.server.enqueue(job(0, tokens=2048, expected_s=9.0))
    served.server.enqueue(job(1, tokens=1024, expected_s=1.0))
    assert served.server.queue_s() == 3.0
