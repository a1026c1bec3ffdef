"""A rank's KV cache in blocks of a pool, as the model's attention and the hand-over both see it.

The pool is memory that peers can reach, laid out as its CacheLayout says. A sequence's keys and values are written into its blocks, and
gathered from them for attention. With a quantised layout a block is a record that is made when the block is full; values that were
computed here are attended to as they were computed, those of blocks that came from elsewhere as decoded.
"""

import math
from typing import Any

import torch
from disaggregation.llama import Tensor

from kvstore.kvcache.codecs.codec import decode, encode
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.transfer.memory.region import Region

NAMES = ("block", "layer", "kv", "head", "token")


class Pool:
    """Blocks in one region of memory, and which of them are free. `values` is a view [block, layer, kv, head, token, head_dim] of float32,
    or of records [block, layer, kv, head, byte]; layers and heads are those of the rank."""

    def __init__(self, layout: CacheLayout, rank: int, region: Region) -> None:
        spec = layout.spec
        self.layout = layout
        self.layers = layout.rank_layers(rank)
        axes = [axis for axis in layout.axes.inner if axis != "token" or not layout.has_records]
        shape = [layout.count(rank, axis) for axis in axes]
        if layout.has_records:
            assert spec.record_bytes(True) == spec.record_bytes(False), "K and V of one size have one shape here"
            memory = torch.frombuffer(region.memory, dtype=torch.uint8).view(*shape, spec.record_bytes(True))
        else:
            memory = torch.frombuffer(region.memory, dtype=torch.float32).view(*shape, spec.head_dim)
        order = [axes.index(axis) for axis in NAMES if axis in axes]
        self.values = memory.permute(*order, len(axes))
        self._free = list(range(layout.pool_blocks))

    def take(self, tokens: int) -> list[int]:
        """Blocks for so many tokens."""
        count = math.ceil(tokens / self.layout.spec.block_tokens)
        assert count <= len(self._free), "the pool is too small for this example"
        blocks, self._free = self._free[:count], self._free[count:]
        return blocks

    def release(self, blocks: list[int]) -> None:
        self._free += blocks


class PagedCache:
    """The cache of one sequence, for LlamaPart. `tokens` are in it in all layers."""

    def __init__(self, pool: Pool, *, capacity_tokens: int) -> None:
        self.pool = pool
        self.blocks = pool.take(capacity_tokens)
        self.tokens = 0
        self._block_tokens = pool.layout.spec.block_tokens

    def update(self, keys: Tensor, values: Tensor, layer: int, **_of_the_pass: Any) -> tuple[Tensor, Tensor]:
        """Write [1, heads, tokens, head_dim] behind the `tokens` that are there; returns all."""
        start, end = self.tokens, self.tokens + keys.shape[2]
        places = torch.arange(start, end)
        blocks = torch.tensor(self.blocks)[places // self._block_tokens]
        of_layer = self.pool.values[:, layer - self.pool.layers.start]
        for kv, new in enumerate((keys, values)):
            of_layer[blocks, kv, :, places % self._block_tokens] = new[0].transpose(0, 1)
        return self._gathered(of_layer, 0, end), self._gathered(of_layer, 1, end)

    def _gathered(self, of_layer: Tensor, kv: int, tokens: int) -> Tensor:
        used = self.blocks[: math.ceil(tokens / self._block_tokens)]
        return of_layer[used, kv].transpose(0, 1).flatten(1, 2)[None, :, :tokens].contiguous()

    def full_blocks(self) -> Tensor:
        """Return the content of the full blocks, as in `Pool.values`."""
        return self.pool.values[self.blocks[: self.tokens // self._block_tokens]]

    def contents(self) -> Tensor:
        """Return the whole content, independent of the size and order of blocks: [layer, kv, head, token, head_dim]."""
        used = self.blocks[: math.ceil(self.tokens / self._block_tokens)]
        return self.pool.values[used].movedim(0, 3).flatten(3, 4)[:, :, :, : self.tokens]

    def close(self) -> None:
        self.pool.release(self.blocks)


class QuantisedCache(PagedCache):
    """The same over records."""

    def __init__(self, pool: Pool, *, capacity_tokens: int) -> None:
        super().__init__(pool, capacity_tokens=capacity_tokens)
        self._computed: dict[tuple[int, int], Tensor] = {}

    def update(self, keys: Tensor, values: Tensor, layer: int, **_of_the_pass: Any) -> tuple[Tensor, Tensor]:
        return self._extended(keys, layer, 0), self._extended(values, layer, 1)

    def contents(self) -> Tensor:
        """Its records, [layer, kv, head, block, byte]."""
        return self.full_blocks().movedim(0, 3)

    def _extended(self, new: Tensor, layer: int, kv: int) -> Tensor:
        before = self._computed.get((layer, kv))
        if before is None:
            before = self._decoded(layer, kv)[:, :, : self.tokens]
        after = self._computed[layer, kv] = torch.cat([before, new], dim=2)
        self._encode_full(after, layer, kv)
        return after

    def _decoded(self, layer: int, kv: int) -> Tensor:
        """[1, heads, tokens, head_dim] of the blocks that were there before anything was computed here."""
        spec = self.pool.layout.spec
        records = self.pool.values[self.blocks[: self.tokens // self._block_tokens], layer - self.pool.layers.start, kv].contiguous()
        scheme = spec.scheme.of(kv == 0)
        values = decode(records, scheme, is_key=kv == 0, tokens=self._block_tokens, head_dim=spec.head_dim, dtype=torch.float32)
        return values.transpose(0, 1).flatten(1, 2)[None]

    def _encode_full(self, values: Tensor, layer: int, kv: int) -> None:
        """Make records of the blocks that this update has filled."""
        first, last = self.tokens // self._block_tokens, values.shape[2] // self._block_tokens
        if first == last:
            return
        filled = values[0, :, first * self._block_tokens : last * self._block_tokens].unflatten(1, (last - first, self._block_tokens))
        records = encode(filled.transpose(0, 1), self.pool.layout.spec.scheme.of(kv == 0), is_key=kv == 0)
        self.pool.values[self.blocks[first:last], layer - self.pool.layers.start, kv] = records


def new_cache(pool: Pool, *, capacity_tokens: int) -> PagedCache:
    kind = QuantisedCache if pool.layout.has_records else PagedCache
    return kind(pool, capacity_tokens=capacity_tokens)
