"""Tests of evictor.py with the block table: demotion, promotion, and no loss of blocks on the way."""

from collections.abc import Callable

import pytest

from kvstore.protocol.catalog_messages import EVENT_MOVED, EVENT_REMOVED
from kvstore.security.quotas.quota import Quota, Quotas
from kvstore.store.block_table import evictor as room
from kvstore.store.block_table import tier_view as level
from kvstore.store.block_table.block import DRAM, HBM, NVME, Block
from kvstore.store.block_table.evictor import TierMove
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.store.storage import readable_blocks
from kvstore.tiers.policies.interface import SeparatePolicies
from kvstore.tiers.policies.lru import LRU
from tests.store.integrity import check
from tests.store.tables import Store, value_of

MakeStore = Callable[..., Store]


def kinds(store: Store) -> list[tuple[int, str, int]]:
    """The events since the last call, as (kind, key, tier mask)."""
    said = [(kind, block.key.decode(), mask) for kind, block, mask in store.events]
    store.events.clear()
    return said


# --- tiers ---


def test_a_put_without_a_free_slot_waits_for_a_demotion(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=1000)
    first = store.put("a")
    store.put("b")
    kinds(store)
    assert store.open("c") is None
    assert store.open("c") is None
    moves = store.table.evictor.take_moves()
    assert [(move.block.key, move.source, move.target) for move in moves] == [(b"a", DRAM, NVME)], "one is enough, however often asked"
    assert store.table.find("red", b"a") is first
    store.finish(moves[0])
    assert kinds(store) == [(EVENT_MOVED, "a", 4)]
    store.put("c")
    assert store.names() == "abc"
    assert store.bytes_of(first, NVME) == value_of(first)
    assert [counts.demotions for _, _, counts, _ in store.table.levels()] == [1, 0]


@pytest.mark.promise("get-exact-bytes")
def test_no_block_is_dropped_while_nvme_has_space(make_store: MakeStore) -> None:
    store = make_store(300, nvme_bytes=5000)
    blocks = []
    for number in range(50):
        while (block := store.try_put(f"{number:02}")) is None:
            store.settle()
        blocks.append(block)
    assert all(kind != EVENT_REMOVED for kind, _, _ in store.events)
    for block in blocks:
        tier = block.fastest()
        assert tier is not None
        assert store.bytes_of(block, tier) == value_of(block)


def test_a_put_that_may_drop_evicts_the_coldest_block(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=1000)
    store.put("a")
    store.put("b")
    kinds(store)
    assert store.open("c") is None, "a is on its way down"
    put = store.open("c", may_drop=True)
    assert put is not None
    assert kinds(store) == [(EVENT_REMOVED, "b", 0)], "what is on its way is written on"
    store.settle()
    store.commit(put)
    assert store.names() == "ac"
    assert [counts.evictions for _, _, counts, _ in store.table.levels()] == [1, 0]


def test_drops_skip_blocks_that_are_being_demoted(make_store: MakeStore) -> None:
    store = make_store(400, nvme_bytes=1000)
    for name in "abcd":
        store.put(name)
    assert store.open("x") is None, "a is on its way down"
    assert store.table.slots.free_slots("red", 100, 2) == []
    slots = store.table.slots.free_slots("red", 100, 2, may_drop=True)
    assert (len(slots), store.names()) == (2, "ad")
    store.table.slots.free(slots)
    store.settle()
    assert store.names() == "ad"


def test_a_put_that_may_drop_waits_for_its_tenants_quota(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=1000)
    store.table.quotas.set(Quotas(Quota(), {"red": Quota(dram_bytes=100)}))
    store.put("a")
    assert store.open("b", may_drop=True) is None
    store.settle()
    store.put("b")
    assert store.names() == "ab"


@pytest.mark.promise("keys-fixed")
@pytest.mark.parametrize("is_restarted", [False, True])
def test_tenants_with_the_same_keys_are_separate_on_nvme(make_store: MakeStore, is_restarted: bool) -> None:
    store = make_store(300, nvme_bytes=1000, slab_bytes=100)
    blocks = [store.put("a", tenant=tenant) for tenant in ("red", "blue")]
    for block in blocks:
        store.table.evictor.evict(block, store.table._ingest_tier)
    store.settle()
    if is_restarted:
        store.tiers[NVME].close()
        store = make_store(300, nvme_bytes=1000, slab_bytes=100)
        assert store.table.recover(readable_blocks(store.tiers[NVME], store.table.rows)) == 2
        blocks = list(store.table.blocks())
    check(store.table)
    for block in blocks:
        store.read(block.tenant, b"a", 0)
        assert store.bytes_of(block, NVME) == value_of(block)
    store.put("b", tenant="blue")
    store.table.copies.drop(blocks[0])
    store.table.copies.drop(blocks[1])
    check(store.table)
    assert store.names() == "b"


