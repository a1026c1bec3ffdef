"""Promises of distances.py, against counting by hand and against LRU."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.lab.accesses import flatten
from kvstore.lab.distances import reuse_distances, reuse_gaps_s, used_once_share
from tests.lab.prompts import prompts, public_trace, requests


@given(st.lists(st.integers(0, 9), max_size=60))
def test_a_distance_is_the_number_of_other_blocks_since_the_last_use(ids: list[int]) -> None:
    found = reuse_distances(flatten(requests([ids])))
    for index, block in enumerate(ids):
        before = [other for other in range(index) if ids[other] == block]
        assert found[index] == (len(set(ids[before[-1] + 1 : index])) if before else np.inf)


@pytest.mark.no_cover
@given(prompts, st.integers(1, 12))
def test_lru_hits_what_was_used_within_its_capacity(found: list[list[int]], capacity: int) -> None:
    lru: list[int] = []
    hits = 0
    for block in (block for prompt in found for block in prompt):
        hits += block in lru
        lru = [*(other for other in lru if other != block), block][-capacity:]
    assert np.count_nonzero(reuse_distances(flatten(requests(found))) < capacity) == hits


def test_gaps_are_between_prompts() -> None:
    accesses = flatten(requests([[1, 2], [1], [2, 3], [1, 3]], every_s=10))
    assert reuse_gaps_s(accesses).tolist() == [10, 20, 20, 10]
    assert reuse_distances(accesses).tolist() == [np.inf, np.inf, 1, 1, np.inf, 2, 1]


def test_the_share_used_once_is_of_unique_blocks() -> None:
    assert used_once_share(flatten(requests([[1, 2, 3], [1, 2, 4], [1]]))) == 0.5
    assert used_once_share(flatten([])) == 0


def test_the_public_trace_is_reused_as_published() -> None:
    accesses = flatten(public_trace())
    assert used_once_share(accesses) == pytest.approx(0.758, abs=5e-4)
    assert np.percentile(reuse_gaps_s(accesses), [50, 90]) == pytest.approx([114, 519], abs=1)
    assert np.mean(reuse_distances(accesses) < 10_000) == pytest.approx(0.2112, abs=5e-5)
