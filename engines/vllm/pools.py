"""The pools of an engine's layers as values: all layers of a block one after another, each in its memory order.

Torch tensors on the CPU or a GPU, without an engine or a store.

- **Values by heads.** With `share_tp` a block has several values, one for each group of KV heads, with its own key.
  Keys and staging memory list a block's values one after another, block by block. A value's parent is the same value of
  the previous block. All are stored under one label, by which nodes evict a block's values together
  (tiers/policies/block_values.py).
- **Staging.** Chunks of memory between pools and store are allocated on first use and kept, because first-touched
  memory is many times slower than a copy: 120 MiB took 300 ms.
"""

import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.engines.head_split import HeadSplit
from kvstore.engines.vllm.identity import Shard, Variant
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ConfigError

MIN_PIECE_BYTES: Final = 32 << 10
"""Smallest part of a block in one layer for direct loads, piece by piece, without staging. The store takes some
microseconds a piece, as long as a copy of this many bytes. Pieces of 256 KiB took half the time of staged loads,
pieces of 16 KiB more."""


class LayerPools:
    """An engine's KV cache: one tensor `[blocks, ...]` a layer, in any memory order. Thread-safe for distinct
    blocks."""

    values_per_block: Final = 1
    """`HeadPools` has more."""

    def __init__(self, layers: Sequence[torch.Tensor], block_count: int, *, copies_on_device: bool | None = None) -> None:
        """Prepare copies of these tensors, which are not copied or owned.

        Args:
            layers: their first axis has `block_count` blocks, or a multiple: smaller blocks that belong together.
            copies_on_device: assemble blocks on the device before they leave it; the default on GPUs. Otherwise blocks
                are copied one by one, which takes a third of the time on a CPU.

        Raises:
            ConfigError: no layers, or a layer that is not made of such blocks.
        """
        if not layers:
            raise ConfigError("the engine has no KV cache: there is nothing to store")
        self._runs = _runs([_in_memory_order(layer, block_count).view(torch.uint8) for layer in layers])
        sizes = [run[:, 0].numel() for run in self._runs]
        self._starts: list[int] = list(itertools.accumulate(sizes, initial=0))
        self._copies_on_device = layers[0].device.type != "cpu" if copies_on_device is None else copies_on_device
        single = [layer for run in self._runs for layer in run]
        has_rows = not self._copies_on_device and all(layer[0].is_contiguous() for layer in single)
        self._rows = [layer.flatten(1).numpy() for layer in single] if has_rows else []
        self._row_starts: list[int] = list(itertools.accumulate((rows.shape[1] for rows in self._rows), initial=0))
        self._is_in_pieces = has_rows and min(layer[0].numel() for layer in single) >= MIN_PIECE_BYTES

    @staticmethod
    def form(layer: torch.Tensor, block_count: int) -> str:
        """Return what two layers must have in common for interchangeable blocks.

        The form has the element type and, for each axis of a block in memory order, its size and its layer axis. The
        layer axis tells axes of equal size apart. Axes of size 1 are left out: their order has no effect. Raises
        ConfigError as the constructor.
        """
        blocks = _in_blocks(layer, block_count)
        order = [axis for axis in _memory_order(blocks) if blocks.shape[axis] > 1]
        return f"{layer.dtype} {[blocks.shape[axis] for axis in order]} of {[sorted(order).index(axis) for axis in order]}"

    @property
    def value_bytes(self) -> int:
        """Bytes of one block."""
        return self._starts[-1]

    @property
    def device(self) -> torch.device:
        """Device of all layers."""
        return self._runs[0].device

    def gather(self, blocks: Sequence[int], values: torch.Tensor) -> None:
        """Copy `blocks` into the rows of `values`, uint8 `[len(blocks), value_bytes]` on the CPU."""
        if self._rows:
            for value, of_block in self._side_by_side(values, blocks):
                value[:] = of_block
            return
        if values.device != self.device:
            _gather_on_device(self, blocks, values)
            return
        for run, part in self._parts(values):
            if self._copies_on_device:
                part.copy_(run.index_select(1, self._index(blocks, run)).transpose(0, 1).flatten(1))
            else:
                for row, block in zip(part, blocks, strict=True):
                    place = run[:, block]
                    row.view(place.shape).copy_(place)

    def scatter(self, values: torch.Tensor, blocks: Sequence[int]) -> None:
        """Copy the rows of `values`, as in `gather`, into `blocks`, which are distinct. The copies are complete on
        return."""
        if self._rows:
            for value, of_block in self._side_by_side(values, blocks):
                of_block[:] = value
            return
        values = values.to(self.device)  # at once: columns of it would be copied through pageable memory
        for run, part in self._parts(values):
            if self._copies_on_device:
                rows = part.reshape(len(blocks), *run[:, 0].shape)
                run.index_copy_(1, self._index(blocks, run), rows.transpose(0, 1))
            else:
                for row, block in zip(part, blocks, strict=True):
                    place = run[:, block]
                    place.copy_(row.view(place.shape))
        if self.device.type != "cpu":
            # Of this device: a new thread's current one is the first, not the rank's. Of this stream: others may compute a step.
            torch.accelerator.current_stream(self.device).synchronize()

    def pieces(self, blocks: Sequence[int]) -> list[list[NDArray[np.uint8]]] | None:
        """Return each block's memory as one piece a layer, which together are its value: a load may fill them without
        `scatter`.

        None if the CPU cannot address the memory as contiguous bytes, or if pieces are smaller than MIN_PIECE_BYTES.
        """
        return [[rows[block] for rows in self._rows] for block in blocks] if self._is_in_pieces else None

    def _side_by_side(self, values: torch.Tensor, blocks: Sequence[int]) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield each part of a value with its memory in the pools.

        This thread copies them alone, with the GIL. Torch would copy with several threads that wait for one another:
        while others computed on their cores, 120 MiB took 0.6 to 2 s instead of 0.03 s.
        """
        columns = list(itertools.pairwise(self._row_starts))
        for row, block in zip(values.numpy(), blocks, strict=True):
            value = memoryview(row)
            for rows, (start, end) in zip(self._rows, columns, strict=True):
                yield value[start:end], memoryview(rows[block])

    def _parts(self, values: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each run with its columns of `values`."""
        columns = itertools.pairwise(self._starts)
        return [(run, values[:, start:end]) for run, (start, end) in zip(self._runs, columns, strict=True)]

    @staticmethod
    def _index(blocks: Sequence[int], run: torch.Tensor) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.long, device=run.device)


