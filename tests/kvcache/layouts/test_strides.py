"""The fast form of places against their definition."""

import numpy as np
import pytest

from kvstore.kvcache.codecs.schemes import CacheScheme
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.orders import ORDERS
from kvstore.kvcache.layouts.strides import Placed, Step, strides_of
from kvstore.kvcache.models.spec import CacheSpec
from tests.kvcache.layouts.pools import layout_of, spec_of

MIXED = CacheSpec(layers=3, kv_heads=4, head_dim=16, block_tokens=4, scheme=CacheScheme.parse("k=int8,v=int4/16"))
RAW = spec_of(layers=3)
LAYOUTS = [layout_of(RAW, order=order, tp=2) for order in (*ORDERS, "block token | head layer kv")]
LAYOUTS += [
    layout_of(MIXED, order=order, tp=2)
    for order in (*ORDERS, "kv | head block layer token")
    if layout_of(RAW, order=order).order.endswith("token")
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.spec.scheme.name}: {layout.order}")
def test_sums_of_strides_are_the_places_of_the_definition(layout: CacheLayout) -> None:
    rank = 1
    blocks = np.arange(layout.pool_blocks).repeat(layout.spec.block_tokens)
    tokens = np.tile(np.arange(layout.spec.block_tokens), layout.pool_blocks)
    if layout.has_records:
        blocks, tokens = blocks[tokens == 0], tokens[tokens == 0]
    for kv in range(2):
        strides = strides_of(layout, rank, kv)
        for layer in range(3):
            for head in range(2):
                first = strides.start.moved(strides.layer, layer).moved(strides.head, head)
                regions, offsets = strides.places(Placed(blocks, tokens), first)
                expected = [
                    layout.locate(rank, layer, kv, 2 + head, block, token)
                    for block, token in zip(blocks.tolist(), tokens.tolist(), strict=True)
                ]
                assert list(zip(regions, offsets, strict=True)) == expected


@pytest.mark.parametrize(
    "order", ["vllm-cpu", "layer | block head kv token V^T", "kv | block layer head token K^T V^T", "HND", "vllm-flash"]
)
def test_values_and_tokens_lie_where_numpy_puts_them_in_a_record_of_either_form(order: str) -> None:
    layout = layout_of(spec_of(block_tokens=3), order=order)
    for kv in range(2):
        strides = strides_of(layout, 0, kv)
        if f"{'KV'[kv]}^T" in layout.axes.transposed:
            assert (strides.value, strides.token) == (Step(0, 3 * 2), Step(0, 2))  # [head_dim 2, tokens 3] of 2 bytes
        else:
            assert strides.value == Step(0, 2)
            assert strides.token.size_bytes == (4 if order != "vllm-flash" else 4 * 4)


def test_a_step_moves_by_regions_and_bytes() -> None:
    assert Step(1, 10).moved(Step(2, 3), 4) == Step(9, 22)
