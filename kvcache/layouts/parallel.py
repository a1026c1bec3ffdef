"""Split of a model over an executor's ranks: tensor, pipeline and context parallelism, and attention DP. Independent of
the model.

The context-parallel rank is the fastest part of a rank's number: rank = pp * TP * CP + tp * CP + cp. (With tp fastest,
data would go to wrong ranks if both TP and CP are above 1.)

Source: TensorRT-LLM, `executor/cache_transmission/cacheSplitConcat.cu` (`targetIRanks`), for the numbering of ranks and
the split of attention-DP groups.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.protocol.errors import InvalidArgument

MAX_RANKS: Final = 1024
"""Limit of an executor's ranks: layouts come from peers, and the number of pairs grows with the product of both
sides."""


class Coordinates(NamedTuple):
    """Position of a rank in its executor."""

    pp: int
    tp: int
    cp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Sizes of an executor's kinds of parallelism."""

    tp: int = 1
    """Tensor-parallel ranks; KV heads are split over `tp // dp` of them."""
    pp: int = 1
    """Pipeline stages; each has its own layers."""
    cp: int = 1
    """Context-parallel ranks: block b of a sequence is on rank b % cp."""
    dp: int = 1
    """Attention-DP groups among the tensor-parallel ranks; one of them has a sequence's cache."""
    layer_split: tuple[int, ...] = ()
    """Layers of each pipeline stage; () splits evenly, with the remainder on the first stages."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument: a size below 1, more than MAX_RANKS ranks, or inconsistent sizes."""
        for name, size in (("tp", self.tp), ("pp", self.pp), ("cp", self.cp), ("dp", self.dp)):
            if size < 1:
                raise InvalidArgument(f"{name} is {size}: it must be at least 1")
        if self.ranks > MAX_RANKS:
            raise InvalidArgument(f"tp {self.tp} x pp {self.pp} x cp {self.cp} are {self.ranks} ranks: an executor has at most {MAX_RANKS}")
        if self.tp % self.dp:
            raise InvalidArgument(f"tp is {self.tp}: it must be a multiple of dp, {self.dp}")
        if self.layer_split and (len(self.layer_split) != self.pp or min(self.layer_split) < 1):
            raise InvalidArgument(f"layer_split is {self.layer_split}: it must give each of {self.pp} pipeline stages at least one layer")

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp

    @property
    def shards(self) -> int:
        """Tensor-parallel ranks in one attention-DP group, which share a sequence's heads."""
        return self.tp // self.dp

    def rank_of(self, *, pp: int = 0, tp: int = 0, cp: int = 0) -> int:
        """Return the rank at these coordinates. Raises InvalidArgument: one is out of range."""
        for name, at, size in (("pp", pp, self.pp), ("tp", tp, self.tp), ("cp", cp, self.cp)):
            if not 0 <= at < size:
                raise InvalidArgument(f"{name} rank {at} is outside [0, {size})")
        return pp * self.tp * self.cp + tp * self.cp + cp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the position of `rank`. Raises InvalidArgument: no such rank."""
        if not 0 <= rank < self.ranks:
            raise InvalidArgument(f"rank {rank} is outside [0, {self.ranks})")
        return Coordinates(pp=rank // (self.tp * self.cp), tp=rank % (self.tp * self.cp) // self.cp, cp=rank % self.cp)

    def group_of(self, rank: int) -> int:
        """Return the attention-DP group of `rank`. Raises InvalidArgument: no such rank."""
        return self.coordinates(rank).tp // self.shards

    def shard_of(self, rank: int) -> int:
        """Return the index of `rank` among its group's `shards`. Raises InvalidArgument: no such rank."""
        return self.coordinates(rank).tp % self.shards

    def stage_layers(self, stage: int, *, layers: int) -> range:
        """Return the layers of pipeline stage `stage`, of the model's `layers`."""
        if self.layer_split:
            start = sum(self.layer_split[:stage])
            return range(start, start + self.layer_split[stage])
        size, rest = divmod(layers, self.pp)
        start = stage * size + min(stage, rest)
        return range(start, start + size + (stage < rest))
