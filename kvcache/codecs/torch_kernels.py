"""Records of K and V by torch operations, a function each way for each kind of scheme, and the scales behind a record's payload.

torch for the codecs, which are imported only where tensors are encoded: missing, it is one ConfigError and not an ImportError.

Scales and minimums of quantised records: how they are rounded, and their bytes behind a record's payload.

Scales are such that codes need no clamping. A piece has few of them, so that the number of operations counts here, not their size.
Imported by the codecs only.

fp8: e4m3fn codes and a float32 scale a record, a power of two.

A power of two costs no precision, since e4m3's own steps are relative (at most one of its 15 binades is unused), and decoding is then
exact in bfloat16 and float32: codes are the values' own leading bits. A negative scale says that the record has NaN codes, so
that readers need not look for them. Source: e4m3 of arXiv:2209.05433; powers of two as in OCP's microscaling formats.

int8, symmetric: codes from -127 to 127 and a float16 scale for each token of a record.

|decoded - value| <= scale / 2, where scale is the token's max|value| / 127 in float16, whose least step is 6e-8. A token
whose scale float16 cannot hold (a magnitude over 8.3 million) or that has a NaN or infinity decodes to NaN.

Codes from 0 on with a float16 scale and minimum a group: int8a (a group is a token), and int4 and int2 grouped as KIVI does.

value = code x scale + minimum, with |decoded - value| <= scale / 2. The minimum is rounded to float16, so that a constant group decodes to
its value so rounded; scale is (maximum - minimum) / (2^bits - 1), or four times what the minimum lost by rounding where that is more,
in float16. A group with a NaN or an infinity, or whose minimum or scale float16 cannot hold (a magnitude over 65504, as a
rule), decodes to NaN.

Two or four codes share a byte: byte i of n holds codes i, i + n, i + 2n ... of the flat record, the first in its low bits, so
that they are packed and unpacked by whole words. Behind the payload come all scales, then all minimums, of groups in the order of the
flat record. Source: KIVI, arXiv:2402.02750: keys per channel, values per token.
"""

from math import inf
from typing import Final

from kvstore.protocol.errors import ConfigError
from kvstore.protocol.extras import install_line

try:
    import torch
except ImportError as missing:
    raise ConfigError(f"tensors are encoded and decoded with torch: {install_line('hbm')}") from missing

__all__ = ["torch"]

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


_SHIFT: Final = 1 << 7
_CODE_BITS: Final = 0x3F80 - 0x8000
"""Sign, and where the low four exponent bits and the first three mantissa bits of a float16 lie (as an int16)."""
_BIAS: Final = 2.0**8
"""float16's exponents are biased by 15, e4m3's by 7."""
_NAN_CODE: Final = 0x7F
_LARGEST_CODE: Final = 448.0


def encode_fp8(floats: torch.Tensor, records: torch.Tensor, *, per_tensor: bool) -> None:
    """float32 [..., tokens, head_dim] to records; overwrites `floats`. `per_tensor`: one scale for axes -3 (heads) to -1, else -2 to -1."""
    tokens, head_dim = floats.shape[-2:]
    axes = (-3, -2, -1) if per_tensor else (-2, -1)
    largest = _magnitude(floats, axes)
    sign = None
    if not is_finite(largest):
        sign = torch.where(largest.isfinite(), 1.0, -1.0)
        finite = floats.isfinite()
        largest = _magnitude(torch.where(finite, floats, 0.0), axes)
        floats.masked_fill_(~finite, torch.nan)
    scale, inverse = power_of_two(largest)
    floats.mul_(inverse)
    records[..., : tokens * head_dim].view(torch.float8_e4m3fn).unflatten(-1, (tokens, head_dim)).copy_(floats)
    told = scale if sign is None else scale * sign
    store(records, tokens * head_dim, told.expand(*floats.shape[:-2], 1, 1).flatten(-2))


def decode_fp8(records: torch.Tensor, floats: torch.Tensor, *, limit: float) -> None:
    """Records to float32 [..., tokens, head_dim] of magnitudes up to `limit`: what rounds beyond is brought back to it."""
    tokens, head_dim = floats.shape[-2:]
    codes = records[..., : tokens * head_dim].unflatten(-1, (tokens, head_dim))
    scale = load(records, tokens * head_dim, 1, torch.float32).unsqueeze(-1)
    # torch's own conversion is six times slower. A code's bits, moved to a float16's place, are its value / 2^8, subnormals too.
    bits = torch.empty(floats.shape, dtype=torch.int16, device=floats.device)
    bits.copy_(codes.view(torch.int8)).mul_(_SHIFT).bitwise_and_(_CODE_BITS)
    floats.copy_(bits.view(torch.float16))
    least, most = map(float, scale.aminmax()) if scale.numel() else (0.0, 0.0)
    if max(most, -least) * _LARGEST_CODE > limit:
        floats.mul_(_BIAS).mul_(scale.abs()).clamp_(-limit, limit)
    else:
        floats.mul_(scale.abs() * _BIAS)
    if least < 0:
        floats.masked_fill_(((codes & _NAN_CODE) == _NAN_CODE) & (scale < 0), torch.nan)


