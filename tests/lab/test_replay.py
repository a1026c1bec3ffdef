"""Promises of replay.py: a node's order, the counts, and the ratios published for the public trace."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kvcache.traces.mooncake import TraceRequest
from kvstore.lab import replay as module
from kvstore.lab.replay import CacheReplay, HitCounts
from kvstore.tiers.policies.lru import LRU
from tests.lab.prompts import prompts, public_trace, requests


class Watched(LRU[int]):
    """LRU that records its calls and their times."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.clock = clock

    def insert(self, key: int, parent: int | None = None) -> None:
        self.calls.append(("insert", key, parent, self.clock()))
        super().insert(key, parent)

    def touch(self, key: int) -> None:
        self.calls.append(("touch", key, self.clock()))
        super().touch(key)

    def remove(self, key: int) -> None:
        self.calls.append(("remove", key, self.clock()))
        super().remove(key)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Watched]:
    made: list[Watched] = []

    def make(name: str, *, clock: Callable[[], float]) -> Watched:
        made.append(Watched(clock))
        return made[-1]

    monkeypatch.setattr(module, "make_policy", make)
    return made


def naive_lru(found: list[TraceRequest], capacity: int) -> HitCounts:
    """LRU as one would write it down: a list, oldest first."""
    counts, cache = HitCounts(), list[int]()
    for request in found:
        there = [block in cache for block in request.hash_ids]
        counts.blocks += len(there)
        counts.hits += sum(there)
        counts.prefix_hits += (*there, False).index(False)
        missing = [block for block in request.hash_ids if block not in cache]
        cache = [block for block in cache if block not in request.hash_ids] + [block for block in request.hash_ids if block in cache]
        cache = (cache + missing)[-capacity:]
    return counts


@given(prompts, st.integers(1, 14))
def test_lru_counts_as_a_list_does(found: list[list[int]], capacity: int) -> None:
    assert CacheReplay("lru", capacity).run(requests(found)) == naive_lru(requests(found), capacity)


def test_replay_reads_then_evicts_then_inserts_by_parents(watched: list[Watched]) -> None:
    replay = CacheReplay("lru", 3)
    replay.run(requests([[1, 2, 3], [1, 4, 2, 5]], every_s=1.5))
    (policy,) = watched
    assert policy.calls[:3] == [("insert", 1, None, 0), ("insert", 2, 1, 0), ("insert", 3, 2, 0)]
    assert policy.calls[3:] == [
        ("touch", 1, 1.5),
        ("touch", 2, 1.5),
        ("remove", 3, 1.5),
        ("remove", 1, 1.5),
        ("insert", 4, 1, 1.5),
        ("insert", 5, 2, 1.5),
    ]
    assert (replay.counts.prefix_hits, replay.counts.hits, replay.counts.blocks) == (1, 2, 7)


def test_replay_inserts_large_requests_in_rounds(watched: list[Watched]) -> None:
    CacheReplay("lru", 2).run(requests([[1, 2, 1, 3, 4, 5]]))
    (policy,) = watched
    assert [call[:2] for call in policy.calls] == [
        *[("insert", 1), ("insert", 2), ("remove", 1), ("remove", 2)],
        *[("insert", 3), ("insert", 4), ("remove", 3), ("insert", 5)],
    ]


def test_ratios_of_nothing_are_0() -> None:
    counts = CacheReplay("lru", 1).run([])
    assert counts.prefix_hit_ratio == 0


def test_hits_behind_a_miss_spare_no_work() -> None:
    counts = CacheReplay("lru", 2).run(requests([[1, 2], [3, 2]]))
    assert (counts.prefix_hit_ratio, counts.hits) == (0, 1)


@pytest.mark.parametrize(
    ("policy", "capacity", "ratio"),
    [("lru", 1000, 0.0445), ("lru", 10_000, 0.2112), ("lru", 50_000, 0.3546)],
)
def test_the_public_trace_gives_the_published_ratios(policy: str, capacity: int, ratio: float) -> None:
    assert CacheReplay(policy, capacity).run(public_trace()).prefix_hit_ratio == pytest.approx(ratio, abs=5e-5)
