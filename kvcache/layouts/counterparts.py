"""Pairs of ranks of two executors that exchange cache: intersections of their layers and heads. Independent of bytes.

A destination rank needs its layers and heads of the blocks on its context-parallel rank; source ranks hold such
products, too. So a pair exchanges the intersection: of two intervals of layers, of two intervals of heads, and of two
residues of block numbers. If several source ranks hold copies of a head (GQA with more ranks than heads, MLA),
receivers are distributed over them round-robin.

Source: TensorRT-LLM's `targetIRanks` (in `cacheSplitConcat`) for prefix sums over layers and one sender for each head.
It divides sizes; intersecting intervals also covers sizes that do not divide each other.
"""

from collections import defaultdict
from collections.abc import Iterator
from math import gcd, lcm
from typing import Final, NamedTuple

import numpy as np

from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.protocol.errors import InvalidArgument

MAX_TURN: Final = 1 << 20
"""Limit of the period, in units, after which positions repeat their ranks: layouts come from peers, and a whole
period is enumerated."""


class RankPair(NamedTuple):
    """Layers and KV heads that one rank sends to another, of the blocks that both have."""

    source_rank: int
    destination_rank: int
    layers: range
    heads: range


def find_pairs(source: CacheLayout, destination: CacheLayout, *, source_dp: int, destination_dp: int) -> tuple[RankPair, ...]:
    """Return all pairs of ranks between these attention-DP groups, by rising destination, then source rank.

    Every byte of every destination rank of the group comes from exactly one pair. Receivers are assigned round-robin to
    the source ranks with the same heads, for each pipeline stage and context-parallel rank.

    Raises InvalidArgument: the block sizes are incompatible.
    """
    ours, theirs = source.parallel, destination.parallel
    meeting = _meeting_cp_ranks(source, destination)
    stages = [ours.stage_layers(stage, layers=source.spec.layers) for stage in range(ours.pp)]
    turns: defaultdict[tuple[int, int, int], int] = defaultdict(int)
    pairs = []
    for receiver in range(theirs.ranks):
        if theirs.group_of(receiver) != destination_dp:
            continue
        layers, heads = destination.rank_layers(receiver), destination.rank_heads(receiver)
        for stage, ours_layers in enumerate(stages):
            shared = intersect(ours_layers, layers)
            if not shared:
                continue
            for cp in meeting[theirs.coordinates(receiver).cp]:
                for shard, wanted in _holders(source, heads):
                    copies = _copies_of_head(source)
                    turn = turns[stage, cp, shard]
                    turns[stage, cp, shard] += 1
                    sender = ours.rank_of(pp=stage, tp=source_dp * ours.shards + shard + turn % copies, cp=cp)
                    pairs.append(RankPair(sender, receiver, shared, wanted))
    return tuple(sorted(pairs, key=lambda pair: (pair.destination_rank, pair.source_rank)))


def intersect(one: range, other: range) -> range:
    """Return the intersection of two intervals, possibly empty."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _copies_of_head(layout: CacheLayout) -> int:
    return max(1, layout.parallel.shards // layout.spec.kv_heads)


def _holders(layout: CacheLayout, heads: range) -> Iterator[tuple[int, range]]:
    """Yield the first shard of each group of shards with equal heads, and which of `heads` it holds."""
    copies = _copies_of_head(layout)
    size = max(1, layout.spec.kv_heads // layout.parallel.shards)
    for holder in range(heads.start // size, -(-heads.stop // size)):
        yield holder * copies, intersect(range(holder * size, (holder + 1) * size), heads)


def _meeting_cp_ranks(source: CacheLayout, destination: CacheLayout) -> list[list[int]]:
    """Return, for each destination context-parallel rank, the source ranks with tokens of the same positions. Raises
    InvalidArgument."""
    ours, theirs = source.spec.block_tokens, destination.spec.block_tokens
    unit = gcd(ours, theirs)
    # The ranks of a position repeat after a period of both sides.
    turn = lcm(ours * source.parallel.cp, theirs * destination.parallel.cp)
    if turn > MAX_TURN * unit:
        raise InvalidArgument(f"blocks of {ours} and of {theirs} tokens do not go together: their common period is {turn} tokens")
    starts = np.arange(0, turn, unit)
    met = {*zip((starts // theirs % destination.parallel.cp).tolist(), (starts // ours % source.parallel.cp).tolist(), strict=True)}
    return [sorted(cp for at, cp in met if at == rank) for rank in range(destination.parallel.cp)]
