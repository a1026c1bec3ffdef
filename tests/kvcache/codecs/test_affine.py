"""Codes with a scale and a minimum: int8a, int4 and int2, to the bit as the plain definition, and within half a step."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kvstore.kvcache.codecs import affine as codec_affine
from kvstore.kvcache.codecs.schemes import Scheme
from tests.kvcache.codecs import plain_codec
from tests.kvcache.codecs.cases import floats, plain_records

CASES = [Scheme("int8a"), Scheme("int4", 16), Scheme("int2", 16), Scheme("int4", 32)]


def encode(values: torch.Tensor, scheme: Scheme, is_key: bool) -> torch.Tensor:
    tokens, head_dim = values.shape[-2:]
    size = scheme.record_bytes(is_key, tokens=tokens, head_dim=head_dim, dtype_bytes=4)
    records = torch.zeros((*values.shape[:-2], size), dtype=torch.uint8)
    group, along_tokens = scheme.group or head_dim, bool(scheme.group and is_key)
    codec_affine.encode(values.float().clone(), records, bits=scheme.bits, group=group, along_tokens=along_tokens)
    return records


def decode(records: torch.Tensor, scheme: Scheme, is_key: bool, shape: torch.Size) -> torch.Tensor:
    values = torch.empty(shape)
    group, along_tokens = scheme.group or shape[-1], bool(scheme.group and is_key)
    codec_affine.decode(records, values, bits=scheme.bits, group=group, along_tokens=along_tokens)
    return values


@pytest.mark.parametrize("scheme", CASES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("is_key", [True, False])
@settings(max_examples=10)
@given(values=floats((2, 32, 32)))
def test_records_are_those_of_the_plain_codec_and_within_half_a_step(scheme: Scheme, is_key: bool, values: np.ndarray) -> None:
    tensor = torch.from_numpy(values)
    records = encode(tensor, scheme, is_key)
    assert np.array_equal(records.numpy(), plain_records(tensor, scheme, is_key=is_key))
    decoded = decode(records, scheme, is_key, tensor.shape)
    plain = [plain_codec.decode(row.tobytes(), scheme, is_key=is_key, tokens=32, head_dim=32) for row in records.numpy()]
    assert np.array_equal(decoded.numpy(), np.stack(plain))
    steps = np.stack([plain_codec.steps(head, scheme, is_key=is_key) for head in values])
    # Where the step is 0, ranges are less than a quarter of the least one; float32 rounds code x scale + minimum.
    rounding = np.abs(values) * 2.0**-23
    assert (np.abs(decoded.numpy() - values) <= np.maximum(steps, 2.0**-24) * (0.5 + 2.0**-15) + rounding).all()


@pytest.mark.parametrize("scheme", CASES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("constant", [0.0, -1.0, 0.333, 1e-7, -40_000.0, 65_504.0])
def test_a_constant_group_decodes_to_its_value_in_float16(scheme: Scheme, constant: float) -> None:
    values = torch.full((1, 32, 32), constant)
    decoded = decode(encode(values, scheme, True), scheme, True, values.shape)
    if float(values[0, 0, 0].half()) == float(values[0, 0, 0]):
        assert torch.equal(decoded, values)
    else:
        assert (decoded - values).abs().max() <= max(abs(constant) * 2.0**-11, 2.0**-25)


@pytest.mark.parametrize("scheme", CASES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30, -70_000.0])
def test_what_a_group_cannot_hold_makes_all_of_it_nan_and_nothing_else(scheme: Scheme, is_key: bool, bad: float) -> None:
    values = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(1))
    values[1, 17, 3] = bad
    records = encode(values, scheme, is_key)
    assert np.array_equal(records.numpy(), plain_records(values, scheme, is_key=is_key))
    lost = decode(records, scheme, is_key, values.shape).isnan()
    expected = torch.zeros_like(lost)
    size = scheme.group or 32
    if is_key and scheme.group:
        expected[1, 17 // size * size : 17 // size * size + size, 3] = True
    else:
        expected[1, 17, :size] = True
    assert torch.equal(lost, expected)


@pytest.mark.parametrize("scheme", CASES, ids=lambda scheme: scheme.name)
def test_float32_is_encoded_to_the_same_record_again(scheme: Scheme) -> None:
    """The least of a group has code 0 and the largest the last code, and float16 holds the scale and the minimum."""
    values = torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(2))
    records = encode(values, scheme, True)
    assert torch.equal(encode(decode(records, scheme, True, values.shape), scheme, True), records)
