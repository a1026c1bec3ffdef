"""Tests of drains.py: what only a drained node has is ordered elsewhere, so much at once, and it is done when nothing is left."""

import pytest

from kvstore.master.directory.bounds import DirectoryLimits
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement.copies import FULL_SHARE, REFUSED_NS, CopyLimits, CopyOrder
from kvstore.master.directory.placement.drains import COUNT_INTERVAL_NS, DrainProgress, NodeDrains
from kvstore.protocol.catalog_messages import DRAIN_CLOSED, DRAIN_SAVE, EVENT_MOVED, CommitBlocks
from kvstore.protocol.errors import InvalidArgument, Unavailable
from kvstore.protocol.message import GRANTED
from tests.master.blocks import DRAM, NVME, TENANT, Event, Master, die, tier_of
from tests.master.directory.placement.copying import KEYS, ROOM, Copying

CLOSED = {"closed": 1, "open_puts": 0, "undecided": 0, "publish_backlog": 0}


class Cluster(Copying):
    """Each `step` is later than the last look."""

    def __init__(self, pace: CopyLimits | None = None) -> None:
        super().__init__(DirectoryLimits(pace=pace or CopyLimits()))

    @property
    def drains(self) -> NodeDrains:
        return self.master.directory.drains

    def drain(self, name: str = "one", to: str = "peers") -> None:
        self.master.commit(self.drains.begin(name, to))

    def step(self, passed_ns: int = COUNT_INTERVAL_NS) -> list[CopyOrder]:
        return self.ordered(passed_ns, self.drains.step)

    def beat(self, node: NodeMember, **counters: int) -> None:
        self.master.directory.heartbeat(node.node_id, node.epoch, node.tiers, CLOSED | counters, self.master.now_ns)

    def progress(self, node: NodeMember | None = None) -> DrainProgress:
        found = self.drains.progress(node or self.one)
        assert isinstance(found, DrainProgress)
        return found


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


# --- what operators say ---


def test_nobody_is_drained_unless_it_is_said(cluster: Cluster) -> None:
    assert cluster.drains.progress(cluster.one) is None
    assert cluster.step() == []
    assert cluster.drains.unacknowledged() == []
    with pytest.raises(InvalidArgument, match="there is no node 'two'; there are: one"):
        cluster.drain("two")
    with pytest.raises(InvalidArgument, match="'tape' is not a destination"):
        cluster.drain(to="tape")
    assert cluster.drains.cancel("one") == []
    with pytest.raises(InvalidArgument, match="there are: none"):
        Master().directory.drains.cancel("one")


@pytest.mark.promise("drain-loses-nothing")
def test_drain_survives_restarts_until_cancelled_or_forgotten(cluster: Cluster) -> None:
    cluster.drain()
    assert cluster.drains.begin("one", "peers") == [], "it is so already"
    cluster.drain(to="nvme")
    restarted = cluster.master.restart()
    node = restarted.register("one")
    assert (node.drain, restarted.directory.drains.unacknowledged()) == ("nvme", [(node, DRAIN_SAVE)])
    restarted.commit(restarted.directory.drains.cancel("one"))
    assert (node.drain, restarted.directory.drains.unacknowledged()) == ("", [])
    assert restarted.restart().register("one").drain == ""
    die(cluster.master, cluster.one)
    cluster.master.forget("one")
    assert cluster.master.register("one").drain == ""
    assert cluster.master.restart().register("one").drain == ""


def test_drained_node_gets_no_new_blocks(cluster: Cluster) -> None:
    directory = cluster.master.directory
    two = cluster.node("two", "two")
    cluster.drain()
    granted = directory.reserve(TENANT, [b"x"], [10], local_node=1, now_ns=cluster.master.now_ns)
    assert list(granted.nodes) == [two.node_id]
    claim = CommitBlocks(cluster.one.epoch, TENANT, "", [b"y"], [10], [7], [b""])
    granted = directory.claims.claim(claim, node_id=1, now_ns=cluster.master.now_ns)
    assert (list(granted.nodes), list(granted.statuses)) == ([1], [GRANTED])
    with pytest.raises(Unavailable, match="takes no blocks"):
        directory.replication.plan(TENANT, [b"x"], node_id=1, source_node_id=two.node_id, now_ns=0)
    cluster.drain("two")
    with pytest.raises(Unavailable):
        directory.reserve(TENANT, [b"z"], [10], now_ns=cluster.master.now_ns)


