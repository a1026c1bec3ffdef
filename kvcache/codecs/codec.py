"""Encodes tensors of K or V as records and decodes them, for every scheme and device. schemes.py defines records.

On the CPU, pieces of the tensor go through float32 scratch that stays in the cache, by torch operations, which release
the GIL. On CUDA one fused kernel is used if Triton is available (`triton_kernels.py`). tensor_value.py adds headers.
"""

from collections.abc import Iterator
from typing import Any, Final

from kvstore.kvcache.codecs.schemes import Scheme
from kvstore.kvcache.codecs.torch_kernels import decode_affine, decode_fp8, decode_int8, encode_affine, encode_fp8, encode_int8, load, torch
from kvstore.protocol.errors import InvalidArgument

__all__ = ["decode", "encode", "has_lost", "torch"]

_PIECE_ELEMENTS: Final = 1 << 18
"""Elements per pass and torch thread: 1 MiB of float32, in 2 MiB of L2 cache. With two threads half of it encodes
int8 at 0.9 of the speed, a quarter at 0.6 to 0.8, because splitting an operation costs microseconds."""
_LARGEST_OF_CODES: Final = 2.0**24
"""Upper bound of magnitudes that int8, int8a, int4 and int2 decode to: a float16 minimum and 255 float16 steps."""


