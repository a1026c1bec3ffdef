"""Tests of removals.py, held by a directory with nodes."""

import pytest

from kvstore.master.directory.bounds import DirectoryLimits
from kvstore.master.directory.index.key_index import SMALL_BATCH
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.records import RemovedRecord, decode
from kvstore.protocol.catalog_messages import DeleteBlocks, SetPinned
from tests.master.blocks import NVME, TENANT, Event, Master, die, one_node, publish


def test_removal_takes_effect_with_the_holders_responses() -> None:
    master, _ = one_node(b"a", b"b")
    removal = master.directory.removing.plan(TENANT, [b"a", b"none"], force=False)
    assert list(removal.flags) == [1, 0]
    assert removal.commands.messages() == [(1, DeleteBlocks(1, TENANT, [b"a"], [1]))]
    assert master.directory.removing.dropped(1, TENANT, [b"a"], [1], b"\0") == []
    assert master.exists(b"a") == [1]
    master.commit(master.directory.removing.dropped(1, TENANT, [b"a"], [1], b"\1"))
    assert master.exists(b"a", b"b") == [0, 1]
    assert [key for key in master.catalog if key.startswith(b"b")] == [b"b\x03redb"]


def test_many_pinned_blocks_with_targets_go_with_their_marks() -> None:
    keys = [b"%03d" % number for number in range(2 * SMALL_BATCH)]
    master, _ = one_node(*keys)
    master.commit(master.directory.pins.pin(TENANT, keys, pinned=True).ops)
    master.commit(master.directory.targets.ask(TENANT, keys, 2).ops)
    assert master.remove(*keys) == [0] * len(keys), "they are pinned"
    assert master.remove(*keys, force=True) == [1] * len(keys)
    assert not [key for key in master.catalog if key[:1] in b"bpt"], "neither records, nor pins, nor targets are left"


def test_a_remove_reaches_a_commit_in_flight() -> None:
    master, node = one_node()
    master.directory.plan_publish(1, publish(node.epoch, [Event(b"k", 7)]))
    removal = master.directory.removing.plan(TENANT, [b"k"], force=False)
    assert (list(removal.flags), removal.commands.messages()) == ([0], [(1, DeleteBlocks(1, TENANT, [b"k"], [7]))])


def test_what_only_dead_nodes_hold_is_removed_at_once() -> None:
    master, node = one_node(b"a", b"both")
    other = master.register("b")
    master.publish(other, Event(b"both"))
    die(master, node)
    removal = master.directory.removing.plan(TENANT, [b"a", b"both"], force=False)
    master.commit(removal.ops)
    assert removal.commands.messages() == [(2, DeleteBlocks(1, TENANT, [b"both"], [1]))]
    assert [key for key in master.catalog if key.startswith(b"b")] == [b"b\x03redboth"]
    master.directory.check_integrity()


@pytest.mark.promise("remove-stays-removed")
def test_removed_block_does_not_return_with_its_node() -> None:
    master, node = one_node(b"a", b"kept")
    other = master.register("b")
    master.sync(other)
    die(master, node)
    master.publish(other, Event(b"a", 5))
    removal = master.directory.removing.plan(TENANT, [b"a"], force=False)
    master.commit(removal.ops)
    master.commit(master.directory.removing.dropped(other.node_id, TENANT, [b"a"], [5], b"\1"))
    master = master.restart()
    other = master.register("b")
    master.sync(other)
    node = master.register("a", instance=2)
    commands = master.sync(node, Event(b"a", 1), Event(b"kept", 1))
    assert commands == [(node.node_id, DeleteBlocks(2, TENANT, [b"a"], [1], force=1))]
    assert master.exists(b"a", b"kept") == [0, 1]
    master.delete_unheld()
    assert not [key for key in master.catalog if key.startswith(b"r")], "all nodes are back: nothing to remember"
    master.publish(node, Event(b"a", 10_000))
    assert master.exists(b"a") == [1]


