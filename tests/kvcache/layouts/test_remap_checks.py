"""What a re-mapping refuses, and the reason it gives."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore.kvcache.codecs.schemes import CacheScheme
from kvstore.kvcache.layouts.remap_checks import check_blocks, check_layouts, check_tokens
from kvstore.kvcache.layouts.remap_runs import Units
from kvstore.kvcache.models.spec import Attention, CacheSpec
from kvstore.protocol.errors import InvalidArgument
from tests.kvcache.layouts.pools import layout_of, spec_of

SPEC = CacheSpec(layers=4, kv_heads=1, heads=4, head_dim=16, block_tokens=16, model="one")
INT8 = CacheScheme.parse("int8")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"layers": 5}, "layers 4 and 5"),
        ({"kv_heads": 2}, "kv_heads 1 and 2"),
        ({"head_dim": 32}, "head_dim 16 and 32"),
        ({"dtype": "float16"}, "dtype bfloat16 and float16"),
        ({"attention": Attention.MLA}, "kv_factor 2 and 1"),
        ({"scheme": INT8}, "scheme none and int8"),
        ({"window_tokens": 32, "windowed_layers": 2}, "window_tokens 0 and 32; windowed_layers 0 and 2"),
        ({"model": "two"}, "model 'one' and 'two'"),
        ({"layers": 5, "model": "two"}, "layers 4 and 5; model 'one' and 'two'"),
        ({"block_tokens": 24}, "blocks of 16 tokens cannot become blocks of 24: one must be a multiple of the other"),
    ],
)
def test_layouts_of_different_caches_are_refused(changed: dict[str, Any], reason: str) -> None:
    other = replace(SPEC, **{"attention": None} | changed)
    with pytest.raises(InvalidArgument, match=re.escape(reason)):
        check_layouts(layout_of(SPEC), layout_of(other))


@pytest.mark.parametrize("changed", [{"heads": 8}, {"model": ""}, {"block_tokens": 48}, {"block_tokens": 4}])
def test_layouts_may_differ_in_what_is_not_cached_and_in_the_cut(changed: dict[str, Any]) -> None:
    other = replace(SPEC, **{"attention": None} | changed)
    check_layouts(layout_of(SPEC), layout_of(other, order="NHD", tp=2))
    check_layouts(layout_of(other), layout_of(SPEC))


def test_records_are_not_cut() -> None:
    ours, theirs = (layout_of(replace(SPEC, scheme=INT8, block_tokens=tokens)) for tokens in (16, 32))
    check_layouts(ours, ours)
    with pytest.raises(InvalidArgument, match="records of the scheme int8 are whole blocks: blocks of 16 tokens cannot become "):
        check_layouts(ours, theirs)


def test_what_is_transposed_is_neither_turned_nor_cut() -> None:
    ours = layout_of(SPEC, order="vllm-cpu")
    check_layouts(ours, layout_of(SPEC, order="kv layer | head block token K^T"))
    with pytest.raises(InvalidArgument, match=re.escape("layer | block head kv token K^T and block layer kv head token: what one side")):
        check_layouts(ours, layout_of(SPEC))
    with pytest.raises(InvalidArgument, match="records transposed are whole blocks: blocks of 16 tokens cannot become ones of 32"):
        check_layouts(ours, layout_of(replace(SPEC, block_tokens=32), order="vllm-cpu"))


@pytest.mark.parametrize(("first_token", "tokens"), [(-1, 4), (5, 4), (0, -1)])
def test_tokens_that_are_no_range_are_refused(first_token: int, tokens: int) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(f"tokens [{first_token}, {tokens}) are not a range")):
        check_tokens(layout_of(SPEC), first_token=first_token, tokens=tokens)


def test_quantised_tokens_are_whole_blocks() -> None:
    raw, quantised = layout_of(SPEC), layout_of(replace(SPEC, scheme=INT8))
    assert check_tokens(raw, first_token=3, tokens=20) == (3, 20)
    assert check_tokens(quantised, first_token=16, tokens=20) == (16, 32)
    with pytest.raises(InvalidArgument, match="first_token is 3: with records of whole blocks it must be a multiple of block_tokens, 16"):
        check_tokens(quantised, first_token=3, tokens=20)


def test_a_list_of_blocks_says_where_units_are() -> None:
    layout = layout_of(spec_of(block_tokens=4))
    blocks = check_blocks(layout, 0, [3, 1], first_token=0, end_token=8, is_written=True)
    placed = blocks.place(Units(2, np.array([0, 2, 4, 6])))
    assert placed.blocks.tolist() == [3, 3, 1, 1]
    assert placed.tokens.tolist() == [0, 2, 0, 2]


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ([1], "1 blocks of 2 tokens are too few for 4 tokens: 2 are needed"),
        ([1, 8], "blocks 1 to 8 are not all in a pool of 8 blocks"),
        ([-1, 2], "blocks -1 to 2 are not all in a pool of 8 blocks"),
        ([2, 2], "a block is written to twice"),
        ([1.0, 2.0], "list of whole numbers, not an array of float64"),
        ([[1, 2]], "with 2 axes"),
        (5, "with 0 axes"),
    ],
)
def test_lists_of_blocks_that_cannot_be_are_refused(blocks: Any, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(reason)):
        check_blocks(layout_of(spec_of()), 0, blocks, first_token=0, end_token=3 if blocks == [2, 2] else 4, is_written=True)


def test_only_blocks_that_are_used_are_looked_at() -> None:
    layout = layout_of(spec_of(), cp=2)
    check_blocks(layout, 0, [5, 5, 6, 6], first_token=0, end_token=8, is_written=True)
    check_blocks(layout, 0, [-1, -1, 6, 99], first_token=4, end_token=6, is_written=True)
    check_blocks(layout, 1, [-1, -1, 99, 6], first_token=4, end_token=8, is_written=True)
    check_blocks(layout, 1, [-1, 2, -1, 6], first_token=2, end_token=8, is_written=True)
    check_blocks(layout, 0, [5, 5, 5, 5], first_token=0, end_token=8, is_written=False)
    check_blocks(layout, 0, [], first_token=0, end_token=0, is_written=True)
    with pytest.raises(InvalidArgument, match="written to twice"):
        check_blocks(layout, 0, [5, 1, 5, 2], first_token=0, end_token=8, is_written=True)
    with pytest.raises(InvalidArgument, match="blocks -1 to 6"):
        check_blocks(layout, 1, [0, -1, 0, 6], first_token=2, end_token=8, is_written=True)
