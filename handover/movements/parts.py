"""How the cache that one rank gives another is cut into parts: the same at both ends, from what both know. Arithmetic; no bytes.

A part is some layers of one chunk. A chunk is a run of the sequence that begins where a block begins at both ends; parts that go straight
between the pools have the whole sequence as their only chunk.

How far a request is at one rank, told alike on both sides.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from math import lcm
from typing import Final, NamedTuple, TypedDict

from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.protocol.errors import InvalidArgument

MAX_UNITS: Final = 1 << 19
"""Of a plan. The receiver says how small parts are, and each unit takes the sender's thread a microsecond or two."""


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
    """Chunks have a multiple of this many tokens, so that each pair of ranks has equally much in every whole one."""
    return lcm(source.spec.block_tokens * source.parallel.cp, destination.spec.block_tokens * destination.parallel.cp)


class Extent(TypedDict):
    """Keyword arguments of Remapping.copies, gather, scatter and staged_bytes."""

    tokens: int
    first_token: int
    layers: range


@dataclass(frozen=True, slots=True)
class PartPlan:
    """What one rank gives another of one request."""

    layers: range
    chunks: tuple[Chunk, ...]
    layers_per_part: int
    """At most so many layers go together."""
    layer_bytes: int
    """Of one layer, all chunks together."""
    slot_bytes: int = 0
    """Room that a gathered part takes at most; 0: parts go straight between the pools."""

    @property
    def is_staged(self) -> bool:
        return self.slot_bytes > 0

    @property
    def unit_count(self) -> int:
        """(layer, chunk) pairs."""
        return len(self.layers) * len(self.chunks)

    def extent(self, part: PartId) -> Extent:
        """The part, as the methods of a Remapping name it."""
        chunk = self.chunks[part.chunk]
        return {"tokens": chunk.end, "first_token": chunk.start, "layers": part.layers}

    def has(self, part: PartId) -> bool:
        """Whether this is a part of it: anything may come from a peer."""
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
    """Cut what a pair of ranks moves. `measure` tells the bytes of one layer of a chunk; `part_bytes` 0: straight between the pools.

    A gathered part has about `part_bytes`; more only where one unit of one layer has. Raises InvalidArgument: these are too many parts.
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
    if not measure(chunks[-1]):  # its few blocks lie on other context-parallel ranks
        chunks = chunks[:-1]
    chunk_bytes = max(measure(chunk) for chunk in (chunks[0], chunks[-1]))
    together = max(1, min(len(layers), part_bytes // chunk_bytes))
    return PartPlan(layers, chunks, together, layer_bytes, chunk_bytes * together)


class RequestState(Enum):
    """Of a request at one rank, on either side."""

    WAITING = "waiting"
    """Not every counterpart has asked (sender), or none has said anything (receiver)."""
    MOVING = "moving"
    OVER = "over"
    """Complete, or failed."""
