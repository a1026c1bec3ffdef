"""Codec for message bodies: columns of integers, arrays, strings and packed keys.

A body has one array a field, so that decoding a batch takes a few slices. The writer trusts its caller; the reader
checks every length against the bytes received. `Form` is a message's list of columns, prepared once; a message then
costs one call a column.
"""

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, Final

from kvstore.protocol.batch_of_one import BatchOfOne
from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.frames import MAX_BATCH, MAX_BLOB_BYTES, MAX_COUNT, MAX_KEY_BYTES

_U8: Final = struct.Struct("<B")
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_KEYS: Final = struct.Struct("<IH")
VARIABLE: Final = 0xFFFF
"""key_size of a key column whose keys differ in length: a u8 length a key precedes the keys."""
_CHUNK: Final = 128
"""Keys decoded by one struct; larger ones are no faster (20 us for 1,024 keys) and would fill the cache of structs."""

assert sys.byteorder == "little", "kvstore's columns are little-endian arrays of the machine"


class Writer:
    """Builder of a body. Methods return the writer, for chaining."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[bytes | memoryview] = []

    def u8(self, value: int) -> "Writer":
        self._parts.append(_U8.pack(value))
        return self

    def u32(self, value: int) -> "Writer":
        self._parts.append(_U32.pack(value))
        return self

    def u64(self, value: int) -> "Writer":
        self._parts.append(_U64.pack(value))
        return self

    def blob(self, value: bytes) -> "Writer":
        """A u32 length and the bytes."""
        self._parts.append(_U32.pack(len(value)))
        self._parts.append(value)
        return self

    def text(self, value: str) -> "Writer":
        return self.blob(value.encode())

    def u8s(self, values: bytes | bytearray) -> "Writer":
        """A column of u8; its length is the batch's, which the caller writes."""
        self._parts.append(bytes(values))
        return self

    def u32s(self, values: Sequence[int]) -> "Writer":
        self._parts.append(array("I", values).tobytes())
        return self

    def done(self) -> bytes:
        return b"".join(self._parts)


