"""encode and decode, for every scheme: any strides, any piece, any dtype; refusals that say what is wrong."""

import sys
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.kvcache.codecs import codec
from kvstore.kvcache.codecs.schemes import Scheme
from kvstore.protocol.errors import InvalidArgument
from tests.kvcache.codecs.cases import DTYPES, plain_records, plain_values

SCHEMES = [Scheme(kind) for kind in ("none", "fp8-tensor", "fp8-head", "int8", "int8a")] + [Scheme("int4", 32), Scheme("int2", 16)]
QUANTISED = SCHEMES[1:]
name = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
quantised = pytest.mark.parametrize("scheme", QUANTISED, ids=lambda scheme: scheme.name)


def randn(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@quantised
@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_records_and_values_are_those_of_the_plain_codec(scheme: Scheme, is_key: bool, dtype: torch.dtype) -> None:
    values = randn(2, 2, 32, 32).to(dtype)
    records = codec.encode(values, scheme, is_key=is_key)
    assert np.array_equal(records.numpy(), plain_records(values, scheme, is_key=is_key))
    decoded = codec.decode(records, scheme, is_key=is_key, tokens=32, head_dim=32, dtype=dtype)
    plain = plain_values(records, scheme, is_key=is_key, tokens=32, head_dim=32)
    assert torch.equal(decoded, torch.from_numpy(plain).to(dtype))


@name
@pytest.mark.parametrize("is_key", [True, False])
def test_pieces_and_strides_make_no_difference(scheme: Scheme, is_key: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool's [block, token, layer, kv, head, dim] as blocks of heads, into and out of values with room between them."""
    pool = randn(3, 32, 2, 2, 2, 32)
    values = pool[:, :, :, 1].permute(0, 2, 3, 1, 4)
    whole = codec.encode(values.contiguous(), scheme, is_key=is_key)
    for piece_elements in (1, 3 * 32 * 32, 9 * 32 * 32):
        monkeypatch.setattr(codec, "_PIECE_ELEMENTS", piece_elements)
        memory = torch.zeros((3, 2, 2, whole.shape[-1] + 8), dtype=torch.uint8)
        assert torch.equal(codec.encode(values, scheme, is_key=is_key, out=memory[..., 8:]), whole)
        assert not memory[..., :8].any()
        other = torch.zeros_like(pool)
        out = other[:, :, :, 1].permute(0, 2, 3, 1, 4)
        shape = {"tokens": 32, "head_dim": 32, "dtype": torch.float32}
        assert codec.decode(memory[..., 8:], scheme, is_key=is_key, out=out, **shape) is out
        assert torch.equal(out, codec.decode(whole, scheme, is_key=is_key, **shape))
        assert not other[:, :, :, 0].any()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn])
def test_raw_records_are_the_elements(dtype: torch.dtype) -> None:
    values = randn(2, 2, 16, 8).to(dtype)
    records = codec.encode(values, Scheme("none"), is_key=True)
    assert records.numpy().tobytes() == values.view(torch.uint8).numpy().tobytes()
    decoded = codec.decode(records, Scheme("none"), is_key=True, tokens=16, head_dim=8, dtype=dtype)
    assert torch.equal(decoded.float(), values.float())


@quantised
def test_no_finite_value_becomes_infinite(scheme: Scheme) -> None:
    """The largest of float16 and the largest negative one in one group: steps would bring sums beyond."""
    values = torch.full((1, 1, 32, 32), 65504.0, dtype=torch.float16)
    values[..., ::2, ::2] = -65504.0
    values[..., ::3, ::3] = 60000.0
    records = codec.encode(values, scheme, is_key=True)
    assert not codec.has_lost(records, scheme, is_key=True, tokens=32, head_dim=32)
    decoded = codec.decode(records, scheme, is_key=True, tokens=32, head_dim=32, dtype=torch.float16)
    assert decoded.isfinite().all()
    assert decoded.abs().max() == 65504


@quantised
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_are_told_and_never_finite_again(scheme: Scheme, bad: float) -> None:
    values = randn(2, 2, 32, 32).bfloat16()
    shape = {"tokens": 32, "head_dim": 32}
    assert not codec.has_lost(codec.encode(values, scheme, is_key=False), scheme, is_key=False, **shape)
    values[1, 0, 3, 4] = bad
    records = codec.encode(values, scheme, is_key=False)
    assert codec.has_lost(records, scheme, is_key=False, **shape)
    assert codec.decode(records, scheme, is_key=False, dtype=torch.bfloat16, **shape)[1, 0, 3, 4].isnan()


