"""Encoders and decoders of records by torch operations: fp8, int8 and affine schemes, and the scales behind a record's
payload.

**torch** is imported here for all codecs; without it the import raises ConfigError instead of ImportError.

**Scales** are chosen so that codes need no clamping. A piece has few of them, so the number of operations counts, not
their size.

**fp8**: e4m3fn codes and a float32 scale per record, a power of two. The power of two costs no precision, because e4m3's
own steps are relative (at most one of its 15 binades is unused). Decoding is exact in bfloat16 and float32: codes are
the values' leading bits. A negative scale marks a record with NaN codes, so readers need not search for them. Source: e4m3 of
arXiv:2209.05433; powers of two as in OCP's microscaling formats.

**int8**, symmetric: codes from -127 to 127 and a float16 scale for each token of a record. |decoded - value| <= scale /
2, where scale is the token's max|value| / 127 in float16, whose smallest step is 6e-8. A token decodes to NaN if
float16 cannot hold its scale (a magnitude over 8.3 million) or if it has a NaN or infinity.

**Affine**: codes from 0 on with a float16 scale and minimum per group. int8a has a group per token; int4 and int2 are
grouped as in KIVI. value = code x scale + minimum, with |decoded - value| <= scale / 2. The minimum is rounded to
float16, so a constant group decodes to its rounded value. The scale is (maximum - minimum) / (2^bits - 1), or four
times the minimum's rounding error if that is more, in float16. A group decodes to NaN if it has a NaN or infinity, or
if float16 cannot hold its minimum or scale (usually a magnitude over 65504).

Two or four codes share a byte: byte i of n holds codes i, i + n, i + 2n ... of the flat record, the first in its low
bits, so whole words are packed and unpacked. After the payload come all scales, then all minimums, of groups in the
order of the flat record. Source: KIVI, arXiv:2402.02750: keys per channel, values per token.
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
"""Smallest positive float16, and the step of those under 2^-13."""
_ALMOST_HALF: Final = _LEAST / 2 * (1 - 2.0**-9)
"""Added before rounding to float16. The smallest scales are then rounded up, whose error would otherwise be whole
codes; scales that float16 holds exactly, and 0, do not change."""
_MANTISSA_CARRY: Final = 0x1FFFFF
"""Added to a float32's bits: raises the exponent if the mantissa is above that of 448 = 1.75 x 2^8, the largest
e4m3fn."""
_EXPONENT_BITS: Final = 0x7F800000
_EXPONENT_ONE: Final = 1 << 23
_INVERSE_BITS: Final = 0x7F000000
"""Sum of the exponent bits of a power of two and its inverse."""


def float16_scale(ranges: torch.Tensor, levels: int) -> torch.Tensor:
    """Return float16 steps for float32 `ranges` (>= 0): each range is less than `levels` + 1/4 of its steps, for up to
    255 levels.

    So rounding never overflows a code's bits. 0 for ranges under levels x 2^-34, infinity for steps over 65504, NaN for
    NaN.
    """
    return (ranges * (1 / levels)).add_(_ALMOST_HALF).half()


def float16_inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale in float32; for a scale of 0 a number that makes all codes 0."""
    return scale.float().clamp_(min=_LEAST).reciprocal_()


