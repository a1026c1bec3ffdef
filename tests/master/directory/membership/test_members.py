"""Tests of members.py."""

import pytest

from kvstore.master.directory.membership.members import Membership, NodeInfo
from kvstore.master.directory.records import (
    MAX_DESCRIPTION_BYTES,
    Description,
    NodeRecord,
    UnknownNodesRecord,
    put_node,
    put_unknown_nodes,
)
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Full, InvalidArgument, StaleEpoch
from kvstore.protocol.message import MAX_TENANT_USES
from kvstore.protocol.node_states import ALIVE, DEAD, STOPPED, SYNCING
from tests.master.blocks import tier_of

TTL_NS = 10


def members() -> Membership:
    return Membership(wall_ns=1000, node_ttl_ns=TTL_NS, max_live=2, max_absent=1)


def test_a_node_keeps_its_id_and_gets_a_new_epoch_each_time() -> None:
    nodes = members()
    node, is_new = nodes.register(NodeInfo("a", 1), (), 0)
    first = node.epoch
    assert (node.node_id, is_new, node.state) == (1, True, SYNCING)
    assert first > 1000
    again, is_new = nodes.register(NodeInfo("a", 1), (), 5)
    assert again is node
    assert not is_new
    assert node.epoch > first


def test_a_nodes_host_is_where_others_reach_it() -> None:
    node, _ = members().register(NodeInfo("a", 1, tcp="[::1]:7450"), (), 0)
    assert node.host == "[::1]"


def test_second_live_process_of_a_name_is_refused() -> None:
    nodes = members()
    nodes.register(NodeInfo("a", 1, tcp="host:1"), (), 0)
    with pytest.raises(InvalidArgument, match="a live node already has the name 'a', at host:1"):
        nodes.register(NodeInfo("a", 2), (), 5)
    nodes.expire(TTL_NS)
    assert nodes.register(NodeInfo("a", 2), (), TTL_NS)[0].is_live


@pytest.mark.parametrize("name", ["", "x" * 256])
def test_a_name_that_cannot_be_kept_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="1 to 255"):
        members().register(NodeInfo(name, 1), (), 0)


def test_description_is_kept_and_raises_the_revision() -> None:
    nodes = members()
    node, _ = nodes.register(NodeInfo("a", 1), (), 0, Description(b"topology", b"transfer"))
    first = node.revision
    assert (node.description, first > 0) == (Description(b"topology", b"transfer"), True)
    nodes.register(NodeInfo("a", 1), (), 1, Description(b"topology", b"transfer"))
    assert node.revision == first, "nothing has changed"
    before = node.description
    assert nodes.describe(1, node.epoch, topology=b"other", transfer=None) == (node, before)
    assert (node.description, node.revision > first) == (Description(b"other", b"transfer"), True)
    second = node.revision
    nodes.describe(1, node.epoch, topology=None, transfer=b"")
    assert (node.description, node.revision > second) == (Description(b"other", b""), True)
    third = node.revision
    nodes.describe(1, node.epoch, topology=b"other", transfer=b"")
    assert node.revision == third
    with pytest.raises(StaleEpoch):
        nodes.describe(1, node.epoch - 1, topology=b"", transfer=None)


def test_a_description_over_the_limit_is_refused() -> None:
    nodes = members()
    most, more = bytes(MAX_DESCRIPTION_BYTES), bytes(MAX_DESCRIPTION_BYTES + 1)
    for description in (Description(more), Description(b"", more)):
        with pytest.raises(InvalidArgument, match="at most 262144 bytes each"):
            nodes.register(NodeInfo("a", 1), (), 0, description)
    node, _ = nodes.register(NodeInfo("a", 1), (), 0, Description(most, most))
    with pytest.raises(InvalidArgument, match="not 262144 and 262145"):
        nodes.describe(1, node.epoch, topology=None, transfer=more)
    assert node.description == Description(most, most)


def test_silence_for_the_ttl_is_death_and_heartbeats_prevent_it() -> None:
    nodes = members()
    node, _ = nodes.register(NodeInfo("a", 1), (), 0)
    nodes.heartbeat(1, node.epoch, (), {}, 5)
    assert nodes.expire(TTL_NS) == []
    assert nodes.expire(5 + TTL_NS) == [node]
    assert (node.state, node.changed_ns) == (DEAD, 15)
    with pytest.raises(StaleEpoch, match="must register again"):
        nodes.heartbeat(1, node.epoch, (), {}, 16)