def test_raw_records_lose_nothing() -> None:
    records = codec.encode(torch.full((1, 2, 4), torch.nan), Scheme("none"), is_key=True)
    assert not codec.has_lost(records, Scheme("none"), is_key=True, tokens=2, head_dim=4)


@name
def test_no_records_are_none(scheme: Scheme) -> None:
    values = torch.empty((0, 2, 32, 32))
    records = codec.encode(values, scheme, is_key=True)
    assert codec.decode(records, scheme, is_key=True, tokens=32, head_dim=32, dtype=torch.float32).shape == values.shape


@pytest.mark.parametrize(
    ("values", "scheme"),
    [
        (torch.zeros((2, 16, 8), dtype=torch.int8), Scheme("int8")),
        (torch.zeros((2, 16, 8), dtype=torch.float64), Scheme("int8")),
        (torch.zeros(8), Scheme("int8")),
        (torch.zeros((16, 8)), Scheme("fp8-tensor")),
    ],
)
def test_what_is_no_tensor_of_floats_is_refused(values: torch.Tensor, scheme: Scheme) -> None:
    with pytest.raises(InvalidArgument, match=r"encodes floats of up to 32 bits and . axes or more"):
        codec.encode(values, scheme, is_key=True)


def test_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="multiple of 32"):
        codec.encode(torch.zeros((16, 64)), Scheme("int4", 32), is_key=True)
    with pytest.raises(InvalidArgument, match="multiple of 32"):
        codec.decode(torch.zeros(512, dtype=torch.uint8), Scheme("int4", 32), is_key=True, tokens=16, head_dim=64, dtype=torch.float32)


@pytest.mark.parametrize(
    ("out", "problem"),
    [
        (torch.empty((2, 17), dtype=torch.uint8), "is needed here, not of"),
        (torch.empty((2, 18), dtype=torch.int8), "is needed here, not of"),
        (torch.empty((2, 18), dtype=torch.uint8, device="meta"), "is needed here, not of"),
        (torch.empty((18, 2), dtype=torch.uint8).T, "must be contiguous"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out: torch.Tensor, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        codec.encode(torch.zeros((2, 1, 16)), Scheme("int8"), is_key=True, out=out)


def test_records_of_another_length_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="is needed here, not of"):
        codec.decode(torch.empty((2, 17), dtype=torch.uint8), Scheme("int8"), is_key=True, tokens=1, head_dim=16, dtype=torch.float32)


def test_raw_records_that_are_not_aligned_are_refused() -> None:
    memory = torch.zeros(33, dtype=torch.uint8)[1:].view(2, 16)
    with pytest.raises(InvalidArgument, match="must begin at multiples of 2 bytes"):
        codec.encode(torch.zeros((2, 1, 8), dtype=torch.float16), Scheme("none"), is_key=True, out=memory)


class Kernels:
    """Stands for the fused kernels where there is no CUDA: writes what no codec would."""

    def encode(self, values: torch.Tensor, scheme: Scheme, *, is_key: bool, out: torch.Tensor) -> None:
        out.fill_(7)

    def decode(self, records: torch.Tensor, scheme: Scheme, *, is_key: bool, out: torch.Tensor) -> None:
        out.fill_(-7)


def test_fused_kernels_are_taken_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_fused", lambda *_: Kernels())
    records = codec.encode(torch.zeros((2, 16, 8)), Scheme("int8"), is_key=True)
    assert (records == 7).all()
    assert (codec.decode(records, Scheme("int8"), is_key=True, tokens=16, head_dim=8, dtype=torch.float32) == -7).all()


class OnCuda:
    """A tensor as far as the choice of a codec looks at it."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.stride, self.data_ptr = tensor.shape, tensor.stride, tensor.data_ptr


@pytest.mark.parametrize(("tokens", "is_fused"), [(64, True), (48, False)])
def test_on_cuda_the_fused_kernels_are_chosen_for_what_they_can(tokens: int, is_fused: bool) -> None:
    values = torch.zeros((1, tokens, 16))
    scheme = Scheme("int4", 16)
    records = codec.encode(values, scheme, is_key=True)
    on_cuda: Any = OnCuda
    assert (codec._fused(on_cuda(values), on_cuda(records), scheme, True) is not None) is is_fused


def test_without_triton_cuda_goes_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvstore.kvcache.codecs.triton_kernels", None)
    placed: Any = OnCuda(torch.zeros((1, 16, 16)))
    assert codec._fused(placed, placed, Scheme("int8"), True) is None
