"""Promises of removals.py: what is removed while a node is away does not come back with it."""

from kvstore.master.directory import records
from kvstore.master.directory.membership import ALIVE, Member, Membership, NodeInfo
from kvstore.master.directory.removals import Removals
from kvstore.master.directory.tenants import Tenants


def cluster(*states: str) -> tuple[Tenants, Removals, list[Member]]:
    members = Membership(node_ttl_ns=1, wall_ns=0)
    nodes = [members.register(NodeInfo(f"n{index}", 1), (), 0)[0] for index, _ in enumerate(states)]
    for node, state in zip(nodes, states, strict=True):
        node.state = state
    tenants = Tenants()
    return tenants, Removals(tenants, members, limit=2), nodes


def test_with_every_node_there_a_removal_needs_no_remembering() -> None:
    tenants, removals, _ = cluster(ALIVE, ALIVE)
    assert removals.remember(tenants.of("red"), b"a", 7) == []
    assert not tenants.of("red").removed
    removals.check_integrity()


def test_a_removal_is_kept_durably_until_every_node_has_told_its_inventory() -> None:
    tenants, removals, nodes = cluster(ALIVE, "dead", "syncing")
    red = tenants.of("red")
    assert removals.remember(red, b"a", 7) == [records.removed(red.prefix, b"a", 7)]
    assert removals.remember(red, b"a", 9) == [records.removed(red.prefix, b"a", 9)]
    assert red.removed == {b"a": 9}
    nodes[1].state = ALIVE
    assert removals.settle() == []
    nodes[2].state = ALIVE
    assert removals.settle() == [records.removed(red.prefix, b"a", None)]
    assert not red.removed
    assert removals.settle() == []
    removals.check_integrity()


def test_a_removal_that_a_holder_refuses_is_forgotten() -> None:
    tenants, removals, _ = cluster("dead")
    red = tenants.of("red")
    removals.remember(red, b"a", 7)
    assert removals.refused(red, b"a") == [records.removed(red.prefix, b"a", None)]
    assert removals.refused(red, b"a") == []
    removals.check_integrity()


def test_more_than_can_be_kept_are_not_promised() -> None:
    tenants, removals, _ = cluster("dead")
    red, blue = tenants.of("red"), tenants.of("blue")
    removals.load(red, b"a", 1)
    assert removals.remember(blue, b"b", 2)
    assert removals.remember(blue, b"c", 3) is None
    assert removals.remember(blue, b"b", 4)
    assert (red.removed, blue.removed) == ({b"a": 1}, {b"b": 4})
    removals.check_integrity()