def _magnitude(floats: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    # Two passes: abs() would need a copy of them all, and aminmax is ten times slower.
    return torch.maximum(floats.amax(axes, keepdim=True), -floats.amin(axes, keepdim=True))


_INT8_LEVELS: Final = 127


def encode_int8(floats: torch.Tensor, records: torch.Tensor) -> None:
    """float32 [..., tokens, head_dim] to records; overwrites `floats`."""
    tokens, head_dim = floats.shape[-2:]
    scale = float16_scale(torch.maximum(floats.amax(-1, keepdim=True), -floats.amin(-1, keepdim=True)), _INT8_LEVELS)
    if not is_finite(scale):
        lost = ~scale.isfinite()
        scale.masked_fill_(lost, torch.nan)
        floats.masked_fill_(lost, 0.0)
    floats.mul_(float16_inverse(scale)).round_()
    records[..., : tokens * head_dim].view(torch.int8).unflatten(-1, (tokens, head_dim)).copy_(floats)
    store(records, tokens * head_dim, scale.squeeze(-1))


def decode_int8(records: torch.Tensor, floats: torch.Tensor) -> None:
    """Records to float32 [..., tokens, head_dim]."""
    tokens, head_dim = floats.shape[-2:]
    floats.copy_(records[..., : tokens * head_dim].view(torch.int8).unflatten(-1, (tokens, head_dim)))
    floats.mul_(load(records, tokens * head_dim, tokens, torch.float16).float().unsqueeze(-1))


_MASKS: Final = {4: 0x0F0F0F0F, 2: 0x03030303}


def encode_affine(floats: torch.Tensor, records: torch.Tensor, *, bits: int, group: int, along_tokens: bool) -> None:
    """float32 [..., tokens, head_dim] to records; overwrites `floats`. A group is `group` tokens of a channel, or channels of a token."""
    groups, axis = _groups(floats, group, along_tokens)
    lowest = groups.amin(axis, keepdim=True)
    # Plus 0: which zero is the least of several is not said, and equal values shall have equal records.
    minimum = lowest.half().add_(0.0)
    base = minimum.float()
    levels = 2**bits - 1
    # The minimum may be rounded up, above the lowest value: by a quarter of a step at most, so that its code is still 0.
    ranges = torch.maximum(groups.amax(axis, keepdim=True) - base, (base - lowest).mul_(4 * levels))
    scale = float16_scale(ranges, levels)
    if not is_finite(scale):
        lost = ~scale.isfinite()
        scale.masked_fill_(lost, torch.nan)
        minimum.masked_fill_(lost, 0.0)
        groups.masked_fill_(lost, 0.0)
        base.masked_fill_(lost, 0.0)
    groups.sub_(base).mul_(float16_inverse(scale)).round_()
    payload_bytes = floats.shape[-2] * floats.shape[-1] * bits // 8
    _pack(floats.flatten(-2), records[..., :payload_bytes], bits)
    count = scale.shape[-3:].numel()
    store(records, payload_bytes, scale.flatten(-3))
    store(records, payload_bytes + count * scale.itemsize, minimum.flatten(-3))


def decode_affine(records: torch.Tensor, floats: torch.Tensor, *, bits: int, group: int, along_tokens: bool) -> None:
    """Records to float32 [..., tokens, head_dim]."""
    payload_bytes = floats.shape[-2] * floats.shape[-1] * bits // 8
    _unpack(records[..., :payload_bytes], floats.flatten(-2), bits)
    groups, axis = _groups(floats, group, along_tokens)
    shape = list(groups.shape[-3:])
    shape[axis] = 1
    count = shape[0] * shape[1] * shape[2]
    scale, minimum = load(records, payload_bytes, 2 * count, torch.float16).float().unflatten(-1, (2, *shape)).unbind(-4)
    groups.mul_(scale).add_(minimum)


def _groups(floats: torch.Tensor, group: int, along_tokens: bool) -> tuple[torch.Tensor, int]:
    """A view of `floats` with groups along an axis of their own, and that axis."""
    return (floats.unflatten(-2, (-1, group)), -2) if along_tokens else (floats.unflatten(-1, (-1, group)), -1)


def _pack(floats: torch.Tensor, payload: torch.Tensor, bits: int) -> None:
    """Whole float32 numbers [..., n] of `bits` bits to bytes [..., n * bits / 8]."""
    if bits == 8:
        # By way of int16: from float32 to uint8 there is no vectorised conversion.
        payload.copy_(floats.to(torch.int16))
        return
    first, *others = floats.to(torch.int8).view(torch.int32).chunk(8 // bits, -1)
    for index, codes in enumerate(others, 1):
        first.bitwise_or_(codes.bitwise_left_shift_(index * bits))
    payload.copy_(first.view(torch.uint8))


def _unpack(payload: torch.Tensor, floats: torch.Tensor, bits: int) -> None:
    """The reverse of `_pack`."""
    if bits == 8:
        floats.copy_(payload)
        return
    packed = payload.clone(memory_format=torch.contiguous_format).view(torch.int32)
    codes = torch.empty(floats.shape, dtype=torch.uint8, device=floats.device)
    for index, part in enumerate(codes.view(torch.int32).chunk(8 // bits, -1)):
        torch.bitwise_right_shift(packed, index * bits, out=part).bitwise_and_(_MASKS[bits])
    floats.copy_(codes)
