"""Codes from 0 on with a float16 scale and minimum a group: int8a (a group is a token), and int4 and int2 grouped as KIVI does.

value = code x scale + minimum, with |decoded - value| <= scale / 2. The minimum is rounded to float16, so that a constant group decodes to
its value so rounded; scale is (maximum - minimum) / (2^bits - 1), or four times what the minimum lost by rounding where that is more,
in float16. A group with a NaN or an infinity, or whose minimum or scale float16 cannot hold (a magnitude over 65504, as a
rule), decodes to NaN.

Two or four codes share a byte: byte i of n holds codes i, i + n, i + 2n ... of the flat record, the first in its low bits, so
that they are packed and unpacked by whole words. Behind the payload come all scales, then all minimums, of groups in the order of the
flat record. Source: KIVI, arXiv:2402.02750: keys per channel, values per token.
"""

from typing import Final

from kvstore.kvcache.codecs.scales import float16_inverse, float16_scale, is_finite, load, store
from kvstore.kvcache.codecs.torch_library import torch

_MASKS: Final = {4: 0x0F0F0F0F, 2: 0x03030303}


def encode(floats: torch.Tensor, records: torch.Tensor, *, bits: int, group: int, along_tokens: bool) -> None:
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


def decode(records: torch.Tensor, floats: torch.Tensor, *, bits: int, group: int, along_tokens: bool) -> None:
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
