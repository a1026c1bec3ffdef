"""Promises of crowding.py, by the block table around it."""

from collections.abc import Callable

import pytest

from kvstore.security.quotas.quota import Quota, Quotas
from kvstore.store.blocks import quotas as crowding
from kvstore.store.blocks import room
from tests.store.tables import Store

MakeStore = Callable[..., Store]


def test_a_place_is_made_by_the_coldest_of_all_where_only_all_together_are_limited(make_store: MakeStore) -> None:
    store = make_store(1000, max_blocks=2, slab_bytes=100)
    store.put("a", tenant="blue")
    store.put("b")
    assert store.table.slots.spare_slots("red", 100, 5) == []
    store.put("c")
    assert store.names() == "bc"
    for block in store.table.blocks():
        block.pinned = True
    assert store.try_put("d") is None


def test_a_hold_ends_where_nothing_else_can_leave_for_the_next(make_store: MakeStore) -> None:
    store = make_store(1000, max_blocks=2, slab_bytes=100)
    store.put("a").pinned = True
    held = store.put("b")
    assert store.holds.add("owner", "red", 1, [held], until_ns=10, now_ns=0) == [True]
    store.put("c")
    assert (store.names(), store.holds.yielded) == ("ac", 1)


def test_surplus_blocks_of_a_tenant_leave_in_the_background_and_no_others(make_store: MakeStore) -> None:
    store = make_store(1000, slab_bytes=100)
    store.put("z", tenant="blue")
    for name in "abcd":
        store.put(name)
    store.read("red", b"a", 0)
    first = store.table.find("red", b"b")
    assert first is not None
    first.pinned = True
    store.table.quotas.set(Quotas(tenants={"red": Quota(blocks=1), "blue": Quota(blocks=1)}))
    store.table.relieve()
    assert store.names() == "bz"
    assert store.table.quotas.crowded == set()
    assert store.table.slots.spare_slots("red", 100, 3) == []


def test_a_tenant_with_as_many_as_it_may_gives_its_own_coldest_for_the_next(make_store: MakeStore) -> None:
    store = make_store(1000, slab_bytes=100)
    store.table.quotas.set(Quotas(tenants={"red": Quota(blocks=1)}))
    store.put("z", tenant="blue")
    store.put("a")
    store.put("b").pinned = True
    assert store.names() == "bz"
    assert store.try_put("c") is None


def test_blocks_that_cannot_leave_keep_their_tenant_crowded(make_store: MakeStore) -> None:
    store = make_store(1000, slab_bytes=100)
    for name in "ab":
        store.put(name).pinned = True
    store.table.quotas.set(Quotas(Quota(blocks=1)))
    store.table.relieve()
    assert (store.names(), store.table.quotas.crowded) == ("ab", {"red"})
    store.table.blocks_of("red")[0].pinned = False
    store.table.relieve()
    assert len(store.names()) == 2, "they are looked at once a tick"
    store.table.expire(now_ns=0)
    store.table.relieve()
    assert (len(store.names()), store.table.quotas.crowded) == (1, set())


def test_so_many_leave_at_once_and_the_others_by_the_next_calls(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(1000, slab_bytes=100)
    for name in "abcd":
        store.put(name)
    monkeypatch.setattr(crowding, "SURPLUS_BLOCKS", 2)
    store.table.quotas.set(Quotas(Quota(blocks=1)))
    store.table.relieve()
    assert store.names() == "cd"
    store.table.relieve()
    assert store.names() == "d"


def test_a_put_of_a_tenant_that_has_far_more_than_it_may_takes_so_many_in_a_turn_and_waits(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "EXTRA_BLOCKS", 3)
    store = make_store(1000, slab_bytes=100)
    for name in "abcdefg":
        store.put(name)
    store.table.quotas.set(Quotas(Quota(blocks=2)))
    assert store.try_put("x") is None
    assert store.names() == "defg"
    assert store.try_put("x") is None
    assert store.names() == "defg", "no more in this turn"
    assert store.table.room.next_turn(), "somebody wants more"
    assert store.try_put("x") is not None
    assert store.names() == "gx"
    for name in "pqrst":
        store.put(name)
    assert store.names() == "st", "one for one counts for nothing"
    assert not store.table.room.next_turn()
