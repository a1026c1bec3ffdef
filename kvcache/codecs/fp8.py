"""fp8: e4m3fn codes and a float32 scale a record, a power of two.

A power of two costs no precision, since e4m3's own steps are relative (at most one of its 15 binades is unused), and decoding is then
exact in bfloat16 and float32: codes are the values' own leading bits. A negative scale says that the record has NaN codes, so
that readers need not look for them. Source: e4m3 of arXiv:2209.05433; powers of two as in OCP's microscaling formats.
"""

from typing import Final

from kvstore.kvcache.codecs.scales import is_finite, load, power_of_two, store
from kvstore.kvcache.codecs.torch_library import torch

_SHIFT: Final = 1 << 7
_CODE_BITS: Final = 0x3F80 - 0x8000
"""Sign, and where the low four exponent bits and the first three mantissa bits of a float16 lie (as an int16)."""
_BIAS: Final = 2.0**8
"""float16's exponents are biased by 15, e4m3's by 7."""
_NAN_CODE: Final = 0x7F
_LARGEST_CODE: Final = 448.0


def encode(floats: torch.Tensor, records: torch.Tensor, *, per_tensor: bool) -> None:
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


def decode(records: torch.Tensor, floats: torch.Tensor, *, limit: float) -> None:
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
