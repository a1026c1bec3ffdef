"""What callers were told, and what they may be told next: the checker of the tests that break things under load.

A value says whose it is: tenant, key, version, writer, and a checksum over all of it. A version may be read from the start of its put
until the end of the call that ended it: a removal that was acknowledged. A get may return any version that could have been current between
its own start and end, or miss; where a block was acknowledged and nothing may have taken it away, a miss is a loss, too.

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
    """What callers were told cannot be. `kind` is a few fixed words."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class Described(NamedTuple):
    """What a value says of itself."""

    tenant: str
    key: bytes
    version: int
    writer: int


def describing_value(tenant: str, key: bytes, version: int, writer: int, size_bytes: int) -> bytes:
    """`size_bytes` bytes that no other tenant, key, version, writer or size shares."""
    name = tenant.encode()
    head = _HEADER.pack(MAGIC, size_bytes, version, writer, len(name), len(key)) + name + key
    filling = size_bytes - len(head) - _CHECKSUM_BYTES
    assert filling >= 0, f"a value of {size_bytes} bytes cannot describe itself"
    unit = xxhash.xxh3_128_digest(head)
    body = head + (unit * (filling // len(unit) + 1))[:filling]
    return body + xxhash.xxh3_64_digest(body)


def described(value: bytes) -> Described:
    """Who wrote these bytes. Raises Violation for bytes that nobody wrote as they are."""
    if len(value) >= _HEADER.size + _CHECKSUM_BYTES and xxhash.xxh3_64_digest(value[:-_CHECKSUM_BYTES]) == value[-_CHECKSUM_BYTES:]:
        magic, size_bytes, version, writer, name_bytes, key_bytes = _HEADER.unpack_from(value)
        end = _HEADER.size + name_bytes
        if magic == MAGIC and size_bytes == len(value):
            return Described(value[_HEADER.size : end].decode(), value[end : end + key_bytes], version, writer)
    raise Violation("wrong bytes", f"{len(value)} bytes that nobody put: {value[:40].hex()}...")


class Told(StrEnum):
    """How a put ended."""

    NOTHING = "nothing yet"
    STORED = "stored"
    PRESENT = "already there"
    FAILED = "failed"
    """It may have been stored all the same, or be so later."""


@dataclass(slots=True, eq=False)
class Version:
    """One put. `known_at`: since when every removal reaches it, None while only its node may know of it."""

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
    """It cannot be read any more from here on."""

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
    """None: it was not answered, and may be carried out any time."""


@dataclass(slots=True)
class _Key:
    versions: list[Version] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)
    """Begun, whatever became of them."""


class History:
    """See the module."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, bytes], _Key] = {}

    def begin_put(self, tenant: str, key: bytes, *, writer: int, ack: str, size_bytes: int, at: int) -> Version:
        """The version to put, with its value. From now on it may be read, whether or not the put is acknowledged."""
        known = self._keys.setdefault((tenant, key), _Key())
        version = Version(tenant, key, len(known.versions), writer, ack, size_bytes, at)
        known.versions.append(version)
        return version

    def end_put(self, version: Version, told: Told, *, at: int) -> None:
        version.told, version.ended_at = told, at
        if told is Told.STORED and version.ack != "node":
            version.known_at = at

    def flushed(self, writer: int, *, begun_at: int, at: int) -> None:
        """A flush is over: every block that this writer's puts were told to have stored before it began is known to all from now on."""
        for version in self.versions():
            if self._is_before(version, writer, begun_at) and not version.is_told_lost:
                version.known_at = version.known_at if version.known_at is not None else at

    def flush_told_loss(self, writer: int, *, begun_at: int) -> None:
        """A flush said that a node is gone, and with it what was not known: no later one waits for any of that."""
        for version in self.versions():
            if self._is_before(version, writer, begun_at) and version.known_at is None:
                version.is_told_lost = True

    @staticmethod
    def _is_before(version: Version, writer: int, begun_at: int) -> bool:
        """The writer was told before that it is stored."""
        return version.writer == writer and version.told is Told.STORED and version.ended_at is not None and version.ended_at <= begun_at

    def begin_remove(self, tenant: str, key: bytes, *, writer: int, at: int) -> Removal:
        removal = Removal(tenant, key, writer, at)
        self._keys.setdefault((tenant, key), _Key()).removals.append(removal)
        return removal

    def end_remove(self, removal: Removal, *, is_gone: bool, at: int, nodes_were_away: bool = False) -> None:
        """It was answered: whether the block was there and is gone. What all knew of before it began is over then, and what its own caller
        had put, unless `nodes_were_away`: one of them may have been the only one to know of that."""
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
        """A get that began at `begun_at` and ends now returned `value`. Raises Violation if it could not."""
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
        """All versions of a key, in the order of their puts."""
        known = self._keys.get((tenant, key))
        return [] if known is None else known.versions

    def may_be_removed(self, version: Version) -> bool:
        """Somebody has at least tried to, and it was not over before the version's put began: a miss is no loss."""
        removals = self._keys[version.tenant, version.key].removals
        return any(removal.ended_at is None or removal.ended_at >= version.begun_at for removal in removals)

    def rivals(self, version: Version) -> list[Version]:
        """Other versions of its key that may be there in its stead: all but those that were over before its put began."""
        return [
            other
            for other in self.of(version.tenant, version.key)
            if other is not version
            and other.told is not Told.PRESENT
            and not (other.told is Told.STORED and _before(other.over_at, version.begun_at))
        ]

    def places(self) -> list[tuple[str, bytes]]:
        """Every tenant and key that anybody spoke of."""
        return list(self._keys)


def _before(at: int | None, other: int) -> bool:
    return at is not None and at <= other
