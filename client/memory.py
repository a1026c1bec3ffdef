"""Buffers given by address, and values scattered over several buffers, as engines have whose blocks are rows of many
layers.

The parts of a value are flat byte views that hold it in order; most values have one. Nothing is copied here.
"""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from kvstore.protocol.errors import InvalidArgument

Parts = Sequence[memoryview]
"""Byte views of one value, in order, none empty."""

ADDRESSES: Final = 1 << 64
_PYBUF_WRITE: Final = 0x200

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Memory:
    """`size_bytes` of this process's memory at address `pointer`, for callers that have a pointer and no buffer object.

    It keeps nothing alive and cannot be checked. The memory must be readable, or writable if a value is read into it,
    until the call returns, or until its registration is closed. A wrong pointer crashes the process.
    """

    pointer: int
    size_bytes: int

    def __post_init__(self) -> None:
        """Raises InvalidArgument: not an address, or not a size."""
        if type(self.pointer) is not int or type(self.size_bytes) is not int:
            raise InvalidArgument(f"a pointer and a size are integers, not {self.pointer!r:.50} and {self.size_bytes!r:.50}")
        if self.pointer <= 0 or not 0 <= self.size_bytes <= sys.maxsize or self.pointer + self.size_bytes > ADDRESSES:
            raise InvalidArgument(f"{self.size_bytes} bytes at address {self.pointer:#x} are outside the address space")

    def view(self) -> memoryview:
        """A writable view of the memory."""
        return view_of(self.pointer, self.size_bytes)


def view_of(address: int, size_bytes: int) -> memoryview:
    """A writable byte view of an address range; keeps nothing alive."""
    view: memoryview = _view_memory(address, size_bytes, _PYBUF_WRITE)
    return view


def size_of(parts: Parts) -> int:
    """Total size in bytes."""
    return len(parts[0]) if len(parts) == 1 else sum(map(len, parts))


def first_bytes(parts: Parts, size_bytes: int) -> Parts:
    """The first `size_bytes` of the parts, which have at least as much."""
    if len(parts) == 1:
        return (parts[0][:size_bytes],)
    return next(in_pieces(parts, size_bytes))


def in_pieces(parts: Parts, piece_bytes: int) -> Iterator[list[memoryview]]:
    """Split the parts into pieces of `piece_bytes`, the last one shorter: the parts of each."""
    piece: list[memoryview] = []
    left = piece_bytes
    for part in parts:
        at = 0
        while at < len(part):
            found = part[at : at + left]
            piece.append(found)
            at += len(found)
            left -= len(found)
            if not left:
                yield piece
                piece, left = [], piece_bytes
    if piece:
        yield piece


def checksum(parts: Parts) -> int:
    """xxh3_64 of the value."""
    if len(parts) == 1:
        return int(xxhash.xxh3_64_intdigest(parts[0]))
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return int(digest.intdigest())
