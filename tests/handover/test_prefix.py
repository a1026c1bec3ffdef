"""Promises of prefix.py: the stored prefix of a sequence is loaded into the rank's blocks, and the rest is reported."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.handover.prefix import RankPrefixStore, fetch_prefix
from tests.handover.scene import layout_of


class Shelf:
    """A store of one sequence, whose n-th block of a rank is full of n + 1."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_tensor(self, token_ids: Any, out: Any, *, blocks: Any, first_block: int, deadline_s: float) -> int:
        got = max(0, min(len(blocks), self.count - first_block))
        out[blocks[:got]] = np.arange(first_block + 1, first_block + got + 1)[:, None]
        return got


def fetch(shelf: Shelf, blocks: list[int], first_block: int = 0) -> tuple[int, NDArray[np.uint16]]:
    pool = np.zeros((10, 3), np.uint16)
    count = RankPrefixStore(shelf, pool).fetch(list(range(100)), np.array(blocks, np.int64), first_block=first_block, deadline_s=1.0)
    return count, pool[:, 0]


def test_blocks_are_fetched_to_where_they_lie() -> None:
    count, pool = fetch(Shelf(4), [5, 6, 2, 9, 1])
    assert (count, pool.tolist()) == (4, [0, 0, 3, 0, 0, 1, 2, 0, 0, 4])


@pytest.mark.parametrize(
    ("rank", "tokens", "first_token", "stored", "own", "needed_from"),
    [
        (0, 100, 0, 9, [0, 2, 4], 96),  # blocks 0, 2 and 4 of 6 whole ones are its own
        (1, 100, 0, 9, [1, 3, 5], 100),
        (0, 100, 0, 1, [0], 32),
        (1, 100, 0, 1, [1], 48),
        (0, 100, 0, 0, [], 0),
        (1, 31, 0, 9, [], 0),
        (0, 100, 16, 9, [2, 4], 96),  # what is here already is not fetched
        (1, 100, 16, 9, [1, 3, 5], 100),
        (0, 100, 64, 2, [], 0),
        (0, 100, 40, 9, [], 0),  # nor is a block of which a part is here, or what follows it
        (1, 100, 40, 9, [3, 5], 100),
        (1, 100, 100, 9, [], 0),
    ],
)
def test_a_context_parallel_rank_fetches_its_own_blocks(
    rank: int, tokens: int, first_token: int, stored: int, own: list[int], needed_from: int
) -> None:
    pool = np.zeros((10, 3), np.uint16)
    store = RankPrefixStore(Shelf(stored), pool)
    found = fetch_prefix(store, layout_of(cp=2), rank, range(tokens), np.arange(8), first_token=first_token, deadline_s=1.0)
    assert (found, np.flatnonzero(pool[:, 0]).tolist()) == (needed_from, own)