def test_only_the_newest_registration_may_speak() -> None:
    nodes = members()
    node, _ = nodes.register(NodeInfo("a", 1), (), 0)
    old = node.epoch
    nodes.register(NodeInfo("a", 1), (), 0)
    with pytest.raises(StaleEpoch):
        nodes.check(1, old)
    with pytest.raises(StaleEpoch):
        nodes.check(9, old)
    assert nodes.check(1, node.epoch) is node


def test_a_broken_link_kills_only_its_own_registration() -> None:
    nodes = members()
    node, _ = nodes.register(NodeInfo("a", 1), (), 0)
    old = node.epoch
    nodes.register(NodeInfo("a", 1), (), 1)
    assert not nodes.disconnected(1, old, 2)
    assert not nodes.disconnected(9, old, 2)
    node.state = ALIVE
    assert nodes.disconnected(1, node.epoch, 3)
    assert not nodes.disconnected(1, node.epoch, 4)


def test_a_long_dead_node_is_written_off_once_a_death() -> None:
    nodes = members()
    node, _ = nodes.register(NodeInfo("a", 1), (), 0)
    assert nodes.write_off(100, 20) == []
    nodes.disconnected(1, node.epoch, 100)
    assert nodes.write_off(119, 20) == []
    assert nodes.write_off(120, 20) == [node]
    assert nodes.write_off(121, 20) == []
    nodes.register(NodeInfo("a", 1), (), 130)
    assert not node.written_off
    assert nodes.named("a") is node
    assert nodes.named("b") is None
    assert nodes.get(1) is node


def test_free_bytes_counts_healthy_tiers_less_reservations() -> None:
    nodes = members()
    tiers = (
        pb.TierStatus(name="dram", capacity_bytes=100, used_bytes=30, quarantined_bytes=10, health="ok"),
        tier_of("nvme", 1000, 500),
        tier_of("hbm", 50, health="lost"),
    )
    node, _ = nodes.register(NodeInfo("a", 1), tiers, 0)
    node.reserved_bytes = 60
    assert (node.free_bytes, node.capacity_bytes, node.largest_bytes, node.dram_bytes) == (500, 1100, 1000, 100)
    nodes.heartbeat(1, node.epoch, (), {"gets": 3}, 1)
    assert (node.free_bytes, node.largest_bytes, node.counters) == (0, 0, {"gets": 3})


def test_new_node_over_the_limit_is_refused() -> None:
    nodes = members()
    for name in ("a", "b"):
        nodes.register(NodeInfo(name, 1), (), 0)
    with pytest.raises(Full, match="2 live nodes, as many as max_nodes allows: 'c' cannot join"):
        nodes.register(NodeInfo("c", 1), (), 0)
    assert nodes.named("c") is None
    assert nodes.register(NodeInfo("a", 1), (), 0)[0].node_id == 1


def test_excess_dead_nodes_are_those_that_died_first() -> None:
    nodes = members()
    for node_id, died_ns in ((1, 5), (2, 3), (3, 4)):
        node, _ = nodes.register(NodeInfo(f"n{node_id}", 1), (), 0)
        nodes.disconnected(node_id, node.epoch, died_ns)
        assert len(nodes.excess_dead()) == node_id - 1
    assert [node.info.name for node in nodes.excess_dead()] == ["n2", "n3"]


def test_node_from_the_catalog_is_excess_after_its_time() -> None:
    nodes = members()
    for node_id in (1, 2, 3):
        nodes.remember(NodeRecord(f"n{node_id}", node_id), 5)
    assert (nodes.write_off(24, 20), nodes.excess_dead()) == ([], []), "an owner has just taken over: they may all be about to register"
    here, _ = nodes.register(NodeInfo("n1", 1), (), 24)
    nodes.write_off(25, 20)
    assert [node.info.name for node in nodes.excess_dead()] == ["n2"]
    nodes.disconnected(1, here.epoch, 26)
    assert [node.info.name for node in nodes.excess_dead()] == ["n2", "n3"], "those that died first"


