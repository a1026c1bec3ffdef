"""Scales and minimums of quantised records: how they are rounded, and their bytes behind a record's payload.

Scales are such that codes need no clamping. A piece has few of them, so that the number of operations counts here, not their size.
Imported by the codecs only.
"""

from math import inf
from typing import Final

from kvstore.kvcache.codecs.torch_library import torch

_LEAST: Final = 2.0**-24
"""The least positive float16, and the step of those under 2^-13."""
_ALMOST_HALF: Final = _LEAST / 2 * (1 - 2.0**-9)
"""Added before rounding to float16, it makes that round up the smallest scales, whose error would be whole codes else; those that
float16 holds stay as they are, and so does 0."""
_MANTISSA_CARRY: Final = 0x1FFFFF
"""Added to a float32's bits, it raises the exponent where the mantissa is over that of 448 = 1.75 x 2^8, the largest e4m3fn."""
_EXPONENT_BITS: Final = 0x7F800000
_EXPONENT_ONE: Final = 1 << 23
_INVERSE_BITS: Final = 0x7F000000
"""Exponents of a power of two and of its inverse add up to it."""


def float16_scale(ranges: torch.Tensor, levels: int) -> torch.Tensor:
    """float16 steps for float32 `ranges` (>= 0): each is less than `levels` + 1/4 of its steps, for up to 255 levels.

    So no code leaves its bits by rounding. 0 for ranges under levels x 2^-34, infinity where a step is over 65504, NaN of NaN.
    """
    return (ranges * (1 / levels)).add_(_ALMOST_HALF).half()


def float16_inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale in float32, and for a scale of 0 a number with which all codes are 0."""
    return scale.float().clamp_(min=_LEAST).reciprocal_()


def power_of_two(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least power of two, from 2^-126 on, that brings float32 magnitudes (finite, or -0) within e4m3fn's 448; and its inverse."""
    # abs(): the largest of zeros may be the negative one.
    bits = largest.abs().view(torch.int32) + (_MANTISSA_CARRY - 8 * _EXPONENT_ONE)
    bits.clamp_(min=_EXPONENT_ONE).bitwise_and_(_EXPONENT_BITS)
    return bits.view(torch.float32), (_INVERSE_BITS - bits).view(torch.float32)


def is_finite(numbers: torch.Tensor) -> bool:
    """Whether all numbers, which are not negative, are finite. isfinite() would be five operations."""
    return not numbers.numel() or float(numbers.amax()) < inf


def store(records: torch.Tensor, offset_bytes: int, metadata: torch.Tensor) -> None:
    """Writes `metadata` [..., n] into `records` [..., record_bytes] from `offset_bytes` on; records need no alignment."""
    data = metadata.contiguous().view(torch.uint8)
    records[..., offset_bytes : offset_bytes + data.shape[-1]].copy_(data)


def load(records: torch.Tensor, offset_bytes: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """A copy of the `count` numbers from `offset_bytes` on, [..., count]."""
    # A copy, since a view as wider numbers would need aligned records.
    data = records[..., offset_bytes : offset_bytes + count * dtype.itemsize].clone(memory_format=torch.contiguous_format)
    return data.view(dtype)
