"""The body of a Put of one block that nobody has reserved: the message of small puts, packed and read by one struct whose layout the
lengths of namespace, key and parent choose.

`batch_of_one.py` does the same for any form, in six times the time. Not another form: what does not look like it here is left to that.
"""

import struct
from typing import Final, NamedTuple

from kvstore.protocol.frames import MAX_KEY_BYTES

_TEXT: Final = struct.Struct("<I")
_KEYS: Final = struct.Struct("<IH")
AT_TEXT: Final = 1
"""Behind `ack`."""
FIXED_BYTES: Final = struct.calcsize("<B I IH 3Q IH")
"""Of a body, beside the three that have any length."""
MAX_LAYOUTS: Final = 1024
"""Peers choose the lengths; in practice there are a few."""


class OnePut(NamedTuple):
    """What a body says."""

    ack: int
    namespace: str
    key: bytes
    size_bytes: int
    checksum: int
    parent: bytes


class OnePutForm:
    """Packs and reads. Threads may share it: they make a layout twice at the worst."""

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
        size = len(body) - FIXED_BYTES
        if size <= 0:
            return None
        (text_bytes,) = _TEXT.unpack_from(body, AT_TEXT)
        if text_bytes > MAX_KEY_BYTES or text_bytes >= size:
            return None
        at = AT_TEXT + _TEXT.size + text_bytes
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
