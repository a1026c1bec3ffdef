"""Layout of a model's KV cache in the memory of an executor's ranks. `locate` is its definition; faster code is tested
against it.

Each rank has a pool of blocks for its layers and heads. The module moves no bytes and does not track the owners of
blocks.

`Strides` express a position as a sum of index times stride, so that numpy computes many at once. Keys and values may
differ in size (quantised with different bits), so strides are of one rank's K or V.
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
"""Version of the encoded form that executors exchange."""
MAX_POOL_BYTES: Final = 1 << 56
"""Limit of a pool with all layers and heads: keeps offsets within 64 bits for any peer's layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Layout of one executor's cache: the model, its split over ranks, and the axis order of each rank's pool."""

    spec: CacheSpec
    parallel: Parallel = Parallel()
    pool_blocks: int
    """Blocks in each rank's pool."""
    order: str = "HND"
    """Axis order of a pool, see orders.py: a name or spelled out; stored spelled out."""
    axes: Order = field(init=False, repr=False, compare=False)
    """The parsed order."""
    has_records: bool = field(init=False, repr=False, compare=False)
    """True if the smallest addressable unit is a record (one block, layer, K or V, and head), of a quantised or
    transposed pool. False if it is one token's element."""
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
            raise InvalidArgument(f"records of the scheme {spec.scheme.name} have a fixed order: {order} cannot transpose them")
        if is_quantised and order.inner[-1:] != ("token",):
            raise InvalidArgument(
                f"the scheme {spec.scheme.name} keeps the tokens of a block and head in one record: the order must end in 'token', "
                f"not be '{order}'"
            )

    def rank_layers(self, rank: int) -> range:
        """Return the model's layers on `rank`. Raises InvalidArgument: no such rank."""
        return self.parallel.stage_layers(self.parallel.coordinates(rank).pp, layers=self.spec.layers)

    def rank_heads(self, rank: int) -> range:
        """Return the model's KV heads on `rank`. With more ranks than heads each head is on several.

        Raises:
            InvalidArgument: no such rank.
        """
        shard, shards, heads = self.parallel.shard_of(rank), self.parallel.shards, self.spec.kv_heads
        if shards > heads:
            head = shard // (shards // heads)
            return range(head, head + 1)
        size = heads // shards
        return range(shard * size, (shard + 1) * size)

    def count(self, rank: int, axis: str) -> int:
        """Return the length of `axis` in the pool of `rank`."""
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
        """Return the bytes of the smallest addressable unit of keys (`kv` 0) or values: an element (one token of a
        head) or a record."""
        return self._unit_bytes[kv]

    def bytes_of(self, rank: int, axes: tuple[str, ...], *, kv: int) -> int:
        """Return the bytes of a part of the pool of `rank` that spans these axes, of keys (`kv` 0) or values unless
        the axis kv is one of them."""
        unit_bytes = sum(self._unit_bytes) if "kv" in axes else self._unit_bytes[kv]
        return unit_bytes * prod(self.count(rank, axis) for axis in axes if axis != "kv")

    def regions_of(self, rank: int, axes: tuple[str, ...]) -> int:
        """Return the number of regions that these axes distinguish."""
        return prod(self.count(rank, axis) for axis in axes)

    def region_count(self, rank: int) -> int:
        """Return the number of memory regions in the pool of `rank`. Raises InvalidArgument: no such rank."""
        self.parallel.coordinates(rank)
        return self.regions_of(rank, self.axes.outer)

    def region_bytes(self, rank: int, region: int) -> int:
        """Return the size of a region. Raises InvalidArgument: no such rank or region."""
        if not 0 <= region < self.region_count(rank):
            raise InvalidArgument(f"region {region} of rank {rank} is outside [0, {self.region_count(rank)})")
        outer, inner, _ = self.axes
        kv = 0
        if "kv" in outer:
            kv = region // self.regions_of(rank, outer[outer.index("kv") + 1 :]) % len(self._unit_bytes)
        return self.bytes_of(rank, inner, kv=kv)

    def locate(self, rank: int, layer: int, kv: int, head: int, block: int, token: int = 0) -> tuple[int, int]:
        """Return region and byte offset of an element. `layer` and `head` are the model's, `block` the pool's, `token`
        within the block.

        This is the definition of a layout; faster code is tested against it.

        Raises:
            InvalidArgument: `rank` does not have the element, or `token` is not 0 although the unit is a record.
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
            # Skip `at[axis]` parts, each spanning all inner axes. Keys come before values.
            offset_bytes += at[axis] * self.bytes_of(rank, inner[position + 1 :], kv=0 if axis == "kv" else kv)
        return region, offset_bytes

    def to_bytes(self) -> bytes:
        """Return the encoded form for peers; `from_bytes` decodes it."""
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
        """Decode the form of `to_bytes`. Raises ProtocolError: malformed, or an impossible layout."""
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
    """Stride of an index, in regions and bytes. Also a position: this far from region 0, byte 0."""

    regions: int
    size_bytes: int

    def moved(self, step: "Step", times: int) -> "Step":
        """Return the position `times` steps further."""
        return Step(self.regions + times * step.regions, self.size_bytes + times * step.size_bytes)


class TokenSlots(NamedTuple):
    """Block and position within the block of tokens in a rank's pool. Arrays of equal length."""

    blocks: Int64s
    tokens: Int64s


class RegionOffsets(NamedTuple):
    """Regions and byte offsets. Arrays of equal length."""

    regions: Int64s
    offsets: Int64s


class Strides(NamedTuple):
    """Strides of K or V of one rank; layer and head indices are within the rank."""

    start: Step
    """Position at which all indices are 0."""
    block: Step
    layer: Step
    head: Step
    token: Step
    """Meaningless for quantised records, whose tokens are not addressable."""
    value: Step
    """Between the `head_dim` values of an element. Meaningless for quantised records."""

    def places(self, placed: TokenSlots, first: Step) -> RegionOffsets:
        """Return the positions of these tokens if block 0's first token is at `first`."""
        blocks, tokens = placed
        return RegionOffsets(
            first.regions + blocks * self.block.regions + tokens * self.token.regions,
            first.size_bytes + blocks * self.block.size_bytes + tokens * self.token.size_bytes,
        )


@lru_cache(maxsize=1024)
def strides_of(layout: CacheLayout, rank: int, kv: int) -> Strides:
    """Return the strides of keys (`kv` 0) or values (1) in the pool of `rank`. Raises InvalidArgument: no such rank."""
    steps: dict[str, Step] = {}
    outer, inner, transposed = layout.axes
    for position, axis in enumerate(outer):
        steps[axis] = Step(layout.regions_of(rank, outer[position + 1 :]), 0)
    for position, axis in enumerate(inner):
        # K comes before V: the stride between them is the length of K's part.
        steps[axis] = Step(0, layout.bytes_of(rank, inner[position + 1 :], kv=0 if axis == "kv" else kv))
    start = Step(0, 0).moved(steps["kv"], kv)
    value_bytes, element_bytes = layout.spec.dtype_bytes, layout.spec.dtype_bytes * layout.spec.head_dim
    value = Step(0, value_bytes)
    if TRANSPOSED[kv] in transposed:
        steps["token"], value = value, Step(0, value_bytes * layout.spec.block_tokens)
    elif transposed:  # only the other one is: this one is a record, too, with contiguous elements
        steps["token"] = Step(0, element_bytes)
    return Strides(start, steps["block"], steps["layer"], steps["head"], steps["token"], value)
