"""Scales leave every code within its bits, and cost next to nothing."""

import struct

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.kvcache.codecs.scales import float16_inverse, float16_scale, is_finite, load, power_of_two, store


@pytest.mark.parametrize("levels", [3, 15, 127, 255])
@settings(max_examples=40)
@given(span=st.floats(0, 65504 * 2.5, width=32))
@example(span=65504.0 * 3)
def test_levels_of_the_scale_cover_the_range(levels: int, span: float) -> None:
    scale = float(float16_scale(torch.tensor([span]), levels))
    assert span < (levels + 0.25) * max(scale, 2.0**-24)
    if span < levels * 2.0**-35:
        assert scale == 0
    assert abs(scale - span / levels) <= span / levels * 2.0**-10 + 2.0**-24 or scale == torch.inf


@pytest.mark.parametrize("levels", [3, 15, 127, 255])
def test_a_scale_that_float16_holds_is_kept(levels: int) -> None:
    """So that what was decoded is encoded with the same scale again."""
    scales = torch.arange(0, 0x7C00 if levels < 255 else 0x7800, dtype=torch.int16).view(torch.float16)
    assert torch.equal(float16_scale(scales.float() * levels, levels), scales)


def test_scales_beyond_float16_are_infinite_and_nan_stays() -> None:
    scales = float16_scale(torch.tensor([1e6, torch.inf, torch.nan]), 15)
    assert scales[:2].tolist() == [torch.inf, torch.inf]
    assert scales[2].isnan()


def test_the_inverse_of_a_scale_is_finite() -> None:
    assert float16_inverse(torch.tensor([0.25, 2.0**-24, 0.0]).half()).tolist() == [4.0, 2.0**24, 2.0**24]


@given(largest=st.floats(0, width=32, allow_infinity=False))
@example(largest=-0.0)
@example(largest=448.0)
@example(largest=float(np.nextafter(np.float32(448), np.float32(449))))
@example(largest=float(np.finfo(np.float32).max))
def test_the_power_of_two_is_the_least_that_brings_within_448(largest: float) -> None:
    scale, inverse = (float(number) for number in power_of_two(torch.tensor([largest])))
    assert scale * inverse == 1
    assert struct.pack("<d", scale)[:6] == bytes(6), "a power of two"
    assert largest <= 448 * scale
    assert largest > 224 * scale or scale == 2.0**-126


@pytest.mark.parametrize(("numbers", "expected"), [([1.0, 0.0], True), ([1.0, torch.inf], False), ([torch.nan, 1.0], False), ([], True)])
def test_finite(numbers: list[float], expected: bool) -> None:
    assert is_finite(torch.tensor(numbers)) is expected


def test_metadata_lies_at_any_byte() -> None:
    records = torch.zeros((2, 11), dtype=torch.uint8)
    numbers = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float16)
    store(records, 3, numbers)
    assert torch.equal(load(records, 3, 2, torch.float16), numbers)
    assert records[:, :3].sum() == records[:, 7:].sum() == 0
