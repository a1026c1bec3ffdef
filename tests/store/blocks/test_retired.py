"""Promises of retired.py, over real tiers: blocks of retired namespaces leave before others, whatever the policy."""

from collections.abc import Callable

import pytest

from kvstore.store.blocks import eviction, retired
from kvstore.store.blocks.block import DRAM, NVME
from kvstore.tiers.policies.by_name import POLICIES
from tests.store.tables import Store

MakeStore = Callable[..., Store]


def put_in(store: Store, namespace: str, names: str, tenant: str = "red") -> None:
    store.namespace = namespace
    for name in names:
        store.put(name, tenant=tenant)


def walk(store: Store) -> None:
    while store.table.retired.step():
        pass


def retire(store: Store, *namespaces: str, tenant: str = "red") -> None:
    store.table.retired.set({tenant: frozenset(namespaces)} if namespaces else {})
    walk(store)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_retired_blocks_leave_first_under_each_policy(make_store: MakeStore, policy: str) -> None:
    store = make_store(800, policy=policy)
    put_in(store, "new", "abcd")
    put_in(store, "old", "stuv")
    for _ in range(3):
        for name in "stuv":
            store.read("red", name.encode(), 0)
    retire(store, "old")
    put_in(store, "new", "efg")
    assert set("abcdefg") < set(store.names())
    assert len(store.names()) == 8
    put_in(store, "new", "h")
    assert store.names() == "abcdefgh"
    store.table.check_integrity()


def test_blocks_stay_until_their_room_is_needed(make_store: MakeStore) -> None:
    store = make_store(400)
    put_in(store, "old", "abc")
    retire(store, "old")
    assert store.names() == "abc"
    assert store.read("red", b"a", 0) is not None


def test_blocks_that_come_later_are_known_as_they_come(make_store: MakeStore) -> None:
    store = make_store(400)
    retire(store, "old")
    put_in(store, "new", "a")
    put_in(store, "old", "st")
    put_in(store, "new", "bcd")
    assert store.names() == "abcd"


def test_a_namespace_that_is_used_again_is_like_any_other(make_store: MakeStore) -> None:
    store = make_store(400)
    put_in(store, "old", "st")
    retire(store, "old")
    put_in(store, "new", "ab")
    retire(store)
    for name in "st":
        store.read("red", name.encode(), 0)
    put_in(store, "new", "cd")
    assert store.names() == "cdst"


def test_another_tenants_namespace_of_the_name_is_not_retired(make_store: MakeStore) -> None:
    store = make_store(800, slab_bytes=400)
    put_in(store, "old", "ab", tenant="blue")
    put_in(store, "old", "st")
    retire(store, "old", tenant="blue")
    assert [store.table.retired.holds(block) for block in store.table.blocks()] == [
        block.tenant == "blue" for block in store.table.blocks()
    ]


def test_a_retired_block_in_use_is_passed_by(make_store: MakeStore) -> None:
    store = make_store(400)
    put_in(store, "old", "st")
    put_in(store, "new", "ab")
    retire(store, "old")
    leased = store.table.find("red", b"s")
    assert leased is not None
    store.table.copies.acquire(leased)
    put_in(store, "new", "c")
    assert store.names() == "abcs"
    put_in(store, "new", "d")
    assert store.names() == "bcds"
    store.table.copies.release(leased)
    put_in(store, "new", "e")
    assert store.names() == "bcde"


def test_retired_blocks_go_down_first_and_leave_the_lowest_tier_first(make_store: MakeStore) -> None:
    store = make_store(400, nvme_bytes=3 * 4096)
    put_in(store, "new", "ab")
    put_in(store, "old", "st")
    retire(store, "old")
    assert store.try_put("c") is None
    store.settle()
    first = next(block for block in store.table.blocks() if block.is_in(NVME))
    assert (first.namespace, first.is_in(DRAM)) == ("old", False)


def test_the_beginning_of_a_prompt_stays_longest(make_store: MakeStore) -> None:
    store = make_store(400)
    put_in(store, "old", "abcd")
    retire(store, "old")
    left = []
    for name in "wxy":
        put_in(store, "new", name)
        left.append(store.names())
    assert left == ["abcw", "abwx", "awxy"]


def test_a_batch_takes_retired_blocks_first(make_store: MakeStore) -> None:
    store = make_store(800)
    put_in(store, "new", "abcd")
    put_in(store, "old", "stuv")
    retire(store, "old")
    for name in "stuv":
        store.read("red", name.encode(), 0)
    assert store.table.room.free_at_once(store.table.lowest, 100, "red", 6)
    assert store.names() == "cd"
    store.table.check_integrity()


def test_a_tenant_at_its_limit_gives_up_retired_blocks_of_other_sizes_first(make_store: MakeStore) -> None:
    store = make_store(2000, slab_bytes=200)
    put_in(store, "new", "ab")
    store.namespace = "old"
    store.put("s", 200)
    retire(store, "old")
    level = store.table.lowest
    assert [block.key for block in level.own_victims(100, "red")] == [b"s"]
    found = level.order.next_coldest(lambda _block: True, 9, "red")
    assert [block.key for block in found] == [b"s", b"a", b"b"]
    assert [block.key for block in level.order.next_coldest(lambda _block: True, 9)] == [b"a", b"b", b"s"]


def test_the_walk_goes_on_where_it_was_when_more_is_retired(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retired, "WALKED", 1)
    store = make_store(800, slab_bytes=400)
    put_in(store, "old", "st")
    put_in(store, "older", "uv")
    put_in(store, "old", "x", tenant="blue")
    blocks = store.table.retired
    blocks.set({"red": frozenset({"old"}), "gone": frozenset({"old"})})
    assert blocks.step()
    blocks.set({"red": frozenset({"old", "older"})})
    walk(store)
    order = store.table.lowest.order
    assert sum(len(members.retired) for members in order._groups.values()) == 4
    blocks.set({"red": frozenset({"old"})})
    assert not blocks.step(), "what is retired no more needs no walk"


def test_a_block_that_left_before_the_walk_came_by_is_not_retired(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retired, "WALKED", 1)
    store = make_store(400)
    put_in(store, "old", "st")
    store.table.retired.set({"red": frozenset({"old"})})
    store.table.retired.step()
    for name in "st":
        block = store.table.find("red", name.encode())
        assert block is not None
        store.table.copies.drop(block)
    walk(store)
    assert len(store.table.lowest.order) == 0


def test_retired_blocks_that_may_not_leave_are_looked_at_a_few_at_a_time(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "MAX_RETIRED_ASKED", 2)
    store = make_store(800)
    put_in(store, "old", "vuts")
    retire(store, "old")
    order, group = store.table.lowest.order, store.dram.group(100, tenant="red")
    asked: list[bytes] = []

    def only_v(block: object) -> bool:
        asked.append(block.key)  # type: ignore[attr-defined]
        return bool(asked[-1] == b"v")

    found = [order.retired_victim(group, only_v) for _ in range(2)]
    assert [block.key if block is not None else None for block in found] == [None, b"v"]
    assert order.retired_victim(77, only_v) is None
