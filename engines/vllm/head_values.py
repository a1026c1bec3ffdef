"""Blocks of vLLM's pools whose KV heads are in several values: the keys of these values, and where their bytes lie in the pools.

The values of a block follow one another, block by block, in keys and in staging memory. Each has the same value of the block before as its
parent. All are stored under one label, by which nodes evict the values of a block together (tiers/policies/block_values.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.engines.head_split import HeadSplit
from kvstore.engines.vllm.identity import Shard, Variant
from kvstore.engines.vllm.layout import LayerPools
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeadShards:
    """The shards of the values that one rank holds of each block, in order. It has the methods of `Shard`."""

    label: Shard
    """What they are stored under."""
    shards: tuple[Shard, ...]
    """At least one."""

    @classmethod
    def of_rank(cls, template: Namespace, split: HeadSplit) -> "HeadShards":
        return cls(Shard(split.label(template)), tuple(map(Shard, split.namespaces(template))))

    @property
    def namespace(self) -> Namespace:
        """What the values are stored under."""
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
    """The KV cache of an engine as `LayerPools` has it, with several values a block. Threads may use it at once, on different blocks."""

    def __init__(self, values: Sequence[LayerPools]) -> None:
        """`values`: of each value the heads of all layers that it holds; all of one size."""
        self._values = values
        self.values_per_block = len(values)
        self.value_bytes = values[0].value_bytes

    def gather(self, blocks: Sequence[int], values: torch.Tensor) -> None:
        """Copy `blocks` into the rows of `values`, uint8 `[len(blocks), values_per_block * value_bytes]` on the CPU."""
        for pools, columns in self._columns(values):
            pools.gather(blocks, columns)

    def scatter(self, values: torch.Tensor, blocks: Sequence[int]) -> None:
        """Copy the rows of `values`, as in `gather`, into `blocks`, which differ. They are there when it returns."""
        for pools, columns in self._columns(values):
            pools.scatter(columns, blocks)

    def pieces(self, blocks: Sequence[int]) -> list[list[NDArray[np.uint8]]] | None:
        """Return the memory of each value, block by block, a piece a layer: see `LayerPools.pieces`."""
        of_values = [pools.pieces(blocks) for pools in self._values]
        if any(pieces is None for pieces in of_values):
            return None
        return [pieces for of_block in zip(*filter(None, of_values), strict=True) for pieces in of_block]

    def _columns(self, values: torch.Tensor) -> list[tuple[LayerPools, torch.Tensor]]:
        size = self.value_bytes
        return [(pools, values[:, place * size : (place + 1) * size]) for place, pools in enumerate(self._values)]


def head_slices(layer: torch.Tensor, kv_heads: int, count: int) -> list[torch.Tensor]:
    """Return views of the `count` groups of KV heads of `layer`, `[blocks, kv_heads, tokens, elements]` in any memory order.

    Raises ConfigError: the layer is not of that shape, so that its heads cannot be told from other axes, or `count` does not divide them.
    """
    if layer.dim() != 4 or layer.shape[1] != kv_heads or kv_heads % count:
        raise ConfigError(
            f"share_tp is not 0, and {kv_heads} KV heads in {count} values are not found in a layer of shape {tuple(layer.shape)}: set "
            "share_tp to 0, or choose an attention backend whose KV cache is [blocks, KV heads, tokens, elements]"
        )
    return list(layer.chunk(count, dim=1))