def test_a_prompt_is_demoted_from_its_end_at_once(make_store: MakeStore) -> None:
    """Its last blocks are still in DRAM when the next ones are planned; no other prompt loses its end for that."""
    store = make_store(1000, nvme_bytes=5000, policy="prefix", high=0.8, low=0.5)
    for name, parent in zip(
        ("a0", "a1", "a2", "a3", "b0", "b1", "b2", "b3", "c0"), ("", "a0", "a1", "a2", "", "b0", "b1", "b2", ""), strict=True
    ):
        put = store.table.open(store.block(name, parent=parent), "writer", now_ns=0)
        assert put is not None
        store.commit(put)
    store.table.evictor.demote_to_low_watermark()
    store.table.evictor.demote_to_low_watermark()
    assert [move.block.key for move in store.table.evictor.take_moves()] == [b"a3", b"a2", b"a1", b"a0"]


def test_demotion_runs_from_the_high_to_the_low_watermark(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=5000, high=0.8, low=0.5)
    for number in range(8):
        store.put(str(number))
    store.table.evictor.demote_to_low_watermark()
    assert store.table.evictor.take_moves() == []
    store.put("8")
    store.table.evictor.demote_to_low_watermark()
    store.table.evictor.demote_to_low_watermark()
    moves = store.table.evictor.take_moves()
    assert [move.block.key for move in moves] == [b"0", b"1", b"2", b"3"]
    for move in moves:
        store.finish(move)
    assert store.dram.used_bytes == 500
    for name in "abc":
        store.put(name)
    store.table.evictor.demote_to_low_watermark()
    assert store.table.evictor.take_moves() == [], "until it is above the high one again"