def _in_blocks(layer: torch.Tensor, block_count: int) -> torch.Tensor:
    """Return a view `[block_count, ...]`. Raises ConfigError."""
    if layer.shape[0] % block_count:
        raise ConfigError(f"a layer of shape {tuple(layer.shape)} is not made of {block_count} blocks")
    return layer.unflatten(0, (block_count, -1))


def _memory_order(blocks: torch.Tensor) -> list[int]:
    """Return a block's axes by falling stride, in which a dense block is contiguous. Raises ConfigError."""
    order = sorted(range(1, blocks.dim()), key=lambda axis: (-blocks.stride(axis), axis))
    if blocks.stride(order[-1]) != 1:
        raise ConfigError(f"a layer with strides {blocks.stride()[1:]} has no axis of stride 1: its bytes cannot be copied")
    return order


def _in_memory_order(layer: torch.Tensor, block_count: int) -> torch.Tensor:
    """Return a view `[block_count, ...]` with a block's axes in memory order. Raises ConfigError."""
    blocks = _in_blocks(layer, block_count)
    return blocks.permute(0, *_memory_order(blocks))


def _runs(layers: list[torch.Tensor]) -> list[torch.Tensor]:
    """Join layers at equal distances in one storage into views `[layers, blocks, ...]`, so that one copy moves them
    all."""
    runs: list[torch.Tensor] = []
    while layers:
        first, count, distance = layers[0], 1, 0
        if len(layers) > 1 and (distance := layers[1].storage_offset() - first.storage_offset()) > 0:
            while count < len(layers) and _follows(layers[count], first, count * distance):
                count += 1
        runs.append(first.as_strided((count, *first.shape), (distance if count > 1 else 0, *first.stride())))
        layers = layers[count:]
    return runs


def _follows(layer: torch.Tensor, first: torch.Tensor, distance: int) -> bool:
    same_memory: bool = layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    same_form: bool = layer.shape == first.shape and layer.stride() == first.stride()
    return same_memory and same_form and layer.storage_offset() - first.storage_offset() == distance


