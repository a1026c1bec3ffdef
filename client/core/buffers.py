"""Callers' values as flat byte views: bytes, bytearray, memoryview, numpy arrays, torch tensors; and new bytes objects
to fill.

A list or tuple of buffers is one value, their bytes in order. Nothing is copied, except to and from a CUDA device. A
view keeps its value alive, except a Memory. This module does not import torch: a tensor only exists if torch has been
imported.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from kvstore.client.memory import Memory, Parts, size_of, view_of
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.settings import format_size

_BYTES: Final = np.dtype(np.uint8)
_BYTES_HEADER: Final = bytes.__basicsize__ - 1
"""Offset of the bytes in a bytes object; CPython counts the closing zero in the basic size."""

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)


@dataclass(slots=True)
class Destination:
    """Destination of a value: writable `parts`; `finish` moves the bytes to their final place once all have arrived."""

    parts: Parts
    finish: Callable[[], None] | None = None

    @property
    def size_bytes(self) -> int:
        return size_of(self.parts)


def as_source(value: Any) -> memoryview:
    """The bytes of `value` as a flat view of its memory, which must not change until the operation ends.

    A CUDA tensor is copied to pinned CPU memory, after the kernels of the calling thread's stream. Raises
    InvalidArgument: not a buffer, not C-contiguous, empty, or over 1 GiB.
    """
    view = _source(value)
    check_size(len(view))
    return view


def as_parts(value: Any) -> Parts:
    """As `as_source`, for a value that may be a list. Empty buffers in it are left out."""
    if not isinstance(value, (list, tuple)):
        return (as_source(value),)
    parts = [view for view in map(_source, value) if len(view)]
    check_size(size_of(parts))
    return parts


class Sources:
    """The bytes of values, each in parts. Values of one array are contiguous in `flat`, without an object per value;
    otherwise it is None."""

    __slots__ = ("_values", "flat", "sizes")

    def __init__(self, values: Sequence[Parts], flat: memoryview | None = None, count: int = 0) -> None:
        """Either `values`, or `count` values of equal size in `flat`.
        - Sources.sizes"""
        self._values = values
        self.flat = flat
        self.sizes: list[int] = list(map(size_of, values)) if flat is None else [len(flat) // count] * count
        """In bytes."""

    def __len__(self) -> int:
        return len(self.sizes)

    def bytes_of(self, indices: Sequence[int]) -> int:
        """Total size of these values."""
        if self.flat is not None:
            return len(indices) * self.sizes[0] if indices else 0
        return sum(map(self.sizes.__getitem__, indices))

    def __iter__(self) -> Iterator[Parts]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Parts:
        if self.flat is None:
            return self._values[index]
        size = self.sizes[index]
        return (self.flat[index * size : (index + 1) * size],)


def as_sources(values: Any) -> Sources:
    """`as_source` for each of a sequence; of one C-contiguous array or CPU tensor, for each row."""
    if _is_tensor(values) and _is_rows_on_gpu(values):
        values = _on_host(values)  # one copy, not one for each row
    rows = _rows(values)
    if rows is None:
        return Sources([as_parts(value) for value in values])
    flat = rows.reshape(-1).data
    check_size(rows.shape[1])
    return Sources((), flat, len(rows))


def as_destination(buffer: Any) -> Destination:
    """Destination in `buffer`, or across a list of buffers, which must not be used until the operation ends.

    A CUDA tensor is filled through pinned CPU memory. Raises InvalidArgument: not a buffer, not C-contiguous, empty or
    read-only.
    """
    plain = plain_memory(buffer)
    if plain is not None:
        return Destination((plain,))
    pieces = list(map(_destination, buffer)) if isinstance(buffer, (list, tuple)) else [_destination(buffer)]
    parts = [part for piece in pieces for part in piece.parts if len(part)]
    if not parts:
        raise InvalidArgument("a destination of 0 bytes holds no value")
    finishes = [piece.finish for piece in pieces if piece.finish is not None]
    return Destination(parts, partial(_call_all, finishes) if finishes else None)


def plain_memory(buffer: Any) -> memoryview | None:
    """Fast path of `as_destination` for flat writable bytes; None for any other buffer."""
    kind = type(buffer)
    if kind is bytearray or kind is np.ndarray or kind is memoryview:
        try:
            view = memoryview(buffer)
        except (ValueError, TypeError, BufferError):  # an array whose dtype has no buffer format
            return None
        if view.format == "B" and view.ndim == 1 and view.contiguous and not view.readonly and len(view):
            return view
    return None


def as_memory(buffer: Any) -> memoryview:
    """Memory of a buffer of any size, writable if the buffer is. Raises InvalidArgument: not a buffer, not
    C-contiguous, a CUDA tensor."""
    if not _is_tensor(buffer):
        return _flat(buffer)
    if buffer.is_cuda:
        raise InvalidArgument("a CUDA tensor is not host memory and cannot be registered: it is filled through pinned memory")
    return _tensor_bytes(buffer)


def fresh_bytes(size_bytes: int) -> tuple[bytes, memoryview]:
    """A new bytes object of undefined content, and the writable view to fill it through before it is shared.

    Values are read from the socket or copied out of a slab directly into the object that `get` returns.
    """
    value: bytes = _new_bytes(None, size_bytes)
    return value, view_of(id(value) + _BYTES_HEADER, size_bytes)


def too_small(index: int, buffer_bytes: int, value_bytes: int) -> InvalidArgument:
    return InvalidArgument(f"the buffer of key {index} has {buffer_bytes} bytes, its value has {value_bytes}")


def as_rows(buffers: Any) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """A writable C-contiguous array or CPU tensor of two or more dimensions, as bytes of shape (first dimension, rest);
    None for anything else."""
    rows = _rows(buffers)
    return rows if rows is not None and rows.flags.writeable else None


def _rows(values: Any) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    if _is_tensor(values):
        if values.is_cuda or values.dim() < 2 or not values.is_contiguous():
            return None
        flat = np.frombuffer(_tensor_bytes(values), np.uint8)
    elif isinstance(values, np.ndarray) and values.ndim > 1 and values.flags.c_contiguous and not values.dtype.hasobject:
        flat = np.frombuffer(_flat(values), np.uint8)
    else:
        return None
    return flat.reshape(len(values), -1) if len(values) and len(flat) else None


def nbytes_of(value: Any) -> int | None:
    """`value.nbytes`, or None without one. A sparse tensor raises RuntimeError for it."""
    try:
        size_bytes = getattr(value, "nbytes", None)
    except RuntimeError:
        return None
    return size_bytes if isinstance(size_bytes, int) else None


def check_size(size_bytes: int) -> None:
    """Raises InvalidArgument unless it is a valid size of a value."""
    if not 1 <= size_bytes <= MAX_VALUE_BYTES:
        raise InvalidArgument(f"a value is 1 byte to {format_size(MAX_VALUE_BYTES)} long, not {size_bytes:,} bytes")


def _source(value: Any) -> memoryview:
    if type(value) is bytes:
        return memoryview(value)
    if _is_tensor(value):
        return _tensor_bytes(_on_host(value) if value.is_cuda else value)
    return _flat(value)


def _destination(buffer: Any) -> Destination:
    """Destination in one buffer, which may be empty."""
    if _is_tensor(buffer):
        if buffer.is_cuda:
            return _cuda_destination(buffer)
        view = _tensor_bytes(buffer)
    else:
        view = _flat(buffer)
    if view.readonly and len(view):
        raise InvalidArgument(f"a destination must be writable; this {type(buffer).__name__} is read-only")
    return Destination((view,))


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _flat(value: Any) -> memoryview:
    if type(value) is Memory:
        return value.view()
    if isinstance(value, np.ndarray):
        if value.dtype is _BYTES and value.ndim == 1 and (view := value.data).c_contiguous:
            return view  # the common case, and much faster
        if not value.flags.c_contiguous:
            raise InvalidArgument("an array must be C-contiguous: pass numpy.ascontiguousarray(array)")
        if value.dtype.hasobject:
            raise InvalidArgument("an array of Python objects has no bytes to store")
        return value.reshape(-1).view(np.uint8).data
    try:
        view = memoryview(value)
    except TypeError:
        kind = type(value).__name__
        raise InvalidArgument(
            f"a value is a C-contiguous buffer (bytes, memoryview, numpy, torch, Memory), or a list, not {kind}"
        ) from None
    if not view.c_contiguous:
        raise InvalidArgument("a buffer must be C-contiguous")
    if not view.nbytes:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else np.frombuffer(value, np.uint8).data


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _tensor_bytes(tensor: Any) -> memoryview:
    """Memory of a CPU tensor. bfloat16 and other dtypes that numpy lacks are viewed as bytes first."""
    torch: Any = sys.modules["torch"]
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise InvalidArgument("a tensor must be dense and C-contiguous: pass tensor.contiguous()")
    if not tensor.numel():
        return memoryview(b"")
    try:
        array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError) as error:
        raise InvalidArgument(f"this tensor's memory cannot be read as bytes: {error}") from None
    return array.data


def _is_rows_on_gpu(tensor: Any) -> bool:
    is_dense = tensor.is_cuda and tensor.layout == sys.modules["torch"].strided
    return bool(is_dense and tensor.dim() > 1 and tensor.is_contiguous())


def _on_host(tensor: Any) -> Any:  # pragma: no cover  (runs on CUDA only)
    """Copy of a CUDA tensor in pinned memory, which the device fills several times as fast as pageable memory."""
    staged = _pinned_like(tensor)
    return staged.copy_(tensor.detach())


def _cuda_destination(tensor: Any) -> Destination:  # pragma: no cover  (runs on CUDA only)
    staged = _pinned_like(tensor)

    def finish() -> None:
        with sys.modules["torch"].inference_mode():  # an inference tensor may be written only there
            tensor.copy_(staged)

    return Destination((_tensor_bytes(staged),), finish)


def _pinned_like(tensor: Any) -> Any:  # pragma: no cover  (runs on CUDA only)
    """Pinned memory of a tensor's form. torch keeps what is freed for the next one: pinning takes longer than a copy."""
    torch: Any = sys.modules["torch"]
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise InvalidArgument("a tensor must be dense and C-contiguous: pass tensor.contiguous()")
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
