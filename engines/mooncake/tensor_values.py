"""Binary form of a torch tensor as an object: Mooncake's header of 304 bytes, then the elements in C order.

Source: `TensorMetadata` in Mooncake's mooncake-integration/integration_utils.h.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

MAGIC: Final = 0x4D4F4F4E
VERSION: Final = 1
MAX_DIMENSIONS: Final = 8
MAX_AXES: Final = 4
FULL, SHARD = 0, 1
TENSOR_PARALLEL: Final = 1
"""Kind of an axis; kinds 0 to 4 are valid."""
MAX_KIND: Final = 4
DTYPES: Final = (
    "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool", "float16", "bfloat16",
    "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
"""In the order of their numbers in the header."""
_HEADER: Final = struct.Struct("<IHHiiIIQQ")
"""Magic, version, header bytes, dtype, dimensions, layout, flags, offset of the elements, bytes of the elements."""
_SHAPE: Final = struct.Struct(f"<{MAX_DIMENSIONS}q")
_COUNT: Final = struct.Struct("<II")
_AXIS: Final = struct.Struct("<6iq")
"""Kind, index, rank, ranks, split dimension, reserved, length of that dimension in the shard."""
_AXES_AT: Final = _HEADER.size + 2 * _SHAPE.size + _COUNT.size
HEADER_BYTES: Final = _AXES_AT + MAX_AXES * _AXIS.size


@dataclass(frozen=True, slots=True)
class ShardOf:
    """Position of a shard in a tensor that is split over ranks."""

    shape: Sequence[int]
    rank: int
    ranks: int
    dimension: int


@dataclass(frozen=True, slots=True)
class Parsed:
    """Fields of a valid header."""

    dtype: str
    shape: list[int]
    offset: int


def encoded(tensor: Any, shard: ShardOf | None = None) -> list[Any] | None:
    """Return the parts of an object, header and elements. None unless `tensor` is a dense tensor with memory whose
    dtype and number of dimensions Mooncake supports."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.dim() > MAX_DIMENSIONS or tensor.is_meta:
        return None
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        return None
    elements = tensor.detach().cpu().contiguous()
    header = _header(DTYPES.index(name), list(tensor.shape), elements.numel() * elements.element_size(), shard)
    return [header, elements] if elements.numel() else [header]


def _header(dtype: int, shape: list[int], data_bytes: int, shard: ShardOf | None) -> bytes:
    layout = FULL if shard is None else SHARD
    fields = _HEADER.pack(MAGIC, VERSION, HEADER_BYTES, dtype, len(shape), layout, 0, HEADER_BYTES, data_bytes)
    whole = shape if shard is None else list(shard.shape)
    shapes = b"".join(_SHAPE.pack(*one, *[-1] * (MAX_DIMENSIONS - len(one))) for one in (whole, shape))
    axes = b""
    if shard is not None:
        axes = _AXIS.pack(TENSOR_PARALLEL, 0, shard.rank, shard.ranks, shard.dimension, 0, shape[shard.dimension])
    return (fields + shapes + _COUNT.pack(bool(axes), 0) + axes).ljust(HEADER_BYTES, b"\0")


def decoded(value: memoryview, *, copies: bool) -> Any | None:
    """Return an object's tensor; None if the object is no tensor.

    With `copies` the tensor owns its memory. Otherwise it uses the object's memory, which must be writable and outlive
    it.
    """
    import torch

    found = parsed(value)
    if found is None:
        return None
    dtype = getattr(torch, found.dtype)
    if len(value) == found.offset:
        return torch.empty(found.shape, dtype=dtype)
    if not copies:
        return torch.frombuffer(value, dtype=torch.uint8, offset=found.offset).view(dtype).reshape(found.shape)
    tensor = torch.empty(found.shape, dtype=dtype)
    np.copyto(tensor.reshape(-1).view(torch.uint8).numpy(), np.frombuffer(value, np.uint8)[found.offset :])
    return tensor


def parsed(value: memoryview) -> Parsed | None:
    """Return the header of a whole object; None if it is no tensor or has another size."""
    if len(value) < HEADER_BYTES:
        return None
    magic, version, header_bytes, dtype, dimensions, layout, _, offset, data_bytes = _HEADER.unpack_from(value)
    if (magic, version, header_bytes) != (MAGIC, VERSION, HEADER_BYTES) or layout not in (FULL, SHARD):
        return None
    if not 0 <= dtype < len(DTYPES) or not 0 <= dimensions <= MAX_DIMENSIONS or not HEADER_BYTES <= offset <= len(value):
        return None
    shapes = [_SHAPE.unpack_from(value, _HEADER.size + at) for at in (0, _SHAPE.size)]
    if any(min(one[:dimensions], default=0) < 0 or set(one[dimensions:]) - {-1} for one in shapes):
        return None
    shape = list(shapes[1][:dimensions])
    expected = math.prod(shape) * _element_bytes(DTYPES[dtype])
    if not data_bytes == expected == len(value) - offset or not _has_sound_axes(value, dimensions):
        return None
    return Parsed(DTYPES[dtype], shape, offset)


def _has_sound_axes(value: memoryview, dimensions: int) -> bool:
    count, _ = _COUNT.unpack_from(value, _AXES_AT - _COUNT.size)
    if count > MAX_AXES:
        return False
    axes = [_AXIS.unpack_from(value, _AXES_AT + number * _AXIS.size) for number in range(count)]
    return all(0 <= kind <= MAX_KIND and 0 <= rank < ranks and -1 <= split < dimensions for kind, _, rank, ranks, split, *_ in axes)


def _element_bytes(name: str) -> int:
    import torch

    return int(getattr(torch, name).itemsize)


def serialized(tensor: Any) -> tuple[bytes, int, int, Any]:
    """Return header, address and bytes of the elements, and the tensor that owns them: Mooncake's `_serialize_tensor`.

    Raises ValueError: not a tensor that can be an object.
    """
    parts = encoded(tensor)
    if parts is None:
        raise ValueError("unsupported tensor for Mooncake tensor serialization")
    owner = tensor.contiguous()
    return parts[0], owner.data_ptr(), owner.numel() * owner.element_size(), owner


def deserialized(payload: bytes) -> Any:
    """Return the tensor of an object's bytes: Mooncake's `_deserialize_tensor`. Raises ValueError for other bytes."""
    tensor = decoded(memoryview(payload), copies=True)
    if tensor is None:
        raise ValueError("invalid serialized Mooncake tensor payload")
    return tensor