@dataclass(frozen=True, slots=True)
class HeadShards:
    """Shards of the values that one rank holds of each block, in order. It has the methods of `Shard`."""

    label: Shard
    """Namespace that the values are stored under."""
    shards: tuple[Shard, ...]
    """At least one."""

    @classmethod
    def of_rank(cls, template: Namespace, split: HeadSplit) -> "HeadShards":
        return cls(Shard(split.label(template)), tuple(map(Shard, split.namespaces(template))))

    @property
    def namespace(self) -> Namespace:
        """The label's namespace."""
        return self.label.namespace

    def canonical(self) -> list[bytes]:
        """Return the canonical forms of the values' namespaces, in order."""
        return [shard.namespace.canonical() for shard in self.shards]

    def of(self, variant: Variant) -> "HeadShards":
        """Return the shards of one variant."""
        return HeadShards(self.label.of(variant), tuple(shard.of(variant) for shard in self.shards))

    def keys(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Return the keys of all values of the blocks, block by block."""
        seeds = [shard.namespace.id for shard in self.shards]
        return [seed + block_hash for block_hash in hashes for seed in seeds]


class HeadPools:
    """An engine's KV cache with several values a block, else as `LayerPools`. Thread-safe for distinct blocks."""

    def __init__(self, values: Sequence[LayerPools]) -> None:
        """Combine `values`: each has the heads of one value in all layers; all have one size."""
        self._values = values
        self.values_per_block = len(values)
        self.value_bytes = values[0].value_bytes
        self.device = values[0].device

    def gather(self, blocks: Sequence[int], values: torch.Tensor) -> None:
        """Copy `blocks` into the rows of `values`, uint8 `[len(blocks), values_per_block * value_bytes]` on the CPU."""
        if values.device != self.device:
            _gather_on_device(self, blocks, values)
            return
        for pools, columns in self._columns(values):
            pools.gather(blocks, columns)

    def scatter(self, values: torch.Tensor, blocks: Sequence[int]) -> None:
        """Copy the rows of `values`, as in `gather`, into `blocks`, which are distinct. The copies are complete on
        return."""
        for pools, columns in self._columns(values.to(self.device)):
            pools.scatter(columns, blocks)

    def pieces(self, blocks: Sequence[int]) -> list[list[NDArray[np.uint8]]] | None:
        """Return the memory of each value, block by block, one piece a layer: see `LayerPools.pieces`."""
        of_values = [pools.pieces(blocks) for pools in self._values]
        if any(pieces is None for pieces in of_values):
            return None
        return [pieces for of_block in zip(*filter(None, of_values), strict=True) for pieces in of_block]

    def _columns(self, values: torch.Tensor) -> list[tuple[LayerPools, torch.Tensor]]:
        size = self.value_bytes
        return [(pools, values[:, place * size : (place + 1) * size]) for place, pools in enumerate(self._values)]


def _gather_on_device(pools: LayerPools | HeadPools, blocks: Sequence[int], values: torch.Tensor) -> None:
    """Assemble values on the pools' device and copy them to the host at once: columns would go through pageable memory."""
    on_device = torch.empty(values.shape, dtype=torch.uint8, device=pools.device)
    pools.gather(blocks, on_device)
    values.copy_(on_device)


def head_slices(layer: torch.Tensor, kv_heads: int, count: int) -> list[torch.Tensor]:
    """Return views of the `count` groups of KV heads of `layer`, `[blocks, kv_heads, tokens, elements]` in any memory
    order.

    Raises ConfigError: the layer does not have that shape, so its head axis is ambiguous, or `count` does not divide
    the heads.
    """
    if layer.dim() != 4 or layer.shape[1] != kv_heads or kv_heads % count:
        raise ConfigError(
            f"share_tp is not 0, but a layer of shape {tuple(layer.shape)} does not split {kv_heads} KV heads into {count} values: set "
            "share_tp to 0, or choose an attention backend whose KV cache is [blocks, KV heads, tokens, elements]"
        )
    return list(layer.chunk(count, dim=1))


CHUNK_BYTES: Final = 16 << 20
"""Approximate size of one request to the store: its round trip is negligible at this size."""


class ChunkStaging:
    """Bounded pool of staging chunks. Thread-safe."""

    def __init__(self, value_bytes: int, max_bytes: int, *, is_pinned: bool = False) -> None:
        """Allow as many chunks as fit in `max_bytes`, at least one. A chunk has CHUNK_BYTES, or `value_bytes`, the
        largest value, if that is more. `is_pinned`: of page-locked memory, which a GPU copies fastest."""
        self._is_pinned = is_pinned
        self._chunk_bytes = max(CHUNK_BYTES, value_bytes)
        self._left = max(1, max_bytes // self._chunk_bytes)
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def values(self, value_bytes: int) -> int:
        """Return how many values of this size fit in a chunk."""
        return self._chunk_bytes // value_bytes

    def take(self) -> torch.Tensor | None:
        """Return a chunk, uint8 with undefined contents; None while all are in use. The caller returns it with
        `release`.

        Raises what torch raises without memory; a later call may succeed.
        """
        with self._lock:
            if self._free:
                return self._free.pop()
            if not self._left:
                return None
            self._left -= 1
        try:
            return torch.empty(self._chunk_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        except BaseException:
            with self._lock:
                self._left += 1
            raise

    def release(self, chunk: torch.Tensor) -> None:
        with self._lock:
            self._free.append(chunk)


def rows(chunk: torch.Tensor, count: int, value_bytes: int) -> torch.Tensor:
    """Return the first bytes of a chunk as `[count, value_bytes]`."""
    return chunk[: count * value_bytes].view(count, value_bytes)
