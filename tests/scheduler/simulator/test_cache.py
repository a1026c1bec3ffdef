"""Promises of cache.py."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.scheduler.prefix_index import PrefixIndex
from kvstore.scheduler.simulator.prefill import LocalCache
from kvstore.tiers.policies.lru import LRU


def make(blocks: int) -> tuple[LocalCache, PrefixIndex[Any]]:
    index: PrefixIndex[Any] = PrefixIndex()
    return LocalCache(1, blocks, LRU(), index), index


def test_a_match_ends_at_the_first_block_that_is_not_there() -> None:
    cache, _ = make(10)
    cache.insert([1, 2, 3], first=0)
    assert cache.match([1, 2, 9, 3]) == 2
    assert cache.match([1, 2]) == 2
    assert cache.match([]) == 0


def test_the_policy_says_which_leaves_and_the_index_hears_of_it() -> None:
    cache, index = make(3)
    cache.insert([1, 2, 3], first=0)
    cache.touch([1])
    cache.insert([4], first=0)
    assert [key in cache for key in (1, 2, 3, 4)] == [True, False, True, True]
    assert [index.match([key], 2)[1] for key in (1, 2, 3, 4)] == [1, 0, 1, 1]
    # One that is there already is a use of it.
    cache.insert([3, 5], first=0)
    assert [key in cache for key in (1, 3, 4, 5)] == [False, True, True, True]


@pytest.mark.no_cover
@given(st.integers(1, 5), st.lists(st.tuples(st.lists(st.integers(0, 8), unique=True), st.integers(0, 3))))
def test_index_and_cache_hold_the_same_and_never_too_much(blocks: int, prompts: list[tuple[list[int], int]]) -> None:
    cache, index = make(blocks)
    for keys, first in prompts:
        cache.insert(keys, first=first)
        held = [key for key in range(9) if key in cache]
        assert [key for key in range(9) if index.match([key], 2)[1]] == held
        assert len(cache) == len(index) == len(held) <= blocks
