"""Promises of evictor.py, with the table over it, about several tiers: what goes down, what comes up, and that nothing is lost on the
way."""

from collections.abc import Callable

import pytest

from kvstore.protocol.catalog_messages import EVENT_MOVED, EVENT_REMOVED
from kvstore.security.quotas.quota import Quota, Quotas
from kvstore.store.block_table import evictor as room
from kvstore.store.block_table import tier_view as level
from kvstore.store.block_table.block import DRAM, HBM, NVME, Block
from kvstore.store.block_table.uncommitted import UNDECIDED
from kvstore.store.storage import readable_blocks
from tests.store.integrity import check
from tests.store.tables import Store, value_of

MakeStore = Callable[..., Store]


def kinds(store: Store) -> list[tuple[int, str, int]]:
    """The events since the last call, as (kind, key, tier mask)."""
    said = [(kind, block.key.decode(), mask) for kind, block, mask in store.events]
    store.events.clear()
    return said


# --- tiers ---


def test_a_put_that_finds_no_room_has_the_coldest_copied_down_and_waits(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=1000)
    first = store.put("a")
    store.put("b")
    kinds(store)
    assert store.open("c") is None
    assert store.open("c") is None
    moves = store.table.room.take_moves()
    assert [(move.block.key, move.source, move.target) for move in moves] == [(b"a", DRAM, NVME)], "one is enough, however often asked"
    assert store.table.find("red", b"a") is first
    store.finish(moves[0])
    assert kinds(store) == [(EVENT_MOVED, "a", 4)]
    store.put("c")
    assert store.names() == "abc"
    assert store.bytes_of(first, NVME) == value_of(first)
    assert [counts.demotions for _, _, counts, _ in store.table.levels()] == [1, 0]


def test_nothing_is_lost_while_nvme_has_room(make_store: MakeStore) -> None:
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


def test_a_put_that_may_drop_has_the_coldest_leave_the_node(make_store: MakeStore) -> None:
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


def test_many_that_may_drop_pass_by_what_is_on_its_way_down(make_store: MakeStore) -> None:
    store = make_store(400, nvme_bytes=1000)
    for name in "abcd":
        store.put(name)
    assert store.open("x") is None, "a is on its way down"
    assert store.table.slots.free_slots("red", 100, 2) == []
    slots = store.table.slots.free_slots("red", 100, 2, may_drop=True)
    assert (len(slots), store.names()) == (2, "ad")
    store.table.slots.give_back(slots)
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


@pytest.mark.parametrize("is_restarted", [False, True])
def test_tenants_with_the_same_keys_do_not_meet_on_nvme(make_store: MakeStore, is_restarted: bool) -> None:
    store = make_store(300, nvme_bytes=1000, slab_bytes=100)
    blocks = [store.put("a", tenant=tenant) for tenant in ("red", "blue")]
    for block in blocks:
        store.table.room.evict(block, store.table._landing)
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


def test_above_the_high_watermark_the_coldest_go_down_to_the_low_one(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=5000, high=0.8, low=0.5)
    for number in range(8):
        store.put(str(number))
    store.table.room.relieve()
    assert store.table.room.take_moves() == []
    store.put("8")
    store.table.room.relieve()
    store.table.room.relieve()
    moves = store.table.room.take_moves()
    assert [move.block.key for move in moves] == [b"0", b"1", b"2", b"3"]
    for move in moves:
        store.finish(move)
    assert store.dram.used_bytes == 500
    for name in "abc":
        store.put(name)
    store.table.room.relieve()
    assert store.table.room.take_moves() == [], "until it is above the high one again"


