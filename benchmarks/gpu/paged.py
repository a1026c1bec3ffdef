"""An engine's paged KV cache on the device: 32 layers of 16-token blocks, 2 MiB a block, in 64 pieces of 32 KiB."""

from typing import Any, Final

import torch

from benchmarks.gpu.device import BLOCKS, DEVICE, HAS_CUDA
from kvstore.client.tensors.pools import EnginePool
from kvstore.kvcache.layouts.layout import CacheLayout
from kvstore.kvcache.models.spec import CacheSpec

SPEC: Final = CacheSpec(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16)
POOL_BLOCKS: Final = 4 * BLOCKS if HAS_CUDA else 2 * BLOCKS
TABLE: Final = torch.randperm(POOL_BLOCKS, generator=torch.Generator().manual_seed(0))[:BLOCKS].tolist()
"""Blocks of a sequence, scattered over the pool."""


def layers(order: str = "vllm-flash") -> tuple[EnginePool, list[Any]]:
    """An engine's tensors in that order, as a pool and by themselves."""
    layout = CacheLayout(spec=SPEC, pool_blocks=POOL_BLOCKS, order=order)
    sizes = [layout.region_bytes(0, number) for number in range(layout.region_count(0))]
    tensors = [torch.randint(0, 100, (size,), dtype=torch.uint8, device=DEVICE) for size in sizes]
    return EnginePool(layout, tensors), tensors


def blocks_first() -> list[Any]:
    """One tensor `[blocks, 2, tokens, heads, head_dim]` a layer, as vLLM registers them: a piece of 64 KiB a block."""
    shape = (POOL_BLOCKS, 2, SPEC.block_tokens, SPEC.kv_heads, SPEC.head_dim)
    return [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(SPEC.layers)]
