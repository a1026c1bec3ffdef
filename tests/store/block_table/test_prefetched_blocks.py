"""Tests of prefetched_blocks.py: limits, and what counts as useful or wasted."""

import pytest

from kvstore.store.block_table.block import DRAM, Block
from kvstore.store.block_table.prefetched_blocks import AWAIT_NS, MAX_AWAITED, SHARE, UNREAD_NS, PrefetchedBlocks
from kvstore.store.block_table.rows import BlockRows
from kvstore.tiers.tier import Slot

SIZE = 100
LIMIT_BLOCKS = 4


@pytest.fixture
def prefetched() -> PrefetchedBlocks:
    return PrefetchedBlocks(SHARE * LIMIT_BLOCKS * SIZE)


def brought(prefetched: PrefetchedBlocks, rows: BlockRows, key: bytes, now_ns: int = 0) -> Block:
    """A block that was prefetched just now."""
    block = rows.make("red", key, SIZE, 1, "ns", b"")
    block.set_slot(DRAM, Slot(1, 1, SIZE, 0))
    assert prefetched.reserve(SIZE)
    prefetched.add(block, now_ns)
    return block


def test_blocks_count_as_useful_or_wasted_once(prefetched: PrefetchedBlocks) -> None:
    rows = BlockRows()
    read, evicted, dropped, unread = (brought(prefetched, rows, key) for key in (b"r", b"e", b"d", b"u"))
    assert not prefetched.reserve(1)
    read.hits = 1
    evicted.set_slot(DRAM, None)
    dropped.is_dropped = True
    for _ in range(2):
        prefetched.check(1)
        assert (prefetched.useful, prefetched.wasted, prefetched.unread_bytes) == (1, 2, SIZE)
    unread.hits, unread.is_dropped = 1, True
    prefetched.check(1)
    assert (prefetched.useful, prefetched.wasted, prefetched.unread_bytes) == (2, 2, 0)
    assert (prefetched.brought_blocks, prefetched.brought_bytes) == (4, 4 * SIZE)


def test_an_old_unread_block_frees_its_share(prefetched: PrefetchedBlocks) -> None:
    block = brought(prefetched, BlockRows(), b"a", 5)
    prefetched.check(4 + UNREAD_NS)
    assert prefetched.unread_bytes == block.size_bytes
    prefetched.check(5 + UNREAD_NS)
    assert (prefetched.wasted, prefetched.unread_bytes) == (1, 0)


def test_an_awaited_copy_is_charged_from_its_order_on(prefetched: PrefetchedBlocks) -> None:
    rows = BlockRows()
    assert prefetched.await_copies("red", [b"a", b"b"], 0) == [b"a", b"b"]
    assert prefetched.await_copies("red", [b"a", b"c"], 1) == [b"c"]
    assert prefetched.admit_copy("red", b"a", SIZE)
    assert prefetched.admit_copy("red", b"a", SIZE), "the same one"
    assert prefetched.admit_copy("blue", b"a", SIZE), "no prefetch"
    assert not prefetched.admit_copy("red", b"b", LIMIT_BLOCKS * SIZE)
    assert (prefetched.unread_bytes, prefetched.refused, prefetched.awaited) == (SIZE, 1, 2)
    prefetched.copied(rows.make("red", b"a", SIZE, 1, "ns", b""), 2)
    prefetched.copied(rows.make("red", b"z", SIZE, 1, "ns", b""), 2)
    assert (prefetched.brought_blocks, prefetched.awaited) == (1, 1)


def test_copies_that_do_not_come_are_given_up(prefetched: PrefetchedBlocks) -> None:
    prefetched.await_copies("red", [b"a", b"b", b"c"], 0)
    assert prefetched.admit_copy("red", b"a", SIZE)
    assert prefetched.admit_copy("red", b"b", SIZE)
    prefetched.forget_copies("red", [b"a", b"absent"])
    assert (prefetched.awaited, prefetched.unread_bytes) == (2, SIZE)
    prefetched.check(AWAIT_NS - 1)
    assert prefetched.awaited == 2
    prefetched.check(AWAIT_NS)
    assert (prefetched.awaited, prefetched.unread_bytes, prefetched.wasted) == (0, 0, 0)


def test_awaited_copies_are_bounded(prefetched: PrefetchedBlocks) -> None:
    keys = [b"%d" % number for number in range(MAX_AWAITED + 3)]
    assert prefetched.await_copies("red", keys, 0) == keys[:MAX_AWAITED]
    assert (prefetched.awaited, prefetched.refused) == (MAX_AWAITED, 3)
