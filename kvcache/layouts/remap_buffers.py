"""Gathers and scatters a pair's bytes through one contiguous buffer, by strided numpy copies, for runs too short to
send.

The buffer's order is canonical: unit of tokens, layer, K or V, head, token, element; units are those of
`remap_runs.units_of`, in its order. Both ends compute it from the two layouts, independent of their pools' orders. The
code loops over memory regions, not over runs; a pool has one region or one per layer (one per block is the slow case).
"""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.kvcache.layouts.copies import Bytes, Int64s, as_bytes
from kvstore.kvcache.layouts.layout import CacheLayout, Step, TokenSlots, strides_of
from kvstore.protocol.errors import InvalidArgument

_CHUNK_BYTES: Final = 256 << 10
"""Size of one copy. Numpy buffers gathered data before storing it; this size fits the cache and touches no new
pages."""


class Shape(NamedTuple):
    """Layers, heads and tokens that a pair exchanges of each unit."""

    layers: range
    heads: range
    tokens: int


class _StagingAxis(NamedTuple):
    """Axis of layers, heads or tokens: its strides in the pool and in the buffer."""

    repeats: int
    pool: Step
    staged_bytes: int


class _RegionItems(NamedTuple):
    """Items of one region. Those of unit u start at `offsets[u]` in the region and at its slot in the buffer; the
    axes add to both."""

    region: int
    units: NDArray[np.intp]
    offsets: Int64s
    staged_offset: int
    axes: list[_StagingAxis]
    item_bytes: int


def unit_bytes(layout: CacheLayout, shape: Shape) -> int:
    """Return the bytes of one unit in the buffer."""
    return len(shape.layers) * sum(_kv_bytes(layout, shape, kv) for kv in range(layout.spec.kv_factor))


def move(layout: CacheLayout, rank: int, regions: Sequence[Any], placed: TokenSlots, shape: Shape, staged: Bytes, *, to_pool: bool) -> None:
    """Copy units between the pool of `rank` and `staged`, which has exactly their size.

    Raises:
        InvalidArgument: a region is missing, too small, not contiguous, or read-only when written to.
    """
    size_bytes = unit_bytes(layout, shape)
    for kv in range(layout.spec.kv_factor):
        for part in _parts(layout, rank, placed, shape, kv):
            pool = _windows(regions, part)
            if to_pool and not pool.flags.writeable:
                raise InvalidArgument(f"region {part.region} is written to, but is read-only")
            counts, steps = [axis.repeats for axis in part.axes], [axis.staged_bytes for axis in part.axes]
            buffer: NDArray[Any] = np.ndarray(
                (len(placed.blocks), *counts), pool.dtype, buffer=staged, offset=part.staged_offset, strides=(size_bytes, *steps)
            )
            at_once = max(1, _CHUNK_BYTES // (prod(counts) * part.item_bytes))
            for first in range(0, len(part.units), at_once):
                units, offsets = part.units[first : first + at_once], part.offsets[first : first + at_once]
                if to_pool:
                    pool[offsets] = buffer[units]
                else:
                    buffer[units] = pool[offsets]


def _kv_bytes(layout: CacheLayout, shape: Shape, kv: int) -> int:
    return len(shape.heads) * (1 if layout.has_records else shape.tokens) * layout.unit_bytes(kv)


def _parts(layout: CacheLayout, rank: int, placed: TokenSlots, shape: Shape, kv: int) -> Iterator[_RegionItems]:
    strides = strides_of(layout, rank, kv)
    item_bytes, axes = layout.unit_bytes(kv), _axes(layout, rank, shape, kv)
    while axes and axes[-1].pool == Step(0, axes[-1].staged_bytes) == Step(0, item_bytes):
        item_bytes *= axes.pop().repeats
    first = strides.start.moved(strides.layer, shape.layers.start - layout.rank_layers(rank).start)
    places = strides.places(placed, first.moved(strides.head, shape.heads.start - layout.rank_heads(rank).start))
    across = [axis for axis in axes if axis.pool.regions]
    within = [axis for axis in axes if not axis.pool.regions]
    before = sum(_kv_bytes(layout, shape, smaller) for smaller in range(kv))
    for index in product(*(range(axis.repeats) for axis in across)):
        regions = places.regions + sum(at * axis.pool.regions for at, axis in zip(index, across, strict=True))
        staged_offset = before + sum(at * axis.staged_bytes for at, axis in zip(index, across, strict=True))
        for region in np.unique(regions):
            units = np.flatnonzero(regions == region)
            yield _RegionItems(int(region), units, places.offsets[units], staged_offset, within, item_bytes)


def _axes(layout: CacheLayout, rank: int, shape: Shape, kv: int) -> list[_StagingAxis]:
    strides = strides_of(layout, rank, kv)
    head_bytes = _kv_bytes(layout, shape, kv) // len(shape.heads)
    axes = [
        _StagingAxis(len(shape.layers), strides.layer, unit_bytes(layout, shape) // len(shape.layers)),
        _StagingAxis(len(shape.heads), strides.head, head_bytes),
        _StagingAxis(1 if layout.has_records else shape.tokens, strides.token, layout.unit_bytes(kv)),
    ]
    return [axis for axis in axes if axis.repeats > 1]


def _windows(regions: Sequence[Any], part: _RegionItems) -> NDArray[Any]:
    """Return a view that maps a byte offset to the items that the part's axes reach from it."""
    if part.region >= len(regions):
        raise InvalidArgument(f"region {part.region} is needed, but there are {len(regions)} regions")
    flat = as_bytes(regions[part.region])
    counts, steps = [axis.repeats for axis in part.axes], [axis.pool.size_bytes for axis in part.axes]
    reach = sum((count - 1) * step for count, step in zip(counts, steps, strict=True)) + part.item_bytes
    if (end := int(part.offsets.max()) + reach) > flat.size:
        raise InvalidArgument(f"region {part.region} has {flat.size} bytes, but the layout reaches byte {end}")
    item = np.dtype((np.void, part.item_bytes))
    return np.ndarray((flat.size - reach + 1, *counts), item, buffer=flat, strides=(1, *steps))
