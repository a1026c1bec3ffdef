"""Format of a segment: changes of one shard's blocks as one value, in columns; a block takes about 45 bytes with its
parent's key.

    segment    <u64 xxh3_64 of all that follows, u8 version, u8 flags, u16 sections, u32 operations>, then the sections
    flags      1: merged; it repeats the changes of older segments (see merger.py)
    section    <u8 kind, u8 tenant bytes, u32 count>, tenant; then columns of `count` entries
               kind 0, deletions:  keys
               kind 1, puts:       keys, sizes, checksums, generations, namespaces, parents, holders
    integers   <u8 width, u64 base>, then width bytes an entry: each is base + that. Width 0, 1, 2, 4 or 8; 0: all are the base
    texts      integers of the lengths, then the bytes of all
    keys       texts
    sizes, checksums, generations    integers
    namespaces    <u32 distinct>, texts of the distinct ones, integers: the index of each
    parents       <u32 others>, texts of the others, integers: 0 for none, 1 + i for key i of this section, 1 + count + i for other i
    holders       <u32 distinct>, integers of the distinct sets' sizes, integers of all their node ids, integers: the index of each

Within a segment each (tenant, key) occurs once. All integers are little-endian. A change of the format raises the
version; other versions are refused."""

import itertools
import struct
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

import xxhash

from kvstore.master.catalogs.interface import BlockDeletes, BlockPuts, Change
from kvstore.protocol.errors import Corrupt

VERSION: Final = 1
MERGED: Final = 1
MAX_SEGMENT_BYTES: Final = 768 * 1024
"""Upper estimate of an encoded segment; most are half of it. etcd takes 1.5 MiB, with all overhead."""
ROW_BYTES: Final = 48
"""In that estimate: an entry of each column, without the texts and the holders."""
TENANT_BYTES: Final = 144
"""In that estimate: the headers of a tenant's sections, without its name, and of their columns."""

_HEADER: Final = struct.Struct("<QBBHI")
_SECTION: Final = struct.Struct("<BBI")
_INTEGERS: Final = struct.Struct("<BQ")
_COUNT: Final = struct.Struct("<I")
_DELETIONS, _PUTS = 0, 1
_CODES: Final = {1: "B", 2: "H", 4: "I", 8: "Q"}

H = TypeVar("H", bound=Hashable)

Row = tuple[bytes, int, int, int, str, bytes, tuple[int, ...]]
"""Key, size, checksum, generation, namespace, parent, holders."""
Blocks = dict[str, dict[bytes, Row | None]]
"""By tenant and key; None for a deleted block."""


class LogSegment(NamedTuple):
    """A decoded segment. `operations` counts its puts and deletions."""

    merged: bool
    operations: int
    changes: list[Change]


def replay(blocks: Blocks, changes: Sequence[Change]) -> None:
    """Apply a segment's changes to `blocks`."""
    for change in changes:
        if isinstance(change, BlockPuts):
            blocks.setdefault(change.tenant, {}).update(zip(change.keys, zip(*change[1:], strict=True), strict=True))
        elif isinstance(change, BlockDeletes):
            blocks.setdefault(change.tenant, {}).update(dict.fromkeys(change.keys))


def cut(blocks: Blocks) -> Iterator[Blocks]:
    """Split `blocks` into parts that each fit a segment. Yields nothing for no blocks."""
    part: Blocks = {}
    left_bytes = MAX_SEGMENT_BYTES
    for tenant, rows in blocks.items():
        of_tenant: dict[bytes, Row | None] = {}
        tenant_bytes = TENANT_BYTES + 2 * len(tenant.encode())
        for key, row in rows.items():
            size_bytes = ROW_BYTES + len(key)
            if row is not None:
                size_bytes += len(row[4]) + len(row[5]) + 4 * len(row[6])
            left_bytes -= size_bytes if of_tenant else tenant_bytes + size_bytes
            if left_bytes < 0 and (part or of_tenant):
                if of_tenant:
                    part[tenant] = of_tenant
                yield part
                part, of_tenant, left_bytes = {}, {}, MAX_SEGMENT_BYTES - tenant_bytes - size_bytes
            of_tenant[key] = row
        if of_tenant:
            part[tenant] = of_tenant
    if part:
        yield part


def encode(blocks: Blocks, *, merged: bool = False) -> bytes:
    """Encode `blocks` as one segment."""
    parts: list[bytes] = []
    sections = operations = 0
    for tenant, rows in blocks.items():
        name = tenant.encode()
        puts = [row for row in rows.values() if row is not None]
        deleted = [key for key, row in rows.items() if row is None] if len(puts) < len(rows) else []
        operations += len(rows)
        if deleted:
            sections += 1
            parts += (_SECTION.pack(_DELETIONS, len(name), len(deleted)), name, _texts(deleted))
        if puts:
            sections += 1
            parts += (_SECTION.pack(_PUTS, len(name), len(puts)), name, *_puts(puts))
    head = _HEADER.pack(0, VERSION, MERGED if merged else 0, sections, operations)[8:]
    rest = b"".join((head, *parts))
    return xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest


