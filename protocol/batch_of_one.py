"""Fast codec for the body of a message about one block.

One struct packs or reads the whole body, in a third of the time of a call a column. The bytes are those of wire.py. A
body of another shape returns None, and wire.py handles it and reports its errors.

`OnePutForm` is the same for Put alone, in a sixth of the time: it needs no message object.
"""

import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from kvstore.protocol.frames import MAX_KEY_BYTES

_FIXED: Final = {"u8": "B", "u32": "I", "u64": "Q", "count": "I", "u8s": "1s", "u32s": "I", "u64s": "Q"}
_LENGTHS: Final = {"text": "I", "keys": "IH", "parents": "IH"}
"""Prefix of a field of variable length: its length, and for a key column the batch's count (1) before it."""
_CODES: Final = _FIXED | _LENGTHS
_BATCHES: Final = ("count", "keys")
_U32: Final = struct.Struct("<I")
_KEYS: Final = struct.Struct("<IH")
MAX_BYTES: Final = MAX_KEY_BYTES
"""Longest key or text; wire.py handles longer texts."""
_AT_TEXT: Final = 1
"""Offset of a Put's namespace, behind `ack`."""
_PUT_BYTES: Final = struct.calcsize("<B I IH 3Q IH")
"""Bytes of a Put's body without namespace, key and parent."""
MAX_LAYOUTS: Final = 1024
"""Cached structs of one form. Peers choose the lengths; in practice there are a few."""


class BatchOfOne:
    """Codec for bodies with one entry, of one form: (attribute, kind) pairs in wire order. Thread-safe."""

    __slots__ = (
        "_count", "_get", "_keyed", "_kinds", "_last_first", "_layouts", "_long", "_numbers", "_rest", "_singles", "_texts", "_u8s",
    )  # fmt: skip

    @staticmethod
    def suits(columns: Sequence[tuple[str, str]]) -> bool:
        """Return True if the form has exactly one batch, and otherwise columns of that length, single numbers and texts.
        A last column of kind "rest" is allowed: messages that have one go through wire.py."""
        columns = columns[:-1] if columns[-1:] and columns[-1][1] == "rest" else columns
        names, kinds = [name for name, _ in columns], [kind for _, kind in columns]
        batches = [index for index, kind in enumerate(kinds) if kind in _BATCHES]
        if len(kinds) < 2 or len(batches) != 1 or not all(kind in _CODES for kind in kinds) or "parents" in kinds[: batches[0]]:
            return False
        return kinds[batches[0]] == "keys" or names.count(names[batches[0]]) > 1  # what is counted is one of the columns, too

    def __init__(self, columns: Sequence[tuple[str, str]]) -> None:
        self._rest = attrgetter(columns[-1][0]) if columns[-1][1] == "rest" else None
        columns = columns[:-1] if self._rest is not None else columns
        self._kinds = [kind for _, kind in columns]
        self._get = attrgetter(*(name for name, _ in columns))
        counts = self._all_of("count")
        self._count = counts[0] if counts else None
        self._u8s = self._all_of("u8s")
        self._texts = self._all_of("text")
        self._keyed = self._all_of("keys", "parents")
        self._numbers = self._all_of("u32s", "u64s")
        self._singles = self._keyed + self._numbers
        self._long: list[tuple[int, int, str, int]] = []
        """Fields of variable length: (index in the row, fixed bytes since the previous one, kind, bit offset of its
        length in the layout's key)."""
        gap = 0
        for index, kind in enumerate(self._kinds):
            if kind in _LENGTHS:
                self._long.append((index, gap, kind, 16 * len(self._long)))
                gap = 0
            else:
                gap += struct.calcsize("<" + _CODES[kind])
        self._last_first = [(index, kind == "text", shift) for index, _, kind, shift in reversed(self._long)]
        self._layouts: dict[int, tuple[struct.Struct, struct.Struct]] = {}

    def _all_of(self, *kinds: str) -> list[int]:
        return [index for index, kind in enumerate(self._kinds) if kind in kinds]

    def pack(self, message: object) -> bytes | None:
        """Return the body; None if the message has not one entry, or a value exceeds its column."""
        if self._rest is not None and self._rest(message):
            return None
        row = list(self._get(message))
        for index in self._u8s:
            if len(row[index]) != 1:
                return None
        if self._count is not None:
            row[self._count] = 1
        for index in self._singles:
            column = row[index]
            if len(column) != 1:
                return None
            row[index] = column[0]
        lengths = 0
        for index, is_text, shift in self._last_first:
            value = row[index]
            if is_text:
                value = value.encode()
                length = len(value)
                row[index : index + 1] = length, value
            else:
                length = len(value)
                row[index : index + 1] = 1, length, value
            if length > MAX_BYTES:
                return None
            lengths |= length << shift
        try:
            return (self._layouts.get(lengths) or self._layout(lengths))[0].pack(*row)
        except struct.error:
            return None

    def unpack(self, data: bytes | bytearray | memoryview) -> list[Any] | None:
        """Return the values in wire order, or None for a body with another number of entries or another form.

        Integer columns are tuples: making an array of one takes as long as the rest of a body.
        """
        at = lengths = 0
        try:
            for _, gap, kind, shift in self._long:
                at += gap
                if kind == "text":
                    [length] = _U32.unpack_from(data, at)
                    at += 4 + length
                else:
                    count, length = _KEYS.unpack_from(data, at)
                    at += 6 + length
                    if count != 1 or (not length and kind == "keys"):
                        return None
                if length > MAX_BYTES:
                    return None
                lengths |= length << shift
            row = list((self._layouts.get(lengths) or self._layout(lengths))[1].unpack(data))
            for index in self._texts:
                row[index] = row[index].decode()
        except (struct.error, UnicodeDecodeError):
            return None
        if self._count is not None and row[self._count] != 1:
            return None
        for index in self._keyed:
            row[index] = [row[index]]
        for index in self._numbers:
            row[index] = (row[index],)
        if self._count is not None:
            del row[self._count]
        if self._rest is not None:
            row.append(b"")
        return row

    def _layout(self, lengths: int) -> tuple[struct.Struct, struct.Struct]:
        """Return the structs (to pack, to read); the one to read skips counts and lengths, which are known."""
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.clear()
        pack, read, fields = "<", "<", iter(self._long)
        for kind in self._kinds:
            code = _CODES[kind]
            if kind in _LENGTHS:
                length = lengths >> next(fields)[3] & 0xFFFF
                pack += f"{code}{length}s"
                read += f"{struct.calcsize('<' + code)}x{length}s"
            else:
                pack, read = pack + code, read + code
        found = self._layouts[lengths] = struct.Struct(pack), struct.Struct(read)
        return found


