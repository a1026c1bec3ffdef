"""The codecs said plainly, a group at a time in numpy: the oracle of the fast ones and of the fused kernels, to the bit."""

from typing import Any

import numpy as np

from kvstore.kvcache.codecs.schemes import Scheme

Floats = np.ndarray[Any, Any]
F16, F32 = np.float16, np.float32


def e4m3_table() -> Floats:
    """The 127 finite numbers that e4m3fn has from 0 on, by code."""
    codes = np.arange(127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def encode(values: Floats, scheme: Scheme, *, is_key: bool) -> list[bytes]:
    """The records of `values` [heads, tokens, head_dim] float32, the heads of one tensor."""
    with np.errstate(all="ignore"):
        match scheme.kind:
            case "fp8-tensor":
                return [_encode_fp8(head, values) for head in values]
            case "fp8-head":
                return [_encode_fp8(head, head) for head in values]
            case "int8":
                return [_encode_int8(head) for head in values]
            case _:
                return [_encode_affine(head, scheme, is_key) for head in values]


def decode(record: bytes, scheme: Scheme, *, is_key: bool, tokens: int, head_dim: int) -> Floats:
    """float32 [tokens, head_dim], not yet brought within any dtype's range."""
    elements = tokens * head_dim
    if scheme.kind.startswith("fp8"):
        codes = np.frombuffer(record, np.uint8, elements).astype(int)
        scale = np.abs(np.frombuffer(record[elements:], F32)[0])
        table = np.append(e4m3_table(), np.nan)
        values = np.where(codes & 128, -1.0, 1.0) * table[codes & 127] * scale
        return np.array(values, F32).reshape(tokens, head_dim)
    if scheme.kind == "int8":
        scale = np.frombuffer(record[elements:], F16).astype(F32)
        codes = np.frombuffer(record, np.int8, elements).reshape(tokens, head_dim)
        return np.array(codes * scale[:, None], F32)
    codes = _unpack(record[: elements * scheme.bits // 8], scheme.bits)
    groups = _groups(scheme, is_key, tokens, head_dim)
    scale, minimum = np.frombuffer(record[elements * scheme.bits // 8 :], F16).astype(F32).reshape(2, len(groups))
    values = np.empty(elements, F32)
    for group, places in enumerate(groups):
        values[places] = codes[places].astype(F32) * scale[group] + minimum[group]
    return values.reshape(tokens, head_dim)


def steps(values: Floats, scheme: Scheme, *, is_key: bool) -> Floats:
    """The step (the decoded scale) of each element of one head, for the integer schemes."""
    tokens, head_dim = values.shape
    record = encode(values[None], scheme, is_key=is_key)[0]
    if scheme.kind == "int8":
        return np.repeat(np.frombuffer(record[values.size :], F16).astype(F32), head_dim).reshape(values.shape)
    groups = _groups(scheme, is_key, tokens, head_dim)
    scale = np.frombuffer(record[values.size * scheme.bits // 8 :], F16, len(groups))
    each = np.empty(values.size, F32)
    for group, places in enumerate(groups):
        each[places] = scale[group]
    return each.reshape(values.shape)


def _encode_fp8(head: Floats, spanned: Floats) -> bytes:
    finite = np.abs(spanned[np.isfinite(spanned)])
    largest = float(finite.max()) if finite.size else 0.0
    exponent = -126
    while largest > 448 * 2.0**exponent:
        exponent += 1
    is_damaged = finite.size < spanned.size
    codes = bytes(_e4m3(float(value) * 2.0**-exponent) for value in head.ravel())
    return codes + F32((-1 if is_damaged else 1) * 2.0**exponent).tobytes()


def _e4m3(value: float) -> int:
    if not np.isfinite(value):
        return 127
    distance = np.abs(e4m3_table() - abs(value))
    nearest = np.flatnonzero(distance == distance.min())
    # Of two as near, the even code.
    code = int(min(nearest, key=lambda code: code & 1))
    return code | (128 if np.signbit(value) else 0)


def _scale(span: np.float32, levels: int) -> np.float16:
    return F16(F32(span * F32(1 / levels)) + F32(2.0**-25 * (1 - 2.0**-9)))


def _inverse(scale: np.float16) -> np.float32:
    return F32(1) / max(F32(scale), F32(2.0**-24))


def _encode_int8(head: Floats) -> bytes:
    codes, scales = [], []
    for token in head:
        scale = _scale(np.abs(token).max(), 127)
        if np.isfinite(scale):
            codes.append(np.rint(token * _inverse(scale)).astype(np.int8))
        else:
            scale = F16(np.nan)
            codes.append(np.zeros(len(token), np.int8))
        scales.append(scale)
    return np.concatenate(codes).tobytes() + np.array(scales, F16).tobytes()


def _encode_affine(head: Floats, scheme: Scheme, is_key: bool) -> bytes:
    flat, codes, levels = head.ravel(), np.zeros(head.size, np.uint8), 2**scheme.bits - 1
    scales, minimums = [], []
    for places in _groups(scheme, is_key, *head.shape):
        group = flat[places]
        minimum = F16(group.min()) + F16(0)
        base = F32(minimum)
        scale = _scale(max(group.max() - base, F32(4 * levels) * (base - group.min())), levels)
        if np.isfinite(group).all() and np.isfinite(scale) and np.isfinite(minimum):
            codes[places] = np.rint((group - base) * _inverse(scale)).astype(np.uint8)
        else:
            scale, minimum = F16(np.nan), F16(0)
        scales.append(scale)
        minimums.append(minimum)
    return _pack(codes, scheme.bits) + np.array(scales, F16).tobytes() + np.array(minimums, F16).tobytes()


def _groups(scheme: Scheme, is_key: bool, tokens: int, head_dim: int) -> list[Floats]:
    """Places in the flat record of each group's elements, in the order of the metadata."""
    places = np.arange(tokens * head_dim).reshape(tokens, head_dim)
    size = scheme.group or head_dim
    if is_key and scheme.group:
        return [places[start : start + size, channel] for start in range(0, tokens, size) for channel in range(head_dim)]
    return [places[token, start : start + size] for token in range(tokens) for start in range(0, head_dim, size)]


def _pack(codes: Floats, bits: int) -> bytes:
    parts = codes.reshape(8 // bits, -1).astype(int)
    return bytes(sum(int(code) << (bits * index) for index, code in enumerate(column)) for column in parts.T)


def _unpack(payload: bytes, bits: int) -> Floats:
    return np.concatenate([[byte >> (bits * index) & (2**bits - 1) for byte in payload] for index in range(8 // bits)])
