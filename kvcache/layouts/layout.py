"""Where the KV cache of a model lies in the memory of an executor's ranks. `locate` is the definition; fast plans are made elsewhere.

Each rank has a pool of blocks for the layers and the heads it owns. Nothing here moves a byte or knows which block belongs to whom.

Fast plans are sums of index times stride, so that numpy makes many places at once. Keys and values may differ in size (quantised with
different bits): strides are of one rank's K, or of its V.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Final, NamedTuple

from kvstore.kvcache.codecs.schemes import NONE, CacheScheme
from kvstore.kvcache.layouts.copies import Int64s
from kvstore.kvcache.layouts.orders import TRANSPOSED, Order, parse_order
from kvstore.kvcache.layouts.parallel import Parallel
from kvstore.kvcache.models.spec import Attention, CacheSpec
from kvstore.protocol.errors import ConfigError, InvalidArgument, ProtocolError
from kvstore.protocol.wire import Reader, Writer

VERSION: Final = 1
"""Of the bytes by which executors tell one another their layouts."""
MAX_POOL_BYTES: Final = 1 << 56
"""Of a pool with all layers and heads: keeps offsets far inside of 64 bits, whatever a peer says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """One executor's cache: the model, how it is split over ranks, and how each rank's pool is ordered."""

    spec: CacheSpec
    parallel: Parallel = Parallel()
    pool_blocks: int
    """Blocks of each rank's pool."""
    order: str = "HND"
    """Axes of a pool, see orders.py: a name or written out; held written out."""
    axes: Order = field(init=False, repr=False, compare=False)
    """The order, read."""
    has_records: bool = field(init=False, repr=False, compare=False)
    """Whether the smallest thing with a place of its own is a record (one block, layer, K or V, and head), not an element of one token:
    it is quantised, or transposed."""
    _unit_bytes: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises InvalidArgument if the order, the heads, the layers or the scheme do not fit the parallelism or one another."""
        spec, parallel = self.spec, self.parallel
        order = parse_order(self.order)
        is_quantised = any(spec.scheme.of(is_key) != NONE.of(is_key) for is_key in spec.kinds)
        has_records = is_quantised or bool(order.transposed)
        record_bytes = map(spec.record_bytes, spec.kinds)
        object.__setattr__(self, "order", str(order))
        object.__setattr__(self, "axes", order)
        object.__setattr__(self, "has_records", has_records)
        object.__setattr__(self, "_unit_bytes", tuple(size if has_records else size // spec.block_tokens for size in record_bytes))
        if not 1 <= self.pool_blocks <= MAX_POOL_BYTES // spec.block_bytes:
            most = MAX_POOL_BYTES // spec.block_bytes
            raise InvalidArgument(f"pool_blocks is {self.pool_blocks}: with blocks of {spec.block_bytes} bytes it must be 1 to {most}")
        if spec.kv_heads % parallel.shards and parallel.shards % spec.kv_heads:
            raise InvalidArgument(f"{spec.kv_heads} KV heads over {parallel.shards} ranks: one of the two must divide the other")
        if spec.layers < parallel.pp or (parallel.layer_split and sum(parallel.layer_split) != spec.layers):
            split = parallel.layer_split or f"{parallel.pp} stages"
            raise InvalidArgument(f"the model has {spec.layers} layers, which cannot be split as {split}")
        if is_quantised and order.transposed:
            raise InvalidArgument(f"records of the scheme {spec.scheme.name} have an order of their own: {order} cannot transpose them")
        if is_quantised and order.inner[-1:] != ("token",):
            raise InvalidArgument(
                f"the scheme {spec.scheme.name} keeps the tokens of a block and head in one record: the order must end in 'token', "
                f"not be '{order}'"
            )

    def rank_layers(self, rank: int) -> range:
        """Layers that `rank` has, of the model's. Raises InvalidArgument if there is no such rank."""
        return self.parallel.stage_layers(self.parallel.coordinates(rank).pp, layers=self.spec.layers)

    def rank_heads(self, rank: int) -> range:
        """KV heads that `rank` has, of the model's; with more ranks than heads each head is on several.

        Raises:
            InvalidArgument: there is no such rank.
        """
        shard, shards, heads = self.parallel.shard_of(rank), self.parallel.shards, self.spec.kv_heads
        if shards > heads:
            head = shard // (shards // heads)
            return range(head, head + 1)
        size = heads // shards
        return range(shard * size, (shard + 1) * size)

    def count(self, rank: int, axis: str) -> int:
        """How long `axis` is in the pool of `rank`."""
        if axis == "layer":
            return len(self.rank_layers(rank))
        if axis == "head":
            return len(self.rank_heads(rank))
        if axis == "block":
            return self.pool_blocks
        if axis == "kv":
            return len(self._unit_bytes)
        return 1 if self.has_records else self.spec.block_tokens

    def unit_bytes(self, kv: int) -> int:
        """Bytes of the smallest thing with a place of its own, of keys (`kv` 0) or values: an element (one token of a head) or a record."""
        return self._unit_bytes[kv]

    def bytes_of(self, rank: int, axes: tuple[str, ...], *, kv: int) -> int:
        """Bytes of a part of the pool of `rank` that spans these axes; of keys (`kv` 0) or values unless the axis kv is among them."""
        unit_bytes = sum(self._unit_bytes) if "kv" in axes else self._unit_bytes[kv]
        return unit_bytes * prod(self.count(rank, axis) for axis in axes if axis != "kv")

    def regions_of(self, rank: int, axes: tuple[str, ...]) -> int:
        """Regions that these axes tell apart."""
        return prod(self.count(rank, axis) for axis in axes)

    def region_count(self, rank: int) -> int:
        """Regions of memory that the pool of `rank` consists of. Raises InvalidArgument if there is no such rank."""
        self.parallel.coordinates(rank)
        return self.regions_of(rank, self.axes.outer)

    def region_bytes(self, rank: int, region: int) -> int:
        """Size of one of them. Raises InvalidArgument if there is no such rank or region."""
        if not 0 <= region < self.region_count(rank):
            raise InvalidArgument(f"region {region} of rank {rank} is outside [0, {self.region_count(rank)})")
        outer, inner, _ = self.axes
        kv = 0
        if "kv" in outer:
            kv = region // self.regions_of(rank, outer[outer.index("kv") + 1 :]) % len(self._unit_bytes)
        return self.bytes_of(rank, inner, kv=kv)

    def locate(self, rank: int, layer: int, kv: int, head: int, block: int, token: int = 0) -> tuple[int, int]:
        """Region and offset in bytes of an element: `layer` and `head` are the model's, `block` the pool's, `token` within the block.

        This is the definition of a layout, in the plainest words; everything that is quicker is tested against it.

        Raises:
            InvalidArgument: `rank` does not have it, or `token` is not 0 where the unit is a whole record.
        """
        first = {"layer": self.rank_layers(rank).start, "head": self.rank_heads(rank).start}
        at = {}
        for axis, index in (("layer", layer), ("kv", kv), ("head", head), ("block", block), ("token", token)):
            at[axis] = index - first.get(axis, 0)
            if not 0 <= at[axis] < self.count(rank, axis):
                raise InvalidArgument(f"rank {rank} has no {axis} {index}")
        outer, inner, _ = self.axes
        region = offset_bytes = 0
        for axis in outer:
            region = region * self.count(rank, axis) + at[axis]
        for position, axis in enumerate(inner):
            # What lies before it: as many parts as the index says, each of all the axes inside of this one. Before values are keys.
            offset_bytes += at[axis] * self.bytes_of(rank, inner[position + 1 :], kv=0 if axis == "kv" else kv)
        return region, offset_bytes

    def to_bytes(self) -> bytes:
        """As peers tell each other; `from_bytes` reads it."""
        spec, parallel = self.spec, self.parallel
        writer = Writer().u8(VERSION).u64(self.pool_blocks).text(self.order)
        for number in _spec_numbers(spec):
            writer.u32(number)
        writer.text(spec.dtype).text(spec.attention or "").text(spec.scheme.name).text(spec.model)
        for size in (parallel.tp, parallel.pp, parallel.cp, parallel.dp, len(parallel.layer_split)):
            writer.u32(size)
        return writer.u32s(parallel.layer_split).done()

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> "CacheLayout":
        """What `to_bytes` made. Raises ProtocolError for anything else, also a layout that cannot be."""
        reader = Reader(data)
        if (version := reader.u8()) != VERSION:
            raise ProtocolError(f"a layout of version {version}: this side speaks version {VERSION}; run the same release on both")
        try:
            return cls._read(reader)
        except (InvalidArgument, ConfigError, ValueError) as error:
            raise ProtocolError(f"a peer's layout cannot be: {error}") from None

    @classmethod
    def _read(cls, reader: Reader) -> "CacheLayout":
        pool_blocks, order = reader.u64(), reader.text()
        layers, kv_heads, head_dim, heads, block_tokens, window_tokens, windowed_layers = reader.u32s(7)
        dtype, attention, scheme, model = (reader.text() for _ in range(4))
        tp, pp, cp, dp, stages = reader.u32s(5)
        layer_split = tuple(reader.u32s(stages))
        reader.end()
        spec = CacheSpec(
            layers=layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            heads=heads,
            dtype=dtype,
            block_tokens=block_tokens,
            attention=Attention(attention) if attention else None,
            scheme=CacheScheme.parse(scheme),
            window_tokens=window_tokens,
            windowed_layers=windowed_layers,
            model=model,
        )
        return cls(spec=spec, parallel=Parallel(tp=tp, pp=pp, cp=cp, dp=dp, layer_split=layer_split), pool_blocks=pool_blocks, order=order)


