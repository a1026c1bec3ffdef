"""Conversion of a sequence's KV cache between two executors' layouts: which bytes to copy from where to where.

`remap` compares two layouts once. The resulting `Remapping` computes the copies for a sequence's blocks and a pair of
ranks, as arrays. If runs are too short to send, it gathers and scatters the pair's bytes through one buffer. It sends
nothing.

**Supported.** Any two layouts of one model in which one block size divides the other. Records of quantised blocks are
opaque, so their block sizes must be equal. Tensor-parallel sizes need not divide each other, but each must divide the
heads. Unsupported layouts raise InvalidArgument with the reason.

Source: TensorRT-LLM's cache formatter (its `docs/source/developer-guide/kv-transfer.md`), which rejects different block
sizes.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvstore.kvcache.layouts.copies import Bytes, CopyArrays, Int64s, as_bytes
from kvstore.kvcache.layouts.counterparts import RankPair, find_pairs, intersect
from kvstore.kvcache.layouts.layout import CacheLayout, TokenSlots
from kvstore.kvcache.layouts.remap_buffers import Shape, move, unit_bytes
from kvstore.kvcache.layouts.remap_runs import Units, copies_of, template_of, units_of
from kvstore.protocol.errors import InvalidArgument

_SAME: Final = ("layers", "kv_heads", "head_dim", "dtype", "kv_factor", "scheme", "window_tokens", "windowed_layers")
"""Fields that both specs must agree on. Query heads are not cached."""


def check_layouts(source: CacheLayout, destination: CacheLayout) -> None:
    """Raises InvalidArgument unless a cache of `source` can become one of `destination`; the text lists all
    differences."""
    ours, theirs = source.spec, destination.spec
    differing = []
    for name in _SAME:
        one, other = (value.name if name == "scheme" else value for value in (getattr(ours, name), getattr(theirs, name)))
        if one != other:
            differing.append(f"{name} {one} and {other}")
    if ours.model and theirs.model and ours.model != theirs.model:
        differing.append(f"model {ours.model!r} and {theirs.model!r}")
    if differing:
        raise InvalidArgument(f"the two sides do not have the same cache: {'; '.join(differing)}")
    small, large = sorted((ours.block_tokens, theirs.block_tokens))
    if large % small:
        raise InvalidArgument(
            f"blocks of {ours.block_tokens} tokens cannot become blocks of {theirs.block_tokens}: one must be a multiple of the other"
        )
    if source.axes.transposed != destination.axes.transposed:
        raise InvalidArgument(f"{source.order} and {destination.order}: both sides must transpose the same of K and V")
    if source.has_records and large != small:
        kind = "transposed" if source.axes.transposed else f"of the scheme {ours.scheme.name}"
        raise InvalidArgument(
            f"records {kind} are whole blocks: blocks of {ours.block_tokens} tokens cannot become ones of {theirs.block_tokens} as they are"
        )


def check_tokens(layout: CacheLayout, *, first_token: int, tokens: int) -> tuple[int, int]:
    """Return the half-open range of tokens to move, in whole blocks if there are records. Raises InvalidArgument:
    not a valid range."""
    if not 0 <= first_token <= tokens:
        raise InvalidArgument(f"tokens [{first_token}, {tokens}) are not a range that starts at 0 or later")
    if not layout.has_records:
        return first_token, tokens
    block_tokens = layout.spec.block_tokens
    if first_token % block_tokens:
        raise InvalidArgument(
            f"first_token is {first_token}: with records of whole blocks it must be a multiple of block_tokens, {block_tokens}"
        )
    return first_token, -(-tokens // block_tokens) * block_tokens


class BlockList(NamedTuple):
    """Validated blocks of a sequence in one rank's pool."""

    indexes: Int64s
    block_tokens: int

    def place(self, units: Units) -> TokenSlots:
        """Return the block of each unit, and the unit's start in it."""
        return TokenSlots(self.indexes[units.starts // self.block_tokens], units.starts % self.block_tokens)


def check_blocks(layout: CacheLayout, rank: int, blocks: ArrayLike, *, first_token: int, end_token: int, is_written: bool) -> BlockList:
    """Validate a block list and return it as an array. Only blocks that `rank` holds and that overlap the tokens are
    checked.

    Raises:
        InvalidArgument: not a list of whole numbers, too short, a block outside the pool, or a destination block listed
            twice.
    """
    indexes = np.asarray(blocks)
    if indexes.ndim != 1 or (indexes.size and indexes.dtype.kind not in "iu"):
        raise InvalidArgument(f"blocks must be a list of whole numbers, not an array of {indexes.dtype} with {indexes.ndim} axes")
    block_tokens, parallel = layout.spec.block_tokens, layout.parallel
    needed = -(-end_token // block_tokens)
    if len(indexes) < needed:
        raise InvalidArgument(f"{len(indexes)} blocks of {block_tokens} tokens are too few for {end_token} tokens: {needed} are needed")
    first = first_token // block_tokens
    own = indexes[first + (parallel.coordinates(rank).cp - first) % parallel.cp : needed : parallel.cp]
    if own.size and not 0 <= own.min() <= own.max() < layout.pool_blocks:
        raise InvalidArgument(f"blocks {own.min()} to {own.max()} are not all in a pool of {layout.pool_blocks} blocks")
    if is_written and len(np.unique(own)) != len(own):
        raise InvalidArgument("a block is written to twice: each destination block of a rank may be named once")
    return BlockList(indexes.astype(np.int64, copy=False), block_tokens)


class _Share(NamedTuple):
    """Arguments of one call: a part of what a pair exchanges."""

    pair: RankPair
    layers: range
    first_token: int
    end_token: int
    units: tuple[Units, ...]


class Remapping:
    """Conversion from one layout to another, between one attention-DP group of each. Immutable; created by `remap`.

    - **Pairs.** Methods take a pair of ranks from `pairs`.
    - **Block lists** are in the order of the sequence: entry n is the index of the sequence's n-th block in the pool of
      the rank that has it (with context parallelism rank n % cp). Lists may be longer than needed.
    - **Extent.** Tokens [first_token, tokens) of the sequence, in the pair's layers that are in `layers` (model's
      numbers; None: all).
    - **Records**, quantised or transposed, are moved whole, including the last one.
    """

    def __init__(self, source: CacheLayout, destination: CacheLayout, pairs: tuple[RankPair, ...]) -> None:
        self.source = source
        self.destination = destination
        self.pairs = pairs
        """By rising destination, then source rank."""
        self._by_ranks = {(pair.source_rank, pair.destination_rank): pair for pair in pairs}

    def receivers_of(self, source_rank: int) -> tuple[int, ...]:
        """Return the ranks that `source_rank` sends to, rising; none if another holder of the same heads sends them."""
        return tuple(pair.destination_rank for pair in self.pairs if pair.source_rank == source_rank)

    def senders_of(self, destination_rank: int) -> tuple[int, ...]:
        """Return the ranks that `destination_rank` receives from, rising; none outside the attention-DP group."""
        return tuple(pair.source_rank for pair in self.pairs if pair.destination_rank == destination_rank)

    def pair(self, source_rank: int, destination_rank: int) -> RankPair:
        """Return what one rank sends to the other. Raises InvalidArgument: nothing, or no such ranks."""
        if found := self._by_ranks.get((source_rank, destination_rank)):
            return found
        self.source.parallel.coordinates(source_rank)
        self.destination.parallel.coordinates(destination_rank)
        receivers = self.receivers_of(source_rank) or "no rank"
        raise InvalidArgument(f"rank {source_rank} sends nothing to rank {destination_rank}: it sends to {receivers}")

    def copies(
        self,
        source_rank: int,
        destination_rank: int,
        source_blocks: ArrayLike,
        destination_blocks: ArrayLike,
        *,
        tokens: int | None = None,
        first_token: int = 0,
        layers: range | None = None,
    ) -> CopyArrays:
        """Return the copies between the pools of the two ranks. `tokens` None: as many as the source's blocks hold.

        Raises:
            InvalidArgument: not a pair; a block list is too short or has a block outside the pool; a destination block
                is listed twice; or the tokens or layers are not a range.
        """
        tokens = np.size(source_blocks) * self.source.spec.block_tokens if tokens is None else tokens
        share = self._share(source_rank, destination_rank, tokens=tokens, first_token=first_token, layers=layers)
        first, end = share.first_token, share.end_token
        ours = check_blocks(self.source, source_rank, source_blocks, first_token=first, end_token=end, is_written=False)
        theirs = check_blocks(self.destination, destination_rank, destination_blocks, first_token=first, end_token=end, is_written=True)
        parts = []
        for units in share.units:
            template = template_of(self.source, self.destination, share.pair, layers=share.layers, tokens=units.tokens)
            parts.append((template, ours.place(units), theirs.place(units)))
        return copies_of(parts)

    def run_bytes(self, source_rank: int, destination_rank: int) -> int:
        """Return the shortest run in the copies of whole units between these ranks. If it is short, `gather` and
        `scatter` are faster.

        Raises:
            InvalidArgument: the ranks are no pair.
        """
        pair = self.pair(source_rank, destination_rank)
        unit_tokens = min(self.source.spec.block_tokens, self.destination.spec.block_tokens)
        return min(grid.length for grid in template_of(self.source, self.destination, pair, layers=pair.layers, tokens=unit_tokens))

    def staged_bytes(
        self, source_rank: int, destination_rank: int, *, tokens: int, first_token: int = 0, layers: range | None = None
    ) -> int:
        """Return the bytes that `gather` writes and `scatter` reads: the sum of the copies' lengths. Raises
        InvalidArgument as `copies`."""
        return self._staged_bytes(self._share(source_rank, destination_rank, tokens=tokens, first_token=first_token, layers=layers))

    def gather(
        self,
        source_rank: int,
        destination_rank: int,
        source_regions: Sequence[Any],
        source_blocks: ArrayLike,
        *,
        tokens: int,
        first_token: int = 0,
        layers: range | None = None,
        out: Any = None,
    ) -> Bytes:
        """Return the pair's bytes from the source rank's pool, contiguous, in an order that both ends compute
        independently.

        `out`: a writable buffer of exactly `staged_bytes`; None: new memory. The result is an array over it.

        Raises:
            InvalidArgument: as `copies`, or `out` has another size or is read-only, or a region is too small. `out` may
                be partly written.
        """
        share = self._share(source_rank, destination_rank, tokens=tokens, first_token=first_token, layers=layers)
        staged = as_bytes(np.empty(self._staged_bytes(share), np.uint8) if out is None else out)
        if not staged.flags.writeable:
            raise InvalidArgument("the buffer to gather into is read-only")
        self._move(share, source_regions, source_blocks, staged, to_pool=False)
        return staged

    def scatter(
        self,
        source_rank: int,
        destination_rank: int,
        destination_regions: Sequence[Any],
        destination_blocks: ArrayLike,
        staged: Any,
        *,
        tokens: int,
        first_token: int = 0,
        layers: range | None = None,
    ) -> None:
        """Reverse `gather` at the other end, with the same tokens and layers. `staged` is a contiguous buffer.

        Raises:
            InvalidArgument: as `copies`, or `staged` has another size, or a region is too small or read-only. Regions
                may be partly written.
        """
        share = self._share(source_rank, destination_rank, tokens=tokens, first_token=first_token, layers=layers)
        self._move(share, destination_regions, destination_blocks, as_bytes(staged), to_pool=True)

    def _share(self, source_rank: int, destination_rank: int, *, tokens: int, first_token: int, layers: range | None) -> _Share:
        pair = self.pair(source_rank, destination_rank)
        first, end = check_tokens(self.source, first_token=first_token, tokens=tokens)
        if layers is not None and layers.step != 1:
            raise InvalidArgument(f"layers is {layers}: it must be a range of step 1")
        shared = pair.layers if layers is None else intersect(pair.layers, layers)
        units = units_of(self.source, self.destination, pair, first_token=first, end_token=end) if shared else ()
        return _Share(pair, shared, first, end, units)

    def _staged_bytes(self, share: _Share) -> int:
        return sum(
            len(units.starts) * unit_bytes(self.source, Shape(share.layers, share.pair.heads, units.tokens)) for units in share.units
        )

    def _move(self, share: _Share, regions: Sequence[Any], blocks: ArrayLike, staged: Bytes, *, to_pool: bool) -> None:
        layout, rank = (self.destination, share.pair.destination_rank) if to_pool else (self.source, share.pair.source_rank)
        own = check_blocks(layout, rank, blocks, first_token=share.first_token, end_token=share.end_token, is_written=to_pool)
        if staged.size != (size_bytes := self._staged_bytes(share)):
            raise InvalidArgument(f"a buffer of {staged.size} bytes for {size_bytes}: both ends must use the same tokens and layers")
        at = 0
        for units in share.units:
            shape = Shape(share.layers, share.pair.heads, units.tokens)
            end = at + len(units.starts) * unit_bytes(layout, shape)
            move(layout, rank, regions, own.place(units), shape, staged[at:end], to_pool=to_pool)
            at = end


@lru_cache(maxsize=256)
def remap(source: CacheLayout, destination: CacheLayout, *, source_dp: int = 0, destination_dp: int = 0) -> Remapping:
    """Return the conversion from attention-DP group `source_dp` to group `destination_dp` of the other executor.

    Cached: a call with known layouts costs a lookup.

    Raises:
        InvalidArgument: different models or schemes, incompatible block sizes, or no such group.
    """
    check_layouts(source, destination)
    for name, group, groups in (("source_dp", source_dp, source.parallel.dp), ("destination_dp", destination_dp, destination.parallel.dp)):
        if not 0 <= group < groups:
            raise InvalidArgument(f"{name} is {group}: there are {groups} attention-DP groups")
    return Remapping(source, destination, find_pairs(source, destination, source_dp=source_dp, destination_dp=destination_dp))