def test_a_forgotten_node_is_another_one_when_it_returns() -> None:
    nodes = members()
    node, _ = nodes.register(NodeInfo("a", 1, tcp="host:1"), (), 0)
    with pytest.raises(InvalidArgument, match="node 'a' is alive, at host:1: stop it before it is forgotten"):
        nodes.forget("a")
    nodes.disconnected(1, node.epoch, 1)
    with pytest.raises(InvalidArgument, match="there is no node 'b'; there are: a"):
        nodes.forget("b")
    assert nodes.forget("a") is node
    with pytest.raises(InvalidArgument, match="there are: none"):
        nodes.forget("a")
    with pytest.raises(StaleEpoch):
        nodes.check(1, node.epoch)
    again, is_new = nodes.register(NodeInfo("a", 1), (), 2)
    assert (again.node_id, is_new) == (2, True), "records of blocks may still name the former id"


def test_horizons_rise_for_unsettled_nodes_and_clear() -> None:
    nodes = members()
    here, _ = nodes.register(NodeInfo("here", 1), (), 0)
    here.state = ALIVE
    nodes.remember(NodeRecord("away", 2), 0)
    assert nodes.raise_horizons(7) == [put_unknown_nodes(7, 2), put_node("away", 2, 7)]
    away, _ = nodes.register(NodeInfo("away", 1), (), 0)
    assert (here.removal_horizon, away.removal_horizon) == (0, 7)
    assert nodes.clear_horizons() == []
    away.state, away.owed = ALIVE, 1
    assert nodes.clear_horizons() == [], "it has not dropped all yet"
    away.owed = 0
    assert nodes.clear_horizons() == [put_node("away", 2, 0)]
    assert (away.removal_horizon, nodes.clear_horizons()) == (0, [])


def test_a_floor_and_the_strangers_come_from_the_catalog() -> None:
    nodes = members()
    nodes.remember(NodeRecord("known", 3, 5), 0)
    nodes.load_unknown_nodes(UnknownNodesRecord(9, 6))
    assert nodes.register(NodeInfo("known", 1), (), 0)[0].removal_horizon == 5
    stranger, _ = nodes.register(NodeInfo("stranger", 1), (), 0)
    assert (stranger.node_id, stranger.removal_horizon) == (7, 9)
    nodes.load_unknown_nodes(UnknownNodesRecord(9, 2))
    nodes.disconnected(3, nodes.named("known").epoch, 0)  # type: ignore[union-attr]
    assert nodes.register(NodeInfo("another", 1), (), 0)[0].node_id == 8


def test_closed_node_takes_no_blocks_until_it_registers() -> None:
    nodes = members()
    node, _ = nodes.register(NodeInfo("a", 1), (), 0)
    nodes.heartbeat(node.node_id, node.epoch, (), {"closed": 1}, 1)
    assert not node.takes_blocks
    nodes.disconnected(node.node_id, node.epoch, 2)
    assert not nodes.register(NodeInfo("a", 2), (), 3)[1]
    assert node.takes_blocks


def test_tenant_use_is_the_last_report_and_bounded() -> None:
    nodes = members()
    node, _ = nodes.register(NodeInfo("a", 1), (), 0)
    uses = [pb.TenantUse(tenant=f"tenant-{number}") for number in range(MAX_TENANT_USES + 1)]
    nodes.heartbeat(1, node.epoch, (), {}, 5, tenants=uses[:-1])
    with pytest.raises(InvalidArgument, match="reported 257 tenants: at most 256"):
        nodes.heartbeat(1, node.epoch, (), {}, 6, tenants=uses)
    assert (node.tenants, node.heartbeat_ns) == (uses[:-1], 5)


def test_assigned_node_id_raises_later_ids() -> None:
    nodes = members()
    assert nodes.register(NodeInfo("a", 1), (), 0, node_id=7)[0].node_id == 7
    assert nodes.register(NodeInfo("b", 2), (), 0)[0].node_id == 8


def test_announced_end_makes_a_node_stopped() -> None:
    nodes = members()
    node, _ = nodes.register(NodeInfo("a", 1), (), 0)
    assert nodes.stopping(1, node.epoch) is node
    assert (node.state, node.is_live) == (SYNCING, True), "it serves until its link breaks"
    assert nodes.disconnected(1, node.epoch, 5)
    assert (node.state, node.is_live, node.changed_ns) == (STOPPED, False, 5)
    with pytest.raises(StaleEpoch):
        nodes.stopping(1, node.epoch)
    again, _ = nodes.register(NodeInfo("a", 2), (), 10)
    assert nodes.expire(10 + TTL_NS) == [again]
    assert again.state == DEAD, "its next process has announced nothing"
    nodes.set_stopped("a")
    nodes.set_stopped("none")
    assert again.state == STOPPED
