"""Tests of placement.py."""

import random

import pytest

from kvstore.master.directory.membership.members import NodeInfo, NodeMember
from kvstore.master.directory.placement.placement import place
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument, Unavailable
from kvstore.protocol.node_states import SYNCING
from tests.master.blocks import S, tier_of

NOW_NS = 1000 * S


def node(node_id: int, *tiers: pb.TierStatus, registered_ns: int = 0) -> NodeMember:
    return NodeMember(node_id, NodeInfo(f"node{node_id}", 1), state=SYNCING, changed_ns=registered_ns, tiers=tiers)


def placed(sizes: list[int], *nodes: NodeMember, local_node: int = 0, slow_start_ns: int = 0, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return place(sizes, nodes, local_node=local_node, slow_start_ns=slow_start_ns, rng=rng, now_ns=NOW_NS)


def share_of_first(*nodes: NodeMember, slow_start_ns: int = 0) -> float:
    return sum(placed([1], *nodes, slow_start_ns=slow_start_ns, seed=seed) == [1] for seed in range(400)) / 400


def test_the_writers_own_node_comes_first_even_when_it_is_full() -> None:
    full = node(2, tier_of(capacity_bytes=100, used_bytes=100))
    assert placed([10, 20], node(1, tier_of(capacity_bytes=100)), full, local_node=2) == [2, 2]


def test_a_value_larger_than_the_local_dram_goes_elsewhere() -> None:
    assert placed([50, 10], node(1, tier_of(capacity_bytes=100)), node(2, tier_of(capacity_bytes=20)), local_node=2) == [1, 2]


def test_without_nodes_placement_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="no node"):
        placed([1])


def test_a_value_larger_than_every_tier_can_never_be_kept() -> None:
    with pytest.raises(InvalidArgument, match="101 B is larger"):
        placed([101], node(1, tier_of(capacity_bytes=100), tier_of("nvme", capacity_bytes=1000, health="dead")))


@pytest.mark.promise("last-replica-last")
def test_emptier_nodes_get_more_and_full_ones_a_little() -> None:
    empty, full = node(2, tier_of(capacity_bytes=1000)), node(1, tier_of(capacity_bytes=1000, used_bytes=1000))
    assert 0.01 < share_of_first(full, empty) < 0.12
    assert 0.4 < share_of_first(node(1, tier_of(capacity_bytes=1000)), empty) < 0.6


def test_a_node_just_registered_warms_up() -> None:
    old, new = node(2, tier_of()), node(1, tier_of(), registered_ns=NOW_NS - S)
    assert share_of_first(new, old, slow_start_ns=30 * S) < 0.1
    assert placed([1], node(1, tier_of(), registered_ns=NOW_NS), slow_start_ns=30 * S) == [1]


def test_a_batch_stays_on_one_node_while_it_has_room() -> None:
    nodes = [node(1, tier_of(capacity_bytes=1000)), node(2, tier_of(capacity_bytes=1000))]
    assert len(set(placed([10] * 90, *nodes))) == 1


def test_a_batch_too_large_for_one_node_is_spread() -> None:
    nodes = [node(1, tier_of(capacity_bytes=1000)), node(2, tier_of(capacity_bytes=1000))]
    assert set(placed([10] * 1000, *nodes)) == {1, 2}


@pytest.mark.promise("last-replica-last")
def test_placement_weighs_free_space_by_load() -> None:
    busy, idle = node(1, tier_of(capacity_bytes=1000)), node(2, tier_of(capacity_bytes=1000))
    busy.load.bytes_s = 1 << 30
    assert 0.2 < share_of_first(busy, idle) < 0.3, "twice the mean: a third of what the idle one gets"
    idle.tiers = (tier_of(capacity_bytes=1000, used_bytes=1000),)
    assert share_of_first(busy, idle) > 0.8
