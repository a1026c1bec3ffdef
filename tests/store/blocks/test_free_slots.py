"""Promises of free_slots.py: slots for new blocks are those that are free, or of the coldest, and come back where no put has them."""

from collections.abc import Callable

from tests.store.tables import Store

MakeStore = Callable[..., Store]


def test_spare_slots_are_nobodys_and_come_back(make_store: MakeStore) -> None:
    store = make_store(1000, slab_bytes=300)
    store.put("a")
    spare = store.table.slots.spare_slots("red", 100, 20)
    assert len({slot.index for slot in spare}) == 9
    assert store.table.slots.spare_slots("red", 100, 1) == []
    assert store.names() == "a"
    store.table.slots.give_back(spare)
    assert store.dram.used_bytes == 100
    store.table.check_integrity()


def test_for_free_slots_the_coldest_leave(make_store: MakeStore) -> None:
    store = make_store(1000)
    for name in "abcdefghij":
        store.put(name)
    store.read("red", b"a", 0)
    found = store.table.slots.free_slots("red", 100, 3)
    assert len(found) == 3
    assert store.names() == "aefghij"
    store.table.slots.give_back(found)
    store.table.check_integrity()


def test_for_a_guest_nobody_leaves(make_store: MakeStore) -> None:
    store = make_store(200)
    slot = store.table.slots.guest_slot("red", 100)
    assert slot is not None
    store.table.slots.give_back([slot])
    store.put("a")
    store.put("b")
    assert store.table.slots.guest_slot("red", 100) is None
    assert store.names() == "ab"
