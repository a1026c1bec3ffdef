"""Tests of spilled_blocks.py: what a node without room offers goes to one that has some, which then keeps it."""

import pytest

from kvstore.master.directory.bounds import DirectoryLimits
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement import spilled_blocks as module
from kvstore.master.directory.placement.copies import REFUSED_NS, CopyLimits, CopyOrder
from tests.master.blocks import TENANT, Event, die, tier_of
from tests.master.directory.placement.copying import KEYS, Copying

SIZE = 100
FREE_SHARE = 0.5
FULL = tier_of(capacity_bytes=100_000, used_bytes=100_000)


class Cluster(Copying):
    """Whose node `one` is full."""

    def __init__(self, pace: CopyLimits | None = None, free_share: float = FREE_SHARE) -> None:
        super().__init__(DirectoryLimits(pace=pace or CopyLimits(), spill_free_share=free_share), tier=FULL)

    def may_evict(self, node: NodeMember | None = None) -> bytes:
        node = node or self.one
        return self.master.directory.last_replicas.may_evict(node.node_id, node.epoch, TENANT, KEYS)

    def offer(self, *keys: bytes, node: NodeMember | None = None) -> None:
        """Handle a QueryVictims as the master does."""
        node = node or self.one
        spill = bytes(key in (keys or KEYS) for key in KEYS)
        self.master.directory.spiller.offered(node.node_id, TENANT, KEYS, spill, self.may_evict(node))

    def step(self, passed_ns: int = 0) -> list[CopyOrder]:
        return self.ordered(passed_ns, self.master.directory.spiller.step)

    def spill(self, *keys: bytes) -> None:
        """Until it has arrived."""
        self.offer(*keys)
        for order in self.step():
            self.arrive(order)
        assert self.step() == []


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.mark.promise("last-replica-last")
def test_a_guests_node_keeps_it_and_its_source_may_let_it_go(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.offer()
    [order] = cluster.step()
    assert (order.node_id, order.source_node_id, order.keys) == (two.node_id, cluster.one.node_id, KEYS)
    assert cluster.step() == [], "it is on its way"
    assert cluster.may_evict() == bytes(3)
    cluster.arrive(order)
    assert cluster.step() == []
    assert (cluster.may_evict(), cluster.may_evict(two)) == (b"\1\1\1", bytes(3)), "whatever the generations say"
    spiller = cluster.master.directory.spiller
    assert (spiller.spilled_blocks, spiller.spilled_bytes) == (3, 3 * SIZE)
    assert two.reserved_bytes == 3 * SIZE, "until it says itself how much is used"
    cluster.offer()
    assert cluster.step() == [], "it is elsewhere"


def test_spill_share_is_half_of_the_receivers_free_share(cluster: Cluster) -> None:
    assert cluster.master.directory.spiller.at_share == FREE_SHARE / 2
    off = Cluster(free_share=0.0)
    off.node("two", "y")
    off.offer()
    assert (off.step(), off.master.directory.spiller.at_share) == ([], 0.0)


def test_only_what_is_offered_is_copied(cluster: Cluster) -> None:
    cluster.node("two", "y")
    cluster.offer(b"b")
    assert [order.keys for order in cluster.step()] == [[b"b"]]


def test_receivers_keep_their_free_share(cluster: Cluster) -> None:
    cluster.node("two", "y", tier=tier_of(capacity_bytes=100_000, used_bytes=50_000 - 2 * SIZE))
    cluster.offer()
    [order] = cluster.step()
    assert order.keys == KEYS[:2]
    cluster.arrive(order)
    assert cluster.step() == []
    cluster.offer(b"c")
    assert cluster.step() == [], "its heartbeat has not told of the first two yet, and they count all the same"
    cluster.node("three", "z")
    cluster.offer(b"c")
    assert [order.keys for order in cluster.step()] == [[b"c"]]


def test_spill_prefers_another_host(cluster: Cluster) -> None:
    near = cluster.node("near", "x", tier=tier_of(capacity_bytes=10_000_000))
    cluster.offer(b"a")
    assert [order.node_id for order in cluster.step()] == [near.node_id]
    far = cluster.node("far", "y")
    cluster.offer(b"b")
    assert [order.node_id for order in cluster.step()] == [far.node_id]


def test_nodes_that_take_no_blocks_get_none(cluster: Cluster) -> None:
    cluster.node("drained", "z")
    cluster.master.commit(cluster.master.directory.drains.begin("drained", "peers"))
    cluster.offer()
    assert cluster.step() == []


def test_failed_spill_marks_the_receiver_full(cluster: Cluster) -> None:
    cluster.node("two", "y")
    cluster.offer(b"a")
    [order] = cluster.step()
    cluster.arrive(order, has_room=False)
    cluster.offer(b"a")
    assert cluster.step() == []
    assert cluster.may_evict() == bytes(3)
    assert cluster.master.directory.spiller.spilled_blocks == 0
    cluster.offer(b"a")
    assert len(cluster.step(REFUSED_NS)) == 1


def test_so_much_is_on_its_way_at_once() -> None:
    cluster = Cluster(CopyLimits(blocks=2))
    cluster.node("two", "y")
    cluster.offer()
    [order] = cluster.step()
    assert order.keys == KEYS[:2]
    assert cluster.step() == []
    cluster.arrive(order)
    assert [order.keys for order in cluster.step()] == [KEYS[2:]]
    slow = Cluster(CopyLimits(rows=1))
    slow.node("two", "y")
    slow.offer()
    assert [[order.keys for order in slow.step()] for _ in KEYS] == [[[key]] for key in KEYS]


def test_what_has_changed_since_it_was_offered_is_left_alone(cluster: Cluster) -> None:
    cluster.node("two", "y")
    cluster.offer()
    cluster.gone(cluster.one, b"a")
    cluster.node("three", "z", Event(b"b", 2))
    cluster.master.directory.replication.plan(TENANT, [b"c"], node_id=2, source_node_id=1, now_ns=0)
    assert cluster.step() == [], "a is gone, b at another node, c on its way"
    cluster.offer(b"c")
    die(cluster.master, cluster.one)
    assert cluster.step() == []


def test_gone_tenant_has_nothing_to_spill(cluster: Cluster) -> None:
    cluster.node("two", "y")
    cluster.spill(b"a")
    cluster.offer(b"b")
    [order] = cluster.step()
    cluster.offer(b"c")
    cluster.master.remove(*KEYS)
    cluster.master.directory.run_due(cluster.master.now_ns)
    cluster.arrive(order)
    assert cluster.step() == []
    assert cluster.master.directory.spiller.spilled_blocks == 1


def test_a_node_that_is_forgotten_has_no_guests(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.offer(b"a")
    [order] = cluster.step()
    cluster.arrive(order)
    die(cluster.master, two)
    cluster.master.forget("two")
    assert cluster.step() == []
    assert cluster.master.directory.spiller.spilled_blocks == 0


def test_spilled_block_goes_beside_its_replicas(cluster: Cluster) -> None:
    cluster.node("two", "y", Event(b"a", 1))
    three = cluster.node("three", "z")
    cluster.master.commit(cluster.master.directory.targets.ask(TENANT, [b"a"], 2).ops)
    cluster.spill(b"a")
    assert cluster.may_evict()[0] == 1
    assert cluster.may_evict(three)[0] == 0


def test_spilled_blocks_are_known_while_at_their_source(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_GUESTS", 2)
    two = cluster.node("two", "y")
    cluster.spill()
    guests = cluster.master.directory.spiller.guests
    assert list(guests) == [(TENANT, b"b"), (TENANT, b"c")]
    cluster.gone(cluster.one, b"b")
    cluster.gone(two, b"c")
    cluster.step()
    assert guests == {}
