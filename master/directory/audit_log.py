"""Audit trail of the cluster: the newest entries, as records of the catalog. Sans-I/O.

Two rings: one for changes, one for refused and repeated requests. So a flood of refused logins evicts no change.
Record keys are b"a", the ring's letter and the entry's number (u64, big-endian); the value is a
kvstore.v1.AuditEntry."""

import struct
from collections.abc import Iterator
from typing import Final

from google.protobuf.message import DecodeError

from kvstore.master.catalogs.interface import Op
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Corrupt

MAX_CHANGES: Final = 4096
"""Entries of changes; about 2 MiB of the catalog."""
MAX_OTHERS: Final = 1024
MAX_TEXT_BYTES: Final = 512
"""Of each text of an entry."""
PREFIX: Final = b"a"
CHANGES, OTHERS = b"c", b"o"
_NUMBER: Final = struct.Struct(">Q")
_LIMITS: Final = {CHANGES: MAX_CHANGES, OTHERS: MAX_OTHERS}


class AuditLog:
    """Two bounded rings of entries, numbered together. Not thread-safe."""

    def __init__(self) -> None:
        self._rings: dict[bytes, dict[int, pb.AuditEntry]] = {CHANGES: {}, OTHERS: {}}
        """By number."""
        self.last = 0
        """Number of the newest entry, or 0."""

    def add(self, entry: pb.AuditEntry) -> list[Op]:
        """Append an entry under the next number; return the operations that store it and delete the displaced ones."""
        entry.number = self.last = self.last + 1
        letter = OTHERS if entry.count else CHANGES
        ring = self._rings[letter]
        ring[entry.number] = entry
        ops = [Op(_key(letter, entry.number), entry.SerializeToString())]
        while len(ring) > _LIMITS[letter]:
            oldest = min(ring)
            del ring[oldest]
            ops.append(Op(_key(letter, oldest), None))
        return ops

    def take(self, key: bytes, value: bytes | None) -> None:
        """Apply a record of the catalog, or its deletion (None). Raises Corrupt."""
        letter, number = _read_key(key)
        ring = self._rings[letter]
        if value is None:
            ring.pop(number, None)
            return
        try:
            entry = pb.AuditEntry.FromString(value)
        except DecodeError as error:
            raise Corrupt(f"the catalog's record {key!r} is damaged: {error}") from None
        entry.number = number
        ring[number] = entry
        self.last = max(self.last, number)

    def after(self, number: int) -> list[pb.AuditEntry]:
        """Return the entries with a higher number, oldest first."""
        return sorted(self._newer(number), key=lambda entry: entry.number)

    def _newer(self, number: int) -> Iterator[pb.AuditEntry]:
        if number >= self.last:
            return
        for ring in self._rings.values():
            yield from (entry for entry in ring.values() if entry.number > number)


def is_audit(key: bytes) -> bool:
    """Return True if a record's key is one of the audit trail."""
    return key[:1] == PREFIX


def clip(text: str) -> str:
    """Return the text cut to MAX_TEXT_BYTES, printable and valid UTF-8."""
    shown = "".join(one if one.isprintable() else "\ufffd" for one in text)
    return shown.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore")


def _key(letter: bytes, number: int) -> bytes:
    return PREFIX + letter + _NUMBER.pack(number)


def _read_key(key: bytes) -> tuple[bytes, int]:
    """Raises Corrupt."""
    if len(key) != 2 + _NUMBER.size or key[1:2] not in _LIMITS:
        raise Corrupt(f"the catalog's record {key!r} is damaged: not a key of the audit trail")
    return key[1:2], _NUMBER.unpack_from(key, 2)[0]
