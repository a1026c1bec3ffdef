"""Tests of last_replica.py: the required number of holders keep a block, regardless of who asks and when."""

import pytest

from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement.home_copies import HomeCopy
from kvstore.master.directory.placement.last_replica import LastReplicas
from kvstore.protocol.errors import StaleEpoch
from tests.master.blocks import TENANT, Event, Master, die

NAMES = ("a", "b", "c")


@pytest.fixture
def master() -> Master:
    """Of each generation from 1 to 6 a block, at all three nodes."""
    found = Master()
    for name in NAMES:
        found.sync(found.register(name), *(Event(bytes((generation,)), generation) for generation in range(1, 7)))
    return found


KEYS = [bytes((generation,)) for generation in range(1, 7)]


def node(master: Master, name: str) -> NodeMember:
    member = master.directory.members.named(name)
    assert member is not None
    return member


def kept(master: Master) -> list[str]:
    """Of each key the living nodes that are not told that it may leave."""
    nodes = master.directory.members.live()
    flags = {member.info.name: master.directory.last_replicas.may_evict(member.node_id, member.epoch, TENANT, KEYS) for member in nodes}
    return ["".join(name for name in flags if not flags[name][at]) for at in range(len(KEYS))]


@pytest.mark.promise("last-replica-last")
def test_each_holder_keeps_some_blocks_and_each_block_has_one(master: Master) -> None:
    assert kept(master) == ["b", "c", "a"] * 2
    master.commit(master.directory.targets.ask(TENANT, KEYS[:2], 2).ops)
    assert kept(master) == ["bc", "ac", "a", "b", "c", "a"]
    master.commit(master.directory.targets.ask(TENANT, KEYS[:1], 4).ops)
    assert kept(master)[0] == "abc", "it is at too few as it is"


def test_dead_or_stopping_node_keeps_no_block(master: Master) -> None:
    die(master, node(master, "a"))
    assert kept(master) == ["c", "b"] * 3
    master.commit(master.directory.drains.begin("b", "peers"))
    assert kept(master) == ["c"] * 6


def test_what_a_node_has_not_told_yet_counts_for_no_copy(master: Master) -> None:
    die(master, node(master, "a"))
    die(master, node(master, "b"))
    master.register("a")
    assert kept(master) == ["c"] * 6
    die(master, node(master, "c"))
    assert kept(master) == ["a"] * 6


def test_source_of_a_home_copy_does_not_keep_the_block(master: Master) -> None:
    a, b = node(master, "a").node_id, node(master, "b").node_id
    secondary = {(TENANT, KEYS[0]): HomeCopy(a, source_node_id=b), (TENANT, KEYS[1]): HomeCopy(77, source_node_id=b)}
    last_replicas = LastReplicas(master.directory._parts, secondary, {})

    def may_evict(name: str) -> list[int]:
        asker = node(master, name)
        return list(last_replicas.may_evict(asker.node_id, asker.epoch, TENANT, KEYS[:2]))

    assert kept(master)[:2] == ["b", "c"], "as without home copies"
    assert [may_evict(name) for name in NAMES] == [[1, 1], [1, 1], [0, 0]], "node 77 has nothing"
    master.commit(master.directory.targets.ask(TENANT, KEYS[:1], 2).ops)
    assert [may_evict(name)[0] for name in NAMES] == [0, 1, 0]
    master.commit(master.directory.targets.ask(TENANT, KEYS[:1], 3).ops)
    assert [may_evict(name)[0] for name in NAMES] == [0, 0, 0]


def test_unknown_blocks_may_not_be_evicted_first(master: Master) -> None:
    asker = node(master, "a")
    assert master.directory.last_replicas.may_evict(asker.node_id, asker.epoch, "other", KEYS) == bytes(6)
    assert master.directory.last_replicas.may_evict(asker.node_id, asker.epoch, TENANT, [b"never put"]) == b"\0"
    with pytest.raises(StaleEpoch):
        master.directory.last_replicas.may_evict(asker.node_id, asker.epoch + 1, TENANT, KEYS)
