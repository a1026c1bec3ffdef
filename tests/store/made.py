"""Blocks outside any table."""

from kvstore.store.block_table.block import DRAM, Block
from kvstore.store.block_table.rows import BlockRows
from kvstore.tiers.tier import Slot

ROWS = BlockRows()


def made(
    tenant: str,
    key: bytes,
    size_bytes: int,
    generation: int,
    namespace: str = "",
    parent: bytes = b"",
    checksum: int = 0,
    *,
    dram: Slot | None = None,
    last_access: int = 0,
) -> Block:
    """A block, in DRAM where `dram` is given."""
    block = ROWS.make(tenant, key, size_bytes, generation, namespace, parent, checksum)
    block.set_slot(DRAM, dram)
    block.last_access = last_access
    return block
