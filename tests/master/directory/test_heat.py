"""Promises of reads.py: nodes are asked while somebody wants to know, each in its turn, and what they tell is checked and grows old."""

from math import nan

import pytest

from kvstore.master.directory.membership.reads import ASK_S, MAX_BLOCKS, MAX_OF_NODE, MIN_OF_NODE, TOLD_S, WANTED_S, BlockHeat
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument

S = 1_000_000_000


def hot(tenant: str = "red", **reads_per_s: float) -> pb.HotBlocks:
    return pb.HotBlocks(tenant=tenant, keys=[key.encode() for key in reads_per_s], reads_per_s=list(reads_per_s.values()))


def test_nodes_are_asked_while_somebody_wants_to_know_and_each_once_in_a_while() -> None:
    heat = BlockHeat()
    assert heat.ask(1, 1, S) == 0
    heat.want(S)
    assert heat.ask(1, 1, S) == MAX_OF_NODE
    assert heat.ask(1, 1, 2 * S) == 0
    assert heat.ask(2, 1, 2 * S) == MAX_OF_NODE
    assert heat.ask(1, 1, int((1 + ASK_S) * S)) == MAX_OF_NODE
    assert heat.ask(1, 1, int((1 + WANTED_S) * S)) == 0


@pytest.mark.parametrize(("live", "blocks"), [(0, MAX_OF_NODE), (100, MAX_BLOCKS // 100), (10_000, MIN_OF_NODE)])
def test_the_more_nodes_the_fewer_blocks_of_each(live: int, blocks: int) -> None:
    heat = BlockHeat()
    heat.want(0)
    assert heat.ask(1, live, 0) == blocks


def test_reads_at_several_nodes_add_up_by_tenant_until_they_are_old() -> None:
    heat = BlockHeat()
    heat.want(0)
    for node_id in (1, 2, 3):
        heat.ask(node_id, 3, 0)
    heat.take(1, [hot(a=2.0, b=1.0), hot("blue", a=9.0)], S)
    heat.take(2, [hot(a=3.0)], 3 * S)
    assert heat.of("red", 3 * S) == {b"a": 5.0, b"b": 1.0}
    assert heat.of("blue", 3 * S) == {b"a": 9.0}
    assert heat.of("green", 3 * S) == {}
    assert heat.of("red", int((2 + TOLD_S) * S)) == {b"a": 3.0}
    heat.take(2, [], 4 * S)
    assert heat.of("red", 4 * S)[b"a"] == 5.0, "a node that begins to count has nothing to tell"


def test_all_is_forgotten_when_nobody_looks_any_more_and_who_was_not_asked_is_not_kept() -> None:
    heat = BlockHeat()
    heat.take(1, [hot(a=1.0)], 0)
    heat.want(0)
    assert heat.of("red", 0) == {}
    heat.ask(1, 1, 0)
    heat.take(1, [hot(a=1.0)], 0)
    heat.ask(1, 1, int(WANTED_S * S))
    heat.want(int(WANTED_S * S))
    assert heat.of("red", 0) == {}


def test_what_nodes_told_that_are_gone_is_not_kept_however_long_somebody_looks() -> None:
    heat = BlockHeat()
    for node_id in range(1, 100):
        now_ns = node_id * int(TOLD_S * S)
        heat.want(now_ns)
        heat.ask(node_id, 1, now_ns)
        heat.take(node_id, [hot(a=1.0)], now_ns)
        assert heat.of("red", now_ns)[b"a"] >= 1.0
    assert len(heat._nodes) <= 2


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (hot(a=-1.0), "less than never"),
        (hot(a=nan), "less than never"),
        (hot(a=2e9), "more than 1e"),
        (pb.HotBlocks(tenant="red", keys=[b"a"]), "not as many of both"),
        (pb.HotBlocks(tenant="red", keys=[b"a", b"b"], reads_per_s=[1.0, 1.0], remote_reads_per_s=[1.0]), "not as many of both"),
        (pb.HotBlocks(tenant="red", keys=[b"a"], reads_per_s=[1.0], remote_reads_per_s=[-1.0]), "less than never"),
        (pb.HotBlocks(keys=[b"%d" % number for number in range(MAX_OF_NODE + 1)], reads_per_s=[1.0] * (MAX_OF_NODE + 1)), "at most 1024"),
    ],
)
def test_what_cannot_have_been_counted_is_refused(report: pb.HotBlocks, says: str) -> None:
    heat = BlockHeat()
    heat.want(0)
    heat.ask(1, 1, 0)
    with pytest.raises(InvalidArgument, match=says):
        heat.take(1, [report], 0)
    assert heat.of("red", 0) == {}


def test_reads_from_other_hosts_are_gone_through_as_they_were_told_and_not_once_they_are_old() -> None:
    heat = BlockHeat()
    heat.want(0)
    for node_id in (1, 2, 3):
        heat.ask(node_id, 3, 0)
    heat.take(1, [pb.HotBlocks(tenant="red", keys=[b"a", b"b"], reads_per_s=[3.0, 1.0], remote_reads_per_s=[2.0, 0.0])], S)
    heat.take(2, [hot(a=3.0)], 3 * S)
    heat.take(3, [pb.HotBlocks(tenant="blue", keys=[b"a"], reads_per_s=[1.0], remote_reads_per_s=[0.5])], 3 * S)
    found = heat.far_reads(3 * S)
    assert next(found) == ("red", b"a", 2.0)
    heat.take(3, [hot("blue", a=1.0)], 4 * S)
    assert list(found) == [("blue", b"a", 0.5)], (
        "node 2 is of a release that tells nothing of it, and what is told meanwhile comes next time"
    )
    assert list(heat.far_reads(int((2 + TOLD_S) * S))) == []
