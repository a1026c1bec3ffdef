"""Tests of replica_targets.py: a block gets copies, preferably at other hosts, and again when a node dies; its
target ends with it."""

from functools import partial

import pytest

from kvstore.master.directory.bounds import DirectoryLimits, DirectoryTiming
from kvstore.master.directory.membership.members import NodeInfo
from kvstore.master.directory.placement.copies import REFUSED_NS, CopyLimits, CopyOrder
from kvstore.master.directory.placement.replica_targets import PAUSE_NS
from kvstore.protocol.catalog_messages import EVENT_MOVED, EVENT_REMOVED
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.message import REPLICAS_NO_BLOCK, REPLICAS_NO_NODES, REPLICAS_PENDING, REPLICAS_REACHED
from tests.master.blocks import DRAM, NVME, TENANT, Event, S, die, tier_of
from tests.master.directory.placement.copying import KEYS, ROOM, Copying

PATIENCE_NS = 5 * S


class Cluster(Copying):
    def __init__(self, pace: CopyLimits | None = None) -> None:
        super().__init__(DirectoryLimits(pace=pace or CopyLimits(), timing=DirectoryTiming(repair_after_s=PATIENCE_NS / S)))

    def ask(self, count: int, *keys: bytes, tenant: str = TENANT) -> list[int]:
        asked = self.master.directory.targets.ask(tenant, keys or KEYS, count)
        self.master.commit(asked.ops)
        return list(asked.flags)

    def step(self, passed_ns: int = 0, *, is_periodic: bool = True) -> list[CopyOrder]:
        return self.ordered(passed_ns, partial(self.master.directory.targets.step, is_periodic=is_periodic))


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_blocks_are_copied_up_to_their_target(cluster: Cluster) -> None:
    for name in ("two", "three", "four"):
        cluster.node(name, name)
    assert cluster.ask(3) == [REPLICAS_PENDING] * 3
    orders = cluster.step()
    assert [(order.source_node_id, order.keys) for order in orders] == [(1, KEYS)] * 2, "chains stay together"
    assert cluster.step() == [], "they are on their way"
    cluster.arrive(*orders)
    assert cluster.step() == []
    assert cluster.ask(3) == [REPLICAS_REACHED] * 3
    assert all(len(cluster.holders(key)) == 3 for key in KEYS)
    assert cluster.ask(2) == [REPLICAS_REACHED] * 3
    assert [value for key, value in cluster.master.catalog.items() if key[:1] == b"t"] == [b"\3"] * 3, "the largest number counts"


@pytest.mark.parametrize("count", [0, 17])
def test_a_count_out_of_range_is_refused(cluster: Cluster, count: int) -> None:
    with pytest.raises(InvalidArgument, match="1 to 16 replicas"):
        cluster.ask(count)


def test_what_is_not_there_gets_no_target(cluster: Cluster) -> None:
    assert cluster.ask(2, b"x", b"a") == [REPLICAS_NO_BLOCK, REPLICAS_NO_NODES]
    assert cluster.ask(2, b"a", tenant="blue") == [REPLICAS_NO_BLOCK]
    assert len([key for key in cluster.master.catalog if key[:1] == b"t"]) == 1


def test_missing_copy_is_made_once_enough_nodes_exist(cluster: Cluster) -> None:
    assert cluster.ask(2) == [REPLICAS_NO_NODES] * 3
    assert cluster.step() == cluster.step(PAUSE_NS) == []
    two = cluster.node("two", "y")
    assert cluster.step() == [(TENANT, KEYS, two.node_id, 1)]


@pytest.mark.promise("last-replica-last")
@pytest.mark.promise("replicas-survive")
def test_replica_prefers_another_host(cluster: Cluster) -> None:
    same = cluster.node("same", "x", tier=tier_of(capacity_bytes=10_000_000))
    other = cluster.node("other", "y")
    cluster.ask(2)
    [order] = cluster.step()
    assert order.node_id == other.node_id
    cluster.arrive(order)
    cluster.ask(3)
    [order] = cluster.step()
    assert order.node_id == same.node_id


