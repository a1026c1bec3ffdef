"""Promises of pools.py: what dealing prompts out costs local caches."""

import pytest

from kvstore.lab.pools import PREFILL_S_PER_BLOCK, Routing, compare
from kvstore.lab.replay import CacheReplay
from kvstore.protocol.errors import InvalidArgument
from tests.lab.prompts import conversations, public_trace, requests

TALK = [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]


def test_round_robin_sends_each_turn_elsewhere() -> None:
    found = compare(requests(TALK), policy="lru", instances=2, blocks_per_instance=10, routing=Routing.ROUND_ROBIN)
    assert (found.pooled.prefix_hits, found.local.prefix_hits) == (6, 1 + 2)
    assert found.gain == 2
    assert found.pooled.blocks == found.local.blocks == 10


def test_cache_aware_follows_the_blocks_of_an_idle_instance() -> None:
    found = compare(requests(TALK), policy="lru", instances=3, blocks_per_instance=10, routing=Routing.CACHE_AWARE)
    assert found.local == found.pooled
    assert found.gain == 1


def test_cache_aware_leaves_a_busy_instance() -> None:
    """Ten blocks are at work there, and one that is there already would be saved."""
    busy = requests([range(10), [0, 11]], every_s=PREFILL_S_PER_BLOCK)
    found = compare(busy, policy="lru", instances=2, blocks_per_instance=20, routing=Routing.CACHE_AWARE)
    assert found.local.prefix_hits == 0
    assert found.gain is None


def test_random_is_the_same_for_the_same_seed() -> None:
    found = [
        compare(conversations(), policy="lru", instances=4, blocks_per_instance=500, routing=Routing.RANDOM, seed=seed).local.prefix_hits
        for seed in (1, 1, 2)
    ]
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("routing", Routing)
def test_one_instance_is_the_pool(routing: Routing) -> None:
    found = compare(conversations(), policy="lru", instances=1, blocks_per_instance=500, routing=routing)
    assert found.local == found.pooled == CacheReplay("lru", 500).run(conversations())


def test_the_public_traces_pool_gains_about_what_was_published() -> None:
    """2.22 times, with 3M tokens (5,859 blocks) an instance. Four of them, dealt to without regard to caches."""
    found = compare(public_trace(), policy="lru", instances=4, blocks_per_instance=5859, routing=Routing.ROUND_ROBIN)
    assert found.gain == pytest.approx(2.36, abs=0.01)


@pytest.mark.parametrize("instances", [0, 4097])
def test_the_number_of_instances_is_bounded(instances: int) -> None:
    with pytest.raises(InvalidArgument, match="instances"):
        compare([], policy="lru", instances=instances, blocks_per_instance=1, routing=Routing.RANDOM)
