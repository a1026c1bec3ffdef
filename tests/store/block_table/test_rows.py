"""Tests of rows.py: a row belongs to one block while it is referenced, and batch access equals single access."""

import gc
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.store.block_table.block import DRAM, HBM, NOT_INDEXED, NVME, Block, Loss
from kvstore.store.block_table.rows import (
    BlockRows,
    groups_in,
    keys_of,
    read,
    rows_of,
    slot_indexes_of,
    slots_of,
    write,
)
from kvstore.tiers.tier import Slot
from tests.store.integrity import check

LARGEST = 2**64 - 1


def many(rows: BlockRows, count: int, first: int = 0) -> list[Block]:
    """New blocks in DRAM, each of other numbers."""
    numbers = range(first, first + count)
    slots = [Slot(number << 21, number + 1, 100, number % 3) for number in numbers]
    keys, parents = [b"key %d" % number for number in numbers], [b"parent %d" % number for number in numbers]
    return rows.make_all("red", keys, 100, [LARGEST - number for number in numbers], "ns", parents, slots)


def used(block: Block) -> Block:
    """After everything that a block may have has been said of it."""
    block.readers, block.hits, block.event_seq, block.index_entry, block.last_access = 3, 7, 9, 11, 13
    block.checksum = LARGEST
    block.pinned = block.moving = block.stays_raw = block.is_secondary = block.is_dropped = True
    block.demoted_from = DRAM
    block.set_slot(HBM, Slot(1, 2, 3))
    block.set_slot(NVME, Slot(1, 2, 3))
    block.set_loss(NVME, Loss(5))
    return block


def is_as_new(block: Block) -> bool:
    counted = (block.readers, block.hits, block.event_seq, block.index_entry, block.checksum)
    said = (
        block.pinned,
        block.moving,
        block.stays_raw,
        block.is_secondary,
        block.is_dropped,
        block.demoted_from,
        block.hbm,
        block.nvme,
        block.lossy,
    )
    return counted == (0, 0, 0, NOT_INDEXED, 0) and not any(said)


def test_a_block_is_what_it_was_made_as() -> None:
    rows = BlockRows()
    block = rows.make("red", b"key", 5, LARGEST, "ns", b"parent", LARGEST - 1)
    assert (block.tenant, block.namespace, block.key, block.parent) == ("red", "ns", b"key", b"parent")
    assert (block.size_bytes, block.generation, block.checksum) == (5, LARGEST, LARGEST - 1)
    assert block.slots == (None, None, None)
    block.checksum = 0
    assert is_as_new(block)
    first, second = many(rows, 2)
    assert (second.tenant, second.namespace, second.key, second.parent) == ("red", "ns", b"key 1", b"parent 1")
    assert (second.size_bytes, second.generation, second.dram) == (100, LARGEST - 1, Slot(1 << 21, 2, 100, 1))
    assert is_as_new(first)
    assert is_as_new(second)


@pytest.mark.parametrize("make", [lambda rows: rows.make("red", b"x", 1, 1), lambda rows: many(rows, 1)[0]], ids=["one", "many"])
def test_a_reused_row_keeps_nothing_of_its_former_block(make: Callable[[BlockRows], Block]) -> None:
    rows = BlockRows()
    former = used(many(rows, 1)[0])
    row = int(former)
    other = make(rows)
    assert other != row
    del former
    gc.collect()
    assert rows.in_use == 1
    later = make(rows)
    assert later == row
    assert is_as_new(later)
    check(rows)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3000)), max_size=8))
def test_no_row_is_two_blocks(steps: list[tuple[bool, int]]) -> None:
    rows, here, number = BlockRows(), dict[int, Block](), 0
    for is_made, count in steps:
        if is_made:
            here.update(enumerate(many(rows, count, number), start=number))
            number += count
        else:
            for key in list(here)[: count // 2]:
                del here[key]
        assert len({int(block) for block in here.values()}) == len(here) == rows.in_use
        check(rows)
    for key, block in here.items():
        assert (block.key, block.dram) == (b"key %d" % key, Slot(key << 21, key + 1, 100, key % 3))


def test_batch_reads_of_columns_match_single_reads() -> None:
    blocks = many(BlockRows(), 40)[::-2]
    columns = blocks[0].columns
    assert keys_of(blocks) == [block.key for block in blocks]
    assert rows_of(blocks).tolist() == [int(block) for block in blocks]
    assert read(columns.generations, rows_of(blocks)).tolist() == [block.generation for block in blocks]
    assert slots_of(blocks) == [block.dram for block in blocks]
    assert slot_indexes_of(blocks).tolist() == [slot.index for block in blocks if (slot := block.dram) is not None]
    assert groups_in(columns, rows_of(blocks)).tolist() == [block.group_in(DRAM) for block in blocks]
    write(columns.checksums, rows_of(blocks), [LARGEST - number for number in range(20)])
    assert [block.checksum for block in blocks] == [LARGEST - number for number in range(20)]
