"""client/tensors/staging_buffers.py: values have the format of tensor_value.py, in memory of any strides."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.client.tensors.config import TensorSettings
from kvstore.client.tensors.staging_buffers import PoolPiece, PoolStaging, Stagings, read_values, write_values
from kvstore.kvcache.codecs.schemes import CacheScheme
from kvstore.kvcache.codecs.tensor_value import TensorHeader, decode_value, encode_value
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.settings import Size
from tests.devices import needs_cuda

BLOCKS = 3
HEADER = TensorHeader(scheme=CacheScheme.parse("none"), dtype="float32", kv_factor=2, layers=3, heads=4, tokens=16, head_dim=32)
ALL = slice(0, BLOCKS)
SCHEMES = ("none", "int8", "k=int4/16,v=int2/32", "fp8-tensor", "k=none,v=int8")


def header_of(scheme: str, **changes: Any) -> TensorHeader:
    return replace(HEADER, scheme=CacheScheme.parse(scheme), **changes)


def random_blocks(header: TensorHeader) -> Any:
    return torch.randn(BLOCKS, *header.shape, generator=torch.Generator().manual_seed(1)).to(getattr(torch, header.dtype))


def whole(values: Any, blocks: Any = ALL) -> list[PoolPiece]:
    return [PoolPiece(slice(0, values.shape[1]), slice(0, values.shape[2]), slice(0, values.shape[3]), values, blocks)]


def in_pieces(values: Any, blocks: Any = ALL) -> list[PoolPiece]:
    """A tensor a layer, K and V apart where there are both."""
    layers, kinds = values.shape[1:3]
    return [
        PoolPiece(
            slice(layer, layer + 1), slice(kind, kind + 1), slice(0, values.shape[3]), values[:, layer : layer + 1, kind : kind + 1], blocks
        )
        for layer in range(layers)
        for kind in range(kinds)
    ]


def written(header: TensorHeader, pieces: list[PoolPiece]) -> np.ndarray[Any, Any]:
    [rows] = PoolStaging(1 << 20).rows(BLOCKS, [header.value_bytes])
    write_values(rows, header, pieces)
    return rows


@pytest.mark.parametrize("kv_factor", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_are_values_and_decode_in_parts(scheme: str, kv_factor: int) -> None:
    header = header_of(scheme, kv_factor=kv_factor)
    values = random_blocks(header)
    rows = written(header, whole(values.transpose(1, 4).contiguous().transpose(1, 4)))
    layers, heads = slice(1, 3), slice(2, 3)
    out = torch.zeros(4, 2, 16, 1, kv_factor, BLOCKS, 32).permute(5, 1, 4, 3, 2, 0, 6)[..., 0, :]
    read_values(rows, header, [PoolPiece(layers, slice(0, kv_factor), heads, out, ALL)])
    for row, block, part in zip(rows, values, out, strict=True):
        assert row.tobytes() == encode_value(block, header.scheme)
        decoded = torch.empty_like(block)
        decode_value(row.data, decoded)
        assert part.equal(decoded[layers, :, heads])


@pytest.mark.parametrize("head_dim", [32, 1024])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_value_is_independent_of_pool_layout(scheme: str, head_dim: int) -> None:
    header = header_of(scheme, head_dim=head_dim, layers=2, heads=2)
    values, places = random_blocks(header), np.array([4, 0, 3])
    rows = written(header, whole(values)).copy()
    pool = torch.zeros(6, *values.shape[1:])
    pool[places] = values
    assert np.array_equal(written(header, in_pieces(values)), rows)
    assert np.array_equal(written(header, in_pieces(pool, places)), rows)
    expected = torch.zeros_like(values)
    read_values(rows, header, whole(expected))
    for pieces in (whole, in_pieces):
        out = torch.zeros_like(pool)
        read_values(rows, header, pieces(out, places))
        assert out[places].equal(expected)
        assert not out[[1, 2, 5]].any()


def test_write_values_refuses_unrepresentable_numbers() -> None:
    header = header_of("int8", dtype="float32")
    values = random_blocks(header)
    values[1, 1, 1, 1, 1, 1] = torch.nan
    out = torch.zeros_like(values)
    read_values(written(header, in_pieces(values)), header, whole(out))
    assert out[1, 1, 1, 1, 1].isnan().all()
    assert int(out.isnan().sum()) == 32
    values[1, 1, 1, 1, 1, 1] = 1e30
    with pytest.raises(InvalidArgument, match="values exceed the float16 scales of int8: use fp8-head"):
        written(header, in_pieces(values))
    values[0, 0, 0, 0, 0, 0] = torch.inf
    with pytest.raises(InvalidArgument, match="exceed the float16 scales"):
        written(header, in_pieces(values))


def test_memory_is_one_call_s_and_then_the_next_one_s() -> None:
    stagings = Stagings(TensorSettings(staging_bytes=Size(1000)))
    with stagings.lend(is_pinned=False) as first, stagings.lend(is_pinned=False) as second:
        assert first is not second
        [row] = first.rows(1, [100])
        second.rows(1, [100])
    with stagings.lend(is_pinned=False) as again:
        assert again is first, "the last to end is the one in the processor's cache"
        assert np.shares_memory(again.rows(1, [100])[0], row)
        with stagings.lend(is_pinned=True) as pinned:
            assert pinned is not second, "of another kind"


@needs_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_cuda_and_cpu_tensors_give_equal_values(scheme: str) -> None:
    header = header_of(scheme, dtype="bfloat16")
    values = random_blocks(header)
    rows = PoolStaging(1 << 20, is_pinned=True).rows(BLOCKS, [header.value_bytes])[0]
    write_values(rows, header, in_pieces(values.cuda().transpose(3, 4).contiguous().transpose(3, 4)))
    out, expected = torch.zeros_like(values, device="cuda")[:, :1, :, 1:2], torch.zeros_like(values)[:, :1, :, 1:2]
    for read, into in ((rows, out), (written(header, whole(values)), expected)):
        read_values(read, header, [PoolPiece(slice(2, 3), slice(0, 2), slice(1, 2), into, ALL)])
    assert torch.allclose(out.cpu(), expected, rtol=0.02, atol=0.02)
