"""Ranks of an executor, its stages and its groups."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kvcache.layouts.parallel import MAX_RANKS, Coordinates, Parallel
from kvstore.protocol.errors import InvalidArgument

SIZES = st.integers(1, 5)


def test_the_context_parallel_rank_is_the_fastest_part_of_a_rank() -> None:
    parallel = Parallel(tp=2, pp=2, cp=3)
    assert parallel.ranks == 12
    assert [parallel.coordinates(rank) for rank in (0, 1, 3, 6, 11)] == [
        Coordinates(0, 0, 0),
        Coordinates(0, 0, 1),
        Coordinates(0, 1, 0),
        Coordinates(1, 0, 0),
        Coordinates(1, 1, 2),
    ]
    assert parallel.rank_of(pp=1, tp=1, cp=2) == 11


@given(tp=SIZES, pp=SIZES, cp=SIZES)
@settings(max_examples=30)
def test_ranks_and_coordinates_are_one_to_one(tp: int, pp: int, cp: int) -> None:
    parallel = Parallel(tp=tp, pp=pp, cp=cp)
    found = [parallel.coordinates(rank) for rank in range(parallel.ranks)]
    assert len(set(found)) == parallel.ranks
    assert [parallel.rank_of(**at._asdict()) for at in found] == list(range(parallel.ranks))


def test_layers_are_split_evenly_with_the_remainder_first() -> None:
    assert [Parallel(pp=3).stage_layers(stage, layers=8) for stage in range(3)] == [range(3), range(3, 6), range(6, 8)]
    assert [Parallel(pp=2).stage_layers(stage, layers=8) for stage in range(2)] == [range(4), range(4, 8)]


def test_layers_are_split_as_said() -> None:
    parallel = Parallel(pp=3, layer_split=(1, 5, 2))
    assert [parallel.stage_layers(stage, layers=8) for stage in range(3)] == [range(1), range(1, 6), range(6, 8)]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"tp": 0}, "tp is 0: it must be at least 1"),
        ({"pp": -1}, "pp is -1"),
        ({"cp": 0}, "cp is 0"),
        ({"dp": 0}, "dp is 0"),
        ({"tp": MAX_RANKS, "cp": 2}, "an executor has at most 1024"),
        ({"tp": 6, "dp": 4}, "tp is 6: it must be a multiple of dp, 4"),
        ({"pp": 2, "layer_split": (4,)}, "layer_split is (4,)"),
        ({"pp": 2, "layer_split": (4, 0)}, "at least one layer"),
    ],
)
def test_what_cannot_be_is_refused(sizes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(reason)):
        Parallel(**sizes)


@pytest.mark.parametrize("at", [{"pp": 2}, {"tp": 3}, {"cp": -1}])
def test_coordinates_outside_of_their_sizes_are_refused(at: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument, match="is outside"):
        Parallel(tp=3, pp=2, cp=2).rank_of(**at)
