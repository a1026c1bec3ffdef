"""Promises of staging.py: the values are those of tensor_value.py, in the caller's memory, whatever its strides."""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.client.tensors.staging import STAGING_BYTES, Staging, are_values, as_index, is_tensor, put_back, read_values, write_values
from kvstore.kvcache.codecs.schemes import CacheScheme
from kvstore.kvcache.codecs.tensor_value import TensorHeader, decode_value, encode_value
from kvstore.protocol.errors import InvalidArgument

BLOCKS = 3
HEADER = TensorHeader(scheme=CacheScheme.parse("none"), dtype="float32", kv_factor=2, layers=3, heads=4, tokens=16, head_dim=32)
SCHEMES = ("none", "int8", "k=int4/16,v=int2/32", "fp8-tensor", "k=none,v=int8")


def header_of(scheme: str, **changes: Any) -> TensorHeader:
    return replace(HEADER, scheme=CacheScheme.parse(scheme), **changes)


def random_blocks(header: TensorHeader) -> Any:
    return torch.randn(BLOCKS, *header.shape, generator=torch.Generator().manual_seed(1)).to(getattr(torch, header.dtype))


def written(header: TensorHeader, values: Any) -> np.ndarray[Any, Any]:
    [rows] = Staging([header.value_bytes]).rows(BLOCKS, is_pinned=False)
    write_values(rows, header, values)
    return rows


@pytest.mark.parametrize("kv_factor", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_are_the_values_of_their_blocks_and_any_part_of_them_is_read_as_it_decodes(scheme: str, kv_factor: int) -> None:
    header = header_of(scheme, kv_factor=kv_factor)
    values = random_blocks(header)
    rows = written(header, values.transpose(1, 4).contiguous().transpose(1, 4))
    layers, heads = slice(1, 3), slice(2, 3)
    out = torch.zeros(4, 2, 16, 1, kv_factor, BLOCKS, 32).permute(5, 1, 4, 3, 2, 0, 6)[..., 0, :]
    read_values(rows, header, layers, heads, out)
    for row, block, part in zip(rows, values, out, strict=True):
        assert row.tobytes() == encode_value(block, header.scheme)
        whole = torch.empty_like(block)
        decode_value(row.data, whole)
        assert part.equal(whole[layers, :, heads])


def test_numpy_arrays_are_written_and_read_as_tensors_are() -> None:
    array: np.ndarray[Any, Any] = random_blocks(HEADER).numpy()
    rows = written(HEADER, array[:, ::-1])
    assert np.array_equal(rows, written(HEADER, torch.from_numpy(array[:, ::-1].copy())))
    out = np.zeros((16, BLOCKS, 1, 2, 4, 32), np.float32).transpose(1, 2, 3, 4, 0, 5)
    read_values(rows, HEADER, slice(0, 1), slice(0, 4), out)
    assert np.array_equal(out[:, 0], array[:, 2])


def test_numbers_that_a_scheme_cannot_hold_are_refused_unless_they_are_not_finite() -> None:
    header = header_of("int8", dtype="float32")
    values = random_blocks(header)
    values[1, 1, 1, 1, 1, 1] = torch.nan
    out = torch.zeros_like(values)
    read_values(written(header, values), header, slice(0, 3), slice(0, 4), out)
    assert out[1, 1, 1, 1, 1].isnan().all()
    assert int(out.isnan().sum()) == 32
    values[1, 1, 1, 1, 1, 1] = 1e30
    with pytest.raises(InvalidArgument, match="too large for the float16 scales of int8: use fp8-head"):
        written(header, values)


def test_rows_lie_apart_in_memory_that_is_kept() -> None:
    staging = Staging([65, 130])
    first, second = staging.rows(3, is_pinned=False)
    first[:], second[:] = 1, 2
    assert first.shape == (3, 65)
    assert second.shape == (3, 130)
    assert (first == 1).all()
    again, _ = staging.rows(2, is_pinned=False)
    assert np.shares_memory(again, first)
    larger, _ = staging.rows(4, is_pinned=False)
    assert not np.shares_memory(larger, first)
    assert first.ctypes.data % 4 == second.ctypes.data % 4 == 0, "so that raw elements are aligned"


def test_as_many_blocks_are_staged_as_the_memory_holds_and_never_none() -> None:
    assert Staging([STAGING_BYTES // 8, STAGING_BYTES // 8]).blocks == 4
    assert Staging([STAGING_BYTES, 1]).blocks == 1


def test_rows_are_known_for_values_by_header_and_size() -> None:
    rows = written(HEADER, random_blocks(HEADER))
    sizes_bytes = np.full(BLOCKS, HEADER.value_bytes)
    assert are_values(rows, sizes_bytes, HEADER)
    assert are_values(rows[:0], sizes_bytes[:0], HEADER)
    assert not are_values(rows, sizes_bytes, replace(HEADER, dtype="float16"))
    assert not are_values(rows, sizes_bytes - [0, 1, 0], HEADER)
    rows[2, 30] ^= 1
    assert not are_values(rows, sizes_bytes, HEADER)


def test_a_run_of_blocks_is_a_view_and_others_are_put_back() -> None:
    for kind in (torch.zeros, np.zeros):
        pool: Any = kind((6, 2))
        for blocks, expected in (([1, 2, 3], slice(1, 4)), ([4, 2], None), ([], None)):
            chosen = np.array(blocks, np.int64)
            index = as_index(chosen)
            assert index == expected if expected else index is chosen
            shard = pool[index]
            shard[:] = 1
            put_back(pool, index, shard)
        assert pool[:, 0].tolist() == [0, 1, 1, 1, 1, 0]


def test_a_tensor_is_one_of_torch() -> None:
    assert is_tensor(torch.zeros(1))
    assert not is_tensor(np.zeros(1))
    assert not is_tensor([0])


def test_torch_is_not_needed_for_numpy_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.ones((BLOCKS, *HEADER.shape), np.float32)
    out = np.zeros_like(array)
    monkeypatch.delitem(sys.modules, "torch")
    read_values(written(HEADER, array), HEADER, slice(0, 3), slice(0, 4), out)
    put_back(out, np.array([0]), out[:1])
    assert "torch" not in sys.modules
    assert np.array_equal(out, array)


if torch.cuda.is_available():

    @pytest.mark.gpu
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_cuda_tensors_make_the_values_of_cpu_tensors_and_read_them(scheme: str) -> None:
        header = header_of(scheme, dtype="bfloat16")
        values = random_blocks(header)
        rows = Staging([header.value_bytes]).rows(BLOCKS, is_pinned=True)[0]
        write_values(rows, header, values.cuda().transpose(3, 4).contiguous().transpose(3, 4))
        out, expected = torch.zeros_like(values, device="cuda")[:, :1, :, 1:2], torch.zeros_like(values)[:, :1, :, 1:2]
        read_values(rows, header, slice(2, 3), slice(1, 2), out)
        read_values(written(header, values), header, slice(2, 3), slice(1, 2), expected)
        assert torch.allclose(out.cpu(), expected, rtol=0.02, atol=0.02)
