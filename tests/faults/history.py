"""History of the results that callers received: the checker of the tests that inject faults under load.

A value contains its tenant, key, version and writer, and a checksum over all of it. A version may be read from the start of its put
until the end of the removal that was acknowledged. A get may return any version that could have been current between its own start and
end, or miss. If a block was acknowledged and nothing may have removed it, a miss is a loss.

Times are any integers that rise with the order of events: virtual nanoseconds, or a counter. Not thread-safe.
Source: CacheLib's ValueHistory (a hit must be a version that could have been current), extended to calls that overlap.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, NamedTuple

import xxhash

MAGIC: Final = b"kvst"
_HEADER: Final = struct.Struct(">4sIIIBB")
_CHECKSUM_BYTES: Final = 8


class Violation(AssertionError):
    """A caller received an impossible result. `kind` is one of a few fixed phrases."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Described(NamedTuple):
    """Header of a value."""

    tenant: str
    key: bytes
    version: int
    writer: int


def describing_value(tenant: str, key: bytes, version: int, writer: int, size_bytes: int) -> bytes:
    """Return `size_bytes` bytes that are unique to this tenant, key, version, writer and size."""
    name = tenant.encode()
    head = _HEADER.pack(MAGIC, size_bytes, version, writer, len(name), len(key)) + name + key
    filling = size_bytes - len(head) - _CHECKSUM_BYTES
    assert filling >= 0, f"a value of {size_bytes} bytes cannot describe itself"
    unit = xxhash.xxh3_128_digest(head)
    body = head + (unit * (filling // len(unit) + 1))[:filling]
    return body + xxhash.xxh3_64_digest(body)


def described(value: bytes) -> Described:
    """Return the header of a value. Raises Violation for bytes that no writer put in this form."""
    if len(value) >= _HEADER.size + _CHECKSUM_BYTES and xxhash.xxh3_64_digest(value[:-_CHECKSUM_BYTES]) == value[-_CHECKSUM_BYTES:]:
        magic, size_bytes, version, writer, name_bytes, key_bytes = _HEADER.unpack_from(value)
        end = _HEADER.size + name_bytes
        if magic == MAGIC and size_bytes == len(value):
            return Described(value[_HEADER.size : end].decode(), value[end : end + key_bytes], version, writer)
    raise Violation("wrong bytes", f"{len(value)} bytes that nobody put: {value[:40].hex()}...")


class Told(StrEnum):
    """Result of a put."""

    NOTHING = "nothing yet"
    STORED = "stored"
    PRESENT = "already there"
    FAILED = "failed"
    """The value may be stored nevertheless, now or later."""


@dataclass(slots=True, eq=False)
class Version:
    """One put. `known_at`: time from which every removal reaches it, or None while only its node may know the block."""

    tenant: str
    key: bytes
    number: int
    writer: int
    ack: str
    size_bytes: int
    begun_at: int
    told: Told = Told.NOTHING
    ended_at: int | None = None
    known_at: int | None = None
    is_told_lost: bool = False
    over_at: int | None = None
    """Time from which it can no longer be read."""

    @property
    def value(self) -> bytes:
        return describing_value(self.tenant, self.key, self.number, self.writer, self.size_bytes)

    def __str__(self) -> str:
        return f"version {self.number} of {self.tenant}/{self.key.hex()} (writer {self.writer}, ack {self.ack}, {self.told})"


@dataclass(slots=True, eq=False)
class Removal:
    tenant: str
    key: bytes
    writer: int
    begun_at: int
    ended_at: int | None = None
    """None: no reply was received, and the removal may be executed at any time."""


@dataclass(slots=True)
class _Key:
    versions: list[Version] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)
    """All removals that began, with any result."""


class History:
    """See the module."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, bytes], _Key] = {}

    def begin_put(self, tenant: str, key: bytes, *, writer: int, ack: str, size_bytes: int, at: int) -> Version:
        """Return the version to put, with its value. From now on it may be read, even if the put is not acknowledged."""
        known = self._keys.setdefault((tenant, key), _Key())
        version = Version(tenant, key, len(known.versions), writer, ack, size_bytes, at)
        known.versions.append(version)
        return version

    def end_put(self, version: Version, told: Told, *, at: int) -> None:
        version.told, version.ended_at = told, at
        if told is Told.STORED and version.ack != "node":
            version.known_at = at

    def flushed(self, writer: int, *, begun_at: int, at: int) -> None:
        """Record the end of a flush: every block that this writer had stored before it began is in the directory from now on."""
        for version in self.versions():
            if self._is_before(version, writer, begun_at) and not version.is_told_lost:
                version.known_at = version.known_at if version.known_at is not None else at

    def flush_told_loss(self, writer: int, *, begun_at: int) -> None:
        """Record a flush that reported a dead node and its uncommitted blocks as lost. Later flushes do not wait for them."""
        for version in self.versions():
            if self._is_before(version, writer, begun_at) and version.known_at is None:
                version.is_told_lost = True

    @staticmethod
    def _is_before(version: Version, writer: int, begun_at: int) -> bool:
        """Return whether the writer received the acknowledgement of this version before `begun_at`."""
        return version.writer == writer and version.told is Told.STORED and version.ended_at is not None and version.ended_at <= begun_at

    def begin_remove(self, tenant: str, key: bytes, *, writer: int, at: int) -> Removal:
        removal = Removal(tenant, key, writer, at)
        self._keys.setdefault((tenant, key), _Key()).removals.append(removal)
        return removal

    def end_remove(self, removal: Removal, *, is_gone: bool, at: int, nodes_were_away: bool = False) -> None:
        """Record the reply: `is_gone` if the block existed and was removed.

        The removal ends every version that was in the directory before it began. It also ends the versions that its own caller had put,
        unless `nodes_were_away`: an unreachable node may have been the only one with such a block."""
        removal.ended_at = at
        if not is_gone:
            return
        for version in self._keys[removal.tenant, removal.key].versions:
            was_there = version.known_at is not None and version.known_at <= removal.begun_at
            had_put = version.writer == removal.writer and version.told is Told.STORED
            is_own = not nodes_were_away and had_put and _before(version.ended_at, removal.begun_at)
            if (was_there or is_own) and version.over_at is None:
                version.over_at = at

    def check_read(self, tenant: str, key: bytes, value: bytes, *, begun_at: int) -> Version:
        """Check `value`, the result of a get that began at `begun_at` and ends now. Raises Violation if it is impossible."""
        found = described(value)
        if (found.tenant, found.key) != (tenant, key):
            kind = "another tenant's bytes" if found.tenant != tenant else "another key's bytes"
            raise Violation(kind, f"{tenant}/{key.hex()} gave {found}")
        versions = self._keys[tenant, key].versions if (tenant, key) in self._keys else []
        if found.version >= len(versions) or versions[found.version].writer != found.writer:
            raise Violation("wrong bytes", f"{tenant}/{key.hex()}: {found} was never put")
        version = versions[found.version]
        if version.over_at is not None and version.over_at <= begun_at:
            raise Violation("stale version", f"{version} was over at {version.over_at}, the get began at {begun_at}")
        return version

    def versions(self) -> Iterator[Version]:
        for known in self._keys.values():
            yield from known.versions

    def of(self, tenant: str, key: bytes) -> list[Version]:
        """Return all versions of a key, in the order of their puts."""
        known = self._keys.get((tenant, key))
        return [] if known is None else known.versions

    def may_be_removed(self, version: Version) -> bool:
        """Return whether a removal was attempted and had not ended before the version's put began. A miss is then no loss."""
        removals = self._keys[version.tenant, version.key].removals
        return any(removal.ended_at is None or removal.ended_at >= version.begun_at for removal in removals)

    def rivals(self, version: Version) -> list[Version]:
        """Return other versions of its key that may be stored in its place: all but those that ended before its put began."""
        return [
            other
            for other in self.of(version.tenant, version.key)
            if other is not version
            and other.told is not Told.PRESENT
            and not (other.told is Told.STORED and _before(other.over_at, version.begun_at))
        ]

    def places(self) -> list[tuple[str, bytes]]:
        """Return every tenant and key of any recorded call."""
        return list(self._keys)


def _before(at: int | None, other: int) -> bool:
    return at is not None and at <= other
