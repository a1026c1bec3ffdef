"""A block as a record of its own key, the form in which catalogs of earlier releases (format 1) keep blocks: read, and no longer written.

    b"b" + u8 tenant length + tenant + block key    <u8 version, u64 size, u64 checksum, u64 generation, u8 namespace length,
                                                    u8 parent length, u16 holders>, namespace, parent key, u32 node id a holder

All integers are little-endian.
"""

import struct
from collections.abc import Sequence
from typing import Final

from kvstore.master.catalogs.interface import BlockPuts, Change, Op
from kvstore.protocol.errors import Corrupt

VERSION: Final = 1
RECORDS: Final = b"r/"
"""What the key of a small record's value begins with."""
KIND: Final = b"b"

_BLOCK: Final = struct.Struct("<BQQQBBH")


def as_changes(key: bytes, value: bytes | None) -> Sequence[Change]:
    """What the value of a small record says, None for one that was deleted; `key` is the value's. Raises Corrupt.

    A block's says nothing when it is deleted: it has become part of a segment.
    """
    record = key.removeprefix(RECORDS)
    if not record.startswith(KIND):
        return [Op(record, value)]
    return [] if value is None else [as_puts(record, value)]


def as_puts(key: bytes, value: bytes) -> BlockPuts:
    """The block of a record. Raises Corrupt."""
    try:
        split = 2 + key[1]
        form, size, checksum, generation, namespace_bytes, parent_bytes, holder_count = _BLOCK.unpack_from(value)
        if form != VERSION:
            raise Corrupt(f"a catalog record has form {form}, this release reads {VERSION}")
        text_end = _BLOCK.size + namespace_bytes
        parent_end = text_end + parent_bytes
        holders: Sequence[int] = struct.unpack(f"<{holder_count}I", value[parent_end:])
        namespace = value[_BLOCK.size : text_end].decode()
        parent = value[text_end:parent_end]
        return BlockPuts(key[2:split].decode(), [key[split:]], [size], [checksum], [generation], [namespace], [parent], [tuple(holders)])
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise Corrupt(f"the catalog's record {key!r} is damaged: {error}") from None
