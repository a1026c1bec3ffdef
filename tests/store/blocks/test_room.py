"""Promises of room.py, with the table over it, about several tiers: what goes down, what comes up, and that nothing is lost on the way."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.protocol.catalog_messages import EVENT_GONE, EVENT_MOVED
from kvstore.security.quotas.quota import Quota, Quotas
from kvstore.store.blocks import level, room
from kvstore.store.blocks.block import DRAM, HBM, NVME, Block
from kvstore.store.blocks.undecided import UNDECIDED
from kvstore.store.storage import readable_blocks
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
    assert all(kind != EVENT_GONE for kind, _, _ in store.events)
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
    assert kinds(store) == [(EVENT_GONE, "b", 0)], "what is on its way is written on"
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


def test_of_many_that_may_drop_none_is_undecided(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=1000)
    store.put("a")
    put = store.table.open(store.table.rows.make("red", b"b", 100, UNDECIDED), "writer", now_ns=0)
    assert put is not None
    store.table.commit_undecided(put, 0)
    slots = store.table.slots.free_slots("red", 100, 2, may_drop=True)
    assert (len(slots), store.names()) == (1, "b")
    store.table.slots.give_back(slots)


def test_a_put_that_may_drop_waits_for_its_tenants_quota(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=1000)
    store.table.quotas.set(Quotas(Quota(), {"red": Quota(dram_bytes=100)}))
    store.put("a")
    assert store.open("b", may_drop=True) is None
    store.settle()
    store.put("b")
    assert store.names() == "ab"


def test_a_put_that_may_drop_waits_for_a_slab(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000, slab_bytes=100)
    store.put("a", 50)
    store.put("b", 50)
    assert store.open("c", may_drop=True) is None
    store.settle()
    store.put("c")
    assert store.names() == "abc"


def test_a_put_that_may_drop_waits_for_what_is_undecided(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000)
    put = store.table.open(store.table.rows.make("red", b"a", 100, UNDECIDED), "writer", now_ns=0)
    assert put is not None
    store.table.commit_undecided(put, 0)
    assert store.open("b", may_drop=True) is None
    assert store.names() == "a"


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
    store.table.check_integrity()
    for block in blocks:
        store.read(block.tenant, b"a", 0)
        assert store.bytes_of(block, NVME) == value_of(block)
    store.put("b", tenant="blue")
    store.table.copies.drop(blocks[0])
    store.table.copies.drop(blocks[1])
    store.table.check_integrity()
    assert store.names() == "b"


def test_a_full_nvme_gives_up_the_coldest_whosever_it_is(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=200)
    for name, tenant in (("a", "red"), ("b", "blue"), ("c", "red"), ("d", "blue")):
        while store.try_put(name, tenant=tenant) is None:
            store.settle()
        if name == "b":
            store.read("red", b"a", 0)
    assert store.names() == "acd"


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
        store.table.check_integrity()
    assert demoted == list(range(blocks * 8 // 10)), "the coldest, down to the low watermark"


def asked_about(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[Block]:
    """The blocks of which it is asked from now on whether they may leave DRAM."""
    level, asked = store.table._landing, list[Block]()
    may_leave = level.may_leave_now()

    def look(block: Block) -> bool:
        asked.append(block)
        return may_leave(block)

    monkeypatch.setattr(level, "may_leave_now", lambda: look)
    return asked


def test_blocks_of_which_none_could_leave_are_looked_at_once_a_tick(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(1000, nvme_bytes=1000, high=0.5, low=0.5)
    for number in range(6):
        store.put(str(number)).pinned = True
    asked = asked_about(store, monkeypatch)
    for _ in range(3):
        store.table.relieve()
    assert len(asked) == 6
    store.table.expire(now_ns=0)
    store.table.relieve()
    assert len(asked) == 12
    for block in store.table.blocks():
        block.pinned = False
    store.table.expire(now_ns=0)
    store.table.relieve()
    assert [move.block.key for move in store.table.room.take_moves()] == [b"0"]


def test_where_nothing_can_go_anywhere_nothing_is_looked_at(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(1000, high=0.5, low=0.2)
    for number in range(9):
        store.put(str(number))
    asked = asked_about(store, monkeypatch)
    store.table.relieve()
    assert asked == []
    assert len(store.names()) == 9


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


def test_relief_drops_copies_that_a_lower_tier_has(make_store: MakeStore) -> None:
    store = make_store(400, nvme_bytes=1000, high=0.5, low=0.5)
    block = store.put("a")
    store.put("b")
    store.put("c")
    store.table.room.relieve()
    (move,) = store.table.room.take_moves()
    store.table.copies.acquire(block)
    store.finish(move)
    assert block.tier_mask() == 6, "being read, it stays"
    store.table.copies.release(block)
    store.table.room.relieve()
    assert store.table.room.take_moves() == []
    assert block.tier_mask() == 4


def test_relief_waits_for_a_tier_below_that_is_full_of_pinned_blocks(make_store: MakeStore) -> None:
    store = make_store(300, nvme_bytes=100, high=0.5, low=0.1)
    first = store.put("a")
    store.put("b")
    store.table.room.relieve()
    store.settle()
    first.pinned = True
    store.put("c")
    store.table.room.relieve()
    assert store.table.room.take_moves() == []
    assert store.names() == "abc"
    while store.try_put("d", 250) is None:
        store.settle()
    assert store.names() == "ad", "a put needs the room: what cannot go down is lost"


def test_a_value_larger_than_nvme_leaves_for_good_when_its_room_is_needed(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=100)
    store.put("a", 150)
    store.put("b", 150)
    assert store.names() == "b"


def test_a_full_nvme_forgets_its_coldest_and_keeps_what_is_above(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=200)
    for name in "abcdef":
        while store.try_put(name) is None:
            store.settle()
    assert store.names() == "cdef"
    nvme = next(counts for index, _, counts, _ in store.table.levels() if index == NVME)
    assert nvme.evictions == 2


def test_nvme_lets_go_of_copies_that_dram_has_too_before_anything_is_lost(make_store: MakeStore) -> None:
    store = make_store(300, nvme_bytes=100)
    block = store.put("a")
    store.put("b")
    store.put("c")
    assert store.open("d") is None
    (move,) = store.table.room.take_moves()
    store.table.copies.acquire(block)
    store.finish(move)
    store.table.copies.release(block)
    store.read("red", b"a", 0)
    kinds(store)
    assert store.open("d") is None
    assert kinds(store) == [(EVENT_MOVED, "a", 2)]
    store.settle()
    assert store.names() == "abc"


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


def test_a_copy_that_could_not_be_made_leaves_the_block_where_it_was(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000)
    block = store.put("a")
    assert store.open("b") is None
    (move,) = store.table.room.take_moves()
    store.finish(move, is_done=False)
    assert block.tier_mask() == 2
    assert not block.moving
    assert store.tiers[NVME].used_bytes == 0
    assert store.open("b") is None


def test_a_block_removed_while_it_moves_is_gone_from_both_tiers_when_the_copy_ends(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000)
    block = store.put("a")
    assert store.open("b") is None
    (move,) = store.table.room.take_moves()
    store.table.copies.acquire(block)
    store.table.copies.drop(block)
    assert store.dram.quarantined_bytes == 100
    store.table.check_integrity()
    store.table.copies.release(block)
    assert store.dram.quarantined_bytes == 100, "the copy still reads it"
    store.finish(move, is_done=True)
    assert store.dram.free_bytes == 100
    assert store.tiers[NVME].used_bytes == 0
    assert kinds(store)[-1] == (EVENT_GONE, "a", 0)


def test_a_block_removed_while_it_moves_outlives_the_copy_under_a_reader(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000)
    block = store.put("a")
    assert store.open("b") is None
    (move,) = store.table.room.take_moves()
    store.table.copies.acquire(block)
    store.table.copies.drop(block)
    store.finish(move)
    assert store.dram.quarantined_bytes == 100
    store.table.copies.release(block)
    assert store.dram.free_bytes == 100


def test_a_block_pinned_while_it_moves_keeps_both_copies(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000)
    block = store.put("a")
    assert store.open("b") is None
    block.pinned = True
    store.settle()
    assert block.tier_mask() == 6
    assert store.open("b") is None


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


def test_a_promotion_takes_the_place_of_a_copy_that_is_further_down_too(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000)
    first = store.put("a")
    assert store.open("b") is None
    first.pinned = True
    store.settle()
    first.pinned = False
    store.put("b")
    second = store.table.find("red", b"b")
    assert second is not None
    assert store.open("c") is None
    second.pinned = True
    store.settle()
    second.pinned = False
    slot = store.table.begin_promotion(first)
    assert slot is not None
    assert (first.tier_mask(), second.tier_mask()) == (4, 4)
    store.table.finish_move(first, NVME, DRAM, slot, is_done=False)
    assert not first.moving
    assert store.dram.free_bytes == 100


def test_a_promotion_that_races_with_a_removal_leaves_no_slot_behind(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000)
    block = store.put("a")
    assert store.open("b") is None
    store.settle()
    slot = store.table.begin_promotion(block)
    assert slot is not None
    store.table.copies.acquire(block)
    store.table.copies.drop(block)
    store.table.finish_move(block, NVME, DRAM, slot, is_done=True)
    store.table.copies.release(block)
    assert store.dram.free_bytes == 100
    assert store.tiers[NVME].used_bytes == 0


def test_a_recovered_block_larger_than_todays_dram_is_not_promoted(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(100, nvme_bytes=1000)
    block = store.block("a", 500)
    block.set_slot(NVME, store.tiers[NVME].allocate(500))
    assert store.table.recover([block]) == 1
    assert store.table.begin_promotion(block) is None
    assert not block.moving


def test_a_damaged_copy_is_given_up_and_the_block_with_its_last_one(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=1000)
    block = store.put("a")
    store.put("b")
    assert store.open("c") is None
    (move,) = store.table.room.take_moves()
    store.table.copies.acquire(block)
    store.finish(move)
    store.table.copies.release(block)
    kinds(store)
    store.table.copies.drop_copy(block, NVME)
    store.table.copies.drop_copy(block, NVME)
    assert kinds(store) == [(EVENT_MOVED, "a", 2)]
    store.table.copies.drop_copy(block, DRAM)
    store.table.copies.drop_copy(block, DRAM)
    assert kinds(store) == [(EVENT_GONE, "a", 0)]
    assert store.names() == "b"


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


def test_for_many_another_groups_slab_is_taken_as_for_one(make_store: MakeStore) -> None:
    store = make_store(4 * 4096, slab_bytes=4096)
    for name in "abcd":
        store.put(name, 4096)
    slots = store.table.slots.free_slots("red", 1024, 6)
    assert len(slots) == 6
    assert store.names() == "cd"
    store.table.slots.give_back(slots)
    store.table.check_integrity()


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


def test_a_batch_that_takes_anothers_slab_has_none_in_a_turn_where_enough_have_left(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "EXTRA_BLOCKS", 1)
    store = make_store(800, slab_bytes=400)
    for name in "abcdefgh":
        store.put(name)
    first = store.table.slots.free_slots("red", 50, 8)
    assert (len(first), store.names()) == (8, "efgh")
    assert store.table.slots.free_slots("blue", 50, 8) == []
    assert store.table.room.next_turn()
    assert len(store.table.slots.free_slots("blue", 50, 8)) == 8
    store.table.slots.give_back(first)


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


def test_a_put_waits_for_what_is_undecided_of_its_own_group_and_takes_nothing_of_others_for_it(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=10_000, slab_bytes=500)
    for name in "01234":
        block = store.block(name)
        block.generation = UNDECIDED
        put = store.table.open(block, "writer", now_ns=0)
        assert put is not None
        store.write(put)
        store.table.commit_undecided(put, 1)
    for name in "abcde":
        store.put(name, tenant="blue")
    assert store.try_put("x") is None
    assert store.table.room.take_moves() == []


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


@pytest.mark.usefixtures("small_parts")
def test_nobody_is_asked_for_more_of_a_slab_while_the_first_part_of_it_goes_down(make_store: MakeStore) -> None:
    store = a_slab_each(make_store, nvme_bytes=10_000)
    assert store.open("g", 500, tenant="green") is None
    moves = store.table.room.take_moves()
    store.table.room.next_turn()
    assert store.open("g", 500, tenant="green") is None
    assert (len(moves), store.table.room.take_moves()) == (2, [])
    for move in moves:
        store.finish(move)


@pytest.mark.usefixtures("small_parts")
def test_a_slab_that_nobody_wants_emptied_any_more_serves_its_tenant_again(make_store: MakeStore) -> None:
    store = a_slab_each(make_store)
    assert store.open("g", 50, tenant="green") is None
    store.table.expire(now_ns=0)
    assert store.table.slots.spare_slots("red", 100, 1) == []
    store.table.expire(now_ns=0)
    store.put("f")
    assert store.names() == "cdefvwxyz"


@pytest.mark.usefixtures("small_parts")
def test_a_slab_in_which_something_is_needed_again_is_emptied_no_further(make_store: MakeStore) -> None:
    store = a_slab_each(make_store)
    assert store.open("g", 50, tenant="green") is None
    last = store.table.blocks_of("red")[0]
    last.pinned = True
    for block in store.table.blocks_of("red")[1:2]:
        store.table.copies.drop(block)
    while store.open("g", 50, tenant="green") is None:
        store.table.room.next_turn()
    assert [block.key for block in store.table.blocks_of("blue")] == []
    assert len(store.table.blocks_of("red")) == 2


@pytest.mark.usefixtures("small_parts")
def test_a_tenants_own_slab_above_its_limit_is_emptied_part_by_part(make_store: MakeStore) -> None:
    store = a_slab_each(make_store)
    store.table.quotas.set(Quotas(tenants={"red": Quota(dram_slabs=0)}))
    left = []
    for _ in range(3):
        assert store.open("g", 50, tenant="green") is None or not store.table.blocks_of("red")
        left.append(len(store.table.blocks_of("red")))
        store.table.room.next_turn()
    assert left == [3, 1, 0]
