"""Contents of synthetic blocks, derived from the block id alone, so that a reader can verify them.

Word j of a block is mix(id) xor (j * odd constant). `mix` is a permutation of 64-bit numbers, so two blocks differ in
every word, and no two words of one block are equal. A swapped, torn, shifted or stale block is detected. Generated at
memory speed.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.protocol.errors import InvalidArgument

WORD_BYTES: Final = 8
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR: Final = np.uint64(0x94D049BB133111EB)

Words = NDArray[np.uint64]


class BlockArena:
    """Memory for `blocks` blocks that are read or generated at once. `views[i]` is block i, without padding."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        """Raises InvalidArgument for a size below 1."""
        if blocks < 1 or block_bytes < 1:
            raise InvalidArgument(f"{blocks} blocks of {block_bytes} bytes: both must be at least 1")
        words = -(-block_bytes // WORD_BYTES)
        self.block_bytes = block_bytes
        self._words: Words = np.zeros((blocks, words), np.uint64)
        self._offsets: Words = np.arange(words, dtype=np.uint64) * _STEP
        self._bytes: NDArray[np.uint8] = self._words.view(np.uint8)[:, :block_bytes]
        self.views: list[memoryview] = [memoryview(self._bytes[i]) for i in range(blocks)]

    def __len__(self) -> int:
        return len(self.views)

    def make(self, ids: Sequence[int]) -> None:
        """Fill the first blocks with the contents of `ids`."""
        np.bitwise_xor(mix(ids)[:, None], self._offsets[None, :], out=self._words[: len(ids)])

    def wrong_bytes(self, expected: "BlockArena", count: int) -> NDArray[np.int64]:
        """Number of bytes that differ from `expected`, for each of the first `count` blocks."""
        if self._bytes.shape[1] % WORD_BYTES == 0:
            same = (self._words[:count] == expected._words[:count]).all(axis=1)
            if same.all():
                return np.zeros(count, np.int64)
        counts: NDArray[np.int64] = (self._bytes[:count] != expected._bytes[:count]).sum(axis=1, dtype=np.int64)
        return counts


def mix(ids: Sequence[int]) -> Words:
    """The finaliser of SplitMix64, a permutation of the 64-bit numbers. Source: Steele, Lea, Flood, OOPSLA 2014."""
    mixed = np.array(ids, np.uint64) + _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST_FACTOR
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND_FACTOR
    return mixed ^ (mixed >> np.uint64(31))


def block_key(block_id: int, block_bytes: int) -> bytes:
    """16-byte key of a trace's block. The block size is part of it, so that replays with other sizes do not collide."""
    return xxhash.xxh3_128_digest(b"kvstore replay" + block_bytes.to_bytes(8, "little") + block_id.to_bytes(8, "little"))
