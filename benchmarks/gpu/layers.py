"""Paged layers into values on the host and back: by the connectors' code, and by one copy a piece."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.device import BLOCKS, against, gb_s, on_device, pinned
from benchmarks.gpu.paged import SPEC, TABLE, blocks_first, layers
from kvstore.cli.tools.bench import BenchRow
from kvstore.client.tensors.arrays import as_index, mark, on_side_stream, placed
from kvstore.client.tensors.config import TensorSettings
from kvstore.client.tensors.staging_buffers import PoolPiece, Stagings, read_values, write_values
from kvstore.engines.vllm.pools import LayerPools
from kvstore.kvcache.codecs.tensor_value import TensorHeader


def rows() -> Iterator[BenchRow]:
    size_bytes = BLOCKS * SPEC.block_bytes
    host, there = pinned(size_bytes), on_device(size_bytes)
    out_limit = gb_s(size_bytes, lambda: host.copy_(there, non_blocking=True))
    in_limit = gb_s(size_bytes, lambda: there.copy_(host, non_blocking=True))
    what = f"{BLOCKS} blocks of 16 tokens x {SPEC.layers} layers"
    yield BenchRow(f"{what}: the limit, device to host", out_limit, "GB/s")
    yield BenchRow(f"{what}: the limit, host to device", in_limit, "GB/s")
    tensors = blocks_first()
    values = host.view(BLOCKS, -1)
    yield from against(f"{what}: gather, vLLM's pools", *connector(tensors, values, out_limit, is_gather=True), 0.7)
    yield from against(f"{what}: scatter, vLLM's pools", *connector(tensors, values, in_limit, is_gather=False), 0.7)
    yield from against(f"{what}: gather, one copy a piece", gb_s(size_bytes, lambda: by_piece(tensors, values)), out_limit)
    yield from tensor_cache_rows(what, out_limit, in_limit)


def connector(tensors: list[Any], values: Any, limit: float, *, is_gather: bool) -> tuple[float, float]:
    """GB/s of the copies of engines/vllm, with the limit."""
    pools = LayerPools(tensors, len(tensors[0]))
    assert pools.value_bytes == values.shape[1]
    call = (lambda: pools.gather(TABLE, values)) if is_gather else (lambda: pools.scatter(values, TABLE))
    return gb_s(values.numel(), call), limit


def by_piece(tensors: list[Any], values: Any) -> None:
    """Copy each block of each layer by a call of its own."""
    for row, block in zip(values, TABLE, strict=True):
        for piece, layer in zip(row.chunk(len(tensors)), tensors, strict=True):
            piece.copy_(layer[block].view(-1).view(torch.uint8), non_blocking=True)


def tensor_cache_rows(what: str, out_limit: float, in_limit: float) -> Iterator[BenchRow]:
    """TensorCache's copies, from a tensor for K and one for V in each layer."""
    pool, _ = layers()
    header = TensorHeader(
        scheme=SPEC.scheme,
        dtype=SPEC.dtype,
        kv_factor=2,
        layers=SPEC.layers,
        heads=SPEC.kv_heads,
        tokens=SPEC.block_tokens,
        head_dim=SPEC.head_dim,
    )
    at_once = min(BLOCKS, TensorSettings().staging_bytes // header.value_bytes)
    index = placed(as_index(np.array(TABLE[:at_once], np.int64)), pool.device)
    pieces = [
        PoolPiece(
            slice(plane.layers.start, plane.layers.stop),
            slice(plane.kinds.start, plane.kinds.stop),
            slice(0, SPEC.kv_heads),
            plane.values,
            index,
        )
        for plane in pool.planes
    ]
    settings = TensorSettings()
    with Stagings(settings).lend(is_pinned=pool.is_on_gpu) as staging:
        [of_call] = staging.rows(at_once, [header.value_bytes])

        def move(how: Any) -> None:
            with on_side_stream(pool.device, mark(pool.device)):
                how(of_call, header, pieces)

        size_bytes = at_once * SPEC.block_bytes
        yield from against(
            f"{what}: gather, TensorCache's, {at_once} blocks at a time", gb_s(size_bytes, lambda: move(write_values)), out_limit, 0.7
        )
        yield from against(f"{what}: scatter, TensorCache's", gb_s(size_bytes, lambda: move(read_values)), in_limit, 0.7)
