"""Tests of retired_blocks.py over real tiers: blocks of retired namespaces are evicted first under each policy."""

from collections.abc import Callable

import pytest

from kvstore.store.block_table.block import DRAM, NVME
from kvstore.tiers.policies.by_name import POLICIES
from tests.store.integrity import check
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
    check(store.table)


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


def test_retired_blocks_are_demoted_and_dropped_first(make_store: MakeStore) -> None:
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
    assert store.table.evictor.free_at_once(store.table.lowest, 100, "red", 6)
    assert store.names() == "cd"
    check(store.table)


def test_a_tenant_at_its_quota_evicts_retired_blocks_first(make_store: MakeStore) -> None:
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