@pytest.mark.parametrize("is_over_quota", [False, True])
def test_relief_of_many_blocks_looks_at_few_in_a_turn_and_goes_on_in_the_next(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, is_over_quota: bool
) -> None:
    blocks, looked = 3000, 0
    store = make_store(100 * blocks, nvme_bytes=200 * blocks, high=1 if is_over_quota else 0.9, low=0.2)
    level = store.table._landing
    may_leave = level.may_leave_now()

    def look(block: Block) -> bool:
        nonlocal looked
        looked += 1
        return may_leave(block)

    for number in range(blocks):
        store.put(str(number))
    if is_over_quota:
        store.table.quotas.set(Quotas(tenants={"red": Quota(dram_bytes=20 * blocks)}))
    monkeypatch.setattr(level, "may_leave_now", lambda: look)
    demoted = list[int]()
    while True:
        looked = 0
        store.table.relieve()
        assert looked < 8192
        store.table.relieve()
        moves = store.table.room.take_moves()
        if not moves:
            break
        demoted += [int(move.block.key) for move in moves]
        for move in moves:
            store.finish(move)
        check(store.table)
    assert demoted == list(range(blocks * 8 // 10)), "the coldest, down to the low watermark"


def test_relief_loses_nothing_for_a_block_that_cannot_go_down(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=300, high=0.5, low=0.2, slab_bytes=100)
    for number in range(5):
        store.put(str(number)).pinned = True
    store.put("5", 350)
    store.table.room.relieve()
    assert store.table.room.take_moves() == [], "too large for NVMe, and the others are pinned"
    for block in store.table.blocks():
        block.pinned = False
    store.read("red", b"5", 0)
    store.table.room.relieve()
    store.settle()
    assert store.names() == "012345"
    assert store.tiers[NVME].used_bytes == 300


def test_a_full_nvme_forgets_its_coldest_and_keeps_what_is_above(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=200)
    for name in "abcdef":
        while store.try_put(name) is None:
            store.settle()
    assert store.names() == "cdef"
    nvme = next(counts for index, _, counts, _ in store.table.levels() if index == NVME)
    assert nvme.evictions == 2


def test_a_suspended_tier_gets_nothing_and_is_as_if_it_were_not_there(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000, hbm_bytes=1000)
    store.table.room.suspend(NVME, is_suspended=True)
    store.table.room.suspend(HBM, is_suspended=True)
    first = store.put("a")
    for _ in range(3):
        store.read("red", b"a", 0)
    store.table.room.warm(first)
    store.put("b")
    assert store.names() == "b"
    assert store.table.room.take_moves() == []
    store.table.room.suspend(NVME, is_suspended=False)
    assert store.open("c") is None
    store.settle()
    assert store.names() == "b"


def test_the_second_hit_below_dram_earns_a_slot_there_if_nobody_has_to_wait_for_it(make_store: MakeStore) -> None:
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


def test_many_leave_at_once_only_where_they_need_not_be_copied_first(make_store: MakeStore) -> None:
    store = make_store(300, nvme_bytes=10_000)
    first, second, third = (store.put(name) for name in "abc")
    landing = store.table._landing
    assert not store.table.room.free_at_once(landing, 100, "red", 3)
    assert store.names() == "abc"
    store.table.room.evict(first, landing)
    store.settle()
    slot = store.table.begin_promotion(first)
    assert slot is not None
    store.table.finish_move(first, NVME, DRAM, slot, is_done=True)
    for block in (second, third):
        store.read("red", block.key, 0)
    assert store.table.room.free_at_once(landing, 100, "red", 3)
    assert (first.dram, first.nvme is not None) == (None, True)
    assert store.names() == "abc"
    assert len(store.table.slots.free_slots("red", 100, 3)) == 1


def test_a_value_that_takes_the_room_of_many_waits_for_the_next_turns(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "EXTRA_BLOCKS", 3)
    store = make_store(1000, slab_bytes=200)
    for name in "abcdefghij":
        store.put(name)
    left = []
    while store.open("x", 800) is None:
        left.append(store.names())
        assert store.open("x", 800) is None
        assert store.names() == left[-1], "no more in this turn"
        assert store.table.room.next_turn()
    assert left == ["efghij"], "the slab that reaches the limit is emptied"
    assert store.names() == "ij"
    assert not store.table.room.next_turn()


@pytest.mark.parametrize("is_lowered", [False, True])
def test_nobody_waits_for_what_the_master_has_not_decided_about_where_others_can_leave(make_store: MakeStore, is_lowered: bool) -> None:
    """Of the two slabs its one is the coldest; and it goes first, too, where its tenant has more than it may."""
    store = make_store(1000, nvme_bytes=10_000, slab_bytes=500)
    undecided = store.block("0", tenant="red")
    undecided.generation = UNDECIDED
    put = store.table.open(undecided, "writer", now_ns=0)
    assert put is not None
    store.write(put)
    store.table.commit_undecided(put, 1)
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
    assert undecided.is_in(DRAM)
    assert [block.tier_mask() for block in store.table.blocks_of("blue")] == [1 << NVME] * 5


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "EXTRA_BLOCKS", 2)
    monkeypatch.setattr(level, "MAX_PART", 2)


def a_slab_each(make_store: MakeStore, *, nvme_bytes: int = 0) -> Store:
    """Red's is the colder one."""
    store = make_store(1000, nvme_bytes=nvme_bytes, slab_bytes=500)
    for name in "abcde":
        store.put(name)
    for name in "vwxyz":
        store.put(name, tenant="blue")
    return store


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("nvme_bytes", [0, 10_000])
def test_anothers_slab_is_emptied_part_by_part_and_nobody_gets_what_is_free_of_it(make_store: MakeStore, nvme_bytes: int) -> None:
    store = a_slab_each(make_store, nvme_bytes=nvme_bytes)
    left = []
    while store.open("g", 50, tenant="green") is None:
        left.append(sum(block.is_in(DRAM) and not block.moving for block in store.table.blocks_of("red")))
        assert store.table.slots.spare_slots("red", 100, 1) == []
        store.settle()
        store.table.room.next_turn()
    assert left == [3, 1] if not nvme_bytes else [3, 1, 0]
    assert store.names() == ("abcdevwxyz" if nvme_bytes else "vwxyz")
    assert len(store.table.blocks_of("blue")) == 5
