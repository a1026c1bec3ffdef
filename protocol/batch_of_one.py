"""The body of a message about one block, as most are for which somebody waits: a struct packs and reads it whole, where a call a column
takes three times as long. Not another form: what does not look like it here is left to the columns of wire.py, and so are all errors.

`OnePutForm` is the same for the message of small puts alone, in a sixth of the time: without the message object with its lists.
"""

import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

from kvstore.protocol.frames import MAX_KEY_BYTES

_FIXED: Final = {"u8": "B", "u32": "I", "u64": "Q", "count": "I", "u8s": "1s", "u32s": "I", "u64s": "Q"}
_LENGTHS: Final = {"text": "I", "keys": "IH", "parents": "IH"}
"""What goes before bytes of any length: their number; and the batch's, which is 1, before that of a key."""
_CODES: Final = _FIXED | _LENGTHS
_BATCHES: Final = ("count", "keys")
_U32: Final = struct.Struct("<I")
_KEYS: Final = struct.Struct("<IH")
MAX_BYTES: Final = MAX_KEY_BYTES
"""Of a text, too: longer ones are left to the columns."""
_AT_TEXT: Final = 1
"""Of its namespace: behind `ack`."""
_PUT_BYTES: Final = struct.calcsize("<B I IH 3Q IH")
"""Of the body of a Put, beside the three that have any length."""
MAX_LAYOUTS: Final = 1024
"""Of one form. Peers choose the lengths; in practice there are a few."""


class BatchOfOne:
    """Bodies of one form, (attribute, kind) pairs in wire order, that have one entry."""

    __slots__ = ("_count", "_get", "_keyed", "_kinds", "_last_first", "_layouts", "_long", "_numbers", "_singles", "_texts", "_u8s")

    @staticmethod
    def suits(columns: Sequence[tuple[str, str]]) -> bool:
        """Whether the form has one batch, columns of integers and of parents as long as that, and single numbers and texts."""
        names, kinds = [name for name, _ in columns], [kind for _, kind in columns]
        batches = [index for index, kind in enumerate(kinds) if kind in _BATCHES]
        if len(kinds) < 2 or len(batches) != 1 or not all(kind in _CODES for kind in kinds) or "parents" in kinds[: batches[0]]:
            return False
        return kinds[batches[0]] == "keys" or names.count(names[batches[0]]) > 1  # what is counted is one of the columns, too

    def __init__(self, columns: Sequence[tuple[str, str]]) -> None:
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
        """What has any length: (index in the row, bytes of fixed length since the one before, kind, its place in the number that all
        lengths together make)."""
        gap = 0
        for index, kind in enumerate(self._kinds):
            if kind in _LENGTHS:
                self._long.append((index, gap, kind, 16 * len(self._long)))
                gap = 0
            else:
                gap += struct.calcsize("<" + _CODES[kind])
        self._last_first = [(index, kind == "text", place) for index, _, kind, place in reversed(self._long)]
        self._layouts: dict[int, tuple[struct.Struct, struct.Struct]] = {}

    def _all_of(self, *kinds: str) -> list[int]:
        return [index for index, kind in enumerate(self._kinds) if kind in kinds]

    def pack(self, message: object) -> bytes | None:
        """None: it has another number of entries, or what fits into no column."""
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
        for index, is_text, place in self._last_first:
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
            lengths |= length << place
        try:
            return (self._layouts.get(lengths) or self._layout(lengths))[0].pack(*row)
        except struct.error:
            return None

    def unpack(self, data: bytes | bytearray | memoryview) -> list[Any] | None:
        """The values in wire order, columns of integers as tuples: an array of one takes as long to make as all else of a body. None: it is
        not of one entry, or not of this form at all."""
        at = lengths = 0
        try:
            for _, gap, kind, place in self._long:
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
                lengths |= length << place
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
        return row

    def _layout(self, lengths: int) -> tuple[struct.Struct, struct.Struct]:
        """(to pack, to read). To read, what is known already is left out."""
        if len(self._layouts) >= MAX_LAYOUTS:
            self._layouts.clear()
        pack, read, places = "<", "<", iter(self._long)
        for kind in self._kinds:
            code = _CODES[kind]
            if kind in _LENGTHS:
                length = lengths >> next(places)[3] & 0xFFFF
                pack += f"{code}{length}s"
                read += f"{struct.calcsize('<' + code)}x{length}s"
            else:
                pack, read = pack + code, read + code
        found = self._layouts[lengths] = struct.Struct(pack), struct.Struct(read)
        return found


class OnePut(NamedTuple):
    """What a body says."""

    ack: int
    namespace: str
    key: bytes
    size_bytes: int
    checksum: int
    parent: bytes


class OnePutForm:
    """Body of a Put of one unreserved block, by one struct whose layout depends on the lengths of namespace, key and parent. Threads may
    share it: they make a layout twice at the worst."""

    __slots__ = ("_layouts",)

    def __init__(self) -> None:
        self._layouts: dict[int, struct.Struct] = {}

    def pack(self, ack: int, namespace: str, key: bytes, size_bytes: int, checksum: int, parent: bytes) -> bytes | None:
        """`parent` is b"" for none. None: what has another form, or fits into no field."""
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
        """None: it is about several blocks, or reserved ones, or wrong: `Put.unpack` tells."""
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
        ack, _, text, _, _, key, size_bytes, generation, checksum, parents, told, parent = layout.unpack(body)
        if generation or parents != 1 or told != parent_bytes:
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
