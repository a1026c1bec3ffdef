"""Promises of last_copies.py: what the master is asked, and that no answer but its own counts."""

from collections.abc import Callable

import pytest

from kvstore.protocol.catalog_messages import Coldest
from kvstore.protocol.errors import KVStoreError, Unavailable
from kvstore.protocol.session_messages import Flags
from kvstore.store.blocks.partitioning import Partitioning
from kvstore.store.blocks.spares import ASK_EVERY, MAX_AGE_NS
from kvstore.store.blocks.undecided import UNDECIDED
from kvstore.store.last_copies import MIN_PAUSE_NS, LastCopies
from tests.store.tables import Store

SIZE = 100


class Asking:
    """The node's side over a tier that is full, and a master that answers when it is told to."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.now_ns = 0
        self.asked: list[tuple[Coldest, Callable[[Flags | KVStoreError], None]]] = []
        self.last_copies = LastCopies(store.table.lowest, Partitioning(), clock_ns=lambda: self.now_ns)
        for name in "abcdefghij":
            store.put(name, SIZE)

    def link_up(self, epoch: int, *, spill_at_share: float = 0.0) -> None:
        self.last_copies.link_up(lambda message, answered: self.asked.append((message, answered)), epoch, spill_at_share=spill_at_share)

    @property
    def spares(self) -> int:
        return len(self.store.table.lowest.spares)


@pytest.fixture
def asking(make_store: Callable[..., Store]) -> Asking:
    return Asking(make_store(10 * SIZE, slab_bytes=10 * SIZE))


def test_the_master_is_asked_once_about_the_coldest_and_its_answer_counts_for_a_while(asking: Asking) -> None:
    asking.link_up(5)
    asking.last_copies.step()
    assert asking.asked == [], "nothing has left yet"
    asking.store.put("k", SIZE)
    asking.last_copies.step()
    asking.last_copies.step()
    [(message, answered)] = asking.asked
    assert message == Coldest(5, "red", [bytes((letter,)) for letter in b"bcdefghijk"])
    answered(Flags(bytes(10 * (1,))))
    assert asking.spares == 10
    asking.now_ns += MAX_AGE_NS
    asking.last_copies.tick()
    assert asking.spares == 0


@pytest.mark.parametrize("reply", [Flags(b"\1"), Unavailable("the link broke")])
def test_an_answer_that_is_none_names_no_spares(asking: Asking, reply: Flags | KVStoreError) -> None:
    asking.link_up(5)
    asking.store.put("k", SIZE)
    asking.last_copies.step()
    asking.asked.pop()[1](reply)
    assert asking.spares == 0


def test_an_answer_of_a_link_that_is_gone_is_not_believed(asking: Asking) -> None:
    asking.link_up(5)
    asking.store.put("k", SIZE)
    asking.last_copies.step()
    asking.last_copies.link_down()
    asking.asked.pop()[1](Flags(bytes(10 * (1,))))
    asking.store.put("l", SIZE)
    asking.last_copies.step()
    assert (asking.spares, asking.asked) == (0, [])
    asking.link_up(6)
    asking.store.put("m", SIZE)
    asking.last_copies.step()
    assert [message.epoch for message, _ in asking.asked] == [6]


def test_where_all_that_is_cold_is_in_use_nobody_is_asked(asking: Asking) -> None:
    asking.link_up(5)
    asking.store.put("k", SIZE)
    for block in asking.store.table.blocks():
        block.pinned = True
    asking.last_copies.step()
    assert asking.asked == []
    for block in asking.store.table.blocks():
        block.pinned = False
    for number in range(2 * ASK_EVERY):
        asking.store.put(f"more {number}", SIZE)
    asking.last_copies.step()
    assert len(asking.asked) == 1


def test_what_is_to_be_spilled_is_said_before_anything_leaves_and_until_it_is_elsewhere(asking: Asking) -> None:
    asking.last_copies.tick()
    asking.link_up(5, spill_at_share=0.1)
    asking.last_copies.tick()
    asking.last_copies.tick()
    [(message, answered)] = asking.asked
    assert message == Coldest(5, "red", [b"a", b"b"], b"\1\1"), "a quarter of what is here"
    answered(Flags(b"\0\1"))
    assert asking.spares == 1
    asking.last_copies.tick()
    assert len(asking.asked) == 1, "there is a pause"
    asking.now_ns += MIN_PAUSE_NS
    asking.last_copies.tick()
    assert len(asking.asked) == 2
    asking.now_ns += MIN_PAUSE_NS
    asking.last_copies.tick()
    assert len(asking.asked) == 2, "it is asked already"


def test_what_is_asked_as_blocks_leave_says_what_is_to_be_spilled_too(asking: Asking) -> None:
    asking.link_up(5, spill_at_share=0.1)
    asking.store.put("k", SIZE)
    asking.last_copies.step()
    assert [message.spill for message, _ in asking.asked] == [b"\1\1" + bytes(8)]


def test_what_the_master_does_not_know_is_not_spilled(asking: Asking) -> None:
    asking.link_up(5, spill_at_share=0.1)
    generations = [(block, block.generation) for block in asking.store.table.blocks()]
    for block, _ in generations:
        block.generation = UNDECIDED
    asking.last_copies.tick()
    assert asking.asked == []
    for block, generation in generations:
        block.generation = generation


def test_each_partitions_master_is_asked_about_its_own_blocks_as_far_as_there_is_a_link(
    make_store: Callable[..., Store],
) -> None:
    store, partitioning = make_store(10 * SIZE, slab_bytes=10 * SIZE), Partitioning()
    partitioning.tell(3)
    for name in "abcdefghij":
        store.put(name, SIZE)
    last_copies = LastCopies(store.table.lowest, partitioning, clock_ns=lambda: 0)
    asked: dict[int, tuple[Coldest, Callable[[Flags | KVStoreError], None]]] = {}

    def link_up(partition: int) -> None:
        last_copies.link_up(lambda message, answered: asked.update({partition: (message, answered)}), 5 + partition, partition)

    link_up(0)
    link_up(2)
    store.put("k", SIZE)
    last_copies.step()
    assert set(asked) == {0, 2}
    for partition, (message, answered) in asked.items():
        assert message.epoch == 5 + partition
        assert {partitioning.of(key) for key in message.keys} == {partition}
        assert len(store.table.lowest.spares) == 0, "not before all have answered"
        answered(Flags(bytes((1,)) * len(message.keys)))
    keys = [key for message, _answered in asked.values() for key in message.keys]
    assert len(store.table.lowest.spares) == len(keys) == sum(partitioning.of(b"%c" % letter) != 1 for letter in b"bcdefghijk")
    last_copies.link_down(0)
    assert len(store.table.lowest.spares) == 0
