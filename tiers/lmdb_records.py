"""LMDB records of the NVMe tier: a header per value, and the bytes of small values.

Two databases are keyed by the block's id (8 bytes, big-endian, never reused):

    headers  size, checksum, extents and tag of every value
    values   bytes of the values that have no extent

A header, big-endian:

    digest    8 bytes   xxh3_64 of the key and of the rest
    size      uint64    bytes of the value
    checksum  uint64    xxh3_64 of the value
    runs      uint32    number of runs; 0: the value is in `values`
    run       12 bytes  each: first page (uint64) and pages (uint32) in the value file
    tag       the rest

The digest is needed because LMDB detects no flipped bit: one in a tag would return the right bytes for the wrong key.
"""

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import xxhash

from kvstore.protocol.errors import ChecksumMismatch, StaleHandle, TierFailed
from kvstore.tiers.nvme_env import Environment
from kvstore.tiers.placements import Runs, pack_runs, unpack_runs
from kvstore.tiers.tier import Buffer

_DIGEST_BYTES: Final = 8

_RUN_BYTES: Final = 12

_FIXED: Final = struct.Struct(">QQI")

SCAN_CHUNK: Final = 4096
"""Headers read per transaction of a scan, so that a slow caller holds no transaction open."""


class ValueHeader(NamedTuple):
    """Header of a value. `runs` is empty for a value in LMDB."""

    size_bytes: int
    checksum: int
    runs: Runs
    tag: bytes


def pack_header(key: bytes, header: ValueHeader) -> bytes:
    rest = _FIXED.pack(header.size_bytes, header.checksum, len(header.runs)) + pack_runs(header.runs) + header.tag
    return xxhash.xxh3_64_digest(key + rest) + rest


def unpack_header(key: bytes, raw: bytes) -> ValueHeader | None:
    """Return the header, or None if a bit of the key or the header changed."""
    if xxhash.xxh3_64_digest(key + raw[_DIGEST_BYTES:]) != raw[:_DIGEST_BYTES]:
        return None
    size_bytes, checksum, count = _FIXED.unpack_from(raw, _DIGEST_BYTES)
    runs_begin = _DIGEST_BYTES + _FIXED.size
    runs_end = runs_begin + count * _RUN_BYTES
    return ValueHeader(size_bytes, checksum, unpack_runs(raw[runs_begin:runs_end]), raw[runs_end:])


class LmdbRead(NamedTuple):
    """A small value to read into `buffer`, which has its size."""

    block_id: int
    buffer: memoryview


class LmdbRecords:
    """Records of one environment. Any thread may read; `put` and `delete` are called within `Environment.write`."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def put(self, transaction: Any, block_id: int, header: ValueHeader, data: Buffer) -> None:
        """Write the header, and the value's bytes unless they lie in extents."""
        key = key_of(block_id)
        transaction.put(key, pack_header(key, header), db=self._environment.headers)
        if not header.runs:
            transaction.put(key, data, db=self._environment.values)

    def delete(self, transaction: Any, key: bytes) -> None:
        transaction.delete(key, db=self._environment.headers)
        transaction.delete(key, db=self._environment.values)

    def read(self, reads: Sequence[LmdbRead]) -> list[Exception | None]:
        """Fill and verify the buffers; one result per read, as Tier.read_batch_into. Raises Closed."""
        errors: list[Exception | None] = []
        waiting = deque(reads)
        while waiting:
            try:
                with self._environment.read() as transaction:
                    while waiting:
                        errors.append(self._read(transaction, waiting[0]))
                        waiting.popleft()
            except TierFailed as error:
                # A transaction that met a damaged page refuses all further reads: continue in another one.
                errors.append(error)
                waiting.popleft()
        return errors

    def newest_key(self) -> bytes | None:
        """Return the largest key, or None if there is no value. Raises TierFailed."""
        with self._environment.read() as transaction:
            cursor = transaction.cursor(self._environment.headers)
            return bytes(cursor.key()) if cursor.last() else None

    def scan(self) -> Iterator[tuple[bytes, ValueHeader | None]]:
        """Yield keys and headers, oldest first; None for a damaged header. Raises TierFailed."""
        after = b""
        while True:
            with self._environment.read() as transaction:
                cursor = transaction.cursor(self._environment.headers)
                # The successor of `after` in LMDB's order is the same key with a zero byte appended.
                found = cursor.set_range(after + b"\0") if after else cursor.first()
                chunk = [(bytes(key), bytes(raw)) for key, raw in islice(cursor.iternext(), SCAN_CHUNK)] if found else []
            if not chunk:
                return
            after = chunk[-1][0]
            for key, raw in chunk:
                yield key, unpack_header(key, raw)

    def scan_newest(self) -> Iterator[tuple[bytes, ValueHeader | None]]:
        """As `scan`, newest first, in one transaction: consume it without delay."""
        with self._environment.read() as transaction:
            for key, raw in transaction.cursor(self._environment.headers).iterprev():
                yield bytes(key), unpack_header(bytes(key), bytes(raw))

    def _read(self, transaction: Any, read: LmdbRead) -> Exception | None:
        key = key_of(read.block_id)
        raw = transaction.get(key, db=self._environment.headers)
        if raw is None:
            return StaleHandle(f"block {read.block_id} was never written")
        header = unpack_header(key, bytes(raw))
        value = transaction.get(key, db=self._environment.values)
        if header is None or value is None or len(value) != len(read.buffer):
            return ChecksumMismatch(f"block {read.block_id} has a damaged header or length")
        read.buffer[:] = value
        if xxhash.xxh3_64_intdigest(read.buffer) != header.checksum:
            return ChecksumMismatch(f"block {read.block_id} does not hold the bytes that were written")
        return None


def key_of(block_id: int) -> bytes:
    return block_id.to_bytes(8)
