"""Tests of staging in read_request.py: a cold block is read into memory for one reader, bounded, and without evicting
hot blocks."""

from collections.abc import Callable

import pytest

from kvstore.store.block_table.block import NVME, Block
from kvstore.store.block_table.table import STAGED_SHARE
from kvstore.store.reads.read_request import stage
from tests.store.integrity import check
from tests.store.tables import Store, value_of

MakeStore = Callable[..., Store]
DRAM_BYTES = 100 * STAGED_SHARE


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    """DRAM of which one block of 100 bytes may be staged at a time."""
    store: Store = make_store(DRAM_BYTES, nvme_bytes=1 << 20)
    return store


def below(store: Store, name: str, size_bytes: int = 100) -> Block:
    """A block that is on NVMe only."""
    block = store.put(name, size_bytes)
    store.table.evictor.evict(block, store.table._ingest_tier)
    store.settle()
    assert block.tier_mask() == 1 << NVME
    return block


def test_a_staged_copys_slot_is_freed_on_release(store: Store) -> None:
    block = below(store, "a")
    staged = stage(store.table, store.dram, block)
    assert staged is not None
    staged.memory[:] = value_of(block)
    slab, offset = staged.location
    assert bytes(store.dram.slab_memory(slab, tenant="red")[offset : offset + 100]) == value_of(block)
    assert (store.dram.used_bytes, store.dram.quarantined_bytes) == (0, 100)
    assert (block.tier_mask(), store.names(), len(store.table._ingest_tier)) == (1 << NVME, "a", 0)
    store.table.copies.release(staged.copy)
    assert (store.dram.used_bytes, store.dram.quarantined_bytes) == (0, 0)
    check(store.table)


@pytest.mark.promise("space-accounted")
def test_staging_is_bounded_by_a_share_of_dram(store: Store) -> None:
    first, second = below(store, "a"), below(store, "b")
    staged = stage(store.table, store.dram, first)
    assert staged is not None
    assert stage(store.table, store.dram, second) is None
    store.table.copies.release(staged.copy)
    assert stage(store.table, store.dram, second) is not None


@pytest.mark.promise("space-accounted")
def test_staging_evicts_no_block_that_is_only_in_dram(store: Store) -> None:
    cold = below(store, "cold")
    for number in range(STAGED_SHARE):
        store.put(f"hot {number}")
    assert store.dram.free_bytes == 0
    assert stage(store.table, store.dram, cold) is None
    assert store.table.evictor.take_moves() == [], "and nothing goes down for it"
