"""Memory named by its address, and values that lie in several parts: what engines hand over whose blocks are rows of many layers.

A value's parts are flat views of bytes that hold it in order, as a rule one. Nothing is copied here.
"""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

from kvstore.protocol.errors import InvalidArgument

Parts = Sequence[memoryview]
"""The bytes of one value, in order; none of the views is empty."""

ADDRESSES: Final = 1 << 64
_PYBUF_WRITE: Final = 0x200

_view_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.restype = ctypes.py_object
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Memory:
    """`size_bytes` of this process's memory from the address `pointer` on: a buffer for callers that have a pointer and no object.

    It keeps nothing alive, and nobody can check it: it must be readable, or writable where a value is read into it, until the call that
    it was given to returns, and for registered memory until that is closed. A wrong pointer ends the process.
    """

    pointer: int
    size_bytes: int

    def __post_init__(self) -> None:
        """Raises InvalidArgument: no address, or no size."""
        if type(self.pointer) is not int or type(self.size_bytes) is not int:
            raise InvalidArgument(f"a pointer and a size are integers, not {self.pointer!r:.50} and {self.size_bytes!r:.50}")
        if self.pointer <= 0 or not 0 <= self.size_bytes <= sys.maxsize or self.pointer + self.size_bytes > ADDRESSES:
            raise InvalidArgument(f"{self.size_bytes} bytes at address {self.pointer:#x} are no memory")

    def view(self) -> memoryview:
        """The memory as writable bytes."""
        return view_of(self.pointer, self.size_bytes)


def view_of(address: int, size_bytes: int) -> memoryview:
    """Writable bytes of this process; the view keeps nothing alive."""
    view: memoryview = _view_memory(address, size_bytes, _PYBUF_WRITE)
    return view


def size_of(parts: Parts) -> int:
    """In bytes."""
    return len(parts[0]) if len(parts) == 1 else sum(map(len, parts))


def first_bytes(parts: Parts, size_bytes: int) -> Parts:
    """The beginning of the parts, which have at least as much."""
    if len(parts) == 1:
        return (parts[0][:size_bytes],)
    return next(in_pieces(parts, size_bytes))


def in_pieces(parts: Parts, piece_bytes: int) -> Iterator[list[memoryview]]:
    """The parts cut into pieces of `piece_bytes`, the last one of what is left: the parts of each."""
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