@pytest.mark.promise("no-wait-for-peers")
@pytest.mark.parametrize("is_over_quota", [False, True])
def test_demotion_examines_few_candidates_per_iteration(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, is_over_quota: bool
) -> None:
    blocks, looked = 3000, 0
    store = make_store(100 * blocks, nvme_bytes=200 * blocks, high=1 if is_over_quota else 0.9, low=0.2)
    level = store.table._ingest_tier
    may_leave = level.evictable_now()

    def look(block: Block) -> bool:
        nonlocal looked
        looked += 1
        return may_leave(block)

    for number in range(blocks):
        store.put(str(number))
    if is_over_quota:
        store.table.quotas.set(Quotas(tenants={"red": Quota(dram_bytes=20 * blocks)}))
    monkeypatch.setattr(level, "evictable_now", lambda: look)
    demoted = list[int]()
    while True:
        looked = 0
        store.table.demote_to_low_watermark()
        assert looked < 8192
        store.table.demote_to_low_watermark()
        moves = store.table.evictor.take_moves()
        if not moves:
            break
        demoted += [int(move.block.key) for move in moves]
        for move in moves:
            store.finish(move)
        check(store.table)
    assert demoted == list(range(blocks * 8 // 10)), "the coldest, down to the low watermark"


def test_demotion_drops_no_block_that_cannot_be_demoted(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=300, high=0.5, low=0.2, slab_bytes=100)
    for number in range(5):
        store.put(str(number)).pinned = True
    store.put("5", 350)
    store.table.evictor.demote_to_low_watermark()
    assert store.table.evictor.take_moves() == [], "too large for NVMe, and the others are pinned"
    for block in store.table.blocks():
        block.pinned = False
    store.read("red", b"5", 0)
    store.table.evictor.demote_to_low_watermark()
    store.settle()
    assert store.names() == "012345"
    assert store.tiers[NVME].used_bytes == 300


def test_a_full_nvme_drops_its_coldest_and_keeps_upper_tiers(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=200)
    for name in "abcdef":
        while store.try_put(name) is None:
            store.settle()
    assert store.names() == "cdef"
    nvme = next(counts for index, _, counts, _ in store.table.levels() if index == NVME)
    assert nvme.evictions == 2


def test_a_suspended_tier_gets_no_copies(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000, hbm_bytes=1000)
    store.table.evictor.suspend(NVME, is_suspended=True)
    store.table.evictor.suspend(HBM, is_suspended=True)
    first = store.put("a")
    for _ in range(3):
        store.read("red", b"a", 0)
    store.table.evictor.promote_to_hbm(first)
    store.put("b")
    assert store.names() == "b"
    assert store.table.evictor.take_moves() == []
    store.table.evictor.suspend(NVME, is_suspended=False)
    assert store.open("c") is None
    store.settle()
    assert store.names() == "b"


def test_the_second_hit_below_dram_promotes_if_a_slot_is_free(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=1000)
    for name in "abc":
        while store.try_put(name) is None:
            store.settle()
    block = store.read("red", b"a", 0)
    assert block is not None
    assert block.tier_mask() == 4
    assert not store.table.wants_promotion(block)
    store.read("red", b"a", 0)
    assert store.table.wants_promotion(block)
    assert store.table.begin_promotion(block) is None, "DRAM is full of blocks that are nowhere else"
    other = store.table.find("red", b"b")
    assert other is not None
    store.table.copies.drop(other)
    slot = store.table.begin_promotion(block)
    assert slot is not None
    assert not store.table.wants_promotion(block), "one at a time"
    store.table.copies.acquire(block)
    store.dram.view(slot)[:] = value_of(block)
    kinds(store)
    store.table.finish_move(block, NVME, DRAM, slot, is_done=True)
    assert kinds(store) == [(EVENT_MOVED, "a", 6)]
    assert block.hits == 0
    dram = next(counts for index, _, counts, _ in store.table.levels() if index == DRAM)
    assert dram.promotions == 1
    store.table.copies.release(block)


class ByName(LRU[bytes]):
    """A key is worth its first byte."""

    def worth(self, key: bytes) -> float:
        return key[0]


@pytest.fixture
def two_tiers(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store of one block in DRAM and two in NVMe, which demotes only blocks of more worth than those that leave NVMe."""
    monkeypatch.setattr("tests.store.tables.make_family", lambda name: SeparatePolicies(ByName))
    return make_store(100, nvme_bytes=200, write_worth=1.0)


def put_each(store: Store, names: str) -> None:
    for name in names:
        while store.try_put(name) is None:
            store.settle()


def test_a_block_of_less_worth_is_not_written_to_full_nvme(two_tiers: Store) -> None:
    put_each(two_tiers, "nmbx")
    assert two_tiers.names() == "mnx", "m is worth less than n, but NVMe had space"
    put_each(two_tiers, "y")
    assert two_tiers.names() == "mxy", "x is worth more than n"
    counts = {index: counts for index, _, counts, _ in two_tiers.table.levels()}
    assert (counts[DRAM].not_written, counts[DRAM].demotions, counts[NVME].evictions) == (1, 3, 1)
    assert [{name for name, count in counts[index].by_reason().items() if count} for index in (DRAM, NVME)] == [{"worth"}, {"room"}]


def test_an_eviction_for_a_quota_has_one_reason(two_tiers: Store) -> None:
    """The block is not worth a write either."""
    put_each(two_tiers, "nmb")
    two_tiers.table.quotas.set(Quotas(tenants={"red": Quota(dram_bytes=50)}))
    two_tiers.table.evictor.demote_to_low_watermark()
    assert two_tiers.names() == "mn"
    counts = {index: counts for index, _, counts, _ in two_tiers.table.levels()}
    assert counts[DRAM].by_reason() == {"room": 0, "worth": 0, "secondary": 0, "table": 0, "quota": 1}


def test_the_copy_of_a_promoted_block_leaves_nvme_first(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=200)
    put_each(store, "nmab")
    assert [block.tier_mask() for block in store.table.blocks()] == [4, 4, 2, 2]
    block, other = store.table.find("red", b"n"), store.table.find("red", b"a")
    assert block is not None
    assert other is not None
    store.table.copies.drop(other)
    slot = store.table.begin_promotion(block)
    assert slot is not None
    store.finish(TierMove(block, NVME, DRAM, slot))
    assert block.tiers() == (DRAM, NVME)
    put_each(store, "x")
    assert (store.names(), block.tiers()) == ("bmnx", (DRAM,)), "its copy made space for b"
    store.table.copies.drop_copy(block, DRAM)
    assert store.names() == "bmx"


def test_a_promoted_block_leaves_dram_without_a_write(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=200)
    put_each(store, "nm")
    block, other = store.table.find("red", b"n"), store.table.find("red", b"m")
    assert block is not None
    assert other is not None
    store.table.copies.drop(other)
    slot = store.table.begin_promotion(block)
    assert slot is not None
    store.finish(TierMove(block, NVME, DRAM, slot))
    assert store.put("x").tiers() == (DRAM,)
    put_each(store, "yz")
    assert store.names() == "xyz", "n, whose copy in NVMe is the last, leaves as others do"


def test_a_dropped_block_with_a_promoted_copy_is_a_ghost(make_store: MakeStore) -> None:
    """The mark of its copy in NVMe does not make it a block that another node keeps."""
    store = make_store(200, nvme_bytes=200, policy="prefix")
    put_each(store, "abc")
    block, other = store.table.find("red", b"a"), store.table.find("red", b"b")
    assert block is not None
    assert other is not None
    assert block.tiers() == (NVME,)
    store.table.copies.drop(other)
    slot = store.table.begin_promotion(block)
    assert slot is not None
    store.finish(TierMove(block, NVME, DRAM, slot))
    before = store.table._families.remembered
    store.table.copies.drop(block)
    assert store.table._families.remembered == before + 1
    check(store.table)


def test_batch_evictions_need_no_demotion(make_store: MakeStore) -> None:
    store = make_store(300, nvme_bytes=10_000)
    first, second, third = (store.put(name) for name in "abc")
    ingest_tier = store.table._ingest_tier
    assert not store.table.evictor.free_at_once(ingest_tier, 100, "red", 3)
    assert store.names() == "abc"
    store.table.evictor.evict(first, ingest_tier)
    store.settle()
    slot = store.table.begin_promotion(first)
    assert slot is not None
    store.table.finish_move(first, NVME, DRAM, slot, is_done=True)
    for block in (second, third):
        store.read("red", block.key, 0)
    assert store.table.evictor.free_at_once(ingest_tier, 100, "red", 3)
    assert (first.dram, first.nvme is not None) == (None, True)
    assert store.names() == "abc"
    assert len(store.table.slots.free_slots("red", 100, 3)) == 1


@pytest.mark.promise("no-wait-for-peers")
def test_a_large_value_evicts_over_several_iterations(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_EXTRA_EVICTIONS", 3)
    store = make_store(1000, slab_bytes=200)
    for name in "abcdefghij":
        store.put(name)
    left = []
    while store.open("x", 800) is None:
        left.append(store.names())
        assert store.open("x", 800) is None
        assert store.names() == left[-1], "no more in this turn"
        assert store.table.evictor.begin_iteration()
    assert left == ["efghij"], "the slab that reaches the limit is emptied"
    assert store.names() == "ij"
    assert not store.table.evictor.begin_iteration()


@pytest.mark.parametrize("is_lowered", [False, True])
def test_uncommitted_blocks_do_not_delay_other_evictions(make_store: MakeStore, is_lowered: bool) -> None:
    """Its block in one of the two slabs is the coldest; also if its tenant is over quota."""
    store = make_store(1000, nvme_bytes=10_000, slab_bytes=500)
    uncommitted = store.block("0", tenant="red")
    uncommitted.generation = UNCOMMITTED
    put = store.table.open(uncommitted, "writer", now_ns=0)
    assert put is not None
    store.write(put)
    store.table.store_uncommitted(put, 1)
    for name in "1234":
        store.put(name)
    for name in "abcde":
        store.put(name, tenant="blue")
    if is_lowered:
        store.table.quotas.set(Quotas(tenants={"red": Quota(dram_bytes=100)}))
    for _ in range(2):
        if store.try_put("x", 50, tenant="green") is None:
            store.settle()
    assert store.names() == "01234abcdex"
    assert uncommitted.is_in(DRAM)
    assert [block.tier_mask() for block in store.table.blocks_of("blue")] == [1 << NVME] * 5


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_EXTRA_EVICTIONS", 2)
    monkeypatch.setattr(level, "MAX_PART", 2)


def a_slab_each(make_store: MakeStore, *, nvme_bytes: int = 0) -> Store:
    """Red's is the colder one."""
    store = make_store(1000, nvme_bytes=nvme_bytes, slab_bytes=500)
    for name in "abcde":
        store.put(name)
    for name in "vwxyz":
        store.put(name, tenant="blue")
    return store


@pytest.mark.promise("no-wait-for-peers")
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("nvme_bytes", [0, 10_000])
def test_a_slab_of_another_group_is_emptied_in_parts(make_store: MakeStore, nvme_bytes: int) -> None:
    store = a_slab_each(make_store, nvme_bytes=nvme_bytes)
    left = []
    while store.open("g", 50, tenant="green") is None:
        left.append(sum(block.is_in(DRAM) and not block.moving for block in store.table.blocks_of("red")))
        assert store.table.slots.spare_slots("red", 100, 1) == []
        store.settle()
        store.table.evictor.begin_iteration()
    assert left == [3, 1] if not nvme_bytes else [3, 1, 0]
    assert store.names() == ("abcdevwxyz" if nvme_bytes else "vwxyz")
    assert len(store.table.blocks_of("blue")) == 5
