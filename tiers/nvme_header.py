"""Format of a header in the NVMe tier: what a value is, where it lies, and a digest of both.

    digest    8 bytes   xxh3_64 of the key and of all that follows
    size      uint64    bytes of the value
    checksum  uint64    xxh3_64 of the value
    runs      uint32    how many; 0: the value is in the database `values`
    run       12 bytes  each: first page (uint64) and pages (uint32) in the value file
    tag       the rest

Integers are big-endian. LMDB notices no flipped bit: one in a tag would give the right bytes to the wrong key.
"""

import struct
from typing import Final, NamedTuple

import xxhash

from kvstore.tiers.placements import Runs, pack_runs, unpack_runs

_DIGEST_BYTES: Final = 8
_RUN_BYTES: Final = 12
_FIXED: Final = struct.Struct(">QQI")


class Header(NamedTuple):
    """See the module. `runs` is empty for a value in LMDB."""

    size_bytes: int
    checksum: int
    runs: Runs
    tag: bytes


def pack_header(key: bytes, header: Header) -> bytes:
    rest = _FIXED.pack(header.size_bytes, header.checksum, len(header.runs)) + pack_runs(header.runs) + header.tag
    return xxhash.xxh3_64_digest(key + rest) + rest


def unpack_header(key: bytes, raw: bytes) -> Header | None:
    """None where a bit of the key or the header has changed."""
    if xxhash.xxh3_64_digest(key + raw[_DIGEST_BYTES:]) != raw[:_DIGEST_BYTES]:
        return None
    size_bytes, checksum, count = _FIXED.unpack_from(raw, _DIGEST_BYTES)
    runs_begin = _DIGEST_BYTES + _FIXED.size
    runs_end = runs_begin + count * _RUN_BYTES
    return Header(size_bytes, checksum, unpack_runs(raw[runs_begin:runs_end]), raw[runs_end:])
