"""fp8: to the bit as the plain definition, within e4m3's relative error, the same again when encoded again."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kvstore.kvcache.codecs import fp8 as codec_fp8
from kvstore.kvcache.codecs.schemes import Scheme
from tests.kvcache.codecs.cases import floats, plain_records, plain_values

F32_MAX = torch.finfo(torch.float32).max
SHAPE = {"tokens": 3, "head_dim": 8}


def encode(values: torch.Tensor, *, per_tensor: bool) -> torch.Tensor:
    records = torch.zeros((*values.shape[:-2], values.shape[-2] * values.shape[-1] + 4), dtype=torch.uint8)
    codec_fp8.encode(values.clone(), records, per_tensor=per_tensor)
    return records


def decode(records: torch.Tensor, shape: tuple[int, ...], limit: float = F32_MAX) -> torch.Tensor:
    values = torch.empty(shape)
    codec_fp8.decode(records, values, limit=limit)
    return values


def scheme(per_tensor: bool) -> Scheme:
    return Scheme("fp8-tensor" if per_tensor else "fp8-head")


@pytest.mark.parametrize("per_tensor", [True, False])
@settings(max_examples=25)
@given(values=floats((2, 2, 3, 8), 2.0**100))
def test_records_are_those_of_the_plain_codec_and_within_its_error(per_tensor: bool, values: np.ndarray) -> None:
    """A sixteenth of the value, or half of e4m3's least step, 2^-10 of the scale, where it is subnormal."""
    tensor = torch.from_numpy(values)
    records = encode(tensor, per_tensor=per_tensor)
    assert np.array_equal(records.numpy(), plain_records(tensor, scheme(per_tensor), is_key=True))
    decoded = decode(records, values.shape).numpy()
    assert np.array_equal(decoded, plain_values(records, scheme(per_tensor), is_key=True, **SHAPE))
    scale = records[..., 24:].clone().view(torch.float32).numpy()[..., None]
    assert (np.abs(decoded - values) <= np.maximum(np.abs(values) / 16, scale * 2.0**-10)).all()
    again = decode(encode(torch.from_numpy(decoded), per_tensor=per_tensor), values.shape).numpy()
    assert np.array_equal(again, decoded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_was_decoded_is_encoded_to_the_same_values_again(dtype: torch.dtype) -> None:
    """Scales are powers of two and codes have four bits: bfloat16 holds them exactly."""
    values = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(4)).to(dtype)
    once = decode(encode(values.float(), per_tensor=False), values.shape).to(dtype)
    twice = decode(encode(once.float(), per_tensor=False), values.shape).to(dtype)
    assert torch.equal(once, twice)


@pytest.mark.parametrize("is_damaged", [True, False])
def test_every_code_decodes_as_torch_has_it(is_damaged: bool) -> None:
    """The codes of NaN are there only where the scale's sign says so."""
    codes = torch.arange(256, dtype=torch.uint8)
    if not is_damaged:
        codes[[127, 255]] = 0
    scale = torch.tensor([-1.0 if is_damaged else 1.0]).view(torch.uint8)
    decoded = decode(torch.cat([codes, scale])[None], (1, 1, 256))
    assert torch.allclose(decoded[0, 0], codes.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("per_tensor", [True, False])
def test_nan_stays_nan_and_infinity_becomes_it_and_nothing_else_changes(per_tensor: bool) -> None:
    values = torch.randn(2, 2, 3, 8, generator=torch.Generator().manual_seed(5))
    clean = decode(encode(values, per_tensor=per_tensor), values.shape)
    bad = torch.zeros(values.shape, dtype=torch.bool)
    for place, number in (((0, 1, 2, 3), torch.nan), ((0, 1, 0, 0), torch.inf), ((1, 0, 1, 7), -torch.inf)):
        bad[place] = True
        clean[place] = torch.nan
        values[place] = number
    records = encode(values, per_tensor=per_tensor)
    assert np.array_equal(records.numpy(), plain_records(values, scheme(per_tensor), is_key=True))
    decoded = decode(records, values.shape)
    assert torch.equal(decoded.isnan(), bad)
    # Two numbers next to the infinite ones may have set the scale before; here they did not.
    assert torch.allclose(decoded, clean, rtol=0, atol=0, equal_nan=True)


def test_nothing_but_nan_decodes_to_nan() -> None:
    assert decode(encode(torch.full((1, 2, 8), torch.nan), per_tensor=False), (1, 2, 8)).isnan().all()


@pytest.mark.parametrize("limit", [65504.0, F32_MAX])
def test_what_a_step_rounds_beyond_the_dtype_is_its_largest(limit: float) -> None:
    values = torch.tensor([[[limit, -limit, 1.0, limit / 2]]])
    decoded = decode(encode(values, per_tensor=False), values.shape, limit)
    assert decoded.isfinite().all()
    assert decoded[0, 0, 0] == limit
    assert decoded[0, 0, 1] == -limit


def test_no_records_are_decoded_to_none() -> None:
    assert decode(torch.empty((0, 20), dtype=torch.uint8), (0, 2, 8)).shape == (0, 2, 8)