def test_a_remove_that_a_holder_refuses_is_no_removal() -> None:
    master, _node = one_node(b"a")
    die(master, master.register("away"))
    master.commit(master.directory.removing.plan(TENANT, [b"a"], force=False).ops)
    assert [key for key in master.catalog if key.startswith(b"r")]
    master.commit(master.directory.removing.dropped(1, TENANT, [b"a"], [1], b"\0"))
    removals = [(key, value) for key, value in master.catalog.items() if key.startswith(b"r") and isinstance(value, bytes)]
    assert [decode(*item) for item in removals] == [RemovedRecord(TENANT, b"a", 0)]
    master.directory.check_integrity()


def absent_holder(limits: DirectoryLimits) -> tuple[Master, NodeMember]:
    """Node a is away and has all of a0 to a9 on NVMe; node b is there and has them too."""
    master = Master(limits=limits)
    keys = [b"a%d" % number for number in range(10)]
    node, other = master.register("a"), master.register("b")
    for each in (node, other):
        master.sync(each, *(Event(key, tiers=NVME) for key in keys))
    die(master, node)
    return master, node


def test_many_removals_hold_while_a_node_is_unreachable() -> None:
    master, node = absent_holder(DirectoryLimits(kept_removals=3))
    for number in range(9):
        assert master.remove(b"a%d" % number) == [1]
    assert sum(key.startswith(b"r") for key in master.catalog) <= 3
    master = master.restart()
    other = master.register("b")
    master.sync(other, Event(b"a9", tiers=NVME))
    node = master.register("a", instance=2)
    (command,) = master.sync(node, *(Event(b"a%d" % number, tiers=NVME) for number in range(10)))
    dropped = [b"a%d" % number for number in range(9)]
    assert command == (node.node_id, DeleteBlocks(2, TENANT, dropped, [1] * 9, force=1)), "what the directory lists there is kept"
    master.delete_unheld()
    assert not [key for key in master.catalog if key.startswith(b"r")]
    assert node.removal_horizon == 0
    master.publish(node, Event(b"a0", 1))
    assert master.exists(b"a0") == [1], "put again: nothing stands against it any more"


@pytest.mark.promise("remove-stays-removed")
def test_removal_holds_for_forgotten_nodes_after_a_restart() -> None:
    master, _node = absent_holder(DirectoryLimits())
    assert master.remove(b"a0") == [1]
    master.forget("a")
    master.delete_unheld()
    assert not [key for key in master.catalog if key.startswith(b"r")], "nobody that is known is away"
    assert master.remove(b"a1") == [1]
    master = master.restart()
    master.sync(master.register("b"), Event(b"a9", tiers=NVME))
    again = master.register("a", instance=2)
    assert again.node_id == 3, "the id of a forgotten node is nobody else's"
    master = master.restart()
    master.sync(master.register("b"), Event(b"a9", tiers=NVME))
    again = master.register("a", instance=2)
    assert (again.node_id, again.removal_horizon > 0) == (3, True), "a stranger until its inventory is told, whatever restarts in between"
    (command,) = master.sync(again, *(Event(b"a%d" % number, tiers=NVME) for number in range(10)))
    assert isinstance(command[1], DeleteBlocks)
    assert command[1].keys == [b"a%d" % number for number in range(10)]
    assert master.exists(b"a0", b"a1", b"a9") == [0, 0, 1]
    master.delete_unheld()
    assert list(master.directory.queries.lookup(TENANT, [b"a9"]).nodes) == [2]


def test_a_pinned_block_is_removed_only_by_force() -> None:
    master, _ = one_node(b"a")
    pin_result = master.directory.pins.pin(TENANT, [b"a", b"none"], pinned=True)
    assert (pin_result.flags, pin_result.commands.messages()) == (b"\1\0", [(1, SetPinned(1, TENANT, [b"a"], 1))])
    removal = master.directory.removing.plan(TENANT, [b"a"], force=False)
    assert (list(removal.flags), removal.commands.messages()) == ([0], [])
    removal = master.directory.removing.plan(TENANT, [b"a"], force=True)
    assert (list(removal.flags), len(removal.commands.messages()), len(removal.ops)) == ([1], 1, 1)
    assert master.directory.counts().pinned == 0