class OnePut(NamedTuple):
    """Fields of a Put of one unreserved block."""

    ack: int
    namespace: str
    key: bytes
    size_bytes: int
    checksum: int
    parent: bytes


class OnePutForm:
    """Codec for the body of a Put of one unreserved block, by a struct a combination of lengths of namespace, key and
    parent.

    Threads may share it: at worst they make a layout twice.
    """

    __slots__ = ("_layouts",)

    def __init__(self) -> None:
        self._layouts: dict[int, struct.Struct] = {}

    def pack(self, ack: int, namespace: str, key: bytes, size_bytes: int, checksum: int, parent: bytes) -> bytes | None:
        """Return the body, or None if a value exceeds its field or the namespace is not UTF-8.

        `parent` is b"" for none.
        """
        try:
            text = namespace.encode()
        except UnicodeEncodeError:  # half a surrogate pair
            return None
        text_bytes, key_bytes, parent_bytes = len(text), len(key), len(parent)
        if text_bytes > MAX_KEY_BYTES or not 0 < key_bytes <= MAX_KEY_BYTES or parent_bytes > MAX_KEY_BYTES:
            return None
        layout = self._layouts.get(text_bytes | key_bytes << 8 | parent_bytes << 16) or self._layout(text_bytes, key_bytes, parent_bytes)
        return layout.pack(ack, text_bytes, text, 1, key_bytes, key, size_bytes, 0, checksum, 1, parent_bytes, parent)

    def unpack(self, body: bytes | bytearray | memoryview) -> OnePut | None:
        """Return the fields; None for several blocks, a reserved block or a malformed body, which `Put.unpack` handles."""
        size = len(body) - _PUT_BYTES
        if size <= 0:
            return None
        (text_bytes,) = _U32.unpack_from(body, _AT_TEXT)
        if text_bytes > MAX_KEY_BYTES or text_bytes >= size:
            return None
        at = _AT_TEXT + _U32.size + text_bytes
        keys, key_bytes = _KEYS.unpack_from(body, at)
        parent_bytes = size - text_bytes - key_bytes
        if keys != 1 or not 0 < key_bytes <= MAX_KEY_BYTES or not 0 <= parent_bytes <= MAX_KEY_BYTES:
            return None
        layout = self._layouts.get(text_bytes | key_bytes << 8 | parent_bytes << 16) or self._layout(text_bytes, key_bytes, parent_bytes)
        ack, _, text, _, _, key, size_bytes, generation, checksum, parents, declared_bytes, parent = layout.unpack(body)
        if generation or parents != 1 or declared_bytes != parent_bytes:
            return None
        try:
            namespace = text.decode()
        except UnicodeDecodeError:
            return None
        return OnePut(ack, namespace, key, size_bytes, checksum, parent)

    def _layout(self, text_bytes: int, key_bytes: int, parent_bytes: int) -> struct.Struct:
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.clear()
        made = struct.Struct(f"<BI{text_bytes}sIH{key_bytes}s3QIH{parent_bytes}s")
        self._layouts[text_bytes | key_bytes << 8 | parent_bytes << 16] = made
        return made
