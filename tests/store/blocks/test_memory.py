"""Promises of memory.py: as many blocks are known and remembered as fit the memory, and one in any case."""

from kvstore.store.blocks.quotas import most_blocks, most_remembered, table_bytes


def test_as_many_as_may_be_known_and_remembered_fit() -> None:
    for limit_bytes in (100_000, 1 << 20, 1 << 30):
        blocks, remembered = most_blocks(limit_bytes), most_remembered(limit_bytes)
        assert 0.99 * limit_bytes < table_bytes(blocks, remembered) <= limit_bytes
        assert blocks > 0 < remembered


def test_one_block_may_be_known_however_little_memory_there_is() -> None:
    assert most_blocks(1) == 1
    assert most_remembered(1) == 0
