"""Promises of bounds.py: Belady's choice against every choice there is, and no policy above it."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.lab.accesses import flatten
from kvstore.lab.bounds import belady_hits, infinite_hits
from kvstore.lab.replay import Replay
from kvstore.protocol.errors import InvalidArgument
from kvstore.tiers.policies.by_name import POLICIES
from tests.lab.prompts import prompts, public_trace, requests


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
    assert Replay(policy, capacity).run(requests(found)).prefix_hits <= bound <= infinite_hits(accesses)


@given(prompts)
def test_with_room_for_all_belady_is_the_infinite_cache(found: list[list[int]]) -> None:
    accesses = flatten(requests(found))
    assert belady_hits(accesses, max(1, accesses.unique)) == infinite_hits(accesses)


def test_a_bound_needs_a_capacity() -> None:
    with pytest.raises(InvalidArgument, match="0 blocks"):
        belady_hits(flatten([]), 0)


@pytest.mark.no_cover
def test_the_public_traces_bounds_are_the_published_ones() -> None:
    accesses = flatten(public_trace())
    assert infinite_hits(accesses) / len(accesses) == pytest.approx(0.3664, abs=5e-5)
    assert belady_hits(accesses, 1000) / len(accesses) == pytest.approx(0.1907, abs=5e-5)
    assert belady_hits(accesses, 10_000) == infinite_hits(accesses)
