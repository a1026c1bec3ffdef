"""A Put of one block in the bytes of the message Put, made and read without its columns: what most puts are, at a fifth of the cost."""

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final, NamedTuple

from kvstore.protocol.frames import MAX_KEY_BYTES
from kvstore.protocol.node_messages import ACK_NODE, Put

_NAMESPACE: Final = struct.Struct("<BI")
_KEY: Final = struct.Struct("<IH")
MAX_NAMESPACE_BYTES: Final = 255


@lru_cache(maxsize=1024)
def _form(namespace_bytes: int, key_bytes: int, parent_bytes: int) -> struct.Struct:
    """ack, namespace, keys, sizes, generations, checksums, parents."""
    return struct.Struct(f"<BI{namespace_bytes}sIH{key_bytes}sQQQIH{parent_bytes}s")


@lru_cache(maxsize=MAX_KEY_BYTES + 1)
def _rest(key_bytes: int) -> struct.Struct:
    return struct.Struct(f"<{key_bytes}sQQQIH")


@dataclass(slots=True)
class OnePut:
    """To be sent: a block that nobody has reserved."""

    TYPE: ClassVar[int] = Put.TYPE
    namespace: bytes
    key: bytes
    size_bytes: int
    checksum: int
    parent: bytes
    ack: int = ACK_NODE

    def pack(self) -> bytes:
        namespace, key, parent = self.namespace, self.key, self.parent
        form = _form(len(namespace), len(key), len(parent))
        return form.pack(self.ack, len(namespace), namespace, 1, len(key), key, self.size_bytes, 0, self.checksum, 1, len(parent), parent)


class ArrivedPut(NamedTuple):
    """What a OnePut said that is to be answered once the node has the block."""

    namespace: str
    key: bytes
    size_bytes: int
    checksum: int
    parent: bytes


def unpack_one_put(body: memoryview) -> ArrivedPut | None:
    """None: it is of several blocks, or to be answered otherwise, or wrong: Put.unpack tells."""
    try:
        ack, namespace_bytes = _NAMESPACE.unpack_from(body)
        if ack != ACK_NODE or namespace_bytes > MAX_NAMESPACE_BYTES:
            return None
        at = _NAMESPACE.size + namespace_bytes
        namespace = str(body[_NAMESPACE.size : at], "utf-8")
        count, key_bytes = _KEY.unpack_from(body, at)
        if count != 1 or not 0 < key_bytes <= MAX_KEY_BYTES:
            return None
        at += _KEY.size
        rest = _rest(key_bytes)
        key, size_bytes, generation, checksum, parents, parent_bytes = rest.unpack_from(body, at)
        at += rest.size
        if generation or parents != 1 or parent_bytes > MAX_KEY_BYTES or len(body) != at + parent_bytes:
            return None
        return ArrivedPut(namespace, key, size_bytes, checksum, bytes(body[at:]))
    except (struct.error, UnicodeDecodeError):
        return None
