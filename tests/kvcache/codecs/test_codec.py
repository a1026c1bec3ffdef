"""encode and decode for every scheme: to the bit as the plain definition, within its error, of any strides, piece and dtype."""

import runpy
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.kvcache.codecs import codec, torch_kernels
from kvstore.kvcache.codecs.schemes import Scheme
from kvstore.kvcache.codecs.torch_kernels import float16_scale, power_of_two
from kvstore.protocol.errors import ConfigError, InvalidArgument
from tests.kvcache.codecs import plain_codec
from tests.kvcache.codecs.cases import DTYPES, floats, plain_records, plain_values

SCHEMES = [Scheme(kind) for kind in ("none", "fp8-tensor", "fp8-head", "int8", "int8a")] + [Scheme("int4", 32), Scheme("int2", 16)]
QUANTISED = SCHEMES[1:]
AFFINE = QUANTISED[3:]
SHAPE = {"tokens": 32, "head_dim": 32}
name = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
quantised = pytest.mark.parametrize("scheme", QUANTISED, ids=lambda scheme: scheme.name)


def randn(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_as_plain(values: torch.Tensor, scheme: Scheme, *, is_key: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The records and the values decoded from them, both compared with those of the plain codec."""
    records = codec.encode(values, scheme, is_key=is_key)
    assert np.array_equal(records.numpy(), plain_records(values, scheme, is_key=is_key))
    decoded = codec.decode(records, scheme, is_key=is_key, dtype=values.dtype, **SHAPE)
    plain = torch.from_numpy(plain_values(records, scheme, is_key=is_key, **SHAPE))
    assert torch.equal(decoded.isnan(), plain.isnan())
    limit = torch.finfo(values.dtype).max
    assert torch.equal(decoded.nan_to_num(), plain.clamp(-limit, limit).to(values.dtype).nan_to_num())
    return records, decoded


@quantised
@settings(max_examples=20)
@given(values=floats((1, 2, 32, 32)), is_key=st.booleans())
def test_records_are_those_of_the_plain_codec_within_half_a_step(scheme: Scheme, values: np.ndarray, is_key: bool) -> None:
    """fp8: within a sixteenth of the value, or half of e4m3's least step where it is subnormal."""
    records, decoded = check_as_plain(torch.from_numpy(values), scheme, is_key=is_key)
    error = np.abs(decoded.numpy() - values)
    if scheme.kind.startswith("fp8"):
        scale = records[..., -4:].clone().view(torch.float32).numpy()[..., None]
        assert (error <= np.maximum(np.abs(values) / 16, scale * 2.0**-10)).all()
        again = codec.encode(decoded, scheme, is_key=is_key)
        assert torch.equal(codec.decode(again, scheme, is_key=is_key, dtype=torch.float32, **SHAPE), decoded)
    else:
        steps = np.stack([plain_codec.steps(head, scheme, is_key=is_key) for head in values[0]])
        # If the step is 0, the range is less than a quarter of the least step; float32 rounds code x scale + minimum.
        assert (error <= np.maximum(steps, 2.0**-24) * (0.5 + 2.0**-15) + np.abs(values) * 2.0**-23).all()


@quantised
def test_records_of_each_dtype_are_those_of_the_plain_codec(scheme: Scheme) -> None:
    for dtype in DTYPES:
        check_as_plain(randn(2, 2, 32, 32).to(dtype), scheme, is_key=True)


@pytest.mark.parametrize("scheme", QUANTISED[2:], ids=lambda scheme: scheme.name)
def test_decoded_values_are_encoded_to_the_same_records(scheme: Scheme) -> None:
    """A group's extremes have the first and the last code, and float16 holds its scale and minimum."""
    records = codec.encode(randn(2, 2, 32, 32), scheme, is_key=True)
    decoded = codec.decode(records, scheme, is_key=True, dtype=torch.float32, **SHAPE)
    assert torch.equal(codec.encode(decoded, scheme, is_key=True), records)


@pytest.mark.parametrize("scheme", AFFINE, ids=lambda scheme: scheme.name)
def test_constant_group_decodes_to_its_value_in_float16(scheme: Scheme) -> None:
    for constant in (0.0, -1.0, 0.333, 1e-7, -40_000.0, 65_504.0):
        values = torch.full((1, 32, 32), constant)
        records = codec.encode(values, scheme, is_key=True)
        decoded = codec.decode(records, scheme, is_key=True, dtype=torch.float32, **SHAPE)
        is_exact = float(values[0, 0, 0].half()) == float(values[0, 0, 0])
        assert (decoded - values).abs().max() <= (0 if is_exact else max(abs(constant) * 2.0**-11, 2.0**-25))


@quantised
@pytest.mark.parametrize("is_key", [True, False])
def test_number_that_a_group_cannot_hold_makes_all_of_it_nan(scheme: Scheme, is_key: bool) -> None:
    """Of that group alone, and `has_lost` says so. fp8 loses that number alone."""
    for bad in (torch.nan, torch.inf, -torch.inf, 1e30):
        values = randn(1, 2, 32, 32)
        assert not codec.has_lost(codec.encode(values, scheme, is_key=is_key), scheme, is_key=is_key, **SHAPE)
        values[0, 1, 17, 3] = bad
        records, decoded = check_as_plain(values, scheme, is_key=is_key)
        is_held = bad == 1e30 and scheme.kind.startswith("fp8")
        assert codec.has_lost(records, scheme, is_key=is_key, **SHAPE) is not is_held
        assert bool(decoded[0, 1, 17, 3].isnan()) is not is_held
        assert not decoded[0, 0].isnan().any()


@pytest.mark.parametrize("is_damaged", [True, False])
def test_fp8_code_decodes_as_torch_has_it(is_damaged: bool) -> None:
    """The codes of NaN are there only where the scale's sign says so."""
    codes = torch.arange(256, dtype=torch.uint8)
    if not is_damaged:
        codes[[127, 255]] = 0
    records = torch.cat([codes, torch.tensor([-1.0 if is_damaged else 1.0]).view(torch.uint8)])[None]
    decoded = codec.decode(records, Scheme("fp8-head"), is_key=True, tokens=1, head_dim=256, dtype=torch.float32)
    assert torch.allclose(decoded[0, 0], codes.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("levels", [3, 15, 127, 255])
@settings(max_examples=40)
@given(span=st.floats(0, 65504 * 2.5, width=32))
@example(span=65504.0 * 3)
def test_float16_scale_covers_the_range_by_its_levels(levels: int, span: float) -> None:
    scale = float(float16_scale(torch.tensor([span]), levels))
    assert span < (levels + 0.25) * max(scale, 2.0**-24)
    if span < levels * 2.0**-35:
        assert scale == 0
    assert abs(scale - span / levels) <= span / levels * 2.0**-10 + 2.0**-24 or scale == torch.inf


@given(largest=st.floats(0, width=32, allow_infinity=False))
@example(largest=-0.0)
@example(largest=448.0)
@example(largest=float(np.nextafter(np.float32(448), np.float32(449))))
@example(largest=float(np.finfo(np.float32).max))
def test_power_of_two_is_the_least_that_brings_within_448(largest: float) -> None:
    scale, inverse = (float(number) for number in power_of_two(torch.tensor([largest])))
    assert scale * inverse == 1
    assert struct.pack("<d", scale)[:6] == bytes(6), "a power of two"
    assert largest <= 448 * scale
    assert largest > 224 * scale or scale == 2.0**-126


def test_missing_torch_is_one_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[hbm\]'"):
        runpy.run_path(str(Path(torch_kernels.__file__)))


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
        (torch.empty((2, 17), dtype=torch.uint8), "expected a tensor of .*, not of"),
        (torch.empty((2, 18), dtype=torch.int8), "expected a tensor of .*, not of"),
        (torch.empty((2, 18), dtype=torch.uint8, device="meta"), "expected a tensor of .*, not of"),
        (torch.empty((18, 2), dtype=torch.uint8).T, "must be contiguous"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out: torch.Tensor, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        codec.encode(torch.zeros((2, 1, 16)), Scheme("int8"), is_key=True, out=out)


def test_records_of_another_length_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"expected a tensor of .*, not of"):
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


def test_without_triton_cuda_goes_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvstore.kvcache.codecs.triton_kernels", None)
    placed: Any = OnCuda(torch.zeros((1, 16, 16)))
    assert codec._fused(placed, placed, Scheme("int8"), True) is None
