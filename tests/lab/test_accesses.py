"""Promises of accesses.py: previous and next use of each block, for blocks of any id."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.lab.accesses import belady_hits, flatten, infinite_hits, reuse_distances, reuse_gaps_s, used_once_share, working_set
from kvstore.lab.replay import CacheReplay
from kvstore.tiers.policies.by_name import POLICIES
from tests.lab.prompts import prompts, public_trace, requests


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


def test_time_does_not_go_back() -> None:
    found = [replace(request, timestamp_ms=time_ms) for request, time_ms in zip(requests([[1], [2], [3]]), (5000, 2000, 7000), strict=True)]
    assert flatten(found).times_s.tolist() == [5, 5, 7]


@given(st.lists(st.integers(0, 9), max_size=60))
def test_reuse_distance_counts_other_blocks_since_last_use(ids: list[int]) -> None:
    found = reuse_distances(flatten(requests([ids])))
    for index, block in enumerate(ids):
        before = [other for other in range(index) if ids[other] == block]
        assert found[index] == (len(set(ids[before[-1] + 1 : index])) if before else np.inf)


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


@given(prompts, st.sampled_from([0.5, 1.0, 3.0, 7.5, float("inf")]))
def test_it_is_the_different_blocks_of_a_window_that_ends_now(found: list[list[int]], window_s: float) -> None:
    at_s = np.arange(-1, len(found) + 3, 0.5)
    sizes = working_set(flatten(requests(found)), window_s=window_s, at_s=at_s)
    for now_s, size in zip(at_s, sizes, strict=True):
        within = [prompt for time_s, prompt in enumerate(found) if now_s - window_s < time_s <= now_s]
        assert size == len({block for prompt in within for block in prompt})


def best_of_all(ids: tuple[int, ...], capacity: int) -> int:
    """The most hits of any way to store or not to store, by trying them all."""

    @cache
    def best(index: int, resident: frozenset[int]) -> int:
        if index == len(ids):
            return 0
        block = ids[index]
        if block in resident:
            return 1 + best(index + 1, resident)
        choices = [resident]
        if len(resident) < capacity:
            choices.append(resident | {block})
        choices += [resident - {leaver} | {block} for leaver in resident]
        return max(best(index + 1, choice) for choice in choices)

    return best(0, frozenset())


@given(st.lists(st.integers(0, 5), max_size=14), st.integers(1, 4))
def test_belady_is_the_best_of_all_choices(ids: list[int], capacity: int) -> None:
    accesses = flatten(requests([[block] for block in ids]))
    assert belady_hits(accesses, capacity) == best_of_all(tuple(ids), capacity)


@given(prompts, st.integers(1, 12), st.sampled_from(sorted(POLICIES)))
def test_no_policy_has_more_prefix_hits(found: list[list[int]], capacity: int, policy: str) -> None:
    accesses = flatten(requests(found))
    bound = belady_hits(accesses, capacity)
    assert CacheReplay(policy, capacity).run(requests(found)).prefix_hits <= bound <= infinite_hits(accesses)


@given(prompts)
def test_with_room_for_all_belady_is_the_infinite_cache(found: list[list[int]]) -> None:
    accesses = flatten(requests(found))
    assert belady_hits(accesses, max(1, accesses.unique)) == infinite_hits(accesses)


def test_the_public_traces_bounds_are_the_published_ones() -> None:
    accesses = flatten(public_trace())
    assert infinite_hits(accesses) / len(accesses) == pytest.approx(0.3664, abs=5e-5)
    assert belady_hits(accesses, 1000) / len(accesses) == pytest.approx(0.1907, abs=5e-5)
    assert belady_hits(accesses, 10_000) == infinite_hits(accesses)
