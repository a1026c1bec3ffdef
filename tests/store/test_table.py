"""Promises of table.py, over real tiers: what is visible, what leaves for what, and which slots nobody else may get."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.messages import EVENT_COMMIT, EVENT_GONE, EVENT_MOVED
from kvstore.store.block import DRAM, HBM, NVME, Block
from tests.store.tables import PUT_TTL_NS, Store, value_of

MakeStore = Callable[..., Store]


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[MakeStore]:
    stores: list[Store] = []

    def make(dram_bytes: int = 400, **options: int | float | str) -> Store:
        stores.append(Store(dram_bytes, folder=tmp_path, **options))  # type: ignore[arg-type]
        return stores[-1]

    yield make
    for store in stores:
        store.table.check_integrity()
        store.close()


def kinds(store: Store) -> list[tuple[int, str, int]]:
    """The events since the last call, as (kind, key, tier mask)."""
    said = [(kind, block.key.decode(), mask) for kind, block, mask in store.events]
    store.events.clear()
    return said


# --- puts ---


def test_a_block_is_invisible_until_its_commit(make_store: MakeStore) -> None:
    store = make_store()
    put = store.open("a")
    assert put is not None
    assert store.table.find("red", b"a") is None
    assert store.table.writer("red", b"a") is put
    block = store.commit(put)
    assert store.table.find("red", b"a") is block
    assert store.table.find("blue", b"a") is None
    assert store.table.writer("red", b"a") is None
    assert store.bytes_of(block, DRAM) == value_of(block)
    assert kinds(store) == [(EVENT_COMMIT, "a", 2)]


def test_an_aborted_put_leaves_nothing(make_store: MakeStore) -> None:
    store = make_store(100)
    put = store.open("a")
    assert put is not None
    store.table.abort(put)
    assert store.table.writer("red", b"a") is None
    assert store.table.open_puts == 0
    assert store.try_put("b") is not None


@pytest.mark.parametrize("size_bytes", [1, 100, 4096, 5000])
@pytest.mark.parametrize("count", [1, 7, 40])
def test_a_tier_of_n_blocks_bytes_holds_n_blocks_before_any_leaves(make_store: MakeStore, size_bytes: int, count: int) -> None:
    store = make_store(count * size_bytes)
    for number in range(count):
        store.put(str(number), size_bytes)
    assert len(list(store.table.blocks())) == count
    store.put("one more", size_bytes)
    assert len(list(store.table.blocks())) == count
    assert [block.key for kind, block, _ in store.events if kind == EVENT_GONE] == [b"0"]


def test_the_slot_of_an_expired_put_is_not_used_again_until_its_writer_is_gone(make_store: MakeStore) -> None:
    store = make_store(200)
    put = store.open("a", owner="slow")
    store.put("b")
    assert put is not None
    assert store.table.expire(now_ns=PUT_TTL_NS - 1) == 0
    assert store.table.expire(now_ns=PUT_TTL_NS) == 1
    assert store.table.put(put.put_id, "slow") is None
    assert store.table.writer("red", b"a") is None
    other = store.open("a", owner="quick", now_ns=PUT_TTL_NS)
    assert other is not None
    assert other.slot.index != put.slot.index
    assert store.open("c", owner="quick", now_ns=PUT_TTL_NS) is None
    store.table.forget_owner("slow")
    assert store.open("c", owner="quick", now_ns=PUT_TTL_NS) is not None


def test_a_writer_that_is_done_with_its_expired_put_gives_the_slot_back(make_store: MakeStore) -> None:
    store = make_store(100)
    put = store.open("a", owner="slow")
    assert put is not None
    store.table.expire(now_ns=PUT_TTL_NS)
    store.table.settle(put.put_id, "another")
    assert store.open("b") is None
    store.table.settle(put.put_id, "slow")
    store.table.settle(put.put_id, "slow")
    assert store.open("b") is not None


def test_a_writer_that_is_gone_takes_its_open_puts_along_and_no_others(make_store: MakeStore) -> None:
    store = make_store(300)
    store.open("a", owner="x")
    kept = store.open("b", owner="y")
    assert kept is not None
    store.table.forget_owner("x")
    assert store.table.open_puts == 1
    assert store.table.put(kept.put_id, "y") is kept
    assert store.table.put(kept.put_id, "x") is None


def test_a_value_larger_than_dram_is_refused(make_store: MakeStore) -> None:
    store = make_store(100)
    store.table.check_room(100)
    with pytest.raises(InvalidArgument, match="larger than this node's DRAM"):
        store.table.check_room(101)
    with pytest.raises(InvalidArgument):
        store.open("a", 101)


# --- reads ---


def test_a_read_is_an_access_and_a_wrong_generation_a_miss(make_store: MakeStore) -> None:
    store = make_store(200)
    first, _second = store.put("a"), store.put("b")
    assert store.table.read("red", b"a", 0) is first
    assert store.table.read("red", b"a", first.generation) is first
    assert store.table.read("red", b"a", first.generation + 1) is None
    assert store.table.read("red", b"x", 0) is store.table.read("blue", b"a", 0) is None
    assert store.table.misses == 3
    store.put("c")
    assert store.names() == "ac", "b was read longest ago"
    assert [(index, counts.hits, counts.evictions, blocks) for index, _, counts, blocks in store.table.levels()] == [(DRAM, 2, 1, 2)]


def test_a_block_being_read_does_not_leave_and_its_slot_outlives_its_removal(make_store: MakeStore) -> None:
    store = make_store(200)
    read, _other = store.put("a"), store.put("b")
    store.table.acquire(read)
    store.put("c")
    assert store.names() == "ac"
    store.table.drop(read)
    assert store.names() == "c"
    assert store.dram.quarantined_bytes == 100
    store.put("d")
    assert store.names() == "d", "the slot under the reader is not to be had"
    store.table.release(read)
    assert store.dram.quarantined_bytes == 0
    store.put("e")
    assert store.names() == "de"


def test_the_last_of_several_readers_frees_a_removed_block(make_store: MakeStore) -> None:
    store = make_store(100)
    block = store.put("a")
    store.table.acquire(block)
    store.table.acquire(block)
    store.table.drop(block)
    store.table.release(block)
    assert store.dram.quarantined_bytes == 100
    store.table.release(block)
    assert store.dram.free_bytes == 100


def test_with_everything_pinned_or_read_there_is_no_room_until_something_is_let_go(make_store: MakeStore) -> None:
    store = make_store(200)
    pinned, read = store.put("a"), store.put("b")
    pinned.pinned = True
    store.table.acquire(read)
    assert store.open("c") is None
    store.table.release(read)
    assert store.open("c") is not None
    assert store.names() == "a"


# --- groups ---


def test_another_size_gets_the_slab_that_holds_the_coldest_blocks(make_store: MakeStore) -> None:
    store = make_store(4 * 4096, slab_bytes=4096)
    for name in "abcd":
        store.put(name, 4096)
    store.table.read("red", b"a", 0)
    store.put("small", 1024)
    assert store.names() == "acdsmall"


def test_a_newcomers_group_does_not_empty_slabs_that_would_stay_occupied(make_store: MakeStore) -> None:
    """A lease in every slab of the others: their other blocks would leave for nothing."""
    store = make_store(4 * 400, slab_bytes=400)
    blocks = [store.put(f"{number:02}") for number in range(16)]
    for leased in blocks[::4]:
        store.table.acquire(leased)
    assert store.open("big", 300) is None
    assert len(list(store.table.blocks())) == 16
    store.table.release(blocks[8])
    assert store.open("big", 300) is not None
    assert [block.key for block in store.table.blocks()] == [b"%02d" % number for number in (*range(8), *range(12, 16))]


def test_memory_follows_the_load_a_slab_at_a_time(make_store: MakeStore) -> None:
    store = make_store(4 * 1000, slab_bytes=1000)
    for number in range(30):
        store.put(f"old{number}", 100)
    for number in range(200):
        store.put(f"new{number}", 100, tenant="blue")
        assert sum(block.tenant == "red" for block in store.table.blocks()) % 10 == 0, "whole slabs change hands"
    assert sum(block.tenant == "red" for block in store.table.blocks()) == 0
    assert sum(block.tenant == "blue" for block in store.table.blocks()) == 40


def test_a_slab_that_is_owed_but_occupied_is_not_taken(make_store: MakeStore) -> None:
    store = make_store(2 * 200, slab_bytes=200)
    pinned = store.put("a")
    pinned.pinned = True
    store.put("b")
    for number in range(6):
        store.put(str(number), tenant="blue")
    assert store.names() == "45ab"


def test_a_value_of_several_slabs_takes_them_together(make_store: MakeStore) -> None:
    store = make_store(8 * 4096, slab_bytes=4096)
    for name in "abcdefgh":
        store.put(name, 4096)
    store.put("LARGE", 3 * 4096)
    assert store.names() == "LARGEdefgh"


# --- tiers ---


def test_a_put_that_finds_no_room_has_the_coldest_copied_down_and_waits(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=1000)
    first = store.put("a")
    store.put("b")
    kinds(store)
    assert store.open("c") is None
    assert store.open("c") is None
    moves = store.table.take_moves()
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


def test_above_the_high_watermark_the_coldest_go_down_to_the_low_one(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=5000, high=0.8, low=0.5)
    for number in range(8):
        store.put(str(number))
    store.table.relieve()
    assert store.table.take_moves() == []
    store.put("8")
    store.table.relieve()
    store.table.relieve()
    moves = store.table.take_moves()
    assert [move.block.key for move in moves] == [b"0", b"1", b"2", b"3"]
    for move in moves:
        store.finish(move)
    assert store.dram.used_bytes == 500
    store.table.relieve()
    assert store.table.take_moves() == []


def test_relief_loses_nothing_for_a_block_that_cannot_go_down(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=300, high=0.5, low=0.2, slab_bytes=100)
    for number in range(5):
        store.put(str(number)).pinned = True
    store.put("5", 350)
    store.table.relieve()
    assert store.table.take_moves() == [], "too large for NVMe, and the others are pinned"
    for block in store.table.blocks():
        block.pinned = False
    store.table.read("red", b"5", 0)
    store.table.relieve()
    store.settle()
    assert store.names() == "012345"
    assert store.tiers[NVME].used_bytes == 300


def test_relief_drops_copies_that_a_lower_tier_has(make_store: MakeStore) -> None:
    store = make_store(400, nvme_bytes=1000, high=0.5, low=0.5)
    block = store.put("a")
    store.put("b")
    store.put("c")
    store.table.relieve()
    (move,) = store.table.take_moves()
    store.table.acquire(block)
    store.finish(move)
    assert block.tier_mask() == 6, "being read, it stays"
    store.table.release(block)
    store.table.relieve()
    assert store.table.take_moves() == []
    assert block.tier_mask() == 4


def test_relief_waits_for_a_tier_below_that_is_full_of_pinned_blocks(make_store: MakeStore) -> None:
    store = make_store(300, nvme_bytes=100, high=0.5, low=0.1)
    first = store.put("a")
    store.put("b")
    store.table.relieve()
    store.settle()
    first.pinned = True
    store.put("c")
    store.table.relieve()
    assert store.table.take_moves() == []
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
    (move,) = store.table.take_moves()
    store.table.acquire(block)
    store.finish(move)
    store.table.release(block)
    store.table.read("red", b"a", 0)
    kinds(store)
    assert store.open("d") is None
    assert kinds(store) == [(EVENT_MOVED, "a", 2)]
    store.settle()
    assert store.names() == "abc"


def test_a_suspended_tier_gets_nothing_and_is_as_if_it_were_not_there(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000, hbm_bytes=1000)
    store.table.suspend(NVME, is_suspended=True)
    store.table.suspend(HBM, is_suspended=True)
    first = store.put("a")
    for _ in range(3):
        store.table.read("red", b"a", 0)
    store.table.warm(first)
    store.put("b")
    assert store.names() == "b"
    assert store.table.take_moves() == []
    store.table.suspend(NVME, is_suspended=False)
    assert store.open("c") is None
    store.settle()
    assert store.names() == "b"


def test_a_copy_that_could_not_be_made_leaves_the_block_where_it_was(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000)
    block = store.put("a")
    assert store.open("b") is None
    (move,) = store.table.take_moves()
    store.finish(move, is_done=False)
    assert block.tier_mask() == 2
    assert not block.moving
    assert store.tiers[NVME].used_bytes == 0
    assert store.open("b") is None


def test_a_block_removed_while_it_moves_is_gone_from_both_tiers_when_the_copy_ends(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000)
    block = store.put("a")
    assert store.open("b") is None
    (move,) = store.table.take_moves()
    store.table.acquire(block)
    store.table.drop(block)
    assert store.dram.quarantined_bytes == 100
    store.table.check_integrity()
    store.table.release(block)
    assert store.dram.quarantined_bytes == 100, "the copy still reads it"
    store.finish(move, is_done=True)
    assert store.dram.free_bytes == 100
    assert store.tiers[NVME].used_bytes == 0
    assert kinds(store)[-1] == (EVENT_GONE, "a", 0)


def test_a_block_removed_while_it_moves_outlives_the_copy_under_a_reader(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000)
    block = store.put("a")
    assert store.open("b") is None
    (move,) = store.table.take_moves()
    store.table.acquire(block)
    store.table.drop(block)
    store.finish(move)
    assert store.dram.quarantined_bytes == 100
    store.table.release(block)
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
    block = store.table.read("red", b"a", 0)
    assert block is not None
    assert block.tier_mask() == 4
    assert not store.table.wants_promotion(block)
    store.table.read("red", b"a", 0)
    assert store.table.wants_promotion(block)
    assert store.table.begin_promotion(block) is None, "DRAM is full of blocks that are nowhere else"
    other = store.table.find("red", b"b")
    assert other is not None
    store.table.drop(other)
    slot = store.table.begin_promotion(block)
    assert slot is not None
    assert not store.table.wants_promotion(block), "one at a time"
    store.table.acquire(block)
    store.dram.view(slot)[:] = value_of(block)
    kinds(store)
    store.table.finish_move(block, NVME, DRAM, slot, is_done=True)
    assert kinds(store) == [(EVENT_MOVED, "a", 6)]
    assert block.hits == 0
    dram = next(counts for index, _, counts, _ in store.table.levels() if index == DRAM)
    assert dram.promotions == 1
    store.table.release(block)


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
    store.table.acquire(block)
    store.table.drop(block)
    store.table.finish_move(block, NVME, DRAM, slot, is_done=True)
    store.table.release(block)
    assert store.dram.free_bytes == 100
    assert store.tiers[NVME].used_bytes == 0


def test_a_recovered_block_larger_than_todays_dram_is_not_promoted(make_store: MakeStore, tmp_path: Path) -> None:
    store = make_store(100, nvme_bytes=1000)
    block = store.block("a", 500)
    block.slots[NVME] = store.tiers[NVME].allocate(500)
    assert store.table.recover([block]) == 1
    assert store.table.begin_promotion(block) is None
    assert not block.moving


def test_a_damaged_copy_is_given_up_and_the_block_with_its_last_one(make_store: MakeStore) -> None:
    store = make_store(200, nvme_bytes=1000)
    block = store.put("a")
    store.put("b")
    assert store.open("c") is None
    (move,) = store.table.take_moves()
    store.table.acquire(block)
    store.finish(move)
    store.table.release(block)
    kinds(store)
    store.table.drop_copy(block, NVME)
    store.table.drop_copy(block, NVME)
    assert kinds(store) == [(EVENT_MOVED, "a", 2)]
    store.table.drop_copy(block, DRAM)
    store.table.drop_copy(block, DRAM)
    assert kinds(store) == [(EVENT_GONE, "a", 0)]
    assert store.names() == "b"


# --- HBM ---


def warmed(store: Store, name: str) -> Block:
    """A block that was put and copied up."""
    block = store.put(name)
    for _ in range(2):
        store.table.read("red", name.encode(), 0)
    store.table.warm(block)
    store.settle()
    return block


def test_a_block_read_twice_is_copied_to_hbm_without_anyone_waiting(make_store: MakeStore) -> None:
    store = make_store(300, hbm_bytes=100)
    block = store.put("a")
    store.table.read("red", b"a", 0)
    store.table.warm(block)
    assert store.table.take_moves() == []
    store.table.read("red", b"a", 0)
    store.table.warm(block)
    store.table.warm(block)
    store.settle()
    assert block.tier_mask() == 3
    assert store.bytes_of(block, HBM) == value_of(block)
    second = warmed(store, "b")
    assert (block.tier_mask(), second.tier_mask()) == (2, 3), "the copy that is in DRAM too leaves at once"
    assert [(index, counts.promotions) for index, _, counts, _ in store.table.levels()] == [(HBM, 2), (DRAM, 0)]


def test_without_an_hbm_tier_nothing_is_warmed(make_store: MakeStore) -> None:
    store = make_store(300)
    warmed(store, "a")
    assert store.names() == "a"


def test_hbm_full_of_blocks_that_are_nowhere_else_takes_no_more(make_store: MakeStore) -> None:
    store = make_store(200, hbm_bytes=100)
    first = warmed(store, "a")
    store.put("b")
    store.put("c")
    assert first.tier_mask() == 1, "its copy in DRAM left, being elsewhere too"
    other = store.table.find("red", b"c")
    assert other is not None
    for _ in range(2):
        store.table.read("red", b"c", 0)
    store.table.warm(other)
    assert store.table.take_moves() == []


def test_a_block_that_is_in_hbm_alone_is_copied_to_dram_by_a_reader_and_stays_in_both(make_store: MakeStore) -> None:
    store = make_store(200, hbm_bytes=100)
    block = warmed(store, "a")
    store.put("b")
    store.put("c")
    store.table.read("red", b"a", 0)
    store.table.read("red", b"a", 0)
    assert store.table.wants_promotion(block)
    store.table.acquire(block)
    slot = store.table.begin_promotion(block)
    assert slot is not None
    store.table.finish_move(block, HBM, DRAM, slot, is_done=True)
    store.table.release(block)
    assert block.tier_mask() == 3
    store.table.check_integrity()
    dram = next(counts for index, _, counts, _ in store.table.levels() if index == DRAM)
    assert dram.promotions == 1


def test_hbm_above_its_watermark_goes_down_to_dram_and_never_loses_a_block(make_store: MakeStore) -> None:
    store = make_store(200, hbm_bytes=200, nvme_bytes=1000, high=0.4, low=0.0)
    first = warmed(store, "a")
    store.table.drop_copy(first, DRAM)
    blocks = [store.put(name) for name in "bc"]
    for block in blocks:
        block.pinned = True
    store.table.relieve()
    assert store.table.take_moves() == [], "DRAM has no room for it now"
    assert store.names() == "abc"
    blocks[0].pinned = False
    store.table.relieve()
    store.settle()
    store.table.relieve()
    store.settle()
    assert [one.tier_mask() for one in (first, *blocks)] == [2, 4, 2]


def test_room_in_hbm_may_need_a_copy_down_first(make_store: MakeStore) -> None:
    store = make_store(300, hbm_bytes=100)
    first = warmed(store, "a")
    store.table.drop_copy(first, DRAM)
    level = store.table._levels[HBM]
    assert store.table._make_room(level, 100, "red") is None
    store.settle()
    assert first.tier_mask() == 2
    slot = store.table._make_room(level, 100, "red")
    assert slot is not None
    store.tiers[HBM].free(slot)


# --- the whole ---


def test_of_two_recovered_blocks_of_one_key_the_higher_generation_stays(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=1000)
    blocks = [store.block(name) for name in ("a", "b", "a", "b")]
    for block in blocks:
        block.slots[NVME] = store.tiers[NVME].allocate(100)
    assert store.table.recover([blocks[0], blocks[3], blocks[2], blocks[1]]) == 2
    assert set(store.table.blocks()) == {blocks[2], blocks[3]}
    assert store.tiers[NVME].used_bytes == 200


def test_recovered_blocks_leave_oldest_first(make_store: MakeStore) -> None:
    store = make_store(100, nvme_bytes=200)
    blocks = [store.block(name) for name in "ab"]
    for block in blocks:
        block.slots[NVME] = store.tiers[NVME].allocate(100)
    store.table.recover(blocks)
    store.put("c")
    assert store.open("d") is None
    assert store.names() == "bc"
