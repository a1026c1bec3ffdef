"""Promises of block_bytes.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.block_bytes import BlockArena, mix

IDS = st.integers(0, (1 << 64) - 1)


def made(ids: list[int], block_bytes: int) -> BlockArena:
    arena = BlockArena(max(1, len(ids)), block_bytes)
    arena.make(ids)
    return arena


def naive(block_id: int, word: int) -> int:
    """SplitMix64's finaliser and the counter, in plain integers."""
    mask, step = (1 << 64) - 1, 0x9E3779B97F4A7C15
    mixed = (block_id + step) & mask
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & mask
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & mask
    return (mixed ^ (mixed >> 31)) ^ (word * step & mask)


@given(st.lists(IDS, min_size=1, max_size=5), st.integers(1, 40))
def test_bytes_are_those_of_the_naive_form(ids: list[int], block_bytes: int) -> None:
    arena = made(ids, block_bytes)
    for index, block_id in enumerate(ids):
        words = b"".join(naive(block_id, word).to_bytes(8, "little") for word in range(5))
        assert arena.views[index] == words[:block_bytes]


@given(st.lists(IDS, min_size=2, max_size=20, unique=True))
def test_different_blocks_differ_in_every_word(ids: list[int]) -> None:
    assert len(set(mix(ids).tolist())) == len(ids)


@pytest.mark.parametrize("block_bytes", [7, 4096])
@pytest.mark.parametrize("at", [0, 3, 6])
def test_one_flipped_bit_is_one_wrong_byte_of_its_block(block_bytes: int, at: int) -> None:
    arena, expected = made([1, 2, 3], block_bytes), made([1, 2, 3], block_bytes)
    arena.views[1][at] ^= 4
    assert arena.wrong_bytes(expected, 3).tolist() == [0, 1, 0]
    assert arena.wrong_bytes(expected, 1).tolist() == [0]
