"""Tests of evictor.py with the block table for HBM, the tier above DRAM."""

from collections.abc import Callable

from kvstore.store.block_table.block import DRAM, HBM, Block
from tests.store.integrity import check
from tests.store.tables import Store, value_of

MakeStore = Callable[..., Store]


def warmed(store: Store, name: str) -> Block:
    """A block that was put and copied up."""
    block = store.put(name)
    for _ in range(2):
        store.read("red", name.encode(), 0)
    store.table.evictor.promote_to_hbm(block)
    store.settle()
    return block


def test_a_block_read_twice_is_promoted_to_hbm(make_store: MakeStore) -> None:
    store = make_store(300, hbm_bytes=100)
    block = store.put("a")
    store.read("red", b"a", 0)
    store.table.evictor.promote_to_hbm(block)
    assert store.table.evictor.take_moves() == []
    store.read("red", b"a", 0)
    store.table.evictor.promote_to_hbm(block)
    store.table.evictor.promote_to_hbm(block)
    store.settle()
    assert block.tier_mask() == 3
    assert store.bytes_of(block, HBM) == value_of(block)
    second = warmed(store, "b")
    assert (block.tier_mask(), second.tier_mask()) == (2, 3), "the copy that is in DRAM too leaves at once"
    assert [(index, counts.promotions) for index, _, counts, _ in store.table.levels()] == [(HBM, 2), (DRAM, 0)]


def test_a_read_of_an_hbm_block_copies_it_to_dram(make_store: MakeStore) -> None:
    store = make_store(200, hbm_bytes=100)
    block = warmed(store, "a")
    store.put("b")
    store.put("c")
    store.read("red", b"a", 0)
    store.read("red", b"a", 0)
    assert store.table.wants_promotion(block)
    store.table.copies.acquire(block)
    slot = store.table.begin_promotion(block)
    assert slot is not None
    store.table.finish_move(block, HBM, DRAM, slot, is_done=True)
    store.table.copies.release(block)
    assert block.tier_mask() == 3
    check(store.table)
    dram = next(counts for index, _, counts, _ in store.table.levels() if index == DRAM)
    assert dram.promotions == 1


def test_hbm_above_its_watermark_demotes_to_dram(make_store: MakeStore) -> None:
    store = make_store(200, hbm_bytes=200, nvme_bytes=1000, high=0.4, low=0.0)
    first = warmed(store, "a")
    store.table.copies.drop_copy(first, DRAM)
    blocks = [store.put(name) for name in "bc"]
    for block in blocks:
        block.pinned = True
    store.table.evictor.demote_to_low_watermark()
    assert store.table.evictor.take_moves() == [], "DRAM has no room for it now"
    assert store.names() == "abc"
    blocks[0].pinned = False
    store.table.evictor.demote_to_low_watermark()
    store.settle()
    store.table.evictor.demote_to_low_watermark()
    store.settle()
    assert [one.tier_mask() for one in (first, *blocks)] == [2, 4, 2]
