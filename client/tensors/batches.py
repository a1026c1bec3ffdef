"""Batches of blocks of a call, and their copies between the pool and the staging memory.

A call for many sequences is one message each way for as many blocks as the staging memory holds, whichever sequence they belong to.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.client.core.arguments import check_deadline
from kvstore.client.tensors.arrays import as_index, beside
from kvstore.client.tensors.parts import ValuePart
from kvstore.client.tensors.pools import BlockPool
from kvstore.client.tensors.prompts import Keys, flat
from kvstore.client.tensors.staging import PoolPiece, Rows, are_values
from kvstore.kvcache.codecs.tensor_value import TensorHeader
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.protocol.errors import ProtocolError
from kvstore.rpc.deadline import Deadline


@dataclasses.dataclass(slots=True)
class PoolBlock:
    """One block of a call."""

    prompt: int
    """Whose it is: the index of its prompt."""
    place: int
    """In the pool."""
    keys: Keys
    parents: Sequence[bytes | None]


def move(
    how: Callable[[Rows, TensorHeader, Sequence[PoolPiece]], None],
    rows: Sequence[Rows],
    headers: Sequence[TensorHeader],
    parts: Sequence[ValuePart],
    pool: BlockPool,
    places: NDArray[np.int64],
    marked: Any,
) -> None:
    """Write or read the values of blocks at these places of a pool."""
    with beside(pool.device, marked):
        for of_part, header, part in zip(rows, headers, parts, strict=True):
            how(of_part, header, _pieces(pool, part, places))


def _pieces(pool: BlockPool, part: ValuePart, places: NDArray[np.int64]) -> list[PoolPiece]:
    """What each plane of the pool has of the values of a part."""
    index = as_index(places)
    shift = part.value_layers.start - part.own_layers.start  # from the rank's layers to the value's
    pieces = []
    for plane in pool.planes:
        start, stop = max(plane.layers.start, part.own_layers.start), min(plane.layers.stop, part.own_layers.stop)
        if start < stop:
            own = plane.values[:, start - plane.layers.start : stop - plane.layers.start, :, part.own_heads]
            kinds = slice(plane.kinds.start, plane.kinds.stop)
            pieces.append(PoolPiece(slice(start + shift, stop + shift), kinds, part.value_heads, own, index))
    return pieces


def values_of(rows: Sequence[Rows]) -> Any:
    """Block by block; of one array its rows are the values, and cost no object each."""
    return rows[0] if len(rows) == 1 else flat(zip(*rows, strict=True))


def check_values(rows: Sequence[Rows], sizes_read: Sequence[int | None], headers: Sequence[TensorHeader]) -> None:
    """Raises ProtocolError unless these are values of this cache."""
    of_parts = np.array(sizes_read, np.int64).reshape(-1, len(rows)).T
    for of_part, sizes_bytes, header in zip(rows, of_parts, headers, strict=True):
        if not are_values(of_part, sizes_bytes, header):
            raise ProtocolError("a value of this namespace is not of this cache: put other programs' values under another")


# --- batches ---


def first_of_each(blocks: Sequence[PoolBlock]) -> list[PoolBlock]:
    """What several prompts begin with is one block: the first's, in its place before those that follow it."""
    found: dict[Keys, PoolBlock] = {}
    for block in blocks:
        found.setdefault(block.keys, block)
    return list(found.values())


def wanted_batches(blocks: Sequence[PoolBlock], missed: set[int], at_once: int) -> Iterator[list[PoolBlock]]:
    """So many at a time, in order, but none of a prompt that has missed one meanwhile."""
    batch: list[PoolBlock] = []
    left = iter(blocks)
    while True:
        for block in left:
            if block.prompt not in missed:
                batch.append(block)
                if len(batch) == at_once:
                    break
        if not batch:
            return
        yield batch
        batch = []


def found_in(batch: Sequence[PoolBlock], sizes_read: Sequence[int | None], values_each: int, missed: set[int]) -> list[int]:
    """Which blocks of a batch are there whole, and all before them of their prompts."""
    found = []
    for index, block in enumerate(batch):
        if None in sizes_read[index * values_each : (index + 1) * values_each]:
            missed.add(block.prompt)
        elif block.prompt not in missed:
            found.append(index)
    return found


def runs(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[start, stop) of those that follow one another."""
    if indexes:
        cuts = np.flatnonzero(np.diff(indexes) != 1) + 1
        for run in np.split(np.array(indexes), cuts):
            yield int(run[0]), int(run[-1]) + 1


def places_of(batch: Sequence[PoolBlock]) -> NDArray[np.int64]:
    return np.array([block.place for block in batch], np.int64)


def is_outside(part: ValuePart, layers: range, own: range) -> bool:
    """Whether the rank has layers of this value that are not among `layers`."""
    return max(part.model_layers.start, own.start) < layers.start or min(part.model_layers.stop, own.stop) > layers.stop


def header_of(spec: CacheSpec, part: ValuePart) -> TensorHeader:
    return TensorHeader(
        scheme=spec.scheme,
        dtype=spec.dtype,
        kv_factor=spec.kv_factor,
        layers=part.layer_count,
        heads=part.head_count,
        tokens=spec.block_tokens,
        head_dim=spec.head_dim,
    )


def refusal(spec: CacheSpec, layers: range, heads: range) -> str:
    """Why a rank that holds these cannot put, and what would let it."""
    fitting_layers = math.gcd(layers.start, layers.stop % spec.layers) or spec.layers
    return (
        f"layers {layers.start} to {layers.stop - 1} and KV heads {heads.start} to {heads.stop - 1}, which this rank holds, are not whole "
        f"values: to put them, all engines that share the cache must have values=ValueShape(heads={len(heads)}, "
        f"layers={fitting_layers}), or divisors of these"
    )


def stopwatch(deadline_s: float | None) -> Callable[[], float | None]:
    """Tells the time that is left for the whole of a call, None where it has none of its own. Raises InvalidArgument."""
    if deadline_s is None:
        return lambda: None
    check_deadline(deadline_s)
    return Deadline(deadline_s).left_s