def encode(values: torch.Tensor, scheme: Scheme, *, is_key: bool, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return records [..., record_bytes] (uint8) of `values` [..., tokens, head_dim], a tensor of floats with any
    strides.

    With fp8-tensor axis -3 is the heads that share a scale. `out` receives the records, on the device of `values`; its
    last axis is contiguous. Non-finite values never decode to finite ones: fp8 encodes each as NaN, the other schemes
    its whole group. A group beyond the range of float16 scales becomes NaN, too. 0 is preserved.

    Raises InvalidArgument: not floats, too few axes, `out` of another shape, groups that do not divide their axis, or
    misaligned raw records.
    """
    least = 3 if scheme.kind == "fp8-tensor" else 2
    if not values.is_floating_point() or values.element_size() > 4 or values.dim() < least:
        raise InvalidArgument(
            f"{scheme.name} encodes floats of up to 32 bits and {least} axes or more, not {values.dtype} of {values.dim()}"
        )
    tokens, head_dim = values.shape[-2:]
    size = scheme.record_bytes(is_key, tokens=tokens, head_dim=head_dim, dtype_bytes=values.element_size())
    records = _checked(out, (*values.shape[:-2], size), torch.uint8, values.device)
    if scheme.kind == "none":
        _elements(records, values.dtype).unflatten(-1, (tokens, head_dim)).copy_(values)
    elif fused := _fused(values, records, scheme, is_key):
        fused.encode(values, scheme, is_key=is_key, out=records)
    else:
        scratch = torch.empty(_scratch_elements(values.shape, least), dtype=torch.float32, device=values.device)
        for piece, made in _pieces(values, records, least):
            _encode_piece(scratch[: piece.numel()].view(piece.shape).copy_(piece), made, scheme, is_key)
    return records


def decode(
    records: torch.Tensor,
    scheme: Scheme,
    *,
    is_key: bool,
    tokens: int,
    head_dim: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return values [..., tokens, head_dim] of `records` [..., record_bytes] (uint8), as `dtype`, that of the encoded
    tensor.

    `out` receives the values: `dtype`, on the records' device, with any strides. A finite value never becomes infinite:
    it is clamped to the largest number of `dtype`.

    Raises InvalidArgument: records or `out` of another shape or type, groups that do not divide their axis, or
    misaligned raw records.
    """
    size = scheme.record_bytes(is_key, tokens=tokens, head_dim=head_dim, dtype_bytes=dtype.itemsize)
    records = _checked(records, (*records.shape[:-1], size), torch.uint8, records.device)
    values = _checked(out, (*records.shape[:-1], tokens, head_dim), dtype, records.device, any_strides=True)
    if scheme.kind == "none":
        values.copy_(_elements(records, dtype).unflatten(-1, (tokens, head_dim)))
    elif fused := _fused(values, records, scheme, is_key):
        fused.decode(records, scheme, is_key=is_key, out=values)
    else:
        scratch = torch.empty(_scratch_elements(values.shape, 2), dtype=torch.float32, device=values.device)
        limit = torch.finfo(dtype).max
        for piece, made in _pieces(values, records, 2):
            floats = scratch[: piece.numel()].view(piece.shape)
            _decode_piece(made, floats, scheme, is_key, limit)
            piece.copy_(floats)
    return values


def has_lost(records: torch.Tensor, scheme: Scheme, *, is_key: bool, tokens: int, head_dim: int) -> bool:
    """Return whether a NaN, an infinity or a number beyond its scale's range was encoded, by the scales. False for
    raw records."""
    payload_bytes = scheme.payload_bytes(is_key, tokens=tokens, head_dim=head_dim, dtype_bytes=0)
    match scheme.kind:
        case "none":
            return False
        case "fp8-tensor" | "fp8-head":
            return bool((load(records, payload_bytes, 1, torch.float32) < 0).any())
        case _:
            count = tokens * head_dim // scheme.group if scheme.is_grouped else tokens
            return bool(load(records, payload_bytes, count, torch.float16).isnan().any())


def _encode_piece(floats: torch.Tensor, records: torch.Tensor, scheme: Scheme, is_key: bool) -> None:
    match scheme.kind:
        case "fp8-tensor" | "fp8-head":
            encode_fp8(floats, records, per_tensor=scheme.kind == "fp8-tensor")
        case "int8":
            encode_int8(floats, records)
        case "int8a":
            encode_affine(floats, records, bits=8, group=floats.shape[-1], along_tokens=False)
        case _:
            encode_affine(floats, records, bits=scheme.bits, group=scheme.group, along_tokens=is_key)


def _decode_piece(records: torch.Tensor, floats: torch.Tensor, scheme: Scheme, is_key: bool, limit: float) -> None:
    match scheme.kind:
        case "fp8-tensor" | "fp8-head":
            decode_fp8(records, floats, limit=limit)
            return
        case "int8":
            decode_int8(records, floats)
        case "int8a":
            decode_affine(records, floats, bits=8, group=floats.shape[-1], along_tokens=False)
        case _:
            decode_affine(records, floats, bits=scheme.bits, group=scheme.group, along_tokens=is_key)
    if limit < _LARGEST_OF_CODES:
        floats.clamp_(-limit, limit)


def _pieces(values: torch.Tensor, records: torch.Tensor, kept: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield `values` and their records in pieces of at most _piece_elements(), but never split the last `kept` axes."""
    most = _piece_elements()
    if values.dim() == kept or values.numel() <= most:
        yield values, records
        return
    row_elements = values[0].numel()
    if row_elements > most:
        for row, row_records in zip(values, records, strict=True):
            yield from _pieces(row, row_records, kept)
        return
    rows = most // row_elements
    yield from zip(values.split(rows), records.split(rows), strict=True)


def _piece_elements() -> int:
    return _PIECE_ELEMENTS * int(torch.get_num_threads())


def _scratch_elements(shape: torch.Size, kept: int) -> int:
    """Return the elements of the largest piece of a tensor."""
    return int(min(shape.numel(), max(_piece_elements(), shape[-kept:].numel())))


def _checked(
    given: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, any_strides: bool = False
) -> torch.Tensor:
    """Return `given`, or a new tensor. Raises InvalidArgument: wrong shape, dtype or device, or a last axis that is
    not contiguous."""
    if given is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if tuple(given.shape) != shape or given.dtype != dtype or given.device != device:
        is_given = f"{given.dtype} {list(given.shape)} on {given.device}"
        raise InvalidArgument(f"expected a tensor of {dtype} {list(shape)} on {device}, not of {is_given}")
    if not any_strides and given.stride(-1) != 1:
        raise InvalidArgument("the bytes of a record must be contiguous")
    return given


def _elements(records: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a view of raw records as their elements."""
    if any(number % dtype.itemsize for number in (records.storage_offset(), *records.stride()[:-1])):
        raise InvalidArgument(f"raw records of {dtype} must begin at multiples of {dtype.itemsize} bytes")
    return records.view(dtype)


def _fused(values: torch.Tensor, records: torch.Tensor, scheme: Scheme, is_key: bool) -> Any:
    """Return the module of fused kernels if it supports these tensors, else None."""
    if not values.is_cuda:
        return None
    try:
        import kvstore.kvcache.codecs.triton_kernels as codec_triton
    except ImportError:
        return None
    return codec_triton if codec_triton.serves(values, records, scheme, is_key=is_key) else None
