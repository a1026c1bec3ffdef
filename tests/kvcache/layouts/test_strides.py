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
    if layout_of(RAW, order=order).axes.inner[-1] == "token"
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.spec.scheme.name}: {layout.order}")
def test_sums_of_strides_are_the_places_of_the_definition(layout: CacheLayout) -> None:
    rank = 1
    blocks = np.arange(layout.pool_blocks).repeat(layout.spec.block_tokens)
    tokens = np.tile(np.arange(layout.spec.block_tokens), layout.pool_blocks)
    if layout.is_quantised:
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


def test_a_step_moves_by_regions_and_bytes() -> None:
    assert Step(1, 10).moved(Step(2, 3), 4) == Step(9, 22)
