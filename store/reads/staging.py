"""Copies of cold blocks in DRAM for one reader: where a disk reads to, and what the reader maps under its lease.

A block that has not earned a place in DRAM is read there all the same, so that its bytes cross no socket. Its slot is in quarantine: it
belongs to no visible block, evicts nothing that is not on a lower tier too, and is free once the lease is over. No slot is pointed at
before the disk has filled it.
"""

from typing import NamedTuple

from kvstore.store.blocks.block import Block
from kvstore.store.blocks.table import BlockTable
from kvstore.tiers.dram import DramTier


class Staged(NamedTuple):
    """`copy` is acquired; releasing it frees the slot. `memory` is the slot's, writable; `place` its slab and offset."""

    copy: Block
    memory: memoryview
    place: tuple[int, int]


def stage(table: BlockTable, dram: DramTier, block: Block) -> Staged | None:
    """A slot to read the block into. None: the table gives none now."""
    slot = table.staging_slot(block)
    if slot is None:
        return None
    memory, place = dram.view(slot), dram.locate(slot)
    copy = table.rows.make(block.tenant, block.key, block.size_bytes, block.generation, block.namespace)
    table.copies.stage(copy, slot)
    return Staged(copy, memory, place)
