"""Tests of quotas.py with the block table: usage, whose blocks are evicted, and the errors."""

from collections.abc import Callable

import pytest

from kvstore.protocol.errors import QuotaExceeded
from kvstore.security.quotas.quota import Quota, Quotas
from kvstore.store.block_table import evictor as room
from kvstore.store.block_table.block import NVME
from kvstore.store.block_table.quotas import TenantUsage
from tests.store.integrity import check
from tests.store.tables import Store

MakeStore = Callable[..., Store]


def limit(store: Store, tenant: str = "red", **limits: int) -> None:
    store.table.quotas.set(Quotas(tenants={tenant: Quota(**limits)}))


def dropped_for_quota(store: Store) -> list[int]:
    return [counts.quota_evictions for _, _, counts, _ in store.table.levels()]


@pytest.mark.promise("tenant-quotas")
def test_a_tenant_at_its_quota_evicts_its_own_coldest_blocks(make_store: MakeStore) -> None:
    store = make_store(1000, slab_bytes=100)
    blue = store.put("z", tenant="blue")
    limit(store, dram_bytes=300)
    for name in "abc":
        store.put(name)
    store.read("red", b"a", 0)
    store.put("d")
    assert store.names() == "acdz"
    assert store.table.find("blue", b"z") is blue
    assert dropped_for_quota(store) == [1]
    assert store.dram.tenant_bytes == {"red": 300, "blue": 100}
    check(store.table)


def test_a_tenant_at_its_quota_never_evicts_other_tenants(make_store: MakeStore) -> None:
    store = make_store(1000, slab_bytes=100)
    limit(store, dram_bytes=200)
    store.put("z", tenant="blue")
    store.put("a").pinned = True
    held = store.put("b")
    store.table.copies.acquire(held)
    assert store.try_put("c") is None
    exceeded = store.table.quotas.exceeded("red", 100)
    assert exceeded is not None
    assert "tenant 'red' has used its quota on this node, 200 B in DRAM (dram_bytes)" in str(exceeded)
    assert store.table.quotas.exceeded("blue", 100) is None
    store.table.copies.release(held)
    store.put("c")
    assert store.names() == "acz"


def test_a_put_that_lacks_a_slab_reports_the_quota(make_store: MakeStore) -> None:
    store = make_store(1000, slab_bytes=100)
    limit(store, dram_slabs=1)
    store.put("a", 50).pinned = True
    assert store.try_put("b", 30) is None
    exceeded = store.table.quotas.exceeded("red", 30)
    assert exceeded is not None
    assert "1 slabs of DRAM (dram_slabs), none with room for 30 B" in str(exceeded)
    assert store.table.quotas.exceeded("red", 50) is None, "there is a slot for it"
    assert store.table.quotas.exceeded("blue", 30) is None
    limit(store, dram_slabs=0)
    with pytest.raises(QuotaExceeded, match=r"quota of tenant 'red' is 0 dram slabs \(dram_slabs\)"):
        store.table.check_size(1, "red")


@pytest.mark.promise("tenant-quotas")
def test_open_puts_count(make_store: MakeStore) -> None:
    store = make_store(1000, slab_bytes=100)
    limit(store, dram_bytes=200, blocks=2)
    puts = [store.open("a"), store.open("b")]
    assert None not in puts
    assert store.open("c") is None
    assert store.table.quotas.use() == {"red": TenantUsage((0, 200, 0), 2, (0, 2))}
    first = puts[0]
    assert first is not None
    store.table.abort(first)
    assert store.open("c") is not None


def test_a_value_larger_than_the_quota_is_refused(make_store: MakeStore) -> None:
    store = make_store(1000, slab_bytes=100)
    limit(store, dram_bytes=200)
    store.table.check_size(200, "red")
    store.table.check_size(500, "blue")
    with pytest.raises(QuotaExceeded, match=r"value of 201 B exceeds the DRAM quota of tenant 'red', 200 B \(dram_bytes\)"):
        store.table.check_size(201, "red")
    limit(store, blocks=0)
    with pytest.raises(QuotaExceeded, match="is 0 blocks"):
        store.table.check_size(1, "red")


def test_a_tenant_at_its_block_quota_evicts_one_for_the_next(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=1000, slab_bytes=100)
    store.put("z", tenant="blue")
    limit(store, blocks=2)
    low = store.put("a")
    store.table.evictor.evict(low, store.table._ingest_tier)
    store.settle()
    store.put("b")
    store.put("c")
    assert store.names() == "bcz", "the one in the lowest tier left"
    assert dropped_for_quota(store) == [0, 1]
    for name in ("b", "c"):
        block = store.table.find("red", name.encode())
        assert block is not None
        block.pinned = True
    assert store.try_put("d") is None
    exceeded = store.table.quotas.exceeded("red", 100)
    assert exceeded is not None
    assert "2 blocks (blocks)" in str(exceeded)


def test_quota_evictions_demote_unless_the_lower_quota_is_full(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=1000, slab_bytes=100)
    limit(store, dram_bytes=200, nvme_bytes=100)
    store.put("a")
    store.put("b")
    assert store.try_put("c") is None
    assert store.try_put("c") is None
    (move,) = store.table.evictor.take_moves()
    assert (move.block.key, move.target) == (b"a", NVME), "one is enough, however often asked"
    store.finish(move)
    store.put("c")
    assert store.names() == "abc"
    assert store.try_put("d") is None
    store.settle()
    store.put("d")
    assert store.names() == "bcd", "NVMe holds one of its blocks"
    limit(store, dram_bytes=200, nvme_bytes=0)
    store.table.demote_to_low_watermark()
    store.put("e")
    assert store.names() == "de"
    assert store.tiers[NVME].tenant_bytes == {}