def test_drain_command_is_repeated_until_acknowledged(cluster: Cluster) -> None:
    cluster.drains.acknowledged(1, 1, DRAIN_CLOSED)  # of a drain that is over
    cluster.drain()
    assert cluster.drains.unacknowledged() == [(cluster.one, DRAIN_CLOSED)]
    cluster.drains.acknowledged(1, cluster.one.epoch, DRAIN_CLOSED)
    assert cluster.drains.unacknowledged() == []
    cluster.master.register("one", 1, ROOM)
    assert cluster.drains.unacknowledged() == [(cluster.one, DRAIN_CLOSED)]


# --- copies ---


def test_sole_blocks_are_copied_once_until_the_drain_is_done(cluster: Cluster) -> None:
    two = cluster.node("two", "two", Event(b"b", 2))
    cluster.drain()
    [order] = cluster.step()
    assert order == (TENANT, [b"a", b"c"], two.node_id, 1), "b is there already"
    assert cluster.step(1) == cluster.step() == [], "they are on their way"
    assert cluster.progress() == DrainProgress("peers", False, 2, 0, 2, False)
    cluster.arrive(order)
    cluster.step()
    assert cluster.progress() == DrainProgress("peers", False, 0, 0, 0, False), "more may come"
    for counter in ("open_puts", "undecided", "publish_backlog"):
        cluster.beat(cluster.one, **{counter: 1})
        cluster.step()
        assert not cluster.progress().is_done
    cluster.beat(cluster.one, closed=0)
    cluster.step()
    assert not cluster.progress().is_done
    cluster.beat(cluster.one)
    assert not cluster.progress().is_done, "not counted since"
    cluster.step()
    assert cluster.progress().is_done


@pytest.mark.promise("drain-loses-nothing")
def test_copies_under_way_are_limited() -> None:
    for pace in (CopyLimits(blocks=1), CopyLimits(bytes=1), CopyLimits(rows=2)):
        cluster = Cluster(pace)
        cluster.node("two", "two")
        cluster.drain()
        got: list[bytes] = []
        for _ in range(8):
            for order in cluster.step():
                assert len(order.keys) <= (2 if pace.rows == 2 else 1)
                got += order.keys
                cluster.arrive(order)
        assert sorted(got) == KEYS
        cluster.step()
        assert cluster.progress().remaining_blocks == 0


@pytest.mark.promise("drain-loses-nothing")
def test_one_peer_gets_all_while_it_has_room_and_then_the_next(cluster: Cluster) -> None:
    full = int(1000 * FULL_SHARE)
    two = cluster.node("two", "two", tier=tier_of(capacity_bytes=1000, used_bytes=1000 - 200 - full))
    three = cluster.node("three", "three", tier=tier_of(capacity_bytes=1000, used_bytes=1000 - 100 - full))
    cluster.drain()
    assert {(order.node_id, len(order.keys)) for order in cluster.step()} == {(two.node_id, 2), (three.node_id, 1)}


def test_blocks_without_free_space_are_saved_and_stay(cluster: Cluster) -> None:
    two = cluster.node("two", "two", tier=tier_of(capacity_bytes=1000, used_bytes=840))
    cluster.drain()
    cluster.drains.acknowledged(1, cluster.one.epoch, DRAIN_CLOSED)
    [order] = cluster.step()
    assert (order.node_id, len(order.keys)) == (two.node_id, 1)
    cluster.arrive(order)
    two.tiers = (tier_of(capacity_bytes=1000, used_bytes=940),)
    cluster.step()
    cluster.step()
    assert cluster.drains.unacknowledged() == [(cluster.one, DRAIN_SAVE)]
    cluster.beat(cluster.one)
    cluster.step()
    assert cluster.progress() == DrainProgress("peers", False, 2, 0, 0, True)
    rest = [key for key in KEYS if key not in order.keys]
    cluster.master.publish(cluster.one, *(Event(key, 1 + KEYS.index(key), kind=EVENT_MOVED, tiers=DRAM | NVME) for key in rest))
    cluster.step()
    assert cluster.progress() == DrainProgress("peers", True, 0, 2, 0, True)
    two.tiers = (ROOM,)
    [order] = cluster.step()
    assert order.keys == rest, "as soon as there is room"


def test_a_node_that_takes_no_copies_counts_as_full_for_a_while(cluster: Cluster) -> None:
    two = cluster.node("two", "two")
    cluster.drain()
    [order] = cluster.step()
    cluster.arrive(order, has_room=False)
    assert cluster.step() == []
    [order] = cluster.step(REFUSED_NS)
    cluster.beat(two)
    assert cluster.step() == [], "it is to be stopped itself: nobody is left"


