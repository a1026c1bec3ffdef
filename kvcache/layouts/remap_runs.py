"""What one pair of ranks copies, as runs: contiguous on both sides and as long as they get. It knows neither models nor requests.

A *unit* is as many tokens as the smaller of both block sizes, so that it lies in one block on either side; the first and the last of a
range of tokens may be shorter. The runs of one unit (a *template*) do not depend on which blocks it is copied between: they are found
once and kept, and a plan is the sum of their places and the blocks' places, which numpy makes at the speed of memory.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from kvstore.kvcache.layouts.copies import Column, CopyArrays, Int64s
from kvstore.kvcache.layouts.counterparts import RankPair
from kvstore.kvcache.layouts.layout import CacheLayout, RegionOffsets, Step, Strides, TokenSlots, strides_of

_TEMPLATES: Final = 1024
"""Templates kept: a layer of a pair is one of 1 KB, 80 layers with runs of single tokens one of 80 KB."""
_FEW: Final = 1024
"""Sums that are made quicker (1 us) than it is found that they are all equal (20 us)."""
_BUFFER: Final = 256
"""Elements that numpy collects before it adds where rows are shorter: of its own 8,192, rows of a few thousand take three times as long."""
_MAX_NARROW: Final = (1 << 32) - 1
"""What a column of 32 bits holds."""


_Terms = list[tuple[Int64s, Int64s]]


class Units(NamedTuple):
    """Units of one length: the positions in the sequence at which they start."""

    tokens: int
    starts: Int64s


class End(NamedTuple):
    """One side of the runs of a grid."""

    runs: RegionOffsets
    """Of the unit at block 0, token 0."""
    strides: Strides
    """By which they move with block and token."""


class Grid(NamedTuple):
    """Runs of one length: of keys, of values, or of both where they lie side by side."""

    length: int
    source: End
    destination: End


class _RunAxis(NamedTuple):
    repeats: int
    source: Step
    destination: Step


class _Box(NamedTuple):
    """A grid before it is spread out: `length` bytes at `source` and `destination`, repeated along each of the axes."""

    length: int
    source: Step
    destination: Step
    axes: tuple[_RunAxis, ...]


class _Piece(NamedTuple):
    """A grid at several places, `lengths` bytes of each run there."""

    grid: Grid
    source: RegionOffsets
    destination: RegionOffsets
    lengths: Int64s


def units_of(source: CacheLayout, destination: CacheLayout, pair: RankPair, *, first_token: int, end_token: int) -> tuple[Units, ...]:
    """The units of the sequence's tokens [first_token, end_token) that both ranks have, given their context-parallel ranks."""
    unit = min(source.spec.block_tokens, destination.spec.block_tokens)
    whole_start, whole_end = -(-first_token // unit) * unit, end_token // unit * unit
    found = [Units(unit, np.arange(whole_start, whole_end, unit, dtype=np.int64))]
    if first_token < (head_end := min(whole_start, end_token)):
        found.append(Units(head_end - first_token, np.array([first_token], np.int64)))
    if whole_start <= whole_end < end_token:
        found.append(Units(end_token - whole_end, np.array([whole_end], np.int64)))
    kept = []
    for tokens, starts in found:
        for layout, rank in ((source, pair.source_rank), (destination, pair.destination_rank)):
            parallel = layout.parallel
            starts = starts[starts // layout.spec.block_tokens % parallel.cp == parallel.coordinates(rank).cp]
        if len(starts):
            kept.append(Units(tokens, starts))
    return tuple(kept)


@lru_cache(maxsize=_TEMPLATES)
def template_of(source: CacheLayout, destination: CacheLayout, pair: RankPair, *, layers: range, tokens: int) -> tuple[Grid, ...]:
    """The runs of one unit of `tokens` tokens; `layers` are some of the pair's."""
    sides = [
        (strides_of(source, pair.source_rank, kv), strides_of(destination, pair.destination_rank, kv))
        for kv in range(source.spec.kv_factor)
    ]
    boxes = [_box(source, destination, pair, layers, tokens, kv) for kv in range(source.spec.kv_factor)]
    if len(boxes) == 2 and (both := _joined(*boxes)):
        boxes = [both]
    return tuple(_spread(box, ours, theirs) for box, (ours, theirs) in zip(boxes, sides, strict=False))


def copies_of(parts: Iterable[tuple[tuple[Grid, ...], TokenSlots, TokenSlots]]) -> CopyArrays:
    """The runs of templates at blocks: each part is a template and, for either side, the places of its units.

    Units that follow one another on both sides become one run.
    """
    pieces = [piece for template, source, destination in parts for piece in _pieces(template, source, destination)]
    longest = max((int(piece.lengths.max()) for piece in pieces), default=0)
    ours, theirs = _outer_sums(
        [(piece.source.offsets, piece.grid.source.runs.offsets) for piece in pieces],
        [(piece.destination.offsets, piece.grid.destination.runs.offsets) for piece in pieces],
        longest=longest,
    )
    [source_regions] = _outer_sums([(piece.source.regions, piece.grid.source.runs.regions) for piece in pieces])
    [destination_regions] = _outer_sums([(piece.destination.regions, piece.grid.destination.runs.regions) for piece in pieces])
    [lengths] = _outer_sums([(piece.lengths, np.zeros_like(piece.grid.source.runs.offsets)) for piece in pieces])
    return CopyArrays(source_regions, ours, destination_regions, theirs, lengths)


def _pieces(template: tuple[Grid, ...], source: TokenSlots, destination: TokenSlots) -> list[_Piece]:
    nothing = Step(0, 0)
    placed = [
        (grid, grid.source.strides.places(source, nothing), grid.destination.strides.places(destination, nothing)) for grid in template
    ]
    count = len(source.blocks)
    goes_on = np.ones(count - 1, np.bool_)
    for grid, *places in placed:
        for regions, offsets in places:
            goes_on &= (regions[1:] == regions[:-1]) & (offsets[1:] - offsets[:-1] == grid.length)
    if not goes_on.any():
        return [_Piece(*piece, np.full(count, piece[0].length)) for piece in placed]
    starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    counts = np.diff(starts, append=count)
    return [
        _Piece(
            grid,
            RegionOffsets(*(column[starts] for column in ours)),
            RegionOffsets(*(column[starts] for column in theirs)),
            counts * grid.length,
        )
        for grid, ours, theirs in placed
    ]


def _outer_sums(*columns: _Terms, longest: int = 0) -> list[Column]:
    """For each column, pairs of arrays, all sums of each pair, one after the other. A number that repeats throughout takes no memory if it
    repeats often.

    Many are of 32 bits if these hold every sum plus `longest`: how fast memory is written is all that listing runs costs. So columns share
    one allocation: of one the C library keeps what was freed last, of two it gives the system half back.
    """
    total = sum(len(one) * len(other) for one, other in columns[0])
    bounds = [{int(bound) for one, other in terms for bound in (one.min() + other.min(), one.max() + other.max())} for terms in columns]
    is_many = total > _FEW
    wide = np.uint32 if is_many and max(map(max, bounds)) + longest <= _MAX_NARROW else np.int64
    varied = [not is_many or len(found) > 1 for found in bounds]
    memory = iter(np.empty((sum(varied), total), wide))
    return [
        _fill(next(memory), terms) if varies else np.broadcast_to(np.int64(min(found)), (total,))
        for terms, found, varies in zip(columns, bounds, varied, strict=True)
    ]


def _fill(out: Column, terms: _Terms) -> Column:
    at = 0
    with np.errstate():  # which ends the size of the buffer, too
        np.setbufsize(_BUFFER)
        for one, other in terms:
            end = at + len(one) * len(other)
            np.add.outer(one.astype(out.dtype), other.astype(out.dtype), out=out[at:end].reshape(len(one), len(other)))
            at = end
    return out


def _box(source: CacheLayout, destination: CacheLayout, pair: RankPair, layers: range, tokens: int, kv: int) -> _Box:
    corners, repeats = [], (len(layers), len(pair.heads), 1 if source.has_records else tokens)
    for layout, rank in ((source, pair.source_rank), (destination, pair.destination_rank)):
        strides = strides_of(layout, rank, kv)
        start = strides.start.moved(strides.layer, layers.start - layout.rank_layers(rank).start)
        corners.append((start.moved(strides.head, pair.heads.start - layout.rank_heads(rank).start), strides[2:5]))
    (ours, our_steps), (theirs, their_steps) = corners
    return _grown(_Box(source.unit_bytes(kv), ours, theirs, tuple(map(_RunAxis, repeats, our_steps, their_steps))))


def _grown(box: _Box) -> _Box:
    """Takes into the run every axis along which it repeats without a gap on both sides."""
    length, axes = box.length, [axis for axis in box.axes if axis.repeats > 1]
    while axis := next((axis for axis in axes if axis.source == axis.destination == Step(0, length)), None):
        length *= axis.repeats
        axes.remove(axis)
    return _Box(length, box.source, box.destination, tuple(axes))


def _joined(keys: _Box, values: _Box) -> _Box | None:
    """One box of both: where they are alike, or where each run of values follows one of keys on both sides."""
    if keys.axes != values.axes:
        return None
    steps = [
        Step(later.regions - first.regions, later.size_bytes - first.size_bytes)
        for first, later in zip(keys[1:3], values[1:3], strict=True)
    ]
    if keys.length == values.length:
        return _grown(keys._replace(axes=(*keys.axes, _RunAxis(2, *steps))))
    if steps[0] == steps[1] == Step(0, keys.length):
        return _grown(keys._replace(length=keys.length + values.length))
    return None


def _spread(box: _Box, ours: Strides, theirs: Strides) -> Grid:
    """In the order in which the runs lie at the source."""
    axes = sorted(box.axes, key=lambda axis: axis.source, reverse=True)
    ends = []
    for first, steps, strides in (
        (box.source, [axis.source for axis in axes], ours),
        (box.destination, [axis.destination for axis in axes], theirs),
    ):
        regions, offsets = (np.array([value], np.int64) for value in first)
        for axis, step in zip(axes, steps, strict=True):
            index = np.arange(axis.repeats)
            regions = np.add.outer(regions, index * step.regions).reshape(-1)
            offsets = np.add.outer(offsets, index * step.size_bytes).reshape(-1)
        ends.append(End(RegionOffsets(regions, offsets), strides))
    return Grid(box.length, *ends)
