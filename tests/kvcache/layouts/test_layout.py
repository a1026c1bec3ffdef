"""Positions of elements in a layout, and the layout's description for peers.

The fast computation of positions is checked against their definition.
"""

import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore.kvcache.codecs.schemes import CacheScheme
from kvstore.kvcache.layouts.layout import VERSION, CacheLayout, Step, TokenSlots, strides_of
from kvstore.kvcache.layouts.orders import ORDERS, parse_order
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import Attention, CacheSpec
from kvstore.protocol.errors import InvalidArgument, ProtocolError
from tests.kvcache.layouts.pools import layout_of, spec_of

MIXED = CacheScheme.parse("k=int8,v=int4/16")


def places(layout: CacheLayout, rank: int) -> Iterator[tuple[tuple[int, int, int, int, int], tuple[int, int]]]:
    tokens = 1 if layout.has_records else layout.spec.block_tokens
    for layer in layout.rank_layers(rank):
        for kv in range(layout.spec.kv_factor):
            for head in layout.rank_heads(rank):
                for block in range(layout.pool_blocks):
                    for token in range(tokens):
                        yield (layer, kv, head, block, token), layout.locate(rank, layer, kv, head, block, token)


@pytest.mark.parametrize("order", [order for order in ORDERS if not parse_order(order).transposed])
def test_locate_matches_numpy_arrays_of_these_axes(order: str) -> None:
    spec = CacheSpec(layers=3, kv_heads=4, head_dim=2, dtype="float16", block_tokens=5)
    layout = layout_of(spec, order=order, pool_blocks=2, tp=2, pp=2)
    rank, counts = 1, {"layer": 2, "kv": 2, "head": 2, "block": 2, "token": 5}
    outer, inner, _ = layout.axes
    shape = [counts[axis] for axis in inner]
    for (layer, kv, head, block, token), found in places(layout, rank):
        at = {"layer": layer, "kv": kv, "head": head - 2, "block": block, "token": token}
        region = int(np.ravel_multi_index([at[axis] for axis in outer], [counts[axis] for axis in outer])) if outer else 0
        element = int(np.ravel_multi_index([at[axis] for axis in inner], shape))
        assert found == (region, element * layout.unit_bytes(kv))
    assert layout.region_count(rank) == np.prod([counts[axis] for axis in outer], dtype=int)
    assert layout.region_bytes(rank, 0) == 4 * np.prod(shape)
    assert layout.unit_bytes(0) == 4


@pytest.mark.parametrize(
    "order", ["HND", "kv block layer head token", "block kv layer head token", "kv layer | block head token", "head | block layer kv token"]
)
def test_records_of_two_sizes_fill_regions_exactly(order: str) -> None:
    spec = CacheSpec(layers=3, kv_heads=4, head_dim=16, dtype="float16", block_tokens=4, scheme=MIXED)
    layout = layout_of(spec, order=order, pool_blocks=3, tp=2)
    sizes = [spec.record_bytes(True), spec.record_bytes(False)]
    assert sizes[0] != sizes[1]
    assert [layout.unit_bytes(kv) for kv in range(2)] == sizes
    for rank in range(2):
        ends: dict[int, list[tuple[int, int]]] = {}
        for (_, kv, _, _, _), (region, offset) in places(layout, rank):
            ends.setdefault(region, []).append((offset, offset + sizes[kv]))
        assert sorted(ends) == list(range(layout.region_count(rank)))
        for region, spans in ends.items():
            spans.sort()
            assert [start for start, _ in spans] == [0, *(end for _, end in spans[:-1])]
            assert spans[-1][1] == layout.region_bytes(rank, region)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: layout_of(spec_of(), pool_blocks=0), "pool_blocks is 0"),
        (lambda: layout_of(spec_of(), pool_blocks=1 << 50), "with blocks of 128 bytes it must be 1 to 562949953421312"),
        (lambda: layout_of(spec_of(kv_heads=4), tp=3), "4 KV heads over 3 ranks: one of the two must divide the other"),
        (lambda: layout_of(spec_of(layers=2), pp=3), "2 layers, which cannot be split as 3 stages"),
        (
            lambda: CacheLayout(spec=spec_of(layers=4), parallel=Parallel(pp=2, layer_split=(1, 2)), pool_blocks=1),
            "cannot be split as (1, 2)",
        ),
        (lambda: layout_of(spec_of(), order="block"), "must name each of the axes"),
        (lambda: layout_of(spec_of(scheme=CacheScheme.parse("int8")), order="NHD"), "the order must end in 'token'"),
        (lambda: layout_of(spec_of(scheme=CacheScheme.parse("int8")), order="vllm-cpu"), "the scheme int8 have a fixed order"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(reason)):
        make()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"rank": 2}, "rank 2"),
        ({"layer": 2}, "no layer 2"),
        ({"kv": 2}, "no kv 2"),
        ({"head": 2}, "no head 2"),
        ({"block": -1}, "no block -1"),
        ({"token": 2}, "no token 2"),
    ],
)
def test_places_outside_of_a_rank_are_refused(changed: dict[str, int], reason: str) -> None:
    layout = layout_of(spec_of(kv_heads=4), tp=2)
    at = {"rank": 0, "layer": 0, "kv": 0, "head": 0, "block": 0, "token": 0}
    assert layout.locate(**at) == (0, 0)
    with pytest.raises(InvalidArgument, match=reason):
        layout.locate(**at | changed)


