"""Tests of removals.py: what is removed while a node is away does not come back with it, however much is removed meanwhile."""

import pytest

from kvstore.master.directory import records
from kvstore.master.directory.index.tenants import Tenants
from kvstore.master.directory.membership.members import Membership, NodeInfo, NodeMember
from kvstore.master.directory.writes.removals import RemovedKeys
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.node_states import ALIVE


def cluster(*states: str) -> tuple[Tenants, RemovedKeys, list[NodeMember]]:
    members = Membership(node_ttl_ns=1, wall_ns=0, max_live=9, max_absent=9)
    nodes = [members.register(NodeInfo(f"n{index}", 1), (), 0)[0] for index, _ in enumerate(states)]
    for node, state in zip(nodes, states, strict=True):
        node.state = state
    tenants = Tenants()
    return tenants, RemovedKeys(tenants, members, limit=2), nodes


@pytest.mark.promise("remove-stays-removed")
def test_removal_is_kept_until_all_inventories() -> None:
    tenants, removals, nodes = cluster(ALIVE, "dead", "syncing")
    red = tenants.of("red")
    assert removals.remember(red, b"a", 7) == [records.removed(red.prefix, b"a", 7)]
    assert removals.remember(red, b"a", 9) == [records.removed(red.prefix, b"a", 9)]
    assert red.removed == {b"a": 9}
    nodes[1].state = ALIVE
    assert removals.settle() == []
    nodes[2].state, nodes[2].owed = ALIVE, 1
    assert removals.settle() == [], "it has named removed blocks, and not said that they are dropped"
    nodes[2].owed = 0
    assert removals.settle() == [records.removed(red.prefix, b"a", None)]
    assert not red.removed
    assert removals.settle() == []
    removals.check_integrity()


@pytest.mark.promise("remove-stays-removed")
def test_beyond_the_limit_horizons_replace_tombstones() -> None:
    tenants, removals, nodes = cluster("dead", ALIVE)
    red, blue = tenants.of("red"), tenants.of("blue")
    assert removals.remember(red, b"a", 1)
    assert removals.remember(blue, b"b", 2)
    assert (removals.unwritten, nodes[0].removal_horizon) == (0, 0)
    assert removals.remember(blue, b"c", 3) == [records.put_unknown_nodes(3, 2), records.put_node("n0", 1, 3)]
    assert (removals.unwritten, nodes[0].removal_horizon, nodes[1].removal_horizon) == (1, 3, 0)
    assert removals.remember(red, b"d", 3) == [], "the floor stands in for it"
    assert removals.remember(red, b"e", 4) == [records.removed(red.prefix, b"e", 4)], "the floor is not durable yet: one more is kept"
    assert removals.horizons_written() == [records.removed(red.prefix, b"a", None), records.removed(blue.prefix, b"b", None)]
    assert (red.removed, blue.removed, removals.unwritten) == ({b"e": 4}, {}, 0)
    removals.check_integrity()


def test_node_lost_during_horizon_write_keeps_its_tombstones() -> None:
    tenants, removals, nodes = cluster("dead", ALIVE)
    red = tenants.of("red")
    for generation, key in enumerate((b"a", b"b", b"c"), 1):
        removals.remember(red, key, generation)
    nodes[1].state = "dead"
    assert removals.horizons_written() == []
    assert red.removed == {b"a": 1, b"b": 2}
    assert removals.remember(red, b"d", 4) == [records.put_unknown_nodes(4, 2), records.put_node("n0", 1, 4), records.put_node("n1", 2, 4)]
    assert len(removals.horizons_written()) == 2


def test_removals_are_kept_until_the_forget_is_durable() -> None:
    tenants, removals, nodes = cluster("dead", ALIVE)
    red = tenants.of("red")
    removals.remember(red, b"a", 1)
    with pytest.raises(InvalidArgument, match="is alive"):
        removals.forget("n1", 5)
    assert removals.unwritten == 0
    assert removals.forget("n0", 5) == (nodes[0], [records.put_unknown_nodes(5, 2), records.delete_node("n0")])
    assert removals.settle() == []
    removals.remember(red, b"b", 6)
    assert red.removed == {b"a": 1}, "nobody that is known is away"
    assert removals.horizons_written() == [records.removed(red.prefix, b"a", None)]
    removals.check_integrity()


def test_of_several_writes_of_floors_the_last_ends_the_keeping() -> None:
    tenants, removals, _nodes = cluster("dead", "dead")
    red = tenants.of("red")
    removals.remember(red, b"a", 1)
    removals.forget("n0", 5)
    removals.forget("n1", 5)
    assert removals.horizons_written() == []
    assert removals.settle() == []
    assert removals.horizons_written() == [records.removed(red.prefix, b"a", None)]
