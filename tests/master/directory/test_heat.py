"""Tests of reads.py: reports are requested in turn while they are wanted, are checked, and expire."""

from math import nan

import pytest

from kvstore.master.directory.membership.reads import (
    MAX_BLOCKS,
    MAX_OF_NODE,
    MIN_OF_NODE,
    REPORT_INTERVAL_S,
    REPORT_TTL_S,
    WANTED_S,
    BlockHeat,
)
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument

S = 1_000_000_000


def hot(tenant: str = "red", **reads_per_s: float) -> pb.HotBlocks:
    return pb.HotBlocks(tenant=tenant, keys=[key.encode() for key in reads_per_s], reads_per_s=list(reads_per_s.values()))


def test_nodes_are_asked_while_reports_are_wanted() -> None:
    block_heat = BlockHeat()
    assert block_heat.blocks_to_report(1, 1, S) == 0
    block_heat.request_reports(S)
    assert block_heat.blocks_to_report(1, 1, S) == MAX_OF_NODE
    assert block_heat.blocks_to_report(1, 1, 2 * S) == 0
    assert block_heat.blocks_to_report(2, 1, 2 * S) == MAX_OF_NODE
    assert block_heat.blocks_to_report(1, 1, int((1 + REPORT_INTERVAL_S) * S)) == MAX_OF_NODE
    assert block_heat.blocks_to_report(1, 1, int((1 + WANTED_S) * S)) == 0


@pytest.mark.parametrize(("live", "blocks"), [(0, MAX_OF_NODE), (100, MAX_BLOCKS // 100), (10_000, MIN_OF_NODE)])
def test_the_more_nodes_the_fewer_blocks_of_each(live: int, blocks: int) -> None:
    block_heat = BlockHeat()
    block_heat.request_reports(0)
    assert block_heat.blocks_to_report(1, live, 0) == blocks


def test_reads_of_nodes_add_up_until_they_expire() -> None:
    block_heat = BlockHeat()
    block_heat.request_reports(0)
    for node_id in (1, 2, 3):
        block_heat.blocks_to_report(node_id, 3, 0)
    block_heat.take(1, [hot(a=2.0, b=1.0), hot("blue", a=9.0)], S)
    block_heat.take(2, [hot(a=3.0)], 3 * S)
    assert block_heat.of("red", 3 * S) == {b"a": 5.0, b"b": 1.0}
    assert block_heat.of("blue", 3 * S) == {b"a": 9.0}
    assert block_heat.of("green", 3 * S) == {}
    assert block_heat.of("red", int((2 + REPORT_TTL_S) * S)) == {b"a": 3.0}
    block_heat.take(2, [], 4 * S)
    assert block_heat.of("red", 4 * S)[b"a"] == 5.0, "a node that begins to count has nothing to tell"


def test_reports_are_dropped_when_not_wanted() -> None:
    block_heat = BlockHeat()
    block_heat.take(1, [hot(a=1.0)], 0)
    block_heat.request_reports(0)
    assert block_heat.of("red", 0) == {}
    block_heat.blocks_to_report(1, 1, 0)
    block_heat.take(1, [hot(a=1.0)], 0)
    block_heat.blocks_to_report(1, 1, int(WANTED_S * S))
    block_heat.request_reports(int(WANTED_S * S))
    assert block_heat.of("red", 0) == {}


def test_reports_of_gone_nodes_are_dropped() -> None:
    block_heat = BlockHeat()
    for node_id in range(1, 100):
        now_ns = node_id * int(REPORT_TTL_S * S)
        block_heat.request_reports(now_ns)
        block_heat.blocks_to_report(node_id, 1, now_ns)
        block_heat.take(node_id, [hot(a=1.0)], now_ns)
        assert block_heat.of("red", now_ns)[b"a"] >= 1.0
    assert len(block_heat._nodes) <= 2


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (hot(a=-1.0), "negative"),
        (hot(a=nan), "negative"),
        (hot(a=2e9), "above 1e"),
        (pb.HotBlocks(tenant="red", keys=[b"a"]), "lists of different length"),
        (pb.HotBlocks(tenant="red", keys=[b"a", b"b"], reads_per_s=[1.0, 1.0], remote_reads_per_s=[1.0]), "lists of different length"),
        (pb.HotBlocks(tenant="red", keys=[b"a"], reads_per_s=[1.0], remote_reads_per_s=[-1.0]), "negative"),
        (pb.HotBlocks(keys=[b"%d" % number for number in range(MAX_OF_NODE + 1)], reads_per_s=[1.0] * (MAX_OF_NODE + 1)), "at most 1024"),
    ],
)
def test_what_cannot_have_been_counted_is_refused(report: pb.HotBlocks, says: str) -> None:
    block_heat = BlockHeat()
    block_heat.request_reports(0)
    block_heat.blocks_to_report(1, 1, 0)
    with pytest.raises(InvalidArgument, match=says):
        block_heat.take(1, [report], 0)
    assert block_heat.of("red", 0) == {}


def test_far_reads_is_a_snapshot_without_expired_reports() -> None:
    block_heat = BlockHeat()
    block_heat.request_reports(0)
    for node_id in (1, 2, 3):
        block_heat.blocks_to_report(node_id, 3, 0)
    block_heat.take(1, [pb.HotBlocks(tenant="red", keys=[b"a", b"b"], reads_per_s=[3.0, 1.0], remote_reads_per_s=[2.0, 0.0])], S)
    block_heat.take(2, [hot(a=3.0)], 3 * S)
    block_heat.take(3, [pb.HotBlocks(tenant="blue", keys=[b"a"], reads_per_s=[1.0], remote_reads_per_s=[0.5])], 3 * S)
    found = block_heat.remote_reads(3 * S)
    assert next(found) == ("red", b"a", 2.0)
    block_heat.take(3, [hot("blue", a=1.0)], 4 * S)
    assert list(found) == [("blue", b"a", 0.5)], (
        "node 2 is of a release that tells nothing of it, and what is told meanwhile comes next time"
    )
    assert list(block_heat.remote_reads(int((2 + REPORT_TTL_S) * S))) == []
