"""The policies have the hit ratios of libcachesim's, an independent implementation in C (libcachesim 0.3.5; without it these tests skip).

Equal to the last hit where the algorithm leaves nothing open: LRU, LFU, SIEVE, and S3-FIFO once it starts as theirs does. Else within a
tolerance, for a reason that stands beside it. All objects have size 1, as all blocks of a node's policy do.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from kvstore.kvcache.traces.mooncake import read_trace
from kvstore.kvcache.traces.named import generate
from kvstore.tiers.policies.by_name import make_policy
from kvstore.tiers.policies.interface import EvictionPolicy
from kvstore.tiers.policies.s3fifo import S3FIFO, SMALL_SHARE

libcachesim = pytest.importorskip("libcachesim")

TRACE = Path(__file__).parents[4] / "shared/data/traces/conversation_trace.jsonl"
REQUESTS = 1000

THEIRS: dict[str, str] = {
    "lru": "LRU",
    "lfu": "LFU",
    "sieve": "Sieve",
    "s3fifo": "S3FIFO",
    "arc": "ARC",
    "tinylfu": "WTinyLFU",
    "gdsf": "GDSF",
    "lhd": "LHD",
}


@cache
def stream(name: str) -> Sequence[int]:
    """Keys from 1 up: skewed ones that never change, or blocks of prompts: a production trace's, or generated ones where it is absent."""
    if name == "zipf":
        chance = random.Random(7)
        weights = [1 / rank**0.9 for rank in range(1, 5001)]
        return chance.choices(range(1, 5001), weights, k=20_000)
    requests = read_trace(TRACE) if TRACE.exists() and name == "conversation" else generate(seed=7)
    return [block + 1 for request in islice(requests, REQUESTS) for block in request.hash_ids]


def our_hits(policy: EvictionPolicy[int], keys: Sequence[int], capacity: int) -> int:
    present: set[int] = set()
    hits = 0
    for key in keys:
        if key in present:
            policy.touch(key)
            hits += 1
            continue
        if len(present) == capacity:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim)
            present.remove(victim)
        policy.insert(key)
        present.add(key)
    return hits


def their_hits(name: str, keys: Sequence[int], capacity: int) -> int:
    simulated: Any = getattr(libcachesim, THEIRS[name])(cache_size=capacity)
    request = libcachesim.Request()
    request.obj_size = 1
    hits = 0
    for key in keys:
        request.obj_id = key
        hits += simulated.get(request)
    return hits


CASES = [("zipf", 100), ("zipf", 1000), ("conversation", 3000)]


@pytest.mark.parametrize(("name", "capacity"), CASES)
@pytest.mark.parametrize("policy", ["lru", "lfu", "sieve"])
def test_hits_are_equal(policy: str, name: str, capacity: int) -> None:
    hits = their_hits(policy, stream(name), capacity)
    assert hits > 1000
    assert our_hits(make_policy(policy), stream(name), capacity) == hits


class WarmedS3FIFO(S3FIFO[int]):
    """Theirs knows its capacity: until the first eviction newcomers beyond the small queue's share go to the main one."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self._small_capacity = int(SMALL_SHARE * capacity)
        self._is_warm = False

    def insert(self, key: int, parent: int | None = None) -> None:
        super().insert(key, parent)
        if not self._is_warm and len(self._small) > self._small_capacity:
            del self._small[key]
            self._main[key] = None

    def victim(self, evictable: Callable[[int], bool] = lambda key: True) -> int | None:
        self._is_warm = True
        return super().victim(evictable)


@pytest.mark.parametrize(("name", "capacity"), CASES)
def test_hits_of_s3fifo_are_equal_from_the_same_start(name: str, capacity: int) -> None:
    assert our_hits(WarmedS3FIFO(capacity), stream(name), capacity) == their_hits("s3fifo", stream(name), capacity)


TOLERANCES = {
    # Ours adapts after the eviction that a ghost's return causes, theirs before.
    "arc": 0.001,
    # Theirs is not quite the table of ranks of the paper, which ours is: test_gdsf.py.
    "gdsf": 0.005,
    # Two sketches: theirs counts some uses twice and others never, ages later, and its window fills otherwise at the start.
    "tinylfu": 0.02,
}


@pytest.mark.parametrize(("name", "capacity"), CASES)
@pytest.mark.parametrize("policy", sorted(TOLERANCES))
def test_hit_ratios_are_close(policy: str, name: str, capacity: int) -> None:
    keys = stream(name)
    ours, theirs = our_hits(make_policy(policy), keys, capacity), their_hits(policy, keys, capacity)
    assert abs(ours - theirs) <= TOLERANCES[policy] * len(keys)


@pytest.mark.parametrize(("name", "capacity"), CASES)
def test_lhd_is_not_far_below(name: str, capacity: int) -> None:
    """Theirs samples, and learns nothing on streams of this length: it estimates densities every 2^20 uses, and has those it starts from
    until then. Ours has learned by then: better on a stream that never changes, and behind on one that it has seen little of."""
    keys = stream(name)
    assert our_hits(make_policy("lhd"), keys, capacity) >= their_hits("lhd", keys, capacity) - 0.04 * len(keys)


@pytest.mark.parametrize("capacity", [100, 1000])
def test_lhd_learns_what_never_changes(capacity: int) -> None:
    assert our_hits(make_policy("lhd"), stream("zipf"), capacity) > their_hits("lru", stream("zipf"), capacity)
