"""The codecs as fused Triton kernels for CUDA, one per direction: values are read once, records written once.

Results are bit-identical to `torch_kernels.py`, so kernels are launched without fused multiply-add. A program handles
whole groups. e4m3 is encoded and decoded by integer operations, which any GPU supports. Record shapes that `serves`
rejects go through torch. The module imports triton, so `codec.py` imports it only with CUDA.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,attr-defined"
# Kernels are written in Triton's language, whose types mypy does not know.

from typing import Final

import triton
import triton.language as tl

from kvstore.kvcache.codecs.schemes import Scheme
from kvstore.kvcache.codecs.torch_kernels import torch

_MAX_TILE: Final = 8192
"""Elements of a program's tile: 64 registers a thread with 4 warps."""
_MAX_HEAD_DIM: Final = 1024
_MAX_KEY_TOKENS: Final = 256
_CHANNELS: Final = 32
"""Channels of a tile of grouped K: 64 bytes of bfloat16, two memory sectors."""
_BYTES: Final = 1024
"""Payload bytes that a program decodes."""
_LAUNCH: Final = {"num_warps": 4, "enable_fp_fusion": False}


def serves(values: torch.Tensor, records: torch.Tensor, scheme: Scheme, *, is_key: bool) -> bool:
    """Return whether the kernels support the shape: sizes fit a tile, halves or quarters of records are whole
    tokens, and scales are aligned."""
    tokens, head_dim = values.shape[-2:]
    alignment = 4 if scheme.kind.startswith("fp8") else 2
    if any(number % alignment for number in (records.data_ptr(), *records.stride()[:-1], tokens * head_dim * scheme.bits // 8)):
        return False
    if scheme.is_grouped and is_key:
        return bool(tokens <= _MAX_KEY_TOKENS and tokens & (tokens - 1) == 0)
    return bool(head_dim <= _MAX_HEAD_DIM and tokens % (8 // scheme.bits) == 0)


def encode(values: torch.Tensor, scheme: Scheme, *, is_key: bool, out: torch.Tensor) -> None:
    """Encode `values` [..., tokens, head_dim] into `out`, like `codec.encode`, for shapes that `serves` accepts."""
    tokens, head_dim = values.shape[-2:]
    places = (values, _offsets(values, 2), out, _offsets(out, 1), values.stride(-2), values.stride(-1))
    count = out.shape[:-1].numel()
    padded = triton.next_power_of_2(head_dim)
    with torch.cuda.device_of(values):
        if not count:
            return
        if scheme.kind.startswith("fp8"):
            span = values.shape[-3] if scheme.kind == "fp8-tensor" else 1
            _encode_fp8[(count // span,)](*places, span, tokens, head_dim, _rows(tokens, padded), padded, **_LAUNCH)
        elif scheme.is_grouped and is_key:
            grid = (count, triton.cdiv(head_dim, _CHANNELS))
            _encode_channels[grid](*places, tokens, head_dim, _CHANNELS, scheme.group, scheme.bits, **_LAUNCH)
        else:
            share = tokens * scheme.bits // 8
            rows = _rows(share, padded * 8 // scheme.bits)
            grid = (count, triton.cdiv(share, rows))
            group = scheme.group or padded
            _encode_tokens[grid](*places, tokens, head_dim, rows, padded, group, scheme.bits, scheme.kind == "int8", **_LAUNCH)


def decode(records: torch.Tensor, scheme: Scheme, *, is_key: bool, out: torch.Tensor) -> None:
    """Decode `records` into `out` [..., tokens, head_dim], like `codec.decode`, for shapes that `serves` accepts."""
    tokens, head_dim = out.shape[-2:]
    places = (records, _offsets(records, 1), out, _offsets(out, 2), out.stride(-2), out.stride(-1), torch.finfo(out.dtype).max)
    grid = (records.shape[:-1].numel(), triton.cdiv(tokens * head_dim * scheme.bits // 8, _BYTES))
    with torch.cuda.device_of(records):
        if not grid[0]:
            return
        if scheme.kind.startswith("fp8"):
            _decode_fp8[grid](*places, tokens, head_dim, _BYTES, **_LAUNCH)
        else:
            along_tokens = is_key and scheme.is_grouped
            group = scheme.group or head_dim
            _decode_integers[grid](*places, tokens, head_dim, _BYTES, group, scheme.bits, along_tokens, scheme.kind == "int8", **_LAUNCH)


def _rows(tokens: int, row_elements: int) -> int:
    """Return the tokens of a program's tile, a power of two."""
    return int(max(1, min(triton.next_power_of_2(tokens), _MAX_TILE // row_elements)))


def _offsets(tensor: torch.Tensor, trailing: int) -> torch.Tensor:
    """Return each record's start: offsets in elements, int64, over the axes before the `trailing` ones, in order,
    for any strides."""
    offsets = torch.zeros(1, dtype=torch.int64, device=tensor.device)
    for size, stride in zip(tensor.shape[:-trailing], tensor.stride()[:-trailing], strict=True):
        steps = torch.arange(size, dtype=torch.int64, device=tensor.device) * stride
        offsets = (offsets[:, None] + steps).flatten()
    return offsets


@triton.jit
def _nearest(x):
    """Round to the nearest whole number, ties to even, for magnitudes under 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _affine(x, is_there, axis: tl.constexpr, levels: tl.constexpr, symmetric: tl.constexpr):
    """Return codes (int32), and the bits of scale and minimum (int16, axis kept as 1), of groups along axis. Masked
    elements are 0."""
    is_finite = tl.abs(x) <= 3.4028234663852886e38
    is_sound = tl.min(is_finite.to(tl.int32), axis, keep_dims=True) > 0
    clean = tl.where(is_finite, x, 0.0)
    if symmetric:
        ranges = tl.max(tl.abs(clean), axis, keep_dims=True)
        minimum = (ranges * 0.0).to(tl.float16)
        base = minimum.to(tl.float32)
    else:
        low = tl.min(tl.where(is_there, clean, float("inf")), axis, keep_dims=True)
        high = tl.max(tl.where(is_there, clean, float("-inf")), axis, keep_dims=True)
        minimum = low.to(tl.float16)
        base = minimum.to(tl.float32)
        ranges = tl.maximum(high - base, (base - low) * (4.0 * levels))
    scale = (ranges * (1.0 / levels) + 2.9744114726781845e-08).to(tl.float16)
    wide = scale.to(tl.float32)
    is_sound = is_sound & (wide <= 65504.0)
    codes = _nearest((clean - base) * tl.div_rn(1.0, tl.maximum(wide, 5.960464477539063e-08)))
    codes = tl.where(is_sound, codes, 0.0).to(tl.int32)
    scale_bits = tl.where(is_sound, scale.to(tl.int16, bitcast=True), 0x7E00)
    minimum_bits = tl.where(is_sound & (base != 0.0), minimum.to(tl.int16, bitcast=True), 0)
    return codes, scale_bits.to(tl.int16), minimum_bits.to(tl.int16)


@triton.jit
def _encode_tokens(
    values, places, records, made, token_stride, channel_stride, tokens: tl.constexpr, head_dim: tl.constexpr,
    rows: tl.constexpr, padded: tl.constexpr, group_size: tl.constexpr, bits: tl.constexpr, symmetric: tl.constexpr,
):  # fmt: skip
    """Encode int8, int8a and grouped V, with groups along channels. A program has `rows` tokens of each part of the
    record that shares bytes."""
    parts: tl.constexpr = 8 // bits
    levels: tl.constexpr = 127 if symmetric else 2**bits - 1
    groups: tl.constexpr = padded // group_size
    source = values + tl.load(places + tl.program_id(0))
    record = records + tl.load(made + tl.program_id(0))
    line = tl.arange(0, parts * rows)
    row = tl.program_id(1) * rows + line % rows
    token = (line // rows) * (tokens // parts) + row
    channel = tl.arange(0, padded)
    is_there = (row < tokens // parts)[:, None] & (channel < head_dim)[None, :]
    x = tl.load(source + token[:, None] * token_stride + channel[None, :] * channel_stride, mask=is_there, other=0.0).to(tl.float32)
    shape: tl.constexpr = (parts * rows, groups, group_size)
    codes, scale, minimum = _affine(tl.reshape(x, shape), tl.reshape(is_there, shape), 2, levels, symmetric)

    per_token: tl.constexpr = (head_dim + group_size - 1) // group_size
    group = tl.arange(0, groups)
    metadata = (record + tokens * head_dim * bits // 8).to(tl.pointer_type(tl.int16))
    at = metadata + token[:, None] * per_token + group[None, :]
    is_group = (row < tokens // parts)[:, None] & (group < per_token)[None, :]
    tl.store(at, tl.reshape(scale, (parts * rows, groups)), mask=is_group)
    if not symmetric:
        tl.store(at + tokens * per_token, tl.reshape(minimum, (parts * rows, groups)), mask=is_group)

    shift = tl.arange(0, parts) * bits
    packed = tl.sum(tl.reshape(codes, (parts, rows, padded)) << shift[:, None, None], 0)
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    is_byte = (row < tokens // parts)[:, None] & (channel < head_dim)[None, :]
    tl.store(record + row[:, None] * head_dim + channel[None, :], packed.to(tl.uint8), mask=is_byte)


@triton.jit
def _encode_channels(
    values, places, records, made, token_stride, channel_stride, tokens: tl.constexpr, head_dim: tl.constexpr,
    channels: tl.constexpr, group_size: tl.constexpr, bits: tl.constexpr,
):  # fmt: skip
    """Encode grouped K, with groups along tokens. A program has `channels` channels of all tokens of a record."""
    parts: tl.constexpr = 8 // bits
    groups: tl.constexpr = tokens // group_size
    source = values + tl.load(places + tl.program_id(0))
    record = records + tl.load(made + tl.program_id(0))
    token = tl.arange(0, tokens)
    channel = tl.program_id(1) * channels + tl.arange(0, channels)
    is_there = (token >= 0)[:, None] & (channel < head_dim)[None, :]
    x = tl.load(source + token[:, None] * token_stride + channel[None, :] * channel_stride, mask=is_there, other=0.0).to(tl.float32)
    shape: tl.constexpr = (groups, group_size, channels)
    codes, scale, minimum = _affine(tl.reshape(x, shape), tl.reshape(is_there, shape), 1, 2**bits - 1, False)

    group = tl.arange(0, groups)
    metadata = (record + tokens * head_dim * bits // 8).to(tl.pointer_type(tl.int16))
    at = metadata + group[:, None] * head_dim + channel[None, :]
    is_group = (group >= 0)[:, None] & (channel < head_dim)[None, :]
    tl.store(at, tl.reshape(scale, (groups, channels)), mask=is_group)
    tl.store(at + groups * head_dim, tl.reshape(minimum, (groups, channels)), mask=is_group)

    shift = tl.arange(0, parts) * bits
    packed = tl.sum(tl.reshape(codes, (parts, tokens // parts, channels)) << shift[:, None, None], 0)
    row = tl.arange(0, tokens // parts)
    is_byte = (row >= 0)[:, None] & (channel < head_dim)[None, :]
    tl.store(record + row[:, None] * head_dim + channel[None, :], packed.to(tl.uint8), mask=is_byte)


@triton.jit
def _encode_fp8(
    values, places, records, made, token_stride, channel_stride, span, tokens: tl.constexpr, head_dim: tl.constexpr,
    rows: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    """Encode fp8. A program has the `span` records that share a scale: it reads them for the largest magnitude, then
    again, from cache."""
    first = tl.program_id(0) * span
    channel = tl.arange(0, padded)
    largest = 0.0
    sound = 1
    for index in range(first, first + span):
        source = values + tl.load(places + index)
        for start in range(0, tokens, rows):
            row = start + tl.arange(0, rows)
            is_there = (row < tokens)[:, None] & (channel < head_dim)[None, :]
            x = tl.load(source + row[:, None] * token_stride + channel[None, :] * channel_stride, mask=is_there, other=0.0).to(tl.float32)
            is_finite = tl.abs(x) <= 3.4028234663852886e38
            sound = tl.minimum(sound, tl.min(tl.min(is_finite.to(tl.int32), 1), 0))
            largest = tl.maximum(largest, tl.max(tl.max(tl.where(is_finite, tl.abs(x), 0.0), 1), 0))
    # As torch_kernels.power_of_two.
    power = tl.maximum(largest.to(tl.int32, bitcast=True) + (0x1FFFFF - (8 << 23)), 1 << 23) & 0x7F800000
    inverse = (0x7F000000 - power).to(tl.float32, bitcast=True)
    told = tl.where(sound > 0, power, power | (-1 << 31))
    for index in range(first, first + span):
        source = values + tl.load(places + index)
        record = records + tl.load(made + index)
        for start in range(0, tokens, rows):
            row = start + tl.arange(0, rows)
            is_there = (row < tokens)[:, None] & (channel < head_dim)[None, :]
            x = tl.load(source + row[:, None] * token_stride + channel[None, :] * channel_stride, mask=is_there, other=0.0).to(tl.float32)
            code = _e4m3(x * inverse)
            code = tl.where(tl.abs(x) <= 3.4028234663852886e38, code, 0x7F)
            tl.store(record + row[:, None] * head_dim + channel[None, :], code.to(tl.uint8), mask=is_there)
        tl.store((record + tokens * head_dim).to(tl.pointer_type(tl.int32)), told)


@triton.jit
def _e4m3(y):
    """Return the code (int32) nearest to float32 magnitudes up to 448, ties to even."""
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # A normal number loses 20 of its 23 mantissa bits, and its exponent bias changes from 127 to 7; below 2^-6 steps are 2^-9.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    subnormal = _nearest(tl.minimum(tl.abs(y), 1.0) * 512.0).to(tl.int32)
    return tl.where(size >= (127 - 6) << 23, normal, subnormal) | ((bits >> 24) & 0x80)


@triton.jit
def _decode_fp8(
    records,
    made,
    values,
    places,
    token_stride,
    channel_stride,
    limit,
    tokens: tl.constexpr,
    head_dim: tl.constexpr,
    byte_count: tl.constexpr,
):
    record = records + tl.load(made + tl.program_id(0))
    target = values + tl.load(places + tl.program_id(0))
    element = tl.program_id(1) * byte_count + tl.arange(0, byte_count)
    is_there = element < tokens * head_dim
    code = tl.load(record + element, mask=is_there, other=0).to(tl.int32)
    scale = tl.abs(tl.load((record + tokens * head_dim).to(tl.pointer_type(tl.float32))))
    # A code's bits, read as a float16, are its value / 2^8, also for subnormals.
    small = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    x = tl.minimum(tl.maximum((small * 256.0) * scale, -limit), limit)
    x = tl.where((code & 0x7F) == 0x7F, float("nan"), x)
    token = element // head_dim
    at = target + token * token_stride + (element % head_dim) * channel_stride
    tl.store(at, x.to(values.dtype.element_ty), mask=is_there)


@triton.jit
def _decode_integers(
    records, made, values, places, token_stride, channel_stride, limit, tokens: tl.constexpr, head_dim: tl.constexpr,
    byte_count: tl.constexpr, group_size: tl.constexpr, bits: tl.constexpr, along_tokens: tl.constexpr, signed: tl.constexpr,
):  # fmt: skip
    """Decode int8, int8a, int4 and int2. A program has `byte_count` bytes of a record, and all codes in each."""
    parts: tl.constexpr = 8 // bits
    share: tl.constexpr = tokens * head_dim // parts
    count: tl.constexpr = tokens * head_dim // group_size
    record = records + tl.load(made + tl.program_id(0))
    target = values + tl.load(places + tl.program_id(0))
    place = tl.program_id(1) * byte_count + tl.arange(0, byte_count)
    is_there = place < share
    packed = tl.load(record + place, mask=is_there, other=0)
    packed = packed.to(tl.int8, bitcast=True).to(tl.int32) if signed else packed.to(tl.int32)
    metadata = (record + share).to(tl.pointer_type(tl.float16))
    for part in tl.static_range(parts):
        element = place + part * share
        token = element // head_dim
        channel = element % head_dim
        if along_tokens:
            group = (token // group_size) * head_dim + channel
        else:
            group = token * (head_dim // group_size) + channel // group_size
        code = packed if bits == 8 else (packed >> (part * bits)) & (2**bits - 1)
        scale = tl.load(metadata + group, mask=is_there, other=0.0).to(tl.float32)
        x = code.to(tl.float32) * scale
        if not signed:
            x += tl.load(metadata + count + group, mask=is_there, other=0.0).to(tl.float32)
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -limit), limit), x)
        tl.store(target + token * token_stride + channel * channel_stride, x.to(values.dtype.element_ty), mask=is_there)
