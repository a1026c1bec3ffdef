"""Batches of blocks of one call, and their copies between the pool and the staging memory.

A call for many sequences sends one message each way for as many blocks as the staging memory holds, across sequences.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.client.core.arguments import check_deadline
from kvstore.client.tensors.arrays import as_index, on_side_stream, placed
from kvstore.client.tensors.parts import ValuePart
from kvstore.client.tensors.pools import BlockPool
from kvstore.client.tensors.prompts import Keys, flat
from kvstore.client.tensors.staging_buffers import PoolPiece, Rows, are_values
from kvstore.kvcache.codecs.tensor_value import TensorHeader
from kvstore.kvcache.models.spec import CacheSpec
from kvstore.protocol.errors import ProtocolError
from kvstore.rpc.deadline import Deadline


@dataclasses.dataclass(slots=True)
class PoolBlock:
    """One block of a call."""

    prompt: int
    """Index of its prompt."""
    place: int
    """Index of the block in the pool."""
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
    """Apply `how` (write or read) to the values of the blocks at these pool indexes."""
    with on_side_stream(pool.device, marked):
        for of_part, header, part in zip(rows, headers, parts, strict=True):
            how(of_part, header, _pieces(pool, part, places))


def _pieces(pool: BlockPool, part: ValuePart, places: NDArray[np.int64]) -> list[PoolPiece]:
    """The planes' shares of a part's values."""
    index = placed(as_index(places), pool.device)
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
    """The values block by block; a single array's rows are the values, without an object per row."""
    return rows[0] if len(rows) == 1 else flat(zip(*rows, strict=True))


def check_values(rows: Sequence[Rows], sizes_read: Sequence[int | None], headers: Sequence[TensorHeader]) -> None:
    """Raises ProtocolError unless the rows hold values of this cache."""
    of_parts = np.array(sizes_read, np.int64).reshape(-1, len(rows)).T
    for of_part, sizes_bytes, header in zip(rows, of_parts, headers, strict=True):
        if not are_values(of_part, sizes_bytes, header):
            raise ProtocolError(
                "a value under this namespace is not a tensor of this cache: use another namespace for other programs' values"
            )


# --- batches ---


def first_of_each(blocks: Sequence[PoolBlock]) -> list[PoolBlock]:
    """Deduplicate blocks that several prompts begin with; the first prompt's block is kept, before those that follow
    it."""
    found: dict[Keys, PoolBlock] = {}
    for block in blocks:
        found.setdefault(block.keys, block)
    return list(found.values())


def wanted_batches(blocks: Sequence[PoolBlock], missed: set[int], at_once: int) -> Iterator[list[PoolBlock]]:
    """Batches of `at_once` blocks, in order, skipping prompts that have missed a block."""
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
    """Indexes of blocks whose values were all found, as were those of all preceding blocks of their prompt. Adds to
    `missed`."""
    found = []
    for index, block in enumerate(batch):
        if None in sizes_read[index * values_each : (index + 1) * values_each]:
            missed.add(block.prompt)
        elif block.prompt not in missed:
            found.append(index)
    return found


def runs(indexes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[start, stop) of each run of consecutive indexes."""
    if indexes:
        cuts = np.flatnonzero(np.diff(indexes) != 1) + 1
        for run in np.split(np.array(indexes), cuts):
            yield int(run[0]), int(run[-1]) + 1


def places_of(batch: Sequence[PoolBlock]) -> NDArray[np.int64]:
    return np.array([block.place for block in batch], np.int64)


def is_outside(part: ValuePart, layers: range, own: range) -> bool:
    """Return whether the value contains layers of the rank outside `layers`."""
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
    """Error text for a rank that cannot put, with the setting that would allow it."""
    fitting_layers = math.gcd(layers.start, layers.stop % spec.layers) or spec.layers
    return (
        f"layers {layers.start} to {layers.stop - 1} and KV heads {heads.start} to {heads.stop - 1}, which this rank holds, are not whole "
        f"values: to put them, all engines that share the cache must have values=ValueShape(heads={len(heads)}, "
        f"layers={fitting_layers}), or divisors of these"
    )


def stopwatch(deadline_s: float | None) -> Callable[[], float | None]:
    """Function that returns the remaining time of a call, None without a deadline. Raises InvalidArgument."""
    if deadline_s is None:
        return lambda: None
    check_deadline(deadline_s)
    return Deadline(deadline_s).left_s
