"""Copies of one pair of ranks as runs: as long as possible, contiguous on both sides. Independent of models and
requests.

A *unit* has as many tokens as the smaller of both block sizes, so it lies in one block on either side; the first and
the last unit of a token range may be shorter. The runs of one unit (a *template*) do not depend on its blocks: they are
computed once and cached. A plan is the sum of template offsets and block offsets, which numpy computes at memory speed.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from kvstore.kvcache.layouts.copies import Column, CopyArrays, Int64s
from kvstore.kvcache.layouts.counterparts import RankPair
from kvstore.kvcache.layouts.layout import CacheLayout, RegionOffsets, Step, Strides, TokenSlots, strides_of

_TEMPLATES: Final = 1024
"""Cached templates: one layer of a pair takes 1 KB, 80 layers with runs of single tokens 80 KB."""
_FEW: Final = 1024
"""Up to this many sums are computed directly (1 us): checking whether they are all equal takes 20 us."""
_BUFFER: Final = 256
"""Elements of numpy's buffer for short rows: with its default of 8,192, rows of a few thousand take three times as
long."""
_MAX_NARROW: Final = (1 << 32) - 1
"""Maximum of a 32-bit column."""


_Terms = list[tuple[Int64s, Int64s]]


class Units(NamedTuple):
    """Units of equal length: their start positions in the sequence."""

    tokens: int
    starts: Int64s


class End(NamedTuple):
    """One side of a grid's runs."""

    runs: RegionOffsets
    """Of the unit at block 0, token 0."""
    strides: Strides
    """Strides of blocks and tokens."""


class Grid(NamedTuple):
    """Runs of one length: of keys, of values, or of both if they are adjacent."""

    length: int
    source: End
    destination: End


class _RunAxis(NamedTuple):
    repeats: int
    source: Step
    destination: Step


class _Box(NamedTuple):
    """A grid before expansion: `length` bytes at `source` and `destination`, repeated along each axis."""

    length: int
    source: Step
    destination: Step
    axes: tuple[_RunAxis, ...]


class _Piece(NamedTuple):
    """A grid at several positions, with `lengths` bytes of each run."""

    grid: Grid
    source: RegionOffsets
    destination: RegionOffsets
    lengths: Int64s


def units_of(source: CacheLayout, destination: CacheLayout, pair: RankPair, *, first_token: int, end_token: int) -> tuple[Units, ...]:
    """Return the units of tokens [first_token, end_token) that both ranks have, by their context-parallel ranks."""
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
    """Return the runs of one unit of `tokens` tokens; `layers` are some of the pair's."""
    sides = [
        (strides_of(source, pair.source_rank, kv), strides_of(destination, pair.destination_rank, kv))
        for kv in range(source.spec.kv_factor)
    ]
    boxes = [_box(source, destination, pair, layers, tokens, kv) for kv in range(source.spec.kv_factor)]
    if len(boxes) == 2 and (both := _joined(*boxes)):
        boxes = [both]
    return tuple(_spread(box, ours, theirs) for box, (ours, theirs) in zip(boxes, sides, strict=False))


def copies_of(parts: Iterable[tuple[tuple[Grid, ...], TokenSlots, TokenSlots]]) -> CopyArrays:
    """Return the runs of templates at blocks: each part is a template and, for either side, the positions of its units.

    Units that are adjacent on both sides become one run.
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
    """Return, for each column, all sums of each of its pairs of arrays, concatenated. A constant column of many sums
    takes no memory.

    Columns of many sums have 32 bits if these hold every sum plus `longest`, because the speed of writing memory
    dominates. Columns share one allocation: the C library keeps the last freed block, but would return half of two to
    the system.
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
    with np.errstate():  # it also restores the buffer size
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
    """Merge into the run every axis along which it repeats without a gap on both sides."""
    length, axes = box.length, [axis for axis in box.axes if axis.repeats > 1]
    while axis := next((axis for axis in axes if axis.source == axis.destination == Step(0, length)), None):
        length *= axis.repeats
        axes.remove(axis)
    return _Box(length, box.source, box.destination, tuple(axes))


def _joined(keys: _Box, values: _Box) -> _Box | None:
    """Return one box of both, if they have the same form or each run of values follows one of keys on both sides;
    else None."""
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
    """Expand a box into runs, in source order."""
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
