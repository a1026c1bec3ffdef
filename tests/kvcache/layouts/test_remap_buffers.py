"""Units of a pool in one buffer, in an order that does not depend on the pool's."""

import numpy as np
import pytest

from kvstore.kvcache.codecs.schemes import CacheScheme
from kvstore.kvcache.layouts import remap_buffers
from kvstore.kvcache.layouts.layout import CacheLayout, TokenSlots
from kvstore.kvcache.layouts.orders import ORDERS
from kvstore.kvcache.layouts.remap_buffers import Shape, move, unit_bytes
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.protocol.errors import InvalidArgument
from tests.kvcache.layouts.pools import Bytes, layout_of, noisy_pools, spec_of

RAW = spec_of(layers=3, kv_heads=4, block_tokens=4)
MIXED = CacheSpec(layers=3, kv_heads=4, head_dim=16, block_tokens=4, scheme=CacheScheme.parse("k=int8,v=int4/16"))
OWN = ["block | layer kv head token", "head | block layer kv token", "layer head | kv block token", "block token | head layer kv"]
LAYOUTS = [layout_of(RAW, order=order, tp=2) for order in (*ORDERS, *OWN)]
LAYOUTS += [layout_of(MIXED, order=order, tp=2) for order in ("HND", "vllm-flash-hnd", "vllm-blocks-hnd", *OWN[:3])]
RANK = 1


def canonical(layout: CacheLayout, regions: list[Bytes], placed: TokenSlots, shape: Shape) -> bytes:
    """Byte by byte: unit, layer, kv, head, token."""
    parts = []
    for block, first in zip(*placed, strict=True):
        for layer in shape.layers:
            for kv in range(layout.spec.kv_factor):
                for head in shape.heads:
                    for token in range(1 if layout.has_records else shape.tokens):
                        region, offset = layout.locate(RANK, layer, kv, head, block, first + token)
                        parts.append(regions[region][offset : offset + layout.unit_bytes(kv)].tobytes())
    return b"".join(parts)


def cases(layout: CacheLayout) -> list[tuple[TokenSlots, Shape]]:
    blocks = np.array([5, 1, 2, 7])
    whole = TokenSlots(blocks, np.zeros(4, np.int64)), 4
    parts = (
        [whole]
        if layout.has_records
        else [whole, (TokenSlots(blocks, np.array([0, 2, 0, 2])), 2), (TokenSlots(np.array([3]), np.array([1])), 3)]
    )
    return [
        (placed, Shape(layers, heads, tokens))
        for placed, tokens in parts
        for layers in (range(3), range(1, 2))
        for heads in (range(2, 4), range(3, 4))
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.spec.scheme.name}: {layout.order}")
def test_units_are_gathered_in_canonical_order(layout: CacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remap_buffers, "_CHUNK_BYTES", 100)
    for placed, shape in cases(layout):
        regions = noisy_pools(layout, seed=1)[RANK]
        staged = np.zeros(len(placed.blocks) * unit_bytes(layout, shape), np.uint8)
        move(layout, RANK, regions, placed, shape, staged, to_pool=False)
        expected = canonical(layout, regions, placed, shape)
        assert staged.tobytes() == expected

        other = noisy_pools(layout, seed=2)[RANK]
        before = [region.copy() for region in other]
        move(layout, RANK, other, placed, shape, staged, to_pool=True)
        assert canonical(layout, other, placed, shape) == expected
        changed = sum(int((ours != theirs).sum()) for ours, theirs in zip(other, before, strict=True))
        assert changed <= len(staged)


def test_regions_must_be_there_and_large_enough_and_writable() -> None:
    layout = layout_of(RAW, order="vllm-flash")
    placed, shape = TokenSlots(np.array([7]), np.array([0])), Shape(range(3), range(4), 4)
    staged = np.zeros(unit_bytes(layout, shape), np.uint8)
    regions = noisy_pools(layout, seed=1)[0]
    with pytest.raises(InvalidArgument, match="region 2 is needed, but there are 2 regions"):
        move(layout, 0, regions[:2], placed, shape, staged, to_pool=False)
    with pytest.raises(InvalidArgument, match=f"region 0 has 100 bytes, but the layout reaches byte {8 * 4 * 4 * 4}"):
        move(layout, 0, [regions[0][:100], *regions[1:]], placed, shape, staged, to_pool=False)
    for region in regions:
        region.flags.writeable = False
    with pytest.raises(InvalidArgument, match="region 0 is written to, but is read-only"):
        move(layout, 0, regions, placed, shape, staged, to_pool=True)
