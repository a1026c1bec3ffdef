"""Tests of last_replica.py: what the master is queried, and that only answers of the present link count."""

from collections.abc import Callable

import pytest

from kvstore.protocol.catalog_messages import QueryVictims
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.session_messages import Flags
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.block_table.replicated_victims import MAX_AGE_NS
from kvstore.store.replication.last_replica import LastReplicaQueries
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

    def link_up(self, epoch: int) -> None:
        self.victim_queries.link_up(lambda message, answered: self.asked.append((message, answered)), epoch)

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