class Reader:
    """Sequential reader of a body. Every method raises ProtocolError if the bytes do not match."""

    __slots__ = ("_at", "_data", "_end")

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = data
        self._at = 0
        self._end = len(data)

    def _take(self, size_bytes: int) -> int:
        at = self._at
        if size_bytes > self._end - at:
            raise ProtocolError(f"a message of {self._end} bytes is too short: {size_bytes} more bytes should follow byte {at}")
        self._at = at + size_bytes
        return at

    def scalars(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack_from(self._data, self._take(form.size))

    def u8(self) -> int:
        return int(self._data[self._take(1)])

    def u32(self) -> int:
        return int(_U32.unpack_from(self._data, self._take(4))[0])

    def u64(self) -> int:
        return int(_U64.unpack_from(self._data, self._take(8))[0])

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
        """Read a key column.

        Raises ProtocolError: more than MAX_BATCH keys, a key over 255 bytes, or (unless allowed) an empty one.
        """
        count, size = _KEYS.unpack_from(self._data, self._take(_KEYS.size))
        if count > MAX_BATCH:
            raise ProtocolError(f"a batch of {count} keys is over the limit of {MAX_BATCH}")
        if size == VARIABLE:
            return self._variable_keys(count, allow_empty)
        if size > MAX_KEY_BYTES or (size == 0 and count and not allow_empty):
            raise ProtocolError(f"a key of {size} bytes: keys are 1 to {MAX_KEY_BYTES} bytes long")
        at = self._take(count * size)
        if not size or not count:
            return [b""] * count
        return _cut(self._data, at, count, size)

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

    def rest(self) -> bytes:
        """All bytes that are left."""
        at = self._take(self._end - self._at)
        return bytes(self._data[at:])

    def end(self) -> None:
        """Raises ProtocolError if bytes are left."""
        if self._at != self._end:
            raise ProtocolError(f"a message has {self._end - self._at} bytes more than its form")


class Form:
    """Encoding of one message: its columns, (attribute, kind) pairs in wire order, and its constructor's parameters in
    order.

    - u8, u32, u64, text: one value.
    - keys: the batch. count: only the length of a batch, that of the attribute.
    - u8s, u32s, u64s, parents (keys, "" for none), labels (texts), blobs: as long as the nearest batch before.
    - texts: has its own length.
    - rest: the last column, bytes up to the end of the body; none if it is empty.
    """

    __slots__ = ("_order", "_readers", "_writers", "of_one")

    def __init__(self, columns: Sequence[tuple[str, str]], parameters: Sequence[str]) -> None:
        self._writers: list[tuple[Callable[[Any], Any], Callable[[Any], bytes]]] = []
        self._readers: list[Callable[[_Body], Sequence[Any]]] = []
        for names, kinds in _runs(columns):
            if kinds[0] in _SCALARS:
                layout = struct.Struct("<" + "".join(_SCALARS[kind] for kind in kinds))
                self._writers.append((attrgetter(*names), layout.pack if len(names) == 1 else _pack_all(layout)))
                self._readers.append(_read_all(layout))
            else:
                pack, read = _COLUMNS[kinds[0]]
                self._writers.append((attrgetter(*names), pack))
                self._readers.append(read)
        wire = [name for name, kind in columns if kind != "count"]
        self._order = [wire.index(name) for name in parameters] if wire != list(parameters) else []
        self.of_one = BatchOfOne(columns) if BatchOfOne.suits(columns) else None
        """Fast codec for messages of one entry; None if the form does not allow it."""

    def pack(self, message: object) -> bytes:
        if self.of_one is not None and (body := self.of_one.pack(message)) is not None:
            return body
        return b"".join([pack(get(message)) for get, pack in self._writers])

    def unpack(self, data: bytes | bytearray | memoryview) -> list[Any]:
        """Return the values in the order of `parameters`. Raises ProtocolError unless `data` has exactly this form."""
        values = self.of_one.unpack(data) if self.of_one is not None else None
        if values is None:
            body, values = _Body(data), []
            for read in self._readers:
                values += read(body)
            body.end()
        return [values[index] for index in self._order] if self._order else values


class _Body(Reader):
    """Reader that keeps the length of the current batch."""

    __slots__ = ("count",)

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        super().__init__(data)
        self.count = 0

    def read_count(self) -> tuple[()]:
        self.count = self.u32()
        if self.count > MAX_COUNT:
            raise ProtocolError(f"a column of {self.count} is over the limit of {MAX_COUNT}")
        return ()

    def read_keys(self) -> tuple[list[bytes]]:
        keys = self.keys()
        self.count = len(keys)
        return (keys,)

    def read_parents(self) -> tuple[list[bytes]]:
        parents = self.keys(allow_empty=True)
        if len(parents) != self.count:
            raise ProtocolError(f"{len(parents)} entries of a column for a batch of {self.count}")
        return (parents,)

    def read_labels(self) -> tuple[list[str]]:
        return (_decode(self.read_parents()[0]),)

    def read_blobs(self) -> tuple[list[bytes]]:
        blobs: list[bytes] = []
        if not bytes(self._data[self._at : self._at + 4 * self.count]).strip(b"\0"):  # the usual case: all are empty
            self._take(4 * self.count)
            return ([b""] * self.count,)
        for _ in range(self.count):
            blobs.append(self.blob())
            if len(blobs[-1]) > MAX_BLOB_BYTES:
                raise ProtocolError(f"a blob of {len(blobs[-1])} bytes is over the limit of {MAX_BLOB_BYTES}")
        return (blobs,)

    def read_texts(self) -> tuple[list[str]]:
        return (_decode(self.keys(allow_empty=True)),)


def _decode(values: list[bytes]) -> list[str]:
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError as error:
        raise ProtocolError(f"a text is not UTF-8: {error}") from None


def _pack_texts(values: Sequence[str]) -> bytes:
    return pack_keys([value.encode() for value in values])


def _pack_all(layout: struct.Struct) -> Callable[[Any], bytes]:
    return lambda values: layout.pack(*values)


def _read_all(layout: struct.Struct) -> Callable[[_Body], tuple[Any, ...]]:
    return lambda body: body.scalars(layout)


def _runs(columns: Sequence[tuple[str, str]]) -> list[tuple[list[str], list[str]]]:
    """Group adjacent scalars, for one struct."""
    runs: list[tuple[list[str], list[str]]] = []
    for name, kind in columns:
        if runs and kind in _SCALARS and runs[-1][1][0] in _SCALARS:
            runs[-1][0].append(name)
            runs[-1][1].append(kind)
        else:
            runs.append(([name], [kind]))
    return runs


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Encode count, key_size and the keys; keys of different lengths take VARIABLE and a column of lengths.

    An empty key is allowed: it is "none" in a column of parents.
    """
    sizes = set(map(len, keys))
    if len(sizes) == 1:
        return _KEYS.pack(len(keys), sizes.pop()) + b"".join(keys)
    return _KEYS.pack(len(keys), VARIABLE) + bytes(map(len, keys)) + b"".join(keys)


def pack_blob(value: bytes) -> bytes:
    """A u32 length and the bytes."""
    return _U32.pack(len(value)) + value


def _cut(data: bytes | bytearray | memoryview, at: int, count: int, size: int) -> list[bytes]:
    rest = count % _CHUNK
    keys: list[bytes] = []
    if rest != count:
        end = at + (count - rest) * size
        keys.extend(chain.from_iterable(_equal_keys(_CHUNK, size).iter_unpack(data[at:end])))
        at = end
    if rest:
        keys.extend(_equal_keys(rest, size).unpack_from(data, at))
    return keys


@lru_cache(maxsize=1024)
def _equal_keys(count: int, size: int) -> struct.Struct:
    # unpack() of a repeated "16s" makes all keys in one C loop, four times quicker than slices. At most 5 KiB each.
    return struct.Struct(f"{size}s" * count)


_SCALARS: Final = {"u8": "B", "u32": "I", "u64": "Q"}
_COLUMNS: Final[dict[str, tuple[Callable[[Any], bytes], Callable[[_Body], Sequence[Any]]]]] = {
    "text": (lambda text: pack_blob(text.encode()), lambda body: (body.text(),)),
    "count": (lambda values: _U32.pack(len(values)), _Body.read_count),
    "keys": (pack_keys, _Body.read_keys),
    "parents": (pack_keys, _Body.read_parents),
    "labels": (_pack_texts, _Body.read_labels),
    "texts": (_pack_texts, _Body.read_texts),
    "blobs": (lambda values: b"".join(map(pack_blob, values)) if any(values) else bytes(4 * len(values)), _Body.read_blobs),
    "rest": (bytes, lambda body: (body.rest(),)),
    "u8s": (bytes, lambda body: (body.u8s(body.count),)),
    "u32s": (lambda values: array("I", values).tobytes(), lambda body: (body.u32s(body.count),)),
    "u64s": (lambda values: array("Q", values).tobytes(), lambda body: (body.u64s(body.count),)),
}
"""Kind to packer and reader."""