def test_dead_nodes_replicas_are_copied_to_another_node(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.ask(2)
    cluster.arrive(*cluster.step())
    three = cluster.node("three", "z")
    assert cluster.step() == []
    die(cluster.master, two)
    assert cluster.step() == cluster.step(PATIENCE_NS - 1) == [], "it may be back"
    [order] = cluster.step(1)
    assert (order.node_id, order.keys) == (three.node_id, KEYS)
    cluster.arrive(order)
    cluster.node("two", "y", *(Event(key, generation) for generation, key in enumerate(KEYS, start=1)), instance=2)
    assert cluster.step() == []
    assert cluster.holders() == [1, two.node_id, three.node_id]


def test_returning_node_is_missed_only_for_its_losses(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.ask(2)
    cluster.arrive(*cluster.step())
    cluster.master.publish(two, *(Event(key, 1 + KEYS.index(key), kind=EVENT_MOVED, tiers=DRAM | NVME) for key in (b"a", b"c")))
    third = cluster.node("three", "z")
    die(cluster.master, two)
    assert cluster.step() == []
    node, ops = cluster.master.directory.register(NodeInfo("two", 2, tcp="y:1"), (ROOM,), cluster.master.now_ns)
    cluster.master.commit(ops)
    [order] = cluster.step(10 * PATIENCE_NS)
    assert order == (TENANT, [b"b"], third.node_id, 1), "that was in DRAM only; the rest it has not told of yet"
    cluster.arrive(order)
    cluster.master.sync(node, Event(b"a", 1, tiers=NVME))
    [order] = cluster.step()
    assert order.keys == [b"c"]


def test_restarted_master_restores_targets_and_copies(cluster: Cluster) -> None:
    cluster.ask(2, b"a")
    cluster.master = cluster.master.restart()
    cluster.node("one", "x", Event(b"a", 1))
    two = cluster.node("two", "y")
    assert cluster.step() == [(TENANT, [b"a"], two.node_id, 1)]


def test_a_drained_node_counts_no_more_and_is_copied_from(cluster: Cluster) -> None:
    two, three = cluster.node("two", "y"), cluster.node("three", "z")
    cluster.ask(2)
    orders = cluster.step()
    cluster.arrive(*orders)
    third = ({two.node_id, three.node_id} - {order.node_id for order in orders}).pop()
    cluster.master.directory.drains.begin("one", "peers")
    [order] = cluster.step()
    assert (order.node_id, order.keys) == (third, KEYS)


def test_what_finds_no_room_is_tried_again_after_a_pause(cluster: Cluster) -> None:
    two = cluster.node("two", "y", tier=tier_of(capacity_bytes=1000, used_bytes=990))
    cluster.ask(2, b"a")
    assert cluster.step() == []
    two.tiers = (ROOM,)
    assert cluster.step(PAUSE_NS - 1) == []
    [order] = cluster.step(1)
    cluster.arrive(order, has_room=False)
    assert cluster.step() == [], "it refused"
    [order] = cluster.step(REFUSED_NS)
    cluster.arrive(order)
    assert cluster.step(10 * S) == []
    assert cluster.ask(2, b"a") == [REPLICAS_REACHED]


@pytest.mark.promise("replicas-survive")
def test_no_more_is_on_its_way_than_the_pace() -> None:
    for pace in (CopyLimits(blocks=1), CopyLimits(bytes=1), CopyLimits(rows=1)):
        cluster = Cluster(pace)
        cluster.node("two", "y")
        cluster.ask(2)
        for _ in range(10):
            orders = cluster.step()
            assert sum(len(order.keys) for order in orders) <= 1
            cluster.arrive(*orders)
        assert cluster.ask(2) == [REPLICAS_REACHED] * 3


def test_a_replica_that_was_evicted_is_not_made_anew_for_that(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.ask(2, b"a")
    cluster.arrive(*cluster.step())
    cluster.step()
    cluster.master.publish(two, Event(b"a", 1, kind=EVENT_REMOVED))
    assert cluster.step(10 * S) == []


@pytest.mark.promise("replicas-survive")
def test_a_target_ends_with_its_block_however_that_goes(cluster: Cluster) -> None:
    cluster.ask(2)
    cluster.master.remove(b"a")
    cluster.master.publish(cluster.one, Event(b"b", 2, kind=EVENT_REMOVED))
    assert [key[-1:] for key in cluster.master.catalog if key[:1] == b"t"] == [b"c"]
    cluster.master.publish(cluster.one, Event(b"a", 9))
    cluster.node("two", "y")
    assert [order.keys for order in cluster.step()] == [[b"c"]], "another block of the key has none"
    die(cluster.master, cluster.one)
    cluster.master.now_ns += 1000 * S
    cluster.master.directory.run_due(cluster.master.now_ns)
    cluster.master.delete_unheld()
    assert not any(key[:1] == b"t" for key in cluster.master.catalog)
    assert cluster.step() == []


@pytest.mark.promise("replicas-survive")
def test_target_survives_a_refused_removal(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.ask(2, b"a")
    cluster.arrive(*cluster.step())
    cluster.step()
    removing = cluster.master.directory.removing
    removal = removing.plan(TENANT, [b"a"], force=False)
    cluster.master.commit(removal.ops)
    for node, flag in ((two, b"\1"), (cluster.one, b"\0")):
        cluster.master.commit(removing.dropped(node.node_id, TENANT, [b"a"], [1], flag))
    cluster.node("three", "z", tier=tier_of(capacity_bytes=1000, used_bytes=1000))
    assert cluster.step() == [], "whoever has it may yet drop it"
    removing.over(TENANT, removal)
    [order] = cluster.step()
    assert (order.keys, order.node_id, order.source_node_id) == ([b"a"], two.node_id, cluster.one.node_id)
    assert any(key[:1] == b"t" for key in cluster.master.catalog), "over a restart of the master too"


def test_nothing_is_copied_of_what_only_the_catalog_tells_of(cluster: Cluster) -> None:
    cluster.ask(2)
    cluster.node("two", "y")
    cluster.master.directory.register(NodeInfo("one", 1, tcp="x:1"), (ROOM,), cluster.master.now_ns)
    assert cluster.step() == []


@pytest.mark.promise("last-replica-last")
def test_less_busy_node_gets_the_copies(cluster: Cluster) -> None:
    nodes = [cluster.node(name, name) for name in ("two", "three")]
    assert cluster.ask(2) == [REPLICAS_PENDING] * 3
    nodes[0].load.bytes_s = 1 << 30
    assert [order.node_id for order in cluster.step()] == [nodes[1].node_id]


def test_request_checks_no_unplaced_blocks(cluster: Cluster) -> None:
    """A cache is full for ever, and requests come by the hundred."""
    two = cluster.node("two", "y", tier=tier_of(capacity_bytes=1000, used_bytes=990))
    cluster.ask(2, b"a", b"b")
    assert cluster.step() == []
    two.tiers = (ROOM,)
    cluster.ask(2, b"c")
    [order] = cluster.step(PAUSE_NS, is_periodic=False)
    assert order.keys == [b"c"]
    cluster.node("three", "z")
    assert cluster.step(is_periodic=False) == []
    assert sorted(key for order in cluster.step() for key in order.keys) == [b"a", b"b"]


def test_partly_placed_block_waits_for_its_other_copy(cluster: Cluster) -> None:
    """Due and walked over in the same step."""
    two = cluster.node("two", "y")
    three = cluster.node("three", "z", tier=tier_of(capacity_bytes=1000, used_bytes=1000))
    cluster.ask(3, b"a")
    assert [order.node_id for order in cluster.step()] == [two.node_id]
    three.tiers = (ROOM,)
    assert [order.node_id for order in cluster.step(PAUSE_NS)] == [three.node_id]


def test_evicted_replica_is_restored_on_request(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.ask(2, b"a")
    cluster.arrive(*cluster.step())
    cluster.step()
    cluster.master.publish(two, Event(b"a", 1, kind=EVENT_REMOVED))
    assert cluster.ask(2, b"a") == cluster.ask(2, b"a") == [REPLICAS_PENDING]
    [order] = cluster.step()
    assert (order.node_id, order.keys) == (two.node_id, [b"a"])
    assert cluster.ask(2, b"a") == [REPLICAS_PENDING]
    assert cluster.step() == [], "it is on its way"
    cluster.arrive(order)
    assert cluster.ask(2, b"a") == [REPLICAS_REACHED]


def test_who_asks_again_does_not_hasten_what_has_found_no_room(cluster: Cluster) -> None:
    two = cluster.node("two", "y", tier=tier_of(capacity_bytes=1000, used_bytes=990))
    cluster.ask(2, b"a")
    assert cluster.step() == []
    two.tiers = (ROOM,)
    assert cluster.ask(2, b"a") == [REPLICAS_PENDING]
    assert cluster.step(PAUSE_NS - 1) == []
    assert len(cluster.step(1)) == 1