def _spec_numbers(spec: CacheSpec) -> tuple[int, ...]:
    return spec.layers, spec.kv_heads, spec.head_dim, spec.heads, spec.block_tokens, spec.window_tokens, spec.windowed_layers


class Step(NamedTuple):
    """How far the place moves when an index grows by one. Also a place itself: so many steps from region 0, byte 0."""

    regions: int
    size_bytes: int

    def moved(self, step: "Step", times: int) -> "Step":
        """The place `times` steps on."""
        return Step(self.regions + times * step.regions, self.size_bytes + times * step.size_bytes)


class TokenSlots(NamedTuple):
    """Tokens in a rank's pool: the block of each and its place in the block. Arrays of one length."""

    blocks: Int64s
    tokens: Int64s


class RegionOffsets(NamedTuple):
    """Regions and offsets in bytes. Arrays of one length."""

    regions: Int64s
    offsets: Int64s


class Strides(NamedTuple):
    """Of K or V of one rank; indexes of layers and heads are those within the rank."""

    start: Step
    """Where all indexes are 0."""
    block: Step
    layer: Step
    head: Step
    token: Step
    """Of no use where records are quantised: a token is then no place of its own."""
    value: Step
    """Between the `head_dim` values of an element; of no use where records are quantised."""

    def places(self, placed: TokenSlots, first: Step) -> RegionOffsets:
        """Where these tokens are if block 0's first token is at `first`."""
        blocks, tokens = placed
        return RegionOffsets(
            first.regions + blocks * self.block.regions + tokens * self.token.regions,
            first.size_bytes + blocks * self.block.size_bytes + tokens * self.token.size_bytes,
        )


@lru_cache(maxsize=1024)
def strides_of(layout: CacheLayout, rank: int, kv: int) -> Strides:
    """Strides of keys (`kv` 0) or values (1) in the pool of `rank`. Raises InvalidArgument if there is no such rank."""
    steps: dict[str, Step] = {}
    outer, inner, transposed = layout.axes
    for position, axis in enumerate(outer):
        steps[axis] = Step(layout.regions_of(rank, outer[position + 1 :]), 0)
    for position, axis in enumerate(inner):
        # K comes before V: a step from one to the other is as long as K's part.
        steps[axis] = Step(0, layout.bytes_of(rank, inner[position + 1 :], kv=0 if axis == "kv" else kv))
    start = Step(0, 0).moved(steps["kv"], kv)
    value_bytes, element_bytes = layout.spec.dtype_bytes, layout.spec.dtype_bytes * layout.spec.head_dim
    value = Step(0, value_bytes)
    if TRANSPOSED[kv] in transposed:
        steps["token"], value = value, Step(0, value_bytes * layout.spec.block_tokens)
    elif transposed:  # the other one is: this one is a record, too, of elements one after another
        steps["token"] = Step(0, element_bytes)
    return Strides(start, steps["block"], steps["layer"], steps["head"], steps["token"], value)
