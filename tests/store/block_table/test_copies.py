"""Tests of copies.py over real tiers: when the slot of a dropped copy may be reused."""

from collections.abc import Callable

from kvstore.protocol.catalog_messages import EVENT_MOVED, EVENT_REMOVED
from kvstore.store.block_table.block import DRAM, NVME
from tests.store.integrity import check
from tests.store.tables import Store

MakeStore = Callable[..., Store]


def test_a_read_blocks_slot_outlives_its_removal(make_store: MakeStore) -> None:
    store = make_store(200)
    read, _other = store.put("a"), store.put("b")
    store.table.copies.acquire(read)
    store.put("c")
    assert store.names() == "ac"
    store.table.copies.drop(read)
    assert store.names() == "c"
    assert store.dram.quarantined_bytes == 100
    store.put("d")
    assert store.names() == "d", "the slot under the reader is not to be had"
    store.table.copies.release(read)
    assert store.dram.quarantined_bytes == 0
    store.put("e")
    assert store.names() == "de"


def test_the_last_of_several_readers_frees_a_removed_block(make_store: MakeStore) -> None:
    store = make_store(100)
    block = store.put("a")
    store.table.copies.acquire(block)
    store.table.copies.acquire(block)
    store.table.copies.drop(block)
    store.table.copies.release(block)
    assert store.dram.quarantined_bytes == 100
    store.table.copies.release(block)
    assert store.dram.free_bytes == 100


def test_dropping_the_last_copy_drops_the_block(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=10_000)
    block = store.put("a")
    store.table.evictor.evict(block, store.table._ingest_tier)
    store.settle()
    store.events.clear()
    assert block.nvme is not None
    assert block.dram is None
    store.table.copies.drop_copy(block, DRAM)
    assert store.names() == "a"
    assert store.events == []
    store.table.copies.drop_copy(block, NVME)
    assert store.names() == ""
    assert [kind for kind, _, _ in store.events] == [EVENT_REMOVED]


def test_dropping_one_of_two_copies_keeps_the_block(make_store: MakeStore) -> None:
    store = make_store(1000, nvme_bytes=10_000)
    block = store.put("a")
    store.table.evictor.evict(block, store.table._ingest_tier)
    store.settle()
    slot = store.table.begin_promotion(block)
    assert slot is not None
    store.table.finish_move(block, NVME, DRAM, slot, is_done=True)
    store.events.clear()
    store.table.copies.drop_copy(block, DRAM)
    assert (store.names(), block.dram, store.dram.free_bytes) == ("a", None, 1000)
    assert [kind for kind, _, _ in store.events] == [EVENT_MOVED]
    check(store.table)
