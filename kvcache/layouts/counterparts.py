"""Which rank of one executor sends what to which rank of another: intervals of layers and heads that meet. It knows no bytes.

A destination rank needs its layers x its heads of the blocks on its context-parallel rank. Source ranks hold such products too, so a pair
of ranks exchanges the intersection: of two intervals of layers, of two intervals of heads, and of two residues of block numbers.
Where several source ranks hold copies of a head (GQA with more ranks than heads, MLA), receivers take them in turn.

Source: the prefix sums over layers and the rule that a head is sent by one of its holders are those of TensorRT-LLM's `targetIRanks` (in
`cacheSplitConcat`); it divides sizes where this intersects intervals, which also covers sizes that do not divide one another.
"""

from collections import defaultdict
from collections.abc import Iterator
from math import gcd, lcm
from typing import Final, NamedTuple

import numpy as np

from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.protocol.errors import InvalidArgument

MAX_TURN: Final = 1 << 20
"""Units after which positions lie on the same ranks again: a peer tells its layout, and all of a turn are looked at."""


class RankPair(NamedTuple):
    """What one rank sends to another: these layers of these KV heads, of the blocks that both have."""

    source_rank: int
    destination_rank: int
    layers: range
    heads: range


def find_pairs(source: CacheLayout, destination: CacheLayout, *, source_dp: int, destination_dp: int) -> tuple[RankPair, ...]:
    """All pairs of ranks between these attention-DP groups, by rising destination, then source rank.

    Every byte of every destination rank of the group comes from exactly one pair. Of source ranks with the same heads the receivers
    take the first, the second and so on in turn, per pipeline stage and context-parallel rank: load spreads as far as there are receivers.

    Raises InvalidArgument: the blocks' sizes do not go together.
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
    """What two intervals have in common; an empty one if nothing."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _copies_of_head(layout: CacheLayout) -> int:
    return max(1, layout.parallel.shards // layout.spec.kv_heads)


def _holders(layout: CacheLayout, heads: range) -> Iterator[tuple[int, range]]:
    """The first shard of those that hold the same heads, and which of `heads` these are."""
    copies = _copies_of_head(layout)
    size = max(1, layout.spec.kv_heads // layout.parallel.shards)
    for holder in range(heads.start // size, -(-heads.stop // size)):
        yield holder * copies, intersect(range(holder * size, (holder + 1) * size), heads)


def _meeting_cp_ranks(source: CacheLayout, destination: CacheLayout) -> list[list[int]]:
    """For each destination context-parallel rank, the source ones with tokens of the same sequence positions. Raises InvalidArgument."""
    ours, theirs = source.spec.block_tokens, destination.spec.block_tokens
    unit = gcd(ours, theirs)
    # Which ranks a position is on repeats after a turn of both.
    turn = lcm(ours * source.parallel.cp, theirs * destination.parallel.cp)
    if turn > MAX_TURN * unit:
        raise InvalidArgument(f"blocks of {ours} and of {theirs} tokens do not go together: a turn of both is {turn} tokens")
    starts = np.arange(0, turn, unit)
    met = {*zip((starts // theirs % destination.parallel.cp).tolist(), (starts // ours % source.parallel.cp).tolist(), strict=True)}
    return [sorted(cp for at, cp in met if at == rank) for rank in range(destination.parallel.cp)]