@pytest.mark.promise("tenant-quotas")
@pytest.mark.parametrize("nvme_bytes", [0, 1000])
def test_a_lowered_quota_evicts_the_coldest_in_the_background(make_store: MakeStore, nvme_bytes: int) -> None:
    store = make_store(1000, nvme_bytes=nvme_bytes, slab_bytes=100)
    for name in "abcd":
        store.put(name)
    store.put("z", tenant="blue")
    limit(store, dram_bytes=150)
    check(store.table)
    store.table.demote_to_low_watermark()
    store.table.demote_to_low_watermark()
    moves = store.table.evictor.take_moves()
    assert [move.block.key for move in moves] == ([b"a", b"b", b"c"] if nvme_bytes else [])
    for move in moves:
        store.finish(move)
    store.table.demote_to_low_watermark()
    assert store.dram.tenant_bytes == {"red": 100, "blue": 100}
    assert store.names() == ("abcdz" if nvme_bytes else "dz")
    assert store.table._ingest_tier.limits.over_quota == set()


@pytest.mark.promise("no-wait-for-peers")
@pytest.mark.parametrize("is_batch", [False, True])
def test_a_put_after_a_lowered_quota_evicts_in_bounded_steps(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, is_batch: bool
) -> None:
    monkeypatch.setattr(room, "MAX_EXTRA_EVICTIONS", 2)
    store = make_store(1000, slab_bytes=100)
    for name in "abcdefgh":
        store.put(name)
    limit(store, dram_bytes=200)

    def is_put() -> bool:
        if not is_batch:
            return store.try_put("x") is not None
        slots = store.table.slots.free_slots("red", 100, 1)
        store.table.slots.free(slots)
        return len(slots) == 1

    left = []
    while not is_put():
        left.append(store.names())
        assert store.table.evictor.begin_iteration()
    assert left == ["defgh", "gh"], "each time one for the newcomer, and two of those that are too many"
    assert store.names() == ("hx" if not is_batch else "h")
    assert not store.table.evictor.begin_iteration()


def test_a_lowered_nvme_quota_drops_no_block_early(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_EXTRA_EVICTIONS", 2)
    store = make_store(100, nvme_bytes=1000, slab_bytes=100)
    for name in "abcdefgh":
        while store.try_put(name) is None:
            store.settle()
    limit(store, nvme_bytes=100)
    assert store.try_put("x") is None
    assert store.names() == "defgh", "and not h, the only one that is in memory"
    while store.try_put("x") is None:
        store.settle()
        store.table.evictor.begin_iteration()
    assert store.names() == "hx"


def test_a_tenant_over_quota_is_evicted_first(make_store: MakeStore) -> None:
    store = make_store(400, slab_bytes=100)
    store.put("y", tenant="blue")
    store.put("z", tenant="blue")
    store.put("a")
    store.put("b")
    limit(store, dram_bytes=100)
    store.put("x", tenant="blue")
    assert store.names() == "bxyz"


def test_only_blocks_over_the_block_quota_are_evicted(make_store: MakeStore) -> None:
    store = make_store(1000, slab_bytes=100)
    store.put("z", tenant="blue")
    for name in "abcd":
        store.put(name)
    store.read("red", b"a", 0)
    first = store.table.find("red", b"b")
    assert first is not None
    first.pinned = True
    store.table.quotas.set(Quotas(tenants={"red": Quota(blocks=1), "blue": Quota(blocks=1)}))
    store.table.demote_to_low_watermark()
    assert store.names() == "bz"
    assert store.table.quotas.over_block_quota == set()
    assert store.table.slots.spare_slots("red", 100, 3) == []


def test_unevictable_blocks_keep_their_tenant_over_quota(make_store: MakeStore) -> None:
    store = make_store(1000, slab_bytes=100)
    for name in "ab":
        store.put(name).pinned = True
    store.table.quotas.set(Quotas(Quota(blocks=1)))
    store.table.demote_to_low_watermark()
    assert (store.names(), store.table.quotas.over_block_quota) == ("ab", {"red"})
    store.table.blocks_of("red")[0].pinned = False
    store.table.demote_to_low_watermark()
    assert len(store.names()) == 2, "they are looked at once a tick"
    store.table.expire(now_ns=0)
    store.table.demote_to_low_watermark()
    assert (len(store.names()), store.table.quotas.over_block_quota) == (1, set())


@pytest.mark.promise("no-wait-for-peers")
def test_a_put_far_over_the_block_quota_evicts_in_bounded_steps(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_EXTRA_EVICTIONS", 3)
    store = make_store(1000, slab_bytes=100)
    for name in "abcdefg":
        store.put(name)
    store.table.quotas.set(Quotas(Quota(blocks=2)))
    assert store.try_put("x") is None
    assert store.names() == "defg"
    assert store.try_put("x") is None
    assert store.names() == "defg", "no more in this turn"
    assert store.table.evictor.begin_iteration(), "somebody wants more"
    assert store.try_put("x") is not None
    assert store.names() == "gx"
    for name in "pqrst":
        store.put(name)
    assert store.names() == "st", "one for one counts for nothing"
    assert not store.table.evictor.begin_iteration()
