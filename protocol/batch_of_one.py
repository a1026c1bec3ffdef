"""The body of a message about one block, as most are for which somebody waits: a struct packs and reads it whole, where a call a column
takes three times as long. Not another form: what does not look like it here is left to the columns of wire.py, and so are all errors.
"""

import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

from kvstore.protocol.frames import MAX_KEY_BYTES

_SCALARS: Final = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "f64": "d"}
_INTEGERS: Final = {"u8s": "B", "u32s": "I", "u64s": "Q"}
_BATCHES: Final = {"count": "I", "keys": "IH"}
_CODES: Final = _SCALARS | _INTEGERS | _BATCHES
_KEYS: Final = struct.Struct("<IH")


class BatchOfOne:
    """Bodies of one form, (attribute, kind) pairs in wire order, that have one entry."""

    __slots__ = ("_at", "_batch", "_columns", "_get", "_ints", "_is_keys", "_kinds", "_layouts")

    @staticmethod
    def suits(columns: Sequence[tuple[str, str]]) -> bool:
        """Whether the form has one batch, columns of integers as long as that, and single numbers."""
        kinds = [kind for _, kind in columns]
        return len(kinds) > 1 and sum(kind in _BATCHES for kind in kinds) == 1 and all(kind in _CODES for kind in kinds)

    def __init__(self, columns: Sequence[tuple[str, str]]) -> None:
        self._kinds = [kind for _, kind in columns]
        self._get = attrgetter(*(name for name, _ in columns))
        self._batch = next(index for index, kind in enumerate(self._kinds) if kind in _BATCHES)
        self._is_keys = self._kinds[self._batch] == "keys"
        self._at = struct.calcsize("<" + "".join(_CODES[kind] for kind in self._kinds[: self._batch]))
        self._columns = [index for index, kind in enumerate(self._kinds) if kind in _INTEGERS]
        read = [kind for kind in self._kinds if kind != "count"]
        self._ints = [index for index, kind in enumerate(read) if kind in ("u32s", "u64s")]
        self._layouts: list[tuple[struct.Struct, struct.Struct] | None] = [None] * (MAX_KEY_BYTES + 1)
        """By the length of the key."""

    def pack(self, message: object) -> bytes | None:
        """None: it has another number of entries, or what fits into no column."""
        row = list(self._get(message))
        at, key_bytes = self._batch, 0
        if len(row[at]) != 1:
            return None
        for index in self._columns:
            row[index] = row[index][0]
        if self._is_keys:
            key = row[at][0]
            key_bytes = len(key)
            if key_bytes > MAX_KEY_BYTES:
                return None
            row[at : at + 1] = 1, key_bytes, key
        else:
            row[at] = 1
        try:
            return self._layout(key_bytes)[0].pack(*row)
        except struct.error:
            return None

    def unpack(self, data: bytes | bytearray | memoryview) -> list[Any] | None:
        """The values in wire order, columns of integers as tuples: an array of one takes as long to make as all else of a body. None: it is
        not of one entry, or not of this form at all."""
        size = len(data)
        at, key_bytes = self._batch, 0
        if self._is_keys:
            if size < self._at + _KEYS.size:
                return None
            key_bytes = _KEYS.unpack_from(data, self._at)[1]
            if not 1 <= key_bytes <= MAX_KEY_BYTES:
                return None
        layout = self._layout(key_bytes)[1]
        if size != layout.size:
            return None
        row: list[Any] = list(layout.unpack(data))
        if row[at] != 1:
            return None
        if self._is_keys:
            row[at : at + 3] = ([row[at + 2]],)
        else:
            del row[at]
        for index in self._ints:
            row[index] = (row[index],)
        return row

    def _layout(self, key_bytes: int) -> tuple[struct.Struct, struct.Struct]:
        """(to pack, to read). Read, a column of u8 is bytes."""
        found = self._layouts[key_bytes]
        if found is None:
            pack = "".join(_CODES[kind] + (f"{key_bytes}s" if kind == "keys" else "") for kind in self._kinds)
            read = "".join("1s" if kind == "u8s" else _CODES[kind] + (f"{key_bytes}s" if kind == "keys" else "") for kind in self._kinds)
            found = self._layouts[key_bytes] = struct.Struct("<" + pack), struct.Struct("<" + read)
        return found
