"""Promises of keys.py: other ids that mean the same, and lie anywhere."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.lab.keys import spread
from kvstore.lab.replay import Replay
from tests.lab.prompts import conversations, requests

ids = st.lists(st.lists(st.integers(0, 5) | st.integers(0, 2**64 - 1), max_size=5), max_size=10)


@pytest.mark.no_cover
@given(ids)
def test_blocks_are_the_same_ones_under_other_ids(found: list[list[int]]) -> None:
    old, new = requests(found), spread(requests(found))
    assert [replace(request, hash_ids=()) for request in old] == [replace(request, hash_ids=()) for request in new]
    assert [len(request.hash_ids) for request in old] == [len(request.hash_ids) for request in new]
    pairs = {
        (one, other) for before, after in zip(old, new, strict=True) for one, other in zip(before.hash_ids, after.hash_ids, strict=True)
    }
    assert len({one for one, _ in pairs}) == len({other for _, other in pairs}) == len(pairs)


def test_numbers_in_a_row_lie_anywhere() -> None:
    ((*found,),) = (request.hash_ids for request in spread(requests([range(1000)])))
    for bit in range(64):
        assert 400 < sum(id >> bit & 1 for id in found) < 600


def test_a_policy_that_knows_no_numbers_decides_as_before() -> None:
    assert Replay("lru", 500).run(spread(conversations())) == Replay("lru", 500).run(conversations())
