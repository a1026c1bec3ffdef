"""A torch tensor as an object: a header of fixed size, then its elements in C order. The header is ours: it is read by this API alone."""

import math
import struct
from typing import Any, Final

import numpy as np

MAGIC: Final = b"kvtensor"
MAX_DIMENSIONS: Final = 12
_FIELDS: Final = struct.Struct(f"<8sII{MAX_DIMENSIONS}Q")
HEADER_BYTES: Final = 128
"""_FIELDS, filled up with zeros: the elements begin at an address that suits all types, where the object does."""
DTYPES: Final = (
    "float32", "float64", "float16", "bfloat16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool",
    "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip
"""By their number in the header: names are only added, at the end."""


def encoded(tensor: Any) -> list[Any] | None:
    """The parts of the object: header and elements. None for what is no dense tensor of a known type."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.dim() > MAX_DIMENSIONS:
        return None
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        return None
    fields = _FIELDS.pack(MAGIC, DTYPES.index(name), tensor.dim(), *tensor.shape, *[0] * (MAX_DIMENSIONS - tensor.dim()))
    return [fields.ljust(HEADER_BYTES, b"\0"), tensor.detach().cpu().contiguous()]


def size_of(header: memoryview) -> int | None:
    """The size of the whole object that begins so; None for one that is no tensor."""
    found = _parse(header)
    if found is None:
        return None
    dtype, shape = found
    return HEADER_BYTES + math.prod(shape) * int(dtype.itemsize)


def decoded(value: memoryview, *, copies: bool) -> Any | None:
    """The tensor of an object: the caller's own if `copies`, else in the object's memory, which must be writable and stay. None for what is
    no tensor."""
    import torch

    found = _parse(value)
    if found is None or size_of(value) != len(value):
        return None
    dtype, shape = found
    if len(value) == HEADER_BYTES:
        return torch.empty(shape, dtype=dtype)
    if not copies:
        return torch.frombuffer(value, dtype=torch.uint8, offset=HEADER_BYTES).view(dtype).reshape(shape)
    tensor = torch.empty(shape, dtype=dtype)
    np.copyto(tensor.reshape(-1).view(torch.uint8).numpy(), np.frombuffer(value, np.uint8)[HEADER_BYTES:])
    return tensor


def _parse(value: memoryview) -> tuple[Any, list[int]] | None:
    import torch

    if len(value) < HEADER_BYTES:
        return None
    magic, dtype, dimensions, *shape = _FIELDS.unpack_from(value)
    if magic != MAGIC or dtype >= len(DTYPES) or dimensions > MAX_DIMENSIONS:
        return None
    return getattr(torch, DTYPES[dtype]), shape[:dimensions]
