"""Split of the cache that one rank sends another into parts, equal at both ends; and the state of a request.
Arithmetic.

A part is some layers of one chunk. A chunk is a range of tokens that starts at a block boundary at both ends. Parts
that are copied directly between the pools have the whole sequence as their only chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import lcm
from typing import Final, NamedTuple, TypedDict

from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.protocol.errors import InvalidArgument

MAX_UNITS: Final = 1 << 19
"""Limit of a plan's units: receivers choose the part size, and each unit costs the sender's thread a microsecond or
two."""


class PartId(NamedTuple):
    """Layers [layer_start, layer_end) of the model, of one chunk."""

    layer_start: int
    layer_end: int
    chunk: int

    @property
    def layers(self) -> range:
        return range(self.layer_start, self.layer_end)

    @property
    def units(self) -> list[tuple[int, int]]:
        """(layer, chunk) pairs."""
        return [(layer, self.chunk) for layer in self.layers]


class Chunk(NamedTuple):
    """Tokens [start, end) of the sequence."""

    start: int
    end: int


def unit_tokens(source: CacheLayout, destination: CacheLayout) -> int:
    """Return the divisor of chunk lengths, which gives each pair of ranks equal shares of every whole unit."""
    return lcm(source.spec.block_tokens * source.parallel.cp, destination.spec.block_tokens * destination.parallel.cp)


class Extent(TypedDict):
    """Keyword arguments of Remapping.copies, gather, scatter and staged_bytes."""

    tokens: int
    first_token: int
    layers: range


@dataclass(frozen=True, slots=True)
class PartPlan:
    """Parts of one request that one rank sends another."""

    layers: range
    chunks: tuple[Chunk, ...]
    layers_per_part: int
    """Maximum layers of a part."""
    layer_bytes: int
    """Bytes of one layer over all chunks."""
    slot_bytes: int = 0
    """Maximum size of a gathered part; 0: parts are copied directly."""

    @property
    def is_staged(self) -> bool:
        return self.slot_bytes > 0

    @property
    def unit_count(self) -> int:
        """Number of (layer, chunk) pairs."""
        return len(self.layers) * len(self.chunks)

    def extent(self, part: PartId) -> Extent:
        """Return the part as arguments of Remapping's methods."""
        chunk = self.chunks[part.chunk]
        return {"tokens": chunk.end, "first_token": chunk.start, "layers": part.layers}

    def has(self, part: PartId) -> bool:
        """Return whether `part`, which comes from a peer, is a part of the plan."""
        return (
            self.layers.start <= part.layer_start < part.layer_end <= self.layers.stop
            and part.layer_end - part.layer_start <= self.layers_per_part
            and part.chunk < len(self.chunks)
        )


def plan_parts(
    layers: range,
    tokens: Chunk,
    unit: int,
    *,
    measure: Callable[[Chunk], int],
    part_bytes: int,
) -> PartPlan:
    """Split the transfer of a pair of ranks. `measure` returns the bytes of one layer of a chunk; `part_bytes` 0:
    direct copies.

    A gathered part has about `part_bytes`; more only if one unit of one layer has. Raises InvalidArgument: too many
    parts.
    """
    count = tokens.end - tokens.start
    layer_bytes = measure(tokens) if layers and count > 0 else 0
    if not layer_bytes:
        return PartPlan(range(0), (), 1, 0)
    if not part_bytes:
        return PartPlan(layers, (tokens,), len(layers), layer_bytes)
    size = max(1, count * part_bytes // layer_bytes // unit) * unit
    if (units := len(layers) * -(-count // size)) > MAX_UNITS:
        raise InvalidArgument(f"{units} parts of {part_bytes} bytes are more than {MAX_UNITS}: staging_part_bytes is too small")
    chunks = tuple(Chunk(at, min(at + size, tokens.end)) for at in range(tokens.start, tokens.end, size))
    if not measure(chunks[-1]):  # its few blocks are on other context-parallel ranks
        chunks = chunks[:-1]
    chunk_bytes = max(measure(chunk) for chunk in (chunks[0], chunks[-1]))
    together = max(1, min(len(layers), part_bytes // chunk_bytes))
    return PartPlan(layers, chunks, together, layer_bytes, chunk_bytes * together)


class RequestState(Enum):
    """State of a request at one rank, on either side."""

    WAITING = "waiting"
    """Not every receiver has requested parts (sender), or no sender has offered any (receiver)."""
    MOVING = "moving"
    OVER = "over"
    """Complete or failed."""
