"""Tests of hot_copies.py: what other hosts read much is at more nodes, as many as its reads are worth and no more, while they last."""

import pytest

from kvstore.master.directory.bounds import DirectoryLimits, HotCopyLimits
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement import hot_copies as module
from kvstore.master.directory.placement.copies import CopyLimits, CopyOrder
from kvstore.master.directory.placement.hot_copies import RETRY_NS, ROUND_NS
from kvstore.protocol import control_pb2 as pb
from tests.master.blocks import TENANT, Event, die, tier_of
from tests.master.directory.placement.copying import KEYS, Copying

SIZE = 100
HOT = 10.0
"""Reads a second that are worth a copy."""
FULL = tier_of(capacity_bytes=100_000, used_bytes=95_000)
"""As full as a node may be that gets no copies."""


class Cluster(Copying):
    """Each of its blocks is the parent of the next."""

    def __init__(self, copies: int = 1, pace: CopyLimits | None = None) -> None:
        super().__init__(DirectoryLimits(pace=pace or CopyLimits(), spread=HotCopyLimits(copies, HOT)), parents=[b"", *KEYS[:2]])
        self.hot_copies = self.master.directory.hot_copies

    def read(self, node: NodeMember | None = None, /, **remote_reads_per_s: float) -> None:
        """A node's report: reads by other hosts at these rates, and far more in total."""
        block_heat, node = self.master.directory.block_heat, node or self.one
        block_heat.request_reports(self.master.now_ns)
        block_heat.blocks_to_report(node.node_id, 1, self.master.now_ns)
        rates = list(remote_reads_per_s.values())
        keys = [key.encode() for key in remote_reads_per_s]
        report = pb.HotBlocks(tenant=TENANT, keys=keys, reads_per_s=[100 * HOT] * len(rates), remote_reads_per_s=rates)
        block_heat.take(node.node_id, [report], self.master.now_ns)

    def step(self, passed_ns: int = 0) -> list[CopyOrder]:
        return self.ordered(passed_ns, self.hot_copies.step)

    def round(self) -> list[CopyOrder]:
        """The next round, which is over with a step."""
        return self.step(ROUND_NS)

    def spread(self, **remote_reads_per_s: float) -> None:
        """Until all copies have arrived."""
        self.read(**remote_reads_per_s)
        while orders := self.round():
            self.arrive(*orders)

    def may_evict(self, *nodes: NodeMember) -> list[bool]:
        """For each node: may block a be evicted first?"""
        last_replicas = self.master.directory.last_replicas
        return [last_replicas.may_evict(node.node_id, node.epoch, TENANT, KEYS[:1]) == b"\1" for node in nodes]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_block_read_by_other_hosts_gets_a_copy(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.read(a=HOT, b=HOT - 0.1)
    [order] = cluster.step()
    assert order == (TENANT, [b"a"], two.node_id, cluster.one.node_id)
    assert cluster.round() == [], "it is on its way"
    cluster.arrive(order)
    assert cluster.round() == []
    assert cluster.holders() == [1, 2]
    assert (cluster.hot_copies.hot_blocks, cluster.hot_copies.copied_blocks, cluster.hot_copies.copied_bytes) == (1, 1, SIZE)
    assert two.reserved_bytes == SIZE, "until it says itself how much is used"


def test_hot_copies_are_off_by_default() -> None:
    off = Cluster(copies=0)
    off.node("two", "y")
    off.read(a=100 * HOT)
    assert off.round() == []
    asked = Cluster(copies=0).master.directory
    asked.hot_copies.step(0)
    assert asked.block_heat.blocks_to_report(1, 1, 0) == 0
    on = Cluster().master.directory
    on.hot_copies.step(0)
    assert on.block_heat.blocks_to_report(1, 1, 0) > 0


@pytest.mark.promise("last-replica-last")
def test_copies_follow_reads_one_by_one_up_to_the_limit() -> None:
    cluster = Cluster(copies=2)
    for name in ("two", "three", "four", "five"):
        cluster.node(name, name)
    cluster.read(a=1.5 * HOT)
    [order] = cluster.step()
    cluster.arrive(order)
    assert cluster.round() == []
    receiver = cluster.master.directory.members.get(order.node_id)
    cluster.read(receiver, a=0.5 * HOT)
    [order] = cluster.round()
    cluster.arrive(order)
    cluster.read(a=100 * HOT)
    assert cluster.round() == []
    assert len(cluster.holders()) == 3


def test_who_has_it_anyway_counts_for_a_copy(cluster: Cluster) -> None:
    two, three = cluster.node("two", "y", Event(b"a", 1)), cluster.node("three", "z")
    cluster.read(a=HOT)
    assert cluster.step() == []
    cluster.master.commit(cluster.master.directory.drains.begin("two", "peers"))
    assert [order.node_id for order in cluster.round()] == [three.node_id], "one that is to be stopped does not"
    assert two.drain


@pytest.mark.promise("last-replica-last")
def test_nodes_that_are_nearly_full_drained_or_dead_get_none(cluster: Cluster) -> None:
    cluster.node("full", "y", tier=FULL)
    cluster.node("drained", "z")
    cluster.master.commit(cluster.master.directory.drains.begin("drained", "peers"))
    die(cluster.master, cluster.node("dead", "w"))
    cluster.read(a=HOT)
    assert cluster.step() == []
    node = cluster.node("two", "y")
    assert [order.node_id for order in cluster.round()] == [node.node_id]


def test_replica_prefers_another_host(cluster: Cluster) -> None:
    near = cluster.node("near", "x", tier=tier_of(capacity_bytes=10_000_000))
    cluster.read(a=HOT)
    assert [order.node_id for order in cluster.step()] == [near.node_id]
    far = cluster.node("far", "y")
    cluster.read(a=HOT, b=HOT)
    assert [(order.keys, order.node_id) for order in cluster.round()] == [([b"b"], far.node_id)]


def test_chain_goes_to_one_node(cluster: Cluster) -> None:
    together = Cluster()
    for name in ("two", "three", "four", "five"):
        cluster.node(name, name)
        together.node(name, name)
    cluster.spread(a=2 * HOT)
    cluster.spread(a=2 * HOT, b=2 * HOT)
    cluster.spread(a=2 * HOT, b=2 * HOT, c=HOT)
    [place] = {tuple(cluster.holders(key)) for key in KEYS}
    assert len(place) == 2
    together.read(c=2 * HOT, b=2 * HOT, a=2 * HOT)
    assert [order.keys for order in together.step()] == [KEYS]


def test_chains_go_to_different_nodes() -> None:
    places = set()
    cluster = Cluster()
    for name in ("two", "three", "four", "five"):
        cluster.node(name, name)
    for generation in range(10, 40):
        key = b"%d" % generation
        cluster.master.publish(cluster.one, Event(key, generation))
        cluster.read(**{key.decode(): HOT})
        [order] = cluster.round()
        places.add(order.node_id)
    assert places == {2, 3, 4, 5}


@pytest.mark.promise("last-replica-last")
def test_copies_stay_while_hot_and_are_evicted_first_later(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.spread(a=HOT)
    assert cluster.may_evict(cluster.one, two) == [False, False]
    cluster.read(a=0.5 * HOT)
    cluster.round()
    assert cluster.may_evict(cluster.one, two) == [False, False], "not as soon as it falls below what made it hot"
    cluster.read(a=0.4 * HOT)
    cluster.round()
    assert cluster.may_evict(cluster.one, two) == [False, True], "whatever its generation says"
    assert cluster.hot_copies.hot_blocks == 0
    assert cluster.holders() == [1, 2], "nobody deletes it"
    cluster.read(a=0.9 * HOT)
    cluster.round()
    assert cluster.may_evict(cluster.one, two) == [False, True]
    cluster.read(a=HOT)
    assert cluster.round() == []
    assert cluster.may_evict(cluster.one, two) == [False, False]


def test_cooling_block_loses_its_copies_one_by_one() -> None:
    cluster = Cluster(copies=2)
    two, three = cluster.node("two", "y"), cluster.node("three", "z")
    cluster.spread(a=2 * HOT)
    assert len(cluster.holders()) == 3
    cluster.read(a=0.9 * HOT)
    cluster.round()
    assert sorted(cluster.may_evict(cluster.one, two, three)) == [False, False, True]
    assert not cluster.may_evict(cluster.one)[0]
    cluster.read(a=0.0)
    cluster.round()
    assert cluster.may_evict(cluster.one, two, three) == [False, True, True]


def test_a_block_with_replicas_keeps_as_many_when_it_has_cooled(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.spread(a=HOT)
    cluster.master.commit(cluster.master.directory.targets.ask(TENANT, KEYS[:1], 2).ops)
    cluster.read(a=0.0)
    cluster.round()
    assert cluster.may_evict(cluster.one, two) == [False, False]


def test_cooled_block_is_forgotten_with_its_last_copy(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.spread(a=HOT, b=HOT)
    cluster.read(a=0.0, b=HOT)
    cluster.round()
    cluster.gone(two, b"a")
    cluster.round()
    assert list(cluster.hot_copies._hot) == [(TENANT, b"b")]
    cluster.master.remove(b"b")
    cluster.master.publish(two, Event(b"b", 9))
    cluster.round()
    assert cluster.hot_copies._hot[TENANT, b"b"].made_at == set()
    cluster.master.remove(*KEYS)
    cluster.master.directory.run_due(cluster.master.now_ns)
    cluster.round()
    assert cluster.hot_copies._hot == {}, "of a tenant that is gone, too"


def test_refused_copy_delays_the_block_and_the_node(cluster: Cluster) -> None:
    cluster.node("two", "y")
    cluster.read(a=HOT, b=HOT)
    [order] = cluster.step()
    cluster.arrive(order._replace(keys=[b"a"]), has_room=False)
    cluster.arrive(order._replace(keys=[b"b"]))
    cluster.read(a=HOT)
    assert cluster.round() == []
    cluster.read(a=HOT)
    cluster.step(RETRY_NS - ROUND_NS - 1)
    assert cluster.step() == []
    cluster.read(a=HOT)
    assert [order.keys for order in cluster.round()] == [[b"a"]]
    assert cluster.hot_copies.copied_blocks == 1


def test_so_much_is_on_its_way_at_once() -> None:
    cluster = Cluster(pace=CopyLimits(blocks=2))
    cluster.node("two", "y")
    cluster.read(a=3 * HOT, b=2 * HOT, c=HOT)
    [order] = cluster.step()
    assert order.keys == KEYS[:2], "the hottest first"
    assert cluster.round() == []
    cluster.arrive(order)
    assert [order.keys for order in cluster.round()] == [KEYS[2:]]


def test_no_more_becomes_hot_than_the_limit(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HOT", 1)
    cluster.node("two", "y")
    cluster.read(a=2 * HOT, b=HOT)
    assert [order.keys for order in cluster.step()] == [[b"a"]]


def test_unreadable_block_is_not_hot(cluster: Cluster) -> None:
    cluster.node("two", "y")
    cluster.read(z=HOT)
    cluster.step()
    assert cluster.hot_copies.hot_blocks == 0
    die(cluster.master, cluster.one)
    cluster.read(a=HOT)
    assert cluster.round() == []
    cluster.node("one", "x", Event(b"a", 1))
    assert [order.keys for order in cluster.round()] == [[b"a"]]


def test_a_copy_whose_node_is_forgotten_did_not_arrive(cluster: Cluster) -> None:
    two = cluster.node("two", "y")
    cluster.read(a=HOT)
    [order] = cluster.step()
    cluster.arrive(order)
    die(cluster.master, two)
    cluster.master.forget("two")
    assert cluster.round() == []
    assert cluster.hot_copies.copied_blocks == 0
