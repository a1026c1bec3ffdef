"""Runs are as long as both layouts allow, and blocks that follow one another on both sides are one run."""

import numpy as np
import pytest

from kvstore.kvcache.layouts.copies import CopyArrays
from kvstore.kvcache.layouts.counterparts import RankPair, find_pairs
from kvstore.kvcache.layouts.layout import CacheLayout, TokenSlots
from kvstore.kvcache.layouts.remap_runs import Units, copies_of, template_of, units_of
from tests.kvcache.layouts.pools import layout_of, spec_of

ELEMENT = 4
"""Bytes of one token of one head in spec_of."""


def first_pair(source: CacheLayout, destination: CacheLayout) -> RankPair:
    return find_pairs(source, destination, source_dp=0, destination_dp=0)[0]


def runs(source: CacheLayout, destination: CacheLayout, *, tokens: int = 0) -> list[tuple[int, int]]:
    """Return the number of runs and their length, for each grid of a unit."""
    pair = first_pair(source, destination)
    grids = template_of(source, destination, pair, layers=pair.layers, tokens=tokens or source.spec.block_tokens)
    return [(len(grid.source.runs.offsets), grid.length) for grid in grids]


def plan(source: CacheLayout, destination: CacheLayout, ours: list[int], theirs: list[int]) -> CopyArrays:
    pair = first_pair(source, destination)
    template = template_of(source, destination, pair, layers=pair.layers, tokens=source.spec.block_tokens)
    placed = [TokenSlots(np.array(blocks), np.zeros(len(blocks), np.int64)) for blocks in (ours, theirs)]
    return copies_of([(template, placed[0], placed[1])])


def test_equal_layouts_copy_whole_blocks() -> None:
    layout = layout_of(spec_of(layers=3, kv_heads=4), order="trtllm")
    assert runs(layout, layout) == [(1, layout.spec.block_bytes)]


@pytest.mark.parametrize("order", ["vllm-flash", "sglang"])
def test_a_region_a_layer_ends_runs(order: str) -> None:
    layout = layout_of(spec_of(layers=3, kv_heads=4, block_tokens=2), order=order)
    assert runs(layout, layout) == [(2 * 3, 4 * 2 * ELEMENT)]


def test_keys_and_values_side_by_side_are_one_run() -> None:
    layout = layout_of(spec_of(layers=3, kv_heads=4, block_tokens=2), order="vllm-flashinfer")
    assert runs(layout, layout) == [(3, 2 * 4 * 2 * ELEMENT)]


