"""Promises of prefix.py: what a store has of a sequence goes into the rank's blocks, wherever they lie; the rest is told."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.handover.prefix import PrefixStore, fetch_prefix
from kvstore.protocol.errors import Unavailable
from tests.handover.scene import layout_of


class Shelf:
    """A store of one sequence, whose n-th block of a rank is full of n + 1."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_tensor(self, token_ids: Any, out: Any, *, blocks: Any = None, deadline_s: float | None = None) -> int:
        got = min(len(blocks), self.count)
        out[blocks[:got]] = np.arange(1, got + 1)[:, None]
        return got


def fetch(shelf: Shelf, blocks: list[int]) -> tuple[int, NDArray[np.uint16]]:
    pool = np.zeros((10, 3), np.uint16)
    return PrefixStore(shelf, pool).fetch(list(range(100)), np.array(blocks, np.int64), deadline_s=1.0), pool[:, 0]


def test_blocks_are_fetched_to_where_they_lie() -> None:
    count, pool = fetch(Shelf(4), [5, 6, 2, 9, 1])
    assert (count, pool.tolist()) == (4, [0, 0, 3, 0, 0, 1, 2, 0, 0, 4])


def test_no_more_is_fetched_than_there_are_blocks() -> None:
    assert fetch(Shelf(8), [3, 4])[0] == 2


def test_a_store_that_fails_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise Unavailable("gone")

    shelf = Shelf(4)
    monkeypatch.setattr(shelf, "get_tensor", fail)
    assert fetch(shelf, [0, 1])[0] == 0


@pytest.mark.parametrize(
    ("rank", "tokens", "stored", "own", "needed_from"),
    [
        (0, 100, 9, [0, 2, 4], 96),  # blocks 0, 2 and 4 of 6 whole ones are its own
        (1, 100, 9, [1, 3, 5], 100),
        (0, 100, 1, [0], 32),
        (1, 100, 1, [1], 48),
        (0, 100, 0, [], 0),
        (1, 31, 9, [], 0),
    ],
)
def test_a_context_parallel_rank_fetches_its_own_blocks(rank: int, tokens: int, stored: int, own: list[int], needed_from: int) -> None:
    pool = np.zeros((10, 3), np.uint16)
    store = PrefixStore(Shelf(stored), pool)
    found = fetch_prefix(store, layout_of(cp=2), rank, range(tokens), np.arange(8), deadline_s=1.0)
    assert (found, np.flatnonzero(pool[:, 0]).tolist()) == (needed_from, own)