def power_of_two(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest power of two, from 2^-126, that scales float32 magnitudes (finite, or -0) into e4m3fn's
    448; and its inverse."""
    # abs(): the maximum of zeros may be -0.
    bits = largest.abs().view(torch.int32) + (_MANTISSA_CARRY - 8 * _EXPONENT_ONE)
    bits.clamp_(min=_EXPONENT_ONE).bitwise_and_(_EXPONENT_BITS)
    return bits.view(torch.float32), (_INVERSE_BITS - bits).view(torch.float32)


def is_finite(numbers: torch.Tensor) -> bool:
    """Return whether all numbers, which are not negative, are finite. isfinite() would take five operations."""
    return not numbers.numel() or float(numbers.amax()) < inf


def store(records: torch.Tensor, offset_bytes: int, metadata: torch.Tensor) -> None:
    """Write `metadata` [..., n] into `records` [..., record_bytes] at `offset_bytes`; records need no alignment."""
    data = metadata.contiguous().view(torch.uint8)
    records[..., offset_bytes : offset_bytes + data.shape[-1]].copy_(data)


def load(records: torch.Tensor, offset_bytes: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of the `count` numbers at `offset_bytes`, [..., count]."""
    # A copy: a view as wider numbers would need aligned records.
    data = records[..., offset_bytes : offset_bytes + count * dtype.itemsize].clone(memory_format=torch.contiguous_format)
    return data.view(dtype)


_SHIFT: Final = 1 << 7
_CODE_BITS: Final = 0x3F80 - 0x8000
"""Sign, lower four exponent bits and first three mantissa bits of a float16, as an int16 mask."""
_BIAS: Final = 2.0**8
"""float16's exponent bias is 15, e4m3's is 7."""
_NAN_CODE: Final = 0x7F
_LARGEST_CODE: Final = 448.0


def encode_fp8(floats: torch.Tensor, records: torch.Tensor, *, per_tensor: bool) -> None:
    """Encode float32 [..., tokens, head_dim] as records; overwrites `floats`. `per_tensor`: one scale for axes -3
    (heads) to -1, else -2 to -1."""
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
    """Decode records to float32 [..., tokens, head_dim], with magnitudes clamped to `limit`."""
    tokens, head_dim = floats.shape[-2:]
    codes = records[..., : tokens * head_dim].unflatten(-1, (tokens, head_dim))
    scale = load(records, tokens * head_dim, 1, torch.float32).unsqueeze(-1)
    # torch's own conversion is six times slower. A code's bits, read as a float16, are its value / 2^8, also for subnormals.
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
    # Two passes: abs() would copy all numbers, and aminmax is ten times slower.
    return torch.maximum(floats.amax(axes, keepdim=True), -floats.amin(axes, keepdim=True))


_INT8_LEVELS: Final = 127


def encode_int8(floats: torch.Tensor, records: torch.Tensor) -> None:
    """Encode float32 [..., tokens, head_dim] as records; overwrites `floats`."""
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
    """Decode records to float32 [..., tokens, head_dim]."""
    tokens, head_dim = floats.shape[-2:]
    floats.copy_(records[..., : tokens * head_dim].view(torch.int8).unflatten(-1, (tokens, head_dim)))
    floats.mul_(load(records, tokens * head_dim, tokens, torch.float16).float().unsqueeze(-1))


_MASKS: Final = {4: 0x0F0F0F0F, 2: 0x03030303}


def encode_affine(floats: torch.Tensor, records: torch.Tensor, *, bits: int, group: int, along_tokens: bool) -> None:
    """Encode float32 [..., tokens, head_dim] as records; overwrites `floats`. A group is `group` tokens of a
    channel, or channels of a token."""
    groups, axis = _groups(floats, group, along_tokens)
    lowest = groups.amin(axis, keepdim=True)
    # Plus 0: the minimum of several zeros may be either zero, and equal values must have equal records.
    minimum = lowest.half().add_(0.0)
    base = minimum.float()
    levels = 2**bits - 1
    # The minimum may be rounded up above the lowest value, by at most a quarter of a step, so its code is still 0.
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
    """Decode records to float32 [..., tokens, head_dim]."""
    payload_bytes = floats.shape[-2] * floats.shape[-1] * bits // 8
    _unpack(records[..., :payload_bytes], floats.flatten(-2), bits)
    groups, axis = _groups(floats, group, along_tokens)
    shape = list(groups.shape[-3:])
    shape[axis] = 1
    count = shape[0] * shape[1] * shape[2]
    scale, minimum = load(records, payload_bytes, 2 * count, torch.float16).float().unflatten(-1, (2, *shape)).unbind(-4)
    groups.mul_(scale).add_(minimum)


def _groups(floats: torch.Tensor, group: int, along_tokens: bool) -> tuple[torch.Tensor, int]:
    """Return a view of `floats` with a separate axis for groups, and that axis."""
    return (floats.unflatten(-2, (-1, group)), -2) if along_tokens else (floats.unflatten(-1, (-1, group)), -1)


def _pack(floats: torch.Tensor, payload: torch.Tensor, bits: int) -> None:
    """Pack whole float32 numbers [..., n] of `bits` bits into bytes [..., n * bits / 8]."""
    if bits == 8:
        # Through int16: torch has no vectorised conversion from float32 to uint8.
        payload.copy_(floats.to(torch.int16))
        return
    first, *others = floats.to(torch.int8).view(torch.int32).chunk(8 // bits, -1)
    for index, codes in enumerate(others, 1):
        first.bitwise_or_(codes.bitwise_left_shift_(index * bits))
    payload.copy_(first.view(torch.uint8))


def _unpack(payload: torch.Tensor, floats: torch.Tensor, bits: int) -> None:
    """Reverse `_pack`."""
    if bits == 8:
        floats.copy_(payload)
        return
    packed = payload.clone(memory_format=torch.contiguous_format).view(torch.int32)
    codes = torch.empty(floats.shape, dtype=torch.uint8, device=floats.device)
    for index, part in enumerate(codes.view(torch.int32).chunk(8 // bits, -1)):
        torch.bitwise_right_shift(packed, index * bits, out=part).bitwise_and_(_MASKS[bits])
    floats.copy_(codes)
