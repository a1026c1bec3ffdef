"""Tests of limits.py, alone and with the block table: how much memory a tenant with few bytes can occupy."""

from collections.abc import Callable, Iterator

import pytest

from kvstore.security.quotas.quota import Quota, Quotas
from kvstore.store.block_table import tier_view as level
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.limits import SlabLimits
from kvstore.tiers.dram import DramTier
from tests.store.integrity import check
from tests.store.tables import Store

MakeStore = Callable[..., Store]


@pytest.fixture
def tier() -> Iterator[DramTier]:
    opened = DramTier(1000, slab_bytes=100)
    yield opened
    opened.close()


def limit(store: Store, tenant: str = "red", **limits: int) -> None:
    store.table.quotas.set(Quotas(tenants={tenant: Quota(**limits)}))


def test_a_tenant_at_its_slab_limit_lacks_a_slab(tier: DramTier) -> None:
    limits = SlabLimits(tier)
    limits.set({"red": 2, "green": None}, 1)
    slots = [tier.allocate(size_bytes, tenant="red") for size_bytes in (100, 50)]
    assert limits.held() == {"red": 2}
    assert [limits.lacks(size_bytes, "red") for size_bytes in (100, 50, 10)] == [True, False, True], "a slot of 50 is left"
    assert [limits.lacks(100, tenant) for tenant in ("green", "blue")] == [False, False]
    tier.allocate(100, tenant="blue")
    assert limits.lacks(100, "blue")
    tier.quarantine(slots[0])
    assert limits.lacks(100, "red"), "somebody may be reading it"
    tier.release(slots[0])
    assert (limits.lacks(100, "red"), limits.held()) == (False, {"red": 1, "blue": 1})


@pytest.mark.promise("tenant-quotas")
def test_slab_limit_bounds_a_tenant_with_many_sizes(make_store: MakeStore) -> None:
    store = make_store(1000, slab_bytes=100)
    limit(store, dram_slabs=3, dram_bytes=1000)
    for size_bytes in (11, 12, 13):
        store.put(f"{size_bytes}", size_bytes).pinned = True
    assert store.try_put("14", 14) is None
    assert [store.put(name, tenant="blue").dram is not None for name in "abcdefg"] == [True] * 7, "all that is left is blue's"
    assert len(list(store.table.blocks())) == 10
    assert {tenant: use.slabs for tenant, use in store.table.quotas.use().items()} == {"red": (0, 3), "blue": (0, 7)}
    check(store.table)


@pytest.mark.promise("tenant-quotas")
def test_a_tenant_at_its_limit_empties_its_coldest_slab(make_store: MakeStore) -> None:
    store = make_store(1000, slab_bytes=100)
    limit(store, dram_slabs=2)
    store.put("z", tenant="blue")
    for name, size_bytes in (("a", 50), ("b", 50), ("c", 30), ("d", 30)):
        store.put(name, size_bytes)
    for name in "ab":
        store.read("red", name.encode(), 0)
    store.put("e", 20)
    assert store.names() == "abez", "what was read least lately has left with all of its slab"
    assert [counts.quota_evictions for _, _, counts, _ in store.table.levels()] == [2]
    check(store.table)


def test_an_unevictable_slab_stays(make_store: MakeStore) -> None:
    store = make_store(1000, slab_bytes=100)
    limit(store, dram_slabs=2)
    store.put("a", 30)
    store.put("b", 30).pinned = True
    store.put("c", 100).pinned = True
    assert store.try_put("d", 100) is None, "nothing of that size may leave, and nobody leaves for nothing"
    assert store.names() == "abc"
    limit(store, dram_slabs=3)
    store.put("d", 100)
    store.put("e", 100)
    assert store.names() == "abce"


@pytest.mark.promise("tenant-quotas")
@pytest.mark.parametrize("nvme_bytes", [0, 1000])
def test_a_lowered_slab_limit_empties_the_coldest_slabs(make_store: MakeStore, nvme_bytes: int) -> None:
    store = make_store(1000, nvme_bytes=nvme_bytes, slab_bytes=100)
    store.put("z", tenant="blue")
    for name, size_bytes in (("a", 50), ("b", 50), ("c", 30), ("d", 20)):
        store.put(name, size_bytes)
    limit(store, dram_slabs=1)
    for _ in range(4):
        store.table.demote_to_low_watermark()
        store.settle()
    assert store.table.quotas.use()["red"].slabs == (0, 1)
    assert store.names() == ("abcdz" if nvme_bytes else "dz")
    assert store.table._ingest_tier.slab_limits.over_quota == set()


def test_a_tenant_over_its_slab_limit_is_evicted_first(make_store: MakeStore) -> None:
    store = make_store(400, slab_bytes=100)
    for name, tenant in (("y", "blue"), ("z", "blue"), ("a", "red"), ("b", "red")):
        store.put(name, tenant=tenant)
    limit(store, dram_slabs=1)
    store.put("x", tenant="blue")
    assert store.names() == "bxyz"


@pytest.mark.promise("tenant-quotas")
def test_the_search_for_a_slab_to_empty_is_bounded(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(2000, slab_bytes=100)
    for number in range(10):
        store.put(f"{2 * number}", 50)
        store.put(f"{2 * number + 1}", 50).pinned = True
    store.put("a", 100)
    limit(store, dram_slabs=11)
    asked: list[str] = []
    may_leave = store.table._ingest_tier.evictable_now()

    def asking(block: Block) -> bool:
        asked.append(block.key.decode())
        return may_leave(block)

    monkeypatch.setattr(store.table._ingest_tier, "evictable_now", lambda: asking)
    monkeypatch.setattr(level, "MAX_WALKED", 4)
    assert store.try_put("b", 30) is None
    assert len(asked) <= 8, "two slabs, and who is coldest"
    monkeypatch.undo()
    store.put("b", 30)
    assert store.table.find("red", b"a") is None
