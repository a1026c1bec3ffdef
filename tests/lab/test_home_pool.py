"""Tests of home_pool.py: hits of any node count, homes keep blocks, and one node is a plain cache."""

from collections import Counter
from dataclasses import replace

import pytest

from kvstore.lab.home_pool import HomePool, HomePoolCounts, HomePoolOptions
from kvstore.lab.replay import CacheReplay
from kvstore.lab.tiers import TwoTiers
from kvstore.protocol.errors import ConfigError, InvalidArgument
from tests.lab.prompts import conversations, requests

ONE_WRITER = HomePoolOptions((1, 0, 0, 0))


def run(policy: str = "lru", node_blocks: int = 250, options: HomePoolOptions = ONE_WRITER) -> HomePoolCounts:
    return HomePool(policy, node_blocks, options).run(conversations())


@pytest.mark.parametrize("policy", ["lru", "default"])
def test_one_node_is_a_plain_cache(policy: str) -> None:
    found = run(policy, 500, HomePoolOptions((1.0,)))
    alone = CacheReplay(policy, 500).run(conversations())
    assert (found.blocks, found.prefix_hits) == (alone.blocks, alone.prefix_hits)
    assert (found.local_share, found.copies) == (1.0, 0)


def test_one_writer_uses_all_nodes_memory() -> None:
    trace = conversations(1200)
    alone, together = (CacheReplay("lru", blocks).run(trace).prefix_hit_ratio for blocks in (1000, 4000))
    found = HomePool("lru", 1000, ONE_WRITER).run(trace)
    assert found.prefix_hit_ratio > alone + 0.8 * (together - alone)
    assert found.copies > 0


def test_readers_at_the_holder_hit_locally() -> None:
    even = replace(ONE_WRITER, shares=(1, 1, 1, 1))
    routed = replace(even, is_routed=True)
    assert run("lru", 1000, routed).local_share > run("lru", 1000, even).local_share + 0.2


def test_prompts_are_at_the_nodes_by_share() -> None:
    """Without copies each node's blocks are those of its own prompts."""
    pool = HomePool("lru", 10_000, HomePoolOptions((3, 0, 1), lag_s=1e9))
    pool.run(requests([[number] for number in range(4000)]))
    held = Counter(holder.index for holders in pool._holders.values() for holder in holders)
    assert held[1] == 0
    assert held[0] / held[2] == pytest.approx(3, abs=0.3)


def test_exchange_changes_what_policies_know() -> None:
    """A lag without end: only the exchange connects the nodes."""
    apart = replace(ONE_WRITER, shares=(1, 1, 1, 1), lag_s=1e9, is_shared=False)
    assert run("default", options=apart) != run("default", options=replace(apart, is_shared=True))
    assert run("lru", options=apart) == run("lru", options=replace(apart, is_shared=True))


def test_a_copy_needs_its_lag() -> None:
    """Blocks are stored at node 0. Node 1 holds their copies once these have arrived."""
    pool = HomePool("lru", 4, HomePoolOptions((1, 0), lag_s=5.0))
    pool.run(requests([[number] for number in range(5)]))
    assert pool.counts.copies == 0
    pool.run(requests([[number] for number in range(5, 40)], every_s=3.0))
    assert pool.counts.copies > 0
    assert {node.used_blocks for node in pool._nodes} == {4}


def test_one_node_of_two_tiers_is_that_node_alone() -> None:
    found = HomePool("default", 50, HomePoolOptions((1.0,)), nvme_blocks=450).run(conversations())
    alone = TwoTiers("default", dram_blocks=50, nvme_blocks=450).run(conversations())
    assert (found.blocks, found.prefix_hits, found.copies) == (alone.blocks, alone.hits, 0)


def test_nodes_of_two_tiers_are_one_pool() -> None:
    trace = conversations(1200)
    alone, together = (TwoTiers("lru", dram_blocks=nodes * 100, nvme_blocks=nodes * 900).run(trace).prefix_hit_ratio for nodes in (1, 4))
    pool = HomePool("lru", 100, ONE_WRITER, nvme_blocks=900)
    assert pool.run(trace).prefix_hit_ratio > alone + 0.7 * (together - alone)
    assert pool.counts.copies > 0
    held = Counter(node.index for holders in pool._holders.values() for node in holders)
    assert held == {node.index: sum(node.tiers.holds(block) for block in pool._holders) for node in pool._nodes}


def test_the_same_seed_gives_the_same_counts() -> None:
    even = replace(ONE_WRITER, shares=(1, 1, 1, 1))
    assert run(options=even) == run(options=even) != run(options=replace(even, seed=2))


@pytest.mark.parametrize("shares", [(), (0, 0), (1, -1), (1,) * 65])
def test_shares_out_of_range_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgument, match="shares of the prompts"):
        HomePool("lru", 10, HomePoolOptions(shares))


def test_other_wrong_options_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="the lag of a copy"):
        HomePool("lru", 10, replace(ONE_WRITER, lag_s=-1))
    with pytest.raises(ConfigError):
        HomePool("fifo", 10, ONE_WRITER)
    with pytest.raises(InvalidArgument, match="the capacity"):
        HomePool("lru", 0, ONE_WRITER)