def head(value: bytes, name: bytes) -> tuple[bool, int]:
    """Return (merged, operations) of the segment with the key `name`. Raises Corrupt."""
    if len(value) < _HEADER.size:
        raise Corrupt(f"the catalog's segment {name!r} is damaged: {len(value)} bytes")
    checksum, version, flags, _sections, operations = _HEADER.unpack_from(value)
    if xxhash.xxh3_64_intdigest(memoryview(value)[8:]) != checksum:
        raise Corrupt(f"the catalog's segment {name!r} is damaged: its checksum is another")
    if version != VERSION:
        raise Corrupt(f"the catalog's segment {name!r} has form {version}, this release reads {VERSION}")
    return bool(flags & MERGED), operations


def decode(value: bytes, name: bytes) -> LogSegment:
    """Decode the segment with the key `name`. Raises Corrupt, which names it."""
    merged, operations = head(value, name)
    reader = _SegmentReader(value)
    try:
        changes = [reader.section() for _section in range(_HEADER.unpack_from(value)[3])]
    except (struct.error, UnicodeDecodeError, IndexError, ValueError) as error:
        raise Corrupt(f"the catalog's segment {name!r} is damaged: {error}") from None
    if reader.at != len(value) or sum(len(change.keys) for change in changes) != operations:
        raise Corrupt(f"the catalog's segment {name!r} is damaged: it ends at {reader.at} of {len(value)}")
    return LogSegment(merged, operations, list(changes))


def _puts(rows: Sequence[Row]) -> Iterator[bytes]:
    keys, sizes, checksums, generations, namespaces, parents, holders = zip(*rows, strict=True)
    yield _texts(keys)
    for column in (sizes, checksums, generations):
        yield _integers(column)
    names, which = _distinct(namespaces)
    yield from (_COUNT.pack(len(names)), _texts([name.encode() for name in names]), _integers(which))
    others: dict[bytes, int] = {}
    if any(parents):
        place = {b"": 0} | dict(zip(keys, range(1, len(keys) + 1), strict=True))
        for parent in parents:
            if parent not in place:
                place[parent] = 1 + len(keys) + len(others)
                others[parent] = 0
        which = [place[parent] for parent in parents]
    else:
        which = [0] * len(keys)
    yield from (_COUNT.pack(len(others)), _texts(list(others)), _integers(which))
    sets, which = _distinct(holders)
    yield from (_COUNT.pack(len(sets)), _integers(list(map(len, sets))), _integers([node for nodes in sets for node in nodes]))
    yield _integers(which)


def _distinct(values: Sequence[H]) -> tuple[list[H], list[int]]:
    """Return the distinct values, and each value's index among them."""
    found = dict(zip(dict.fromkeys(values), itertools.count(), strict=False))
    return list(found), [0] * len(values) if len(found) == 1 else [found[value] for value in values]


def _texts(texts: Sequence[bytes]) -> bytes:
    return _integers(list(map(len, texts))) + b"".join(texts)


def _integers(values: Sequence[int]) -> bytes:
    base = min(values, default=0)
    span = max(values, default=0) - base
    if not span:
        return _INTEGERS.pack(0, base)
    width = 1 if span < 1 << 8 else 2 if span < 1 << 16 else 4 if span < 1 << 32 else 8
    if width == 8:
        base = 0
    entries = values if not base else [value - base for value in values]
    return _INTEGERS.pack(width, base) + struct.pack(f"<{len(entries)}{_CODES[width]}", *entries)


class _SegmentReader:
    """Reads a segment's sections in order. Raises struct.error, IndexError or ValueError for malformed data."""

    def __init__(self, value: bytes) -> None:
        self._value = value
        self.at = _HEADER.size

    def section(self) -> BlockPuts | BlockDeletes:
        kind, tenant_bytes, count = _SECTION.unpack(self._take(_SECTION.size))
        tenant = self._take(tenant_bytes).decode()
        keys = self._texts(count)
        if kind == _DELETIONS:
            return BlockDeletes(tenant, keys)
        if kind != _PUTS:
            raise ValueError(f"a section of kind {kind}")
        sizes, checksums, generations = (self._integers(count) for _column in range(3))
        names = [name.decode() for name in self._texts(self._count())]
        namespaces = _chosen(names, self._integers(count))
        others = self._texts(self._count())
        parents = _chosen([b"", *keys, *others], self._integers(count))
        set_sizes = self._integers(self._count())
        nodes = iter(self._integers(sum(set_sizes)))
        sets = [tuple(itertools.islice(nodes, size)) for size in set_sizes]
        return BlockPuts(tenant, keys, sizes, checksums, generations, namespaces, parents, _chosen(sets, self._integers(count)))

    def _take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self._value):
            raise ValueError(f"{size} bytes at {self.at} of {len(self._value)}")
        taken = self._value[self.at : end]
        self.at = end
        return taken

    def _count(self) -> int:
        return int(_COUNT.unpack(self._take(_COUNT.size))[0])

    def _integers(self, count: int) -> Sequence[int]:
        width, base = _INTEGERS.unpack(self._take(_INTEGERS.size))
        if not width:
            if count > len(self._value):
                raise ValueError(f"a column of {count}")
            return (base,) * count
        if width not in _CODES:
            raise ValueError(f"integers of {width} bytes")
        found = struct.unpack(f"<{count}{_CODES[width]}", self._take(width * count))
        return found if not base else [base + entry for entry in found]

    def _texts(self, count: int) -> list[bytes]:
        lengths = self._integers(count)
        data = self._take(sum(lengths))
        ends = list(itertools.accumulate(lengths))
        return [data[end - length : end] for end, length in zip(ends, lengths, strict=True)]


def _chosen(values: Sequence[H], which: Sequence[int]) -> list[H]:
    return [values[index] for index in which]