def test_only_the_latent_s_own_scheme_counts_with_mla() -> None:
    spec = CacheSpec(layers=1, kv_heads=1, head_dim=16, attention=Attention.MLA, scheme=CacheScheme.parse("k=none,v=int8"))
    assert not layout_of(spec, order="NHD").has_records


@pytest.mark.parametrize("region", [-1, 2])
def test_regions_that_do_not_exist_are_refused(region: int) -> None:
    layout = layout_of(spec_of(layers=2), order="vllm-flash")
    with pytest.raises(InvalidArgument, match=re.escape(f"region {region} of rank 0 is outside [0, 2)")):
        layout.region_bytes(0, region)
    with pytest.raises(InvalidArgument, match="rank 1 is outside"):
        layout.region_count(1)


LAYOUTS = [
    layout_of(spec_of()),
    layout_of(spec_of(mla=True), order="vllm-mla", tp=4, dp=2, cp=3),
    layout_of(spec_of(), order="vllm-cpu"),
    CacheLayout(
        spec=CacheSpec.named("llama3-70b", block_tokens=64), parallel=Parallel(tp=8, pp=3, layer_split=(20, 20, 40)), pool_blocks=10**6
    ),
    layout_of(
        CacheSpec(layers=3, kv_heads=4, head_dim=16, block_tokens=4, window_tokens=8, windowed_layers=1, scheme=MIXED), order="trtllm"
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_peer_reads_what_was_told(layout: CacheLayout) -> None:
    data = layout.to_bytes()
    assert CacheLayout.from_bytes(data) == layout
    assert CacheLayout.from_bytes(memoryview(data)) == layout


def test_equal_orders_make_equal_layouts_however_they_are_called() -> None:
    assert (
        layout_of(spec_of(), order="hnd") == layout_of(spec_of(), order="block layer kv head token") == layout_of(spec_of(), order="trtllm")
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_bytes_are_refused(layout: CacheLayout) -> None:
    data = layout.to_bytes()
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            CacheLayout.from_bytes(data[:size])
    with pytest.raises(ProtocolError, match="1 bytes more"):
        CacheLayout.from_bytes(data + b"\0")
    for at in range(len(data)):
        # A damaged number may make another layout, but never another kind of error.
        damaged = bytearray(data)
        damaged[at] ^= 0xFF
        try:
            CacheLayout.from_bytes(damaged)
        except ProtocolError:
            continue


def test_other_versions_and_impossible_layouts_are_rejected() -> None:
    data = layout_of(spec_of()).to_bytes()
    with pytest.raises(ProtocolError, match=f"version 9: this side speaks version {VERSION}"):
        CacheLayout.from_bytes(b"\x09" + data[1:])
    for right, wrong, reason in (
        (b"none", b"nine", "no scheme"),
        (b"float16", b"float17", "dtype"),
        (b"mha", b"mhz", "mhz"),
        (b"token", b"tokem", "axes"),
    ):
        assert right in data
        with pytest.raises(ProtocolError, match=f"a peer's layout cannot be: .*{reason}"):
            CacheLayout.from_bytes(data.replace(right, wrong))


MIXED_SPEC = CacheSpec(layers=3, kv_heads=4, head_dim=16, block_tokens=4, scheme=CacheScheme.parse("k=int8,v=int4/16"))
RAW = spec_of(layers=3)
STRIDED = [layout_of(RAW, order=order, tp=2) for order in (*ORDERS, "block token | head layer kv")]
STRIDED += [
    layout_of(MIXED_SPEC, order=order, tp=2)
    for order in (*ORDERS, "kv | head block layer token")
    if layout_of(RAW, order=order).order.endswith("token")
]


@pytest.mark.parametrize("layout", STRIDED, ids=lambda layout: f"{layout.spec.scheme.name}: {layout.order}")
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
                regions, offsets = strides.places(TokenSlots(blocks, tokens), first)
                expected = [
                    layout.locate(rank, layer, kv, 2 + head, block, token)
                    for block, token in zip(blocks.tolist(), tokens.tolist(), strict=True)
                ]
                assert list(zip(regions, offsets, strict=True)) == expected


@pytest.mark.parametrize(
    "order", ["vllm-cpu", "layer | block head kv token V^T", "kv | block layer head token K^T V^T", "HND", "vllm-flash"]
)
def test_values_in_transposed_records_match_numpy(order: str) -> None:
    layout = layout_of(spec_of(block_tokens=3), order=order)
    for kv in range(2):
        strides = strides_of(layout, 0, kv)
        if f"{'KV'[kv]}^T" in layout.axes.transposed:
            assert (strides.value, strides.token) == (Step(0, 3 * 2), Step(0, 2))  # [head_dim 2, tokens 3] of 2 bytes
        else:
            assert strides.value == Step(0, 2)
            assert strides.token.size_bytes == (4 if order != "vllm-flash" else 4 * 4)
