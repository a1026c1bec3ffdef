"""Tests of reservations.py: blocks that can be read at their node already become the cluster's, join what it has, or give way."""

from collections.abc import Sequence
from unittest.mock import patch

import pytest

from kvstore.master.directory.bounds import DirectoryLimits
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.writes import reservations
from kvstore.master.directory.writes.reservations import MIN_NEW
from kvstore.protocol.catalog_messages import PHASE_SYNC, PHASE_SYNC_BEGIN, PHASE_SYNC_END, CommitBlocks
from kvstore.protocol.errors import Full
from kvstore.protocol.master_messages import ReserveReply
from kvstore.protocol.message import BUSY, GRANTED, PRESENT
from kvstore.security.quotas.quota import Quota
from tests.master.blocks import TENANT, Event, Master, publish


def claim(master: Master, node: NodeMember, keys: Sequence[bytes], *, size: int = 100, checksum: int = 7, held: int = 1) -> ReserveReply:
    count = len(keys)
    message = CommitBlocks(node.epoch, TENANT, "ns", list(keys), [size] * count, [checksum] * count, [b""] * count, acknowledged=held)
    grants = master.directory.claims.claim(message, node_id=node.node_id, now_ns=master.now_ns)
    master.directory.check_integrity()
    return grants


def test_unknown_block_is_granted_to_its_node() -> None:
    master = Master()
    node = master.register("a")
    grants = claim(master, node, [b"x", b"y"])
    assert list(grants.statuses) == [GRANTED, GRANTED]
    assert list(grants.nodes) == [node.node_id] * 2
    assert 1000 < grants.generations[0] < grants.generations[1]
    assert master.directory.counts().reserved == 0, "it is published in the same turn"


@pytest.mark.parametrize("known", ["nothing", "held", "in flight", "reserved", "twice"])
def test_many_at_once_are_those_one_by_one(known: str) -> None:
    keys = [b"%d" % number for number in range(MIN_NEW)]
    if known == "twice":
        keys[3] = keys[1]
    found = []
    for at_least in (MIN_NEW, MIN_NEW + 1):
        master = Master()
        node, other = master.register("a"), master.register("b")
        if known == "held":
            master.publish(other, Event(b"1", 5))
        elif known == "in flight":
            master.directory.plan_publish(other.node_id, publish(other.epoch, [Event(b"1", 5)]))
        elif known == "reserved":
            master.directory.reserve(TENANT, [b"1"], [1], local_node=other.node_id, now_ns=master.now_ns)
        with patch.object(reservations, "MIN_NEW", at_least):
            grants = claim(master, node, keys)
        found.append((bytes(grants.statuses), list(grants.nodes), list(grants.generations)))
        assert (grants.statuses.count(GRANTED) == MIN_NEW) == (known == "nothing")
    assert found[0] == found[1]


def test_a_claim_ends_the_reservation_of_a_writer_who_is_gone() -> None:
    master = Master()
    first, second = master.register("a"), master.register("b")
    master.directory.reserve(TENANT, [b"k"], [1], local_node=first.node_id, now_ns=master.now_ns)
    master.directory.disconnected(first.node_id, first.epoch, master.now_ns)
    assert list(claim(master, second, [b"k"]).statuses) == [GRANTED]
    assert master.directory.counts().reserved == 0


@pytest.mark.promise("put-conflicts")
def test_claim_joins_equal_bytes_and_yields_to_others() -> None:
    master = Master()
    first, second = master.register("a"), master.register("b")
    master.publish(first, Event(b"k", 5))
    for size, checksum, generation in ((100, 7, 5), (99, 7, 0), (100, 8, 0)):
        grants = claim(master, second, [b"k"], size=size, checksum=checksum)
        assert (list(grants.statuses), list(grants.generations)) == ([PRESENT], [generation])
        assert list(grants.nodes) == [second.node_id if generation else 0]
    assert master.directory.counts().reserved == 0


def test_a_key_that_another_writer_is_at_is_busy() -> None:
    master = Master()
    first, second = master.register("a"), master.register("b")
    master.directory.reserve(TENANT, [b"reserved"], [1], local_node=first.node_id, now_ns=master.now_ns)
    master.directory.plan_publish(first.node_id, publish(first.epoch, [Event(b"in flight", 2000)]))
    grants = claim(master, second, [b"reserved", b"in flight", b"free", b"free"])
    assert list(grants.statuses) == [BUSY, BUSY, GRANTED, BUSY]
    assert [bool(generation) for generation in grants.generations] == [False, False, True, False]


@pytest.mark.promise("put-flush")
def test_a_block_that_is_being_removed_is_busy_until_it_is_gone() -> None:
    """Else the claim would bring back, as one more replica, what the remove has not reached."""
    master = Master()
    first, second, away = master.register("a"), master.register("b"), master.register("c")
    master.publish(first, Event(b"k", 5))
    master.directory.disconnected(away.node_id, away.epoch, master.now_ns)
    removal = master.directory.removing.plan(TENANT, [b"k"], force=False)
    assert list(claim(master, second, [b"k"]).statuses) == [BUSY]
    [(node_id, command)] = removal.commands.messages()
    master.commit(master.directory.removing.dropped(node_id, TENANT, command.keys, [5], b"\x01"))
    assert list(claim(master, second, [b"k"]).statuses) == [GRANTED]


