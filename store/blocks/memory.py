"""What memory of the process the block table takes beside the values, estimated: by it the operator bounds how many blocks are known."""

from typing import Final

TABLE_BYTES: Final = 470
"""Of a block with a copy in one tier: its row, key, tables and the default policy (404 bytes measured in prompts of 16 blocks, 309 without
parents where many come at a time). A value of a block that is stored in 2, 4 or 8 values takes some 150, 70 and 30 more."""

INDEX_BYTES: Final = 176
"""Of a block that the shared index shows to clients of the host, with a key of 16 bytes: 80, and 96 more in the larger index while it
grows."""

REMEMBERED_BYTES: Final = 400
"""Of a block that left and that the default policy remembers (396 measured where blocks have no parents, 236 in prompts of 50)."""

REMEMBERED_SHARE: Final = 0.25
"""Of the table's memory, for these: a policy remembers several times as many as are there."""


def most_blocks(max_table_bytes: int) -> int:
    """How many blocks may be known in so much memory."""
    return max(1, int(max_table_bytes * (1 - REMEMBERED_SHARE)) // TABLE_BYTES)


def most_index_bytes(max_table_bytes: int) -> int:
    """What the shared index of so many blocks takes: a memfd, beside the table's memory."""
    return most_blocks(max_table_bytes) * INDEX_BYTES


def most_remembered(max_table_bytes: int) -> int:
    """How many that left may be remembered, all tiers together."""
    return int(max_table_bytes * REMEMBERED_SHARE) // REMEMBERED_BYTES


def table_bytes(blocks: int, remembered: int) -> int:
    """What so many blocks, and so many that left, take."""
    return blocks * TABLE_BYTES + remembered * REMEMBERED_BYTES
