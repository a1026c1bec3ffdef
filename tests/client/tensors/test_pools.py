"""client/tensors/pools.py: an engine's tensors are viewed as their layout defines them, in any order."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.client.tensors.pools import BlockPool, EnginePool
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.orders import ORDERS
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import Attention, CacheSpec
from kvstore.protocol.errors import InvalidArgument

SPEC = CacheSpec(layers=4, kv_heads=4, head_dim=6, dtype="float16", block_tokens=3)
LATENT = replace(SPEC, kv_heads=1, heads=4, attention=Attention.MLA)
RANK = 3
ORDERS_HERE = [*ORDERS, "kv | block head layer token V^T", "layer | kv block head token K^T V^T", "block layer head token kv"]


def layout_of(order: str, spec: CacheSpec = SPEC) -> CacheLayout:
    return CacheLayout(spec=spec, parallel=Parallel(tp=2, pp=2), pool_blocks=5, order=order)


def memory_of(layout: CacheLayout) -> list[np.ndarray[Any, Any]]:
    """Regions of a rank, each element another number."""
    random = np.random.default_rng(0)
    sizes = [layout.region_bytes(RANK, number) // 2 for number in range(layout.region_count(RANK))]
    return [random.permutation(np.arange(size)).astype(np.float16) for size in sizes]


def element(layout: CacheLayout, regions: list[np.ndarray[Any, Any]], layer: int, kv: int, head: int, block: int, token: int) -> Any:
    """By the definition of the layout: the `head_dim` values."""
    first_token = 0 if layout.has_records else token
    region, offset = layout.locate(RANK, layer, kv, head, block, first_token)
    unit = regions[region][offset // 2 :][: layout.unit_bytes(kv) // 2]
    if f"{'KV'[kv]}^T" in layout.axes.transposed:
        return unit.reshape(layout.spec.head_dim, -1)[:, token]
    return unit.reshape(-1, layout.spec.head_dim)[token if layout.has_records else 0]


def seen(pool: BlockPool, layout: CacheLayout) -> np.ndarray[Any, Any]:
    """The planes' contents, `[blocks, layers, kv, heads, tokens, head_dim]`, each element from one plane."""
    shape = (5, 2, layout.spec.kv_factor, len(layout.rank_heads(RANK)), 3, 6)
    whole = np.full(shape, np.nan)
    for plane in pool.planes:
        part = whole[:, plane.layers.start : plane.layers.stop, plane.kinds.start : plane.kinds.stop]
        assert np.isnan(part).all()
        part[...] = np.asarray(plane.values)
    assert not np.isnan(whole).any()
    return whole


@pytest.mark.promise("value-layouts")
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("spec", [SPEC, LATENT], ids=["kv", "mla"])
@pytest.mark.parametrize("order", ORDERS_HERE)
def test_planes_show_every_element_where_the_layout_has_it(order: str, spec: CacheSpec, kind: str) -> None:
    layout = layout_of(order, spec)
    regions = memory_of(layout)
    pool = EnginePool(layout, [torch.from_numpy(region) for region in regions] if kind == "torch" else regions, rank=RANK)
    found = seen(pool, layout)
    for (block, at_layer, kv, at_head, token), _ in np.ndenumerate(found[..., 0]):
        layer, head = layout.rank_layers(RANK)[at_layer], layout.rank_heads(RANK)[at_head]
        assert np.array_equal(found[block, at_layer, kv, at_head, token], element(layout, regions, layer, kv, head, block, token))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_pool_uses_memory_order_not_axis_names(kind: str) -> None:
    """vLLM gives tensors [2, blocks, tokens, heads, head_dim] whose memory is [2, blocks, heads, tokens, head_dim]."""
    layout = layout_of("vllm-flash-hnd")
    regions = memory_of(layout)
    expected = seen(EnginePool(layout, regions, rank=RANK), layout)
    named: list[Any] = [region.reshape(2, 5, 2, 3, 6).swapaxes(2, 3) for region in regions]
    as_bytes: list[Any] = [region.view(np.uint8).reshape(2, 5, -1) for region in regions]
    for given in (named, as_bytes):
        tensors = [torch.from_numpy(region) for region in given] if kind == "torch" else given
        assert np.array_equal(seen(EnginePool(layout, tensors, rank=RANK), layout), expected)


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({}, True),
        ({"order": "sglang"}, True),
        ({"rank": 2}, False),
        ({"rank": 1}, False),
        ({"block_tokens": 6}, False),
        ({"dtype": "bfloat16"}, False),
        ({"head_dim": 3, "block_tokens": 6}, False),
    ],
)
def test_a_pool_fits_layouts_of_the_same_part_of_the_same_cache(changed: dict[str, Any], fits: bool) -> None:
    pool = EnginePool(layout_of("HND"), memory_of(layout_of("HND")), rank=RANK)
    rank, order = changed.pop("rank", RANK), changed.pop("order", "HND")
    assert pool.fits(layout_of(order, replace(SPEC, **changed)), rank) == fits


@pytest.mark.parametrize(
    ("order", "change", "message"),
    [
        ("vllm-flash", lambda regions: regions[:1], "1 tensors, where layer | kv block token head has 2: one for each region"),
        ("vllm-flash", lambda regions: [regions[0], regions[1][:-1]], "a tensor of 718 bytes, [359], where"),
        ("vllm-flash", lambda regions: [bytes(region) for region in regions], "torch tensors or numpy arrays, not bytes"),
        ("vllm-flash", lambda regions: [region.astype(np.float32)[: len(region) // 2] for region in regions], "elements are float32"),
        ("vllm-flash", lambda regions: [region.astype(">f2") for region in regions], "elements are >f2"),
        ("HND", lambda regions: np.zeros((720, 2), np.float16)[:, 0], "a tensor with gaps, [720]: give the whole memory"),
        ("HND", lambda regions: torch.zeros(720, 2, dtype=torch.float16)[:, 0], "a tensor with gaps"),
        ("HND", lambda regions: torch.zeros(720, dtype=torch.bfloat16), "elements are torch.bfloat16, and those of the pool float16"),
        ("vllm-flash", lambda regions: [regions[0], torch.from_numpy(regions[1])], "of one kind and on one device"),
        ("block | layer kv head token", lambda regions: regions, "does not hold every block: give tensors that do"),
        ("layer head | kv block token", lambda regions: regions, "does not hold every head"),
    ],
)
def test_tensors_that_are_not_what_the_layout_says_are_refused(order: str, change: Any, message: str) -> None:
    layout = layout_of(order)
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        EnginePool(layout, change(memory_of(layout)), rank=RANK)