def test_dropping_holder_cannot_claim_the_block_back() -> None:
    """The master takes in all answers at once: it would take the node off the holders of what that node has again."""
    master = Master()
    first, second = master.register("a"), master.register("b")
    for node in (first, second):
        master.publish(node, Event(b"k", 5))
    removals = [master.directory.removing.plan(TENANT, [b"k"], force=False) for _ in range(2)]
    for removal in removals:
        assert list(claim(master, first, [b"k"]).statuses) == [BUSY]
        for node_id, command in removal.commands.messages():
            master.commit(master.directory.removing.dropped(node_id, TENANT, command.keys, [5], b"\x00"))
        master.directory.removing.over(TENANT, removal)
    assert list(claim(master, first, [b"k"]).statuses) == [PRESENT], "both refused"


def test_unheld_claim_yields_to_any_existing_block() -> None:
    """It was put for an answer of the master's: that the block is there already is one, be it about to be removed."""
    master = Master()
    first, second, away = master.register("a"), master.register("b"), master.register("c")
    master.publish(first, Event(b"k", 5))
    master.directory.reserve(TENANT, [b"reserved"], [1], local_node=first.node_id, now_ns=master.now_ns)
    grants = claim(master, second, [b"k", b"reserved", b"new", b"new"], held=0)
    assert list(grants.statuses) == [PRESENT, BUSY, GRANTED, BUSY]
    assert [bool(generation) for generation in grants.generations] == [False, False, True, False]
    assert list(grants.nodes) == [0, 0, second.node_id, 0]
    master.directory.disconnected(away.node_id, away.epoch, master.now_ns)
    master.directory.removing.plan(TENANT, [b"k"], force=False)
    grants = claim(master, second, [b"k"], held=0)
    assert (list(grants.statuses), list(grants.generations)) == ([PRESENT], [0])


@pytest.mark.promise("put-conflicts")
@pytest.mark.parametrize("held", [0, 1])
def test_claim_of_a_block_hinted_at_other_nodes_is_busy(held: int) -> None:
    """A node whose link broke may have lost it meanwhile."""
    master = Master()
    first, second = master.register("a"), master.register("b")
    master.sync(first, Event(b"lost", 5), Event(b"kept", 5))
    master.publish(first, phase=PHASE_SYNC_BEGIN)
    assert list(claim(master, second, [b"lost", b"kept"], checksum=8, held=held).statuses) == [BUSY, BUSY]
    master.publish(first, Event(b"kept", 5), phase=PHASE_SYNC)
    master.publish(first, phase=PHASE_SYNC_END)
    assert list(claim(master, second, [b"lost", b"kept"], checksum=8, held=held).statuses) == [GRANTED, PRESENT]


@pytest.mark.promise("put-conflicts")
@pytest.mark.parametrize("held", [0, 1])
def test_claim_of_a_block_hinted_only_here_is_granted(held: int) -> None:
    """It would not claim what it has: the answer to its last claim never came, or it has lost the block since."""
    master = Master()
    first, second = master.register("a"), master.register("b")
    master.sync(first, *(Event(key, 5) for key in (b"own", b"both", b"removed")))
    master.sync(second, Event(b"both", 5))
    master.directory.removing.plan(TENANT, [b"removed"], force=False)  # and the node has yet to answer
    for node in (first, second):
        master.publish(node, phase=PHASE_SYNC_BEGIN)
    grants = claim(master, first, [b"own", b"both", b"removed"], checksum=8, held=held)
    assert list(grants.statuses) == [GRANTED, BUSY, BUSY]
    assert grants.generations[0] > 5
    master.publish(first, Event(b"own", grants.generations[0], checksum=8))
    master.publish(first, phase=PHASE_SYNC_END)
    assert master.exists(b"own") == [1]
    assert list(claim(master, second, [b"own"], checksum=8, held=held).statuses) == [PRESENT]


def test_held_claim_joins_an_unconfirmed_version() -> None:
    """The claim makes them the cluster's, even if the other node lost its own."""
    master = Master()
    first, second = master.register("a"), master.register("b")
    master.sync(first, Event(b"k", 5))
    master.publish(first, phase=PHASE_SYNC_BEGIN)
    grants = claim(master, second, [b"k"])
    assert (list(grants.statuses), list(grants.generations)) == ([PRESENT], [5])


def test_claim_takes_no_reservation() -> None:
    master = Master(quota=Quota(reservations=1))
    node = master.register("a")
    master.directory.reserve(TENANT, [b"k"], [1], now_ns=master.now_ns)
    assert list(claim(master, node, [b"l"], held=0).statuses) == [GRANTED]
    assert master.directory.counts().reserved == 1


def test_what_only_dead_nodes_hold_is_granted_anew() -> None:
    master = Master()
    first, second = master.register("a"), master.register("b")
    master.publish(first, Event(b"k", 5))
    master.directory.disconnected(first.node_id, first.epoch, master.now_ns)
    grants = claim(master, second, [b"k"], checksum=8)
    assert list(grants.statuses) == [GRANTED]
    assert grants.generations[0] > 5


@pytest.mark.parametrize("count", [2, MIN_NEW])
def test_beyond_the_limit_of_reservations_nothing_is_granted(count: int) -> None:
    master = Master(limits=DirectoryLimits(reservations=count - 1))
    node = master.register("a")
    keys = [b"%d" % number for number in range(count)]
    with pytest.raises(Full):
        claim(master, node, keys)
    assert list(claim(master, node, keys[1:]).statuses) == [GRANTED] * (count - 1)
