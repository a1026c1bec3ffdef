"""Pools of two executors in plain memory, filled and read by `CacheLayout.locate` alone: the oracle of every re-mapping."""

from collections import defaultdict
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.kvcache.codecs.schemes import NONE, CacheScheme
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import Attention, CacheSpec

Bytes = NDArray[np.uint8]
Cache = list[Bytes]
"""Of keys and of values: [positions, layers, heads, bytes of an element]; a position is a token, or a block of quantised records."""
Pools = list[list[Bytes]]
"""By rank and region."""


class Cells(NamedTuple):
    """Elements in one region of one rank: where they are, and which they are."""

    rank: int
    region: int
    kv: int
    offsets: NDArray[np.int64]
    positions: NDArray[np.int64]
    layers: NDArray[np.int64]
    heads: NDArray[np.int64]


def spec_of(
    *, layers: int = 2, kv_heads: int = 4, block_tokens: int = 2, mla: bool = False, scheme: CacheScheme = NONE, dtype: str = "float16"
) -> CacheSpec:
    """A cache with elements of 4 bytes, small enough to place each of them by hand."""
    return CacheSpec(
        layers=layers,
        kv_heads=1 if mla else kv_heads,
        head_dim=2,
        dtype=dtype,
        block_tokens=block_tokens,
        attention=Attention.MLA if mla else None,
        scheme=scheme,
    )


def layout_of(spec: CacheSpec, *, order: str = "HND", pool_blocks: int = 8, **sizes: Any) -> CacheLayout:
    return CacheLayout(spec=spec, parallel=Parallel(**sizes), pool_blocks=pool_blocks, order=order)


def blocks_for(layout: CacheLayout, tokens: int, *, seed: int = 0) -> tuple[int, ...]:
    """A sequence's blocks, each rank's in an order of its own; with seed 0 one after the other."""
    count, cp = -(-tokens // layout.spec.block_tokens), layout.parallel.cp
    free = [list(range(layout.pool_blocks)) for _ in range(cp)]
    assert count <= layout.pool_blocks * cp
    if seed:
        for rank, blocks in enumerate(free):
            np.random.default_rng([seed, rank]).shuffle(blocks)
    return tuple(free[at % cp][at // cp] for at in range(count))


@lru_cache(maxsize=512)
def cells_of(layout: CacheLayout, blocks: tuple[int, ...], tokens: int, *, dp: int = 0, first_token: int = 0) -> tuple[Cells, ...]:
    """Each element that the ranks of attention-DP group `dp` hold of the sequence's tokens."""
    found: defaultdict[tuple[int, int, int], list[tuple[int, int, int, int]]] = defaultdict(list)
    block_tokens, parallel = layout.spec.block_tokens, layout.parallel
    step = block_tokens if layout.has_records else 1
    for token in range(first_token, tokens, step):
        at = token // block_tokens
        for rank in range(parallel.ranks):
            if parallel.group_of(rank) != dp or parallel.coordinates(rank).cp != at % parallel.cp:
                continue
            for layer in layout.rank_layers(rank):
                for kv in range(layout.spec.kv_factor):
                    for head in layout.rank_heads(rank):
                        region, offset = layout.locate(rank, layer, kv, head, blocks[at], token % block_tokens)
                        found[rank, region, kv].append((offset, token // step, layer, head))
    return tuple(Cells(*key, *np.array(rows, np.int64).T) for key, rows in found.items())


def random_cache(layout: CacheLayout, tokens: int, *, seed: int) -> Cache:
    random = np.random.default_rng(seed)
    positions = -(-tokens // layout.spec.block_tokens) if layout.has_records else tokens
    shape = positions, layout.spec.layers, layout.spec.kv_heads
    return [random.integers(0, 256, (*shape, layout.unit_bytes(kv)), np.uint8) for kv in range(layout.spec.kv_factor)]


def noisy_pools(layout: CacheLayout, *, seed: int) -> Pools:
    random = np.random.default_rng(seed)
    return [
        [random.integers(0, 256, layout.region_bytes(rank, region), np.uint8) for region in range(layout.region_count(rank))]
        for rank in range(layout.parallel.ranks)
    ]


def scatter(cells: tuple[Cells, ...], cache: Cache, pools: Pools) -> Pools:
    """A copy of `pools` with the cache's elements in their places."""
    filled = [[region.copy() for region in regions] for regions in pools]
    for part in cells:
        elements = cache[part.kv]
        places = part.offsets[:, None] + np.arange(elements.shape[-1])
        filled[part.rank][part.region][places] = elements[part.positions, part.layers, part.heads]
    return filled


def assert_equal(pools: Pools, expected: Pools) -> None:
    """Assert that all bytes are equal, including those that no copy should have touched."""
    for rank, regions in enumerate(expected):
        for region, data in enumerate(regions):
            assert np.array_equal(pools[rank][region], data), f"rank {rank} region {region}"
