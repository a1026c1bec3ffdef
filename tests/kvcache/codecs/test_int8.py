"""int8, symmetric: to the bit as the plain definition, and within half a step."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from kvstore.kvcache.codecs import int8 as codec_int8
from kvstore.kvcache.codecs.schemes import Scheme
from tests.kvcache.codecs import plain_codec
from tests.kvcache.codecs.cases import floats, plain_records, plain_values

INT8 = Scheme("int8")


def encode(values: torch.Tensor) -> torch.Tensor:
    tokens, head_dim = values.shape[-2:]
    records = torch.zeros((*values.shape[:-2], tokens * head_dim + 2 * tokens), dtype=torch.uint8)
    codec_int8.encode(values.clone(), records)
    return records


def decode(records: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    values = torch.empty(shape)
    codec_int8.decode(records, values)
    return values


@settings(max_examples=25)
@given(values=floats((2, 3, 24), 2.0**22))
def test_records_are_those_of_the_plain_codec_and_within_half_a_step(values: np.ndarray) -> None:
    tensor = torch.from_numpy(values)
    records = encode(tensor)
    assert np.array_equal(records.numpy(), plain_records(tensor, INT8, is_key=True))
    decoded = decode(records, tensor.shape)
    assert np.array_equal(decoded.numpy(), plain_values(records, INT8, is_key=True, tokens=3, head_dim=24))
    steps = np.stack([plain_codec.steps(head, INT8, is_key=True) for head in values])
    assert (np.abs(decoded.numpy() - values) <= np.maximum(steps, 2.0**-24) * (0.5 + 2.0**-15)).all()


def test_float32_is_encoded_to_the_same_record_again() -> None:
    """The largest of a token has code 127, and 127 steps of float16 are exact in float32."""
    values = torch.randn(4, 16, 32, generator=torch.Generator().manual_seed(3))
    records = encode(values)
    assert torch.equal(encode(decode(records, values.shape)), records)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e7])
def test_what_a_token_cannot_hold_makes_all_of_it_nan_and_no_other(bad: float) -> None:
    values = torch.ones(2, 4, 8)
    values[1, 2, 3] = bad
    records = encode(values)
    assert np.array_equal(records.numpy(), plain_records(values, INT8, is_key=True))
    expected = torch.zeros(2, 4, 8, dtype=torch.bool)
    expected[1, 2] = True
    assert torch.equal(decode(records, values.shape).isnan(), expected)
