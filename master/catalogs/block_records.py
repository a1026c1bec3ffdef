"""Blocks as records of a key each, the form in which catalogs of format 1 keep them.

    b"b" + u8 tenant length + tenant + block key    <u8 version, u64 size, u64 checksum, u64 generation, u8 namespace length,
                                                    u8 parent length, u16 holders>, namespace, parent key, u32 node id a holder

All integers are little-endian; the version is raised when the form changes, and a record of another version is refused, not guessed at.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvstore.master.catalogs.interface import BlockDeletes, BlockPuts, Change, Op
from kvstore.protocol.errors import Corrupt

VERSION: Final = 1
KIND: Final = b"b"
BATCH: Final = 4096

_BLOCK: Final = struct.Struct("<BQQQBBH")


def as_records(changes: Iterable[Change]) -> dict[bytes, bytes | None]:
    """Key -> its new value, or None to delete it: what the last change of each key says."""
    records: dict[bytes, bytes | None] = {}
    for change in changes:
        if isinstance(change, Op):
            records[change.key] = change.value
            continue
        prefix = _prefix(change.tenant)
        if isinstance(change, BlockPuts):
            for key, *version, namespace, parent, holders in zip(*change[1:], strict=True):
                text = namespace.encode()
                head = _BLOCK.pack(VERSION, *version, len(text), len(parent), len(holders))
                records[prefix + key] = b"".join((head, text, parent, struct.pack(f"<{len(holders)}I", *holders)))
        else:
            records.update((prefix + key, None) for key in change.keys)
    return records


def as_changes(records: Iterable[tuple[bytes, bytes | None]]) -> Iterator[list[Change]]:
    """The records, None for deleted ones, as changes, some at a time. Raises Corrupt."""
    batch: list[Change] = []
    for key, value in records:
        batch.append(_block(key, value) if key.startswith(KIND) else Op(key, value))
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _prefix(tenant: str) -> bytes:
    name = tenant.encode()
    return KIND + bytes((len(name),)) + name


def _block(key: bytes, value: bytes | None) -> BlockPuts | BlockDeletes:
    try:
        split = 2 + key[1]
        if value is None:
            return BlockDeletes(key[2:split].decode(), [key[split:]])
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
