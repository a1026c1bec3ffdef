"""Promises of accesses.py: where each block was used before and is used next, whatever its id."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from kvstore.lab.accesses import flatten
from tests.lab.prompts import prompts, requests


@pytest.mark.no_cover
@given(prompts)
def test_uses_are_linked_to_the_ones_before_and_after(found: list[list[int]]) -> None:
    accesses = flatten(requests(found, every_s=2))
    ids = [block for prompt in found for block in prompt]
    assert len(accesses) == len(ids)
    assert accesses.unique == len(set(ids))
    for index, block in enumerate(ids):
        before = [other for other in range(index) if ids[other] == block]
        after = [other for other in range(index + 1, len(ids)) if ids[other] == block]
        assert accesses.previous[index] == (before[-1] if before else -1)
        assert accesses.next[index] == (after[0] if after else -1)
    assert accesses.times_s.tolist() == [2.0 * number for number, prompt in enumerate(found) for _ in prompt]


def test_ids_are_numbered_without_gaps_up_to_the_largest_that_a_trace_may_have() -> None:
    accesses = flatten(requests([[2**64 - 1, 7], [0, 2**63, 2**64 - 1]]))
    assert sorted(set(accesses.blocks.tolist())) == [0, 1, 2, 3]
    assert accesses.blocks[0] == accesses.blocks[4]
    assert accesses.blocks.dtype == np.int64


def test_a_trace_may_be_empty() -> None:
    accesses = flatten([])
    assert (len(accesses), accesses.unique) == (0, 0)


def test_time_does_not_go_back() -> None:
    found = [replace(request, timestamp_ms=time_ms) for request, time_ms in zip(requests([[1], [2], [3]]), (5000, 2000, 7000), strict=True)]
    assert flatten(found).times_s.tolist() == [5, 5, 7]
