"""Reading and writing the columns of a message body: integers, arrays, strings and packed keys.

A body is columns, not rows: one array a field, so that a batch is a few slices however many blocks it has. The writer trusts
its caller (this process); the reader trusts nobody: every length is checked against the bytes that are there.
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.frames import MAX_BATCH, MAX_KEY_BYTES

_U8: Final = struct.Struct("<B")
_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_F64: Final = struct.Struct("<d")
_KEYS: Final = struct.Struct("<IH")
VARIABLE: Final = 0xFFFF
"""key_size of a key column whose keys differ in length: a u8 of lengths a key goes before the keys."""

assert sys.byteorder == "little", "kvstore's columns are little-endian arrays of the machine"


class Writer:
    """Builds a body. Methods return the writer, so that a message reads as one chain."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[bytes | memoryview] = []

    def u8(self, value: int) -> "Writer":
        self._parts.append(_U8.pack(value))
        return self

    def u16(self, value: int) -> "Writer":
        self._parts.append(_U16.pack(value))
        return self

    def u32(self, value: int) -> "Writer":
        self._parts.append(_U32.pack(value))
        return self

    def u64(self, value: int) -> "Writer":
        self._parts.append(_U64.pack(value))
        return self

    def f64(self, value: float) -> "Writer":
        self._parts.append(_F64.pack(value))
        return self

    def blob(self, value: bytes) -> "Writer":
        """A u32 length and the bytes."""
        self._parts.append(_U32.pack(len(value)))
        self._parts.append(value)
        return self

    def text(self, value: str) -> "Writer":
        return self.blob(value.encode())

    def u8s(self, values: bytes | bytearray) -> "Writer":
        """A column of u8; its length is the batch's, written elsewhere."""
        self._parts.append(bytes(values))
        return self

    def u32s(self, values: Sequence[int]) -> "Writer":
        self._parts.append(array("I", values).tobytes())
        return self

    def u64s(self, values: Sequence[int]) -> "Writer":
        self._parts.append(array("Q", values).tobytes())
        return self

    def keys(self, keys: Sequence[bytes]) -> "Writer":
        """count, key_size, then `count x key_size` bytes; keys of several lengths take VARIABLE and a column of lengths.

        An empty key is allowed here: it stands for "none" in a column of parents.
        """
        sizes = set(map(len, keys))
        if len(sizes) == 1:
            self._parts.append(_KEYS.pack(len(keys), sizes.pop()))
        else:
            self._parts.append(_KEYS.pack(len(keys), VARIABLE))
            self._parts.append(bytes(map(len, keys)))
        self._parts.append(b"".join(keys))
        return self

    def done(self) -> bytes:
        return b"".join(self._parts)


class Reader:
    """Reads a body from front to back. Every method raises ProtocolError when the bytes do not hold what it is asked for."""

    __slots__ = ("_at", "_data", "_end")

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = data
        self._at = 0
        self._end = len(data)

    def _take(self, size_bytes: int) -> int:
        at = self._at
        if size_bytes > self._end - at:
            raise ProtocolError(f"a message of {self._end} bytes ends where {size_bytes} more bytes should be")
        self._at = at + size_bytes
        return at

    def u8(self) -> int:
        return int(self._data[self._take(1)])

    def u16(self) -> int:
        return int(_U16.unpack_from(self._data, self._take(2))[0])

    def u32(self) -> int:
        return int(_U32.unpack_from(self._data, self._take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self._data, self._take(8))[0])

    def f64(self) -> float:
        return float(_F64.unpack_from(self._data, self._take(8))[0])

    def blob(self) -> bytes:
        size_bytes = self.u32()
        at = self._take(size_bytes)
        return bytes(self._data[at : at + size_bytes])

    def text(self) -> str:
        try:
            return self.blob().decode()
        except UnicodeDecodeError as error:
            raise ProtocolError(f"a text field is not UTF-8: {error}") from None

    def u8s(self, count: int) -> bytes:
        at = self._take(count)
        return bytes(self._data[at : at + count])

    def u32s(self, count: int) -> "array[int]":
        at = self._take(count * 4)
        return array("I", bytes(self._data[at : at + count * 4]))

    def u64s(self, count: int) -> "array[int]":
        at = self._take(count * 8)
        return array("Q", bytes(self._data[at : at + count * 8]))

    def keys(self, *, allow_empty: bool = False) -> list[bytes]:
        """A key column. Raises ProtocolError for more than MAX_BATCH keys, a key over 255 bytes, or (unless allowed) an empty one."""
        count, size = _KEYS.unpack_from(self._data, self._take(_KEYS.size))
        if count > MAX_BATCH:
            raise ProtocolError(f"a batch of {count} keys is over the limit of {MAX_BATCH}")
        if size == VARIABLE:
            return self._variable_keys(count, allow_empty)
        if size > MAX_KEY_BYTES or (size == 0 and count and not allow_empty):
            raise ProtocolError(f"a key of {size} bytes: keys are 1 to {MAX_KEY_BYTES} bytes long")
        at = self._take(count * size)
        if not size:
            return [b""] * count
        data = bytes(self._data[at : at + count * size])
        return list(_equal_keys(count, size).unpack(data)) if count <= 1024 else [data[i : i + size] for i in range(0, len(data), size)]

    def _variable_keys(self, count: int, allow_empty: bool) -> list[bytes]:
        sizes = self.u8s(count)
        if not allow_empty and 0 in sizes:
            raise ProtocolError("an empty key: keys are 1 to 255 bytes long")
        total = sum(sizes)
        at = self._take(total)
        data = bytes(self._data[at : at + total])
        keys, start = [], 0
        for size in sizes:
            keys.append(data[start : start + size])
            start += size
        return keys

    def end(self) -> None:
        """Raises ProtocolError if bytes are left: the peer and this side disagree about the message's form."""
        if self._at != self._end:
            raise ProtocolError(f"a message has {self._end - self._at} bytes more than its form")


@lru_cache(maxsize=4096)
def _equal_keys(count: int, size: int) -> struct.Struct:
    # unpack() of a repeated "16s" makes all keys in one C loop; compiling the format costs more than the unpacking, hence the cache.
    return struct.Struct(f"{size}s" * count)