def test_removed_copy_does_not_count_against_the_receiver(cluster: Cluster) -> None:
    cluster.node("two", "two")
    cluster.drain()
    assert len(cluster.step()) == 1
    assert cluster.master.remove(*KEYS) == [1, 1, 1]
    cluster.master.publish(cluster.one, Event(b"d", 4))
    assert [order.keys for order in cluster.step()] == [[b"d"]]
    cluster.master.remove(b"d")
    cluster.master.directory.run_due(cluster.master.now_ns)  # the tenant is gone with its last block
    assert cluster.step() == []


def test_drain_to_nvme_copies_nothing(cluster: Cluster) -> None:
    cluster.node("two", "two")
    cluster.drain(to="nvme")
    cluster.beat(cluster.one)
    assert cluster.step() == []
    assert cluster.progress() == DrainProgress("nvme", False, 3, 0, 0, False)
    cluster.master.publish(
        cluster.one, *(Event(key, generation, kind=EVENT_MOVED, tiers=DRAM | NVME) for generation, key in enumerate(KEYS, start=1))
    )
    cluster.step()
    assert cluster.progress() == DrainProgress("nvme", True, 0, 3, 0, False)


def test_blocks_of_two_drained_nodes_go_to_a_third(cluster: Cluster) -> None:
    two = cluster.node("two", "two", Event(b"a", 1))
    cluster.drain()
    cluster.drain("two")
    assert cluster.step() == []
    assert (cluster.progress().remaining_blocks, cluster.progress(two).remaining_blocks) == (3, 1)
    three = cluster.node("three", "three")
    ordered = cluster.step()
    assert sorted(key for order in ordered for key in order.keys) == KEYS
    assert {order.node_id for order in ordered} == {three.node_id}


def test_stopping_node_neither_gets_copies_nor_counts(cluster: Cluster) -> None:
    two = cluster.node("two", "two", Event(b"a", 1))
    cluster.beat(two)
    cluster.drain()
    three = cluster.node("three", "three")
    [order] = cluster.step()
    assert (order.node_id, order.keys) == (three.node_id, KEYS)


def test_nothing_is_copied_from_what_only_the_catalog_tells_of(cluster: Cluster) -> None:
    """Nor before the node has told its inventory."""
    cluster.node("two", "two")
    cluster.drain()
    cluster.master.register("one", 1, ROOM)
    assert cluster.step() == []
    assert cluster.progress().remaining_blocks == 3


def test_drained_node_is_counted_again_after_its_return(cluster: Cluster) -> None:
    cluster.node("two", "two")
    cluster.drain()
    cluster.step()
    die(cluster.master, cluster.one)
    assert cluster.step() == []
    assert cluster.progress() == DrainProgress("peers", False, 0, 0, 3, False), "the orders stand until their nodes have reported"


def test_block_hinted_elsewhere_is_left_and_not_copied(cluster: Cluster) -> None:
    two = cluster.node("two", "two", *(Event(key, generation) for generation, key in enumerate(KEYS, start=1)))
    cluster.drain()
    cluster.beat(cluster.one)
    assert not cluster.step()
    assert cluster.progress() == DrainProgress("peers", True, 0, 0, 0, False)
    die(cluster.master, two)
    two = cluster.master.register("two", 1, ROOM)
    assert not cluster.step(), "it is about to say"
    assert cluster.progress() == DrainProgress("peers", False, 3, 0, 0, False)
    cluster.master.sync(two, Event(b"a", 1))
    assert [order.keys for order in cluster.step()] == [[b"b", b"c"]]
    assert cluster.progress().remaining_blocks == 2


def test_what_only_a_dead_node_has_on_nvme_is_not_kept(cluster: Cluster) -> None:
    two = cluster.node("two", "two", Event(b"a", 1, tiers=NVME))
    cluster.drain(to="nvme")
    cluster.beat(cluster.one)
    die(cluster.master, two)
    cluster.step()
    assert cluster.progress() == DrainProgress("nvme", False, 3, 0, 0, False)


def test_copy_to_a_dead_node_goes_to_another_at_once(cluster: Cluster) -> None:
    two = cluster.node("two", "two")
    cluster.drain()
    assert [order.node_id for order in cluster.step()] == [two.node_id]
    three = cluster.node("three", "three")
    die(cluster.master, two)
    assert [(order.node_id, order.keys) for order in cluster.step()] == [(three.node_id, KEYS)]
