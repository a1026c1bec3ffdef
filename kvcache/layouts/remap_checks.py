"""What a re-mapping refuses, with the reason: models that differ, blocks that cannot be cut, and lists of blocks that cannot be."""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvstore.kvcache.layouts.copies import Int64s
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.layouts.remap_runs import Units
from kvstore.kvcache.layouts.strides import Placed
from kvstore.protocol.errors import InvalidArgument

_SAME: Final = ("layers", "kv_heads", "head_dim", "dtype", "kv_factor", "scheme", "window_tokens", "windowed_layers")
"""What both specs must agree on. Query heads are not cached."""


def check_layouts(source: CacheLayout, destination: CacheLayout) -> None:
    """Raises InvalidArgument unless a cache of `source` can become one of `destination`; the message names all that differs."""
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
        raise InvalidArgument(f"{source.order} and {destination.order}: what one side keeps transposed is copied as it lies, not turned")
    if source.has_records and large != small:
        kind = "transposed" if source.axes.transposed else f"of the scheme {ours.scheme.name}"
        raise InvalidArgument(
            f"records {kind} are whole blocks: blocks of {ours.block_tokens} tokens cannot become ones of {theirs.block_tokens} as they are"
        )


def check_tokens(layout: CacheLayout, *, first_token: int, tokens: int) -> tuple[int, int]:
    """The half-open range of tokens to move; where there are records their whole blocks. Raises InvalidArgument if it is not one."""
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
    """A sequence's blocks in one rank's pool, checked."""

    indexes: Int64s
    block_tokens: int

    def place(self, units: Units) -> Placed:
        """Blocks of these units, and where in them they start."""
        return Placed(self.indexes[units.starts // self.block_tokens], units.starts % self.block_tokens)


def check_blocks(layout: CacheLayout, rank: int, blocks: ArrayLike, *, first_token: int, end_token: int, is_written: bool) -> BlockList:
    """The list as an array. Only those blocks are looked at that `rank` has and that hold some of the tokens.

    Raises:
        InvalidArgument: the list is not one of whole numbers or too short, a block is outside of the pool, or one that is written to is
            named twice.
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