@pytest.mark.parametrize("order", ["HND", "NHD", "vllm-flash", "sglang", "vllm-blocks-hnd", "sglang-page-head"])
def test_runs_are_listed_as_they_lie_at_the_source(order: str) -> None:
    source = layout_of(spec_of(layers=3, kv_heads=4), order=order)
    found = plan(source, layout_of(source.spec, order="head | block layer kv token"), [0, 3], [0, 4])
    places = list(zip(found.source_region.tolist(), found.source_offset.tolist(), strict=True))
    for block in range(2):
        unit = places[block * len(places) // 2 : (block + 1) * len(places) // 2]
        assert unit == sorted(unit)


def test_heads_that_are_split_end_runs() -> None:
    spec = spec_of(layers=3, kv_heads=4, block_tokens=2)
    hnd, nhd = (layout_of(spec, order=order, tp=2) for order in ("HND", "NHD"))
    assert runs(hnd, layout_of(spec, order="HND", tp=4)) == [(2 * 3, 2 * ELEMENT)]
    assert runs(nhd, layout_of(spec, order="NHD", tp=4)) == [(2 * 3 * 2, ELEMENT)]
    assert runs(hnd, layout_of(spec, order="HND")) == [(2 * 3, 2 * 2 * ELEMENT)]
    assert runs(hnd, nhd) == [(2 * 3 * 2 * 2, ELEMENT)]


def test_heads_outside_of_layers_keep_runs_long() -> None:
    spec = spec_of(layers=3, kv_heads=4, block_tokens=2)
    wide, narrow = (layout_of(spec, order="vllm-blocks-hnd", tp=tp) for tp in (2, 4))
    assert runs(wide, narrow) == [(2, 3 * 2 * ELEMENT)]


def test_adjacent_blocks_on_both_sides_are_one_run() -> None:
    layout = layout_of(spec_of())
    size_bytes = layout.spec.block_bytes
    found = plan(layout, layout, [0, 1, 2, 5, 6, 4], [3, 4, 5, 6, 2, 1])
    assert [column.tolist() for column in found] == [
        [0] * 4,
        [0, 5 * size_bytes, 6 * size_bytes, 4 * size_bytes],
        [0] * 4,
        [3 * size_bytes, 6 * size_bytes, 2 * size_bytes, size_bytes],
        [3 * size_bytes, size_bytes, size_bytes, size_bytes],
    ]


def test_blocks_in_regions_of_their_own_never_do() -> None:
    layout = layout_of(spec_of(), order="block | layer kv head token")
    found = plan(layout, layout, [0, 1], [0, 1])
    assert [column.tolist() for column in found] == [[0, 1], [0, 0], [0, 1], [0, 0], [layout.spec.block_bytes] * 2]


def test_columns_of_one_number_take_no_memory_if_they_are_long() -> None:
    layout = layout_of(spec_of(layers=20), order="NHD", pool_blocks=99, tp=2)
    ours, theirs = list(range(98, 0, -2)), list(range(49))
    found = plan(layout, layout_of(layout.spec, pool_blocks=99), ours, theirs)
    assert len(found.length) > 1024
    assert [column.strides == (0,) for column in found] == [True, False, True, False, True]
    assert set(found.length.tolist()) == {ELEMENT}
    several = layout_of(layout.spec, order="layer | kv block head token", pool_blocks=99)
    assert set(plan(layout, several, ours, theirs).destination_region.tolist()) == set(range(20))


@pytest.mark.parametrize(("pool_blocks", "kind"), [(99, np.uint32), (1 << 28, np.int64)])
def test_offsets_of_many_runs_are_of_32_bits_if_they_fit(pool_blocks: int, kind: type[np.generic]) -> None:
    layout = layout_of(spec_of(layers=20), order="NHD", pool_blocks=pool_blocks, tp=2)
    wide = layout_of(layout.spec, pool_blocks=pool_blocks)
    ours, theirs = list(range(98, 2, -2)) + [pool_blocks - 1], [*range(48), pool_blocks - 1]
    found = plan(layout, wide, ours, theirs)
    assert found.source_offset.dtype == found.destination_offset.dtype == kind
    alone = plan(layout, wide, ours[-1:], theirs[-1:])
    assert alone.source_offset.dtype == np.int64
    count = len(alone.length)
    assert found.source_offset[-count:].tolist() == alone.source_offset.tolist()
    assert found.destination_offset[-count:].tolist() == alone.destination_offset.tolist()
    assert int(alone.source_offset.max()) + ELEMENT == layout.region_bytes(0, 0)


def starts(found: tuple[Units, ...]) -> list[tuple[int, list[int]]]:
    return [(units.tokens, units.starts.tolist()) for units in found]


@pytest.mark.parametrize(
    ("first_token", "end_token", "expected"),
    [
        (0, 12, [(4, [0, 4, 8])]),
        (0, 10, [(4, [0, 4]), (2, [8])]),
        (3, 10, [(4, [4]), (1, [3]), (2, [8])]),
        (5, 7, [(2, [5])]),
        (5, 8, [(3, [5])]),
        (4, 6, [(2, [4])]),
        (5, 5, []),
        (4, 4, []),
        (0, 0, []),
    ],
)
def test_units_are_the_smaller_blocks_and_the_ends(first_token: int, end_token: int, expected: list[tuple[int, list[int]]]) -> None:
    source, destination = layout_of(spec_of(block_tokens=4)), layout_of(spec_of(block_tokens=8))
    pair = first_pair(source, destination)
    assert starts(units_of(source, destination, pair, first_token=first_token, end_token=end_token)) == expected
