"""How one executor splits a model over its ranks: tensor, pipeline and context parallel, and attention-DP. It knows no model and no byte.

A rank's number has the context-parallel rank as its fastest part: rank = pp * TP * CP + tp * CP + cp. (Numbering with tp fastest sends to
the wrong ranks as soon as both TP and CP are above 1.)

Source: TensorRT-LLM, `executor/cache_transmission/cacheSplitConcat.cu` (`targetIRanks`), for the numbering of ranks and the split of
attention-DP groups.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

from kvstore.protocol.errors import InvalidArgument

MAX_RANKS: Final = 1024
"""Of one executor. A peer tells its layout, and the number of pairs of ranks grows with the product of both sides."""


class Coordinates(NamedTuple):
    """Where a rank stands in its executor."""

    pp: int
    tp: int
    cp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Sizes of the kinds of parallelism of one executor."""

    tp: int = 1
    """Tensor-parallel ranks; KV heads are split over `tp // dp` of them."""
    pp: int = 1
    """Pipeline stages, each with layers of its own."""
    cp: int = 1
    """Context-parallel ranks: block b of a sequence lies on rank b % cp."""
    dp: int = 1
    """Attention-DP groups among the tensor-parallel ranks; a sequence's cache lies in one of them."""
    layer_split: tuple[int, ...] = ()
    """Layers of each pipeline stage; () splits evenly, the first stages take the remainder."""

    def __post_init__(self) -> None:
        """Raises InvalidArgument for a size below 1, more than MAX_RANKS ranks, or sizes that do not fit together."""
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
        """Ranks of the executor."""
        return self.tp * self.pp * self.cp

    @property
    def shards(self) -> int:
        """Tensor-parallel ranks that share the heads of one sequence: those of one attention-DP group."""
        return self.tp // self.dp

    def rank_of(self, *, pp: int = 0, tp: int = 0, cp: int = 0) -> int:
        """The rank at these coordinates. Raises InvalidArgument if one of them is outside its size."""
        for name, at, size in (("pp", pp, self.pp), ("tp", tp, self.tp), ("cp", cp, self.cp)):
            if not 0 <= at < size:
                raise InvalidArgument(f"{name} rank {at} is outside [0, {size})")
        return pp * self.tp * self.cp + tp * self.cp + cp

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands. Raises InvalidArgument if there is no such rank."""
        if not 0 <= rank < self.ranks:
            raise InvalidArgument(f"rank {rank} is outside [0, {self.ranks})")
        return Coordinates(pp=rank // (self.tp * self.cp), tp=rank % (self.tp * self.cp) // self.cp, cp=rank % self.cp)

    def group_of(self, rank: int) -> int:
        """The attention-DP group of `rank`. Raises InvalidArgument if there is no such rank."""
        return self.coordinates(rank).tp // self.shards

    def shard_of(self, rank: int) -> int:
        """Which of the `shards` of its group `rank` is. Raises InvalidArgument if there is no such rank."""
        return self.coordinates(rank).tp % self.shards

    def stage_layers(self, stage: int, *, layers: int) -> range:
        """Those of the model's `layers` that pipeline stage `stage` has."""
        if self.layer_split:
            start = sum(self.layer_split[:stage])
            return range(start, start + self.layer_split[stage])
        size, rest = divmod(layers, self.pp)
        start = stage * size + min(stage, rest)
        return range(start, start + size + (stage < rest))
