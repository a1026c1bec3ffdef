"""Tests of last_replica.py: what the master is queried, and that only answers of the present link count."""

from collections.abc import Callable

import pytest

from kvstore.protocol.catalog_messages import QueryVictims
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.session_messages import Flags
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.block_table.replicated_victims import MAX_AGE_NS
from kvstore.store.block_table.tier_view import TierView
from kvstore.store.replication.last_replica import MAX_PAUSE_NS, MIN_PAUSE_NS, LastReplicaQueries, VictimSpiller
from tests.store.tables import Store

SIZE = 100

BLOCKS = 20


class Asking:
    """The node's side over a tier that is full, and a master that answers on the test's command."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now_ns = 0
        self.asked: list[tuple[QueryVictims, Callable[[Flags | KVStoreError], None]]] = []
        self.victim_queries = LastReplicaQueries(store.table.lowest, PartitionMap(), clock_ns=lambda: self.now_ns)
        for name in "abcdefghij":
            store.put(name, SIZE)

    def link_up(self, epoch: int, *, spill_at_share: float = 0.0) -> None:
        self.victim_queries.link_up(lambda message, answered: self.asked.append((message, answered)), epoch, spill_at_share=spill_at_share)

    @property
    def spares(self) -> int:
        return len(self.store.table.lowest.replicated_victims)


@pytest.fixture
def asking(make_store: Callable[..., Store]) -> Asking:
    return Asking(make_store(10 * SIZE, slab_bytes=10 * SIZE))


def test_the_coldest_blocks_are_queried_once_per_answer(asking: Asking) -> None:
    asking.link_up(5)
    asking.victim_queries.step()
    assert asking.asked == [], "nothing has left yet"
    asking.store.put("k", SIZE)
    asking.victim_queries.step()
    asking.victim_queries.step()
    [(message, answered)] = asking.asked
    assert message == QueryVictims(5, "red", [bytes((letter,)) for letter in b"bcdefghijk"])
    answered(Flags(bytes(10 * (1,))))
    assert asking.spares == 10
    asking.now_ns += MAX_AGE_NS
    asking.victim_queries.run_due()
    assert asking.spares == 0


@pytest.mark.promise("last-replica-last")
def test_an_answer_of_a_lost_link_is_ignored(asking: Asking) -> None:
    asking.link_up(5)
    asking.store.put("k", SIZE)
    asking.victim_queries.step()
    asking.victim_queries.link_down()
    asking.asked.pop()[1](Flags(bytes(10 * (1,))))
    asking.store.put("l", SIZE)
    asking.victim_queries.step()
    assert (asking.spares, asking.asked) == (0, [])
    asking.link_up(6)
    asking.store.put("m", SIZE)
    asking.victim_queries.step()
    assert [message.epoch for message, _ in asking.asked] == [6]


def test_blocks_are_offered_until_another_node_has_them(asking: Asking) -> None:
    asking.victim_queries.run_due()
    asking.link_up(5, spill_at_share=0.1)
    asking.victim_queries.run_due()
    asking.victim_queries.run_due()
    [(message, answered)] = asking.asked
    assert message == QueryVictims(5, "red", [b"a", b"b"], b"\1\1"), "a quarter of what is here"
    answered(Flags(b"\0\1"))
    assert asking.spares == 1
    asking.victim_queries.run_due()
    assert len(asking.asked) == 1, "there is a pause"
    asking.now_ns += MIN_PAUSE_NS
    asking.victim_queries.run_due()
    assert len(asking.asked) == 2
    asking.now_ns += MIN_PAUSE_NS
    asking.victim_queries.run_due()
    assert len(asking.asked) == 2, "it is asked already"


def test_each_master_is_queried_about_its_own_partition(
    make_store: Callable[..., Store],
) -> None:
    store, partition_map = make_store(10 * SIZE, slab_bytes=10 * SIZE), PartitionMap()
    partition_map.set_count(3)
    for name in "abcdefghij":
        store.put(name, SIZE)
    victim_queries = LastReplicaQueries(store.table.lowest, partition_map, clock_ns=lambda: 0)
    asked: dict[int, tuple[QueryVictims, Callable[[Flags | KVStoreError], None]]] = {}

    def link_up(partition: int) -> None:
        victim_queries.link_up(lambda message, answered: asked.update({partition: (message, answered)}), 5 + partition, partition)

    link_up(0)
    link_up(2)
    store.put("k", SIZE)
    victim_queries.step()
    assert set(asked) == {0, 2}
    for partition, (message, answered) in asked.items():
        assert message.epoch == 5 + partition
        assert {partition_map.of(key) for key in message.keys} == {partition}
        assert len(store.table.lowest.replicated_victims) == 0, "not before all have answered"
        answered(Flags(bytes((1,)) * len(message.keys)))
    keys = [key for message, _answered in asked.values() for key in message.keys]
    assert len(store.table.lowest.replicated_victims) == len(keys) == sum(partition_map.of(b"%c" % letter) != 1 for letter in b"bcdefghijk")
    victim_queries.link_down(0)
    assert len(store.table.lowest.replicated_victims) == 0


class Node:
    """A tier with room for BLOCKS blocks, 19 of which are there, and a clock."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now_ns = 0
        self.lowest: TierView = store.table.lowest
        self.spilling = VictimSpiller(self.lowest, clock_ns=lambda: self.now_ns)
        for number in range(BLOCKS - 1):
            store.put(f"{number:02}", SIZE)

    def is_due(self) -> bool:
        return self.spilling.due_group() is not None

    def pause(self, flags: bytes) -> int:
        """The time from one question to the next, once the first has been answered so."""
        self.spilling.answered(flags)
        begin_ns = self.now_ns
        while not self.is_due():
            self.now_ns += MIN_PAUSE_NS
        return self.now_ns - begin_ns


@pytest.fixture
def node(make_store: Callable[..., Store]) -> Node:
    return Node(make_store(BLOCKS * SIZE, slab_bytes=BLOCKS * SIZE))


def test_blocks_are_offered_only_when_the_tier_is_nearly_full(node: Node) -> None:
    assert not node.is_due()
    node.spilling.begin(0.05)
    assert not node.is_due(), "a twentieth is free"
    assert node.spilling.offered(list(node.store.table.blocks())) == b""
    node.store.put("last", SIZE)
    assert node.is_due()
    assert not node.is_due(), "not before the pause is over"
    node.now_ns += MIN_PAUSE_NS
    assert node.is_due()
    node.spilling.begin(0.0)
    assert not node.is_due()


@pytest.mark.promise("last-replica-last")
def test_a_spilled_block_is_not_offered_again(node: Node) -> None:
    node.spilling.begin(0.1)
    coldest = list(node.store.table.blocks())[:3]
    coldest[1].is_spilled = True
    assert node.spilling.offered(coldest) == b"\1\0\1"


def test_queries_back_off_while_answers_do_not_change(node: Node) -> None:
    node.spilling.begin(0.1)
    assert node.is_due()
    node.now_ns += MIN_PAUSE_NS
    assert node.is_due()
    assert [node.pause(flags) // MIN_PAUSE_NS for flags in (b"\0\0", b"\0\0", b"\0\1", b"\0\1", b"\1\1", b"\1\1")] == [1, 2, 4, 1, 2, 1]
    for _ in range(10):
        last_ns = node.pause(b"\1\1")
    assert last_ns == MAX_PAUSE_NS
