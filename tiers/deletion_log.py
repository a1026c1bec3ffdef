"""Log of deletions that LMDB could not write: a small preallocated file beside it.

LMDB writes a deletion to new pages, which a full disk does not have. This file has its blocks from the start and is
written in place; only a disk that accepts no write at all fails both. Records of RECORD_BYTES:

    id       8 bytes, big-endian
    digest   xxh3_64 of the id: a record of zeros, or a torn one, is void

The caller never assigns an id that is in the log to another value.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import xxhash

from kvstore.protocol.errors import ConfigError, TierFailed
from kvstore.tiers.tier import TierFull

RECORD_BYTES: Final = 16
MAX_LOGGED_DELETIONS: Final = 16_384
"""Fixed size of the file: 256 KiB."""


class DeletionLog:
    """The file at `path`. Not thread-safe."""

    def __init__(self, path: Path, *, sync: bool) -> None:
        """Open or create it. With `sync`, `add` is durable on return. Raises ConfigError."""
        self._sync = sync
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        try:
            os.posix_fallocate(self._descriptor, 0, MAX_LOGGED_DELETIONS * RECORD_BYTES)
            raw = os.pread(self._descriptor, MAX_LOGGED_DELETIONS * RECORD_BYTES, 0)
        except OSError as error:
            os.close(self._descriptor)
            raise ConfigError(f"{path} cannot be allocated: {error.strerror}") from error
        # Skip the trailing zeros, nearly all of the file: examining each record took most of the time to open a tier.
        offsets = range(0, len(raw.rstrip(b"\0")), RECORD_BYTES)
        found = {begin: raw[begin : begin + 8] for begin in offsets if raw[begin : begin + RECORD_BYTES] == _record(raw[begin : begin + 8])}
        self.ids: set[bytes] = set(found.values())
        """The ids in the file."""
        self._end_bytes = max(found, default=-RECORD_BYTES) + RECORD_BYTES

    def add(self, ids: Iterable[bytes]) -> None:
        """Append the ids that are not in it; durable on return. Raises TierFull or TierFailed; some of them may then be
        in the file.
        """
        new = [one for one in ids if one not in self.ids]
        if not new:
            return
        data = b"".join(map(_record, new))
        if self._end_bytes + len(data) > MAX_LOGGED_DELETIONS * RECORD_BYTES:
            raise TierFull(f"{MAX_LOGGED_DELETIONS} deletions already wait for LMDB: free space on its disk")
        self._write(data, self._end_bytes)
        self._end_bytes += len(data)
        self.ids.update(new)

    def clear(self) -> None:
        """Remove all ids: LMDB has their deletions. If the write fails they stay, which is harmless: they refer to no
        value.
        """
        if self._end_bytes:
            with suppress(TierFull, TierFailed):
                self._write(bytes(self._end_bytes), 0)
                self._end_bytes = 0
                self.ids.clear()

    def close(self) -> None:
        """A second close is a no-op."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, data: bytes, offset_bytes: int) -> None:
        try:
            written = os.pwrite(self._descriptor, data, offset_bytes)
            if self._sync:
                os.fdatasync(self._descriptor)
        except OSError as error:
            raise TierFailed(f"a deletion cannot be logged: {error.strerror}") from error
        if written < len(data):
            raise TierFull(f"a deletion cannot be logged: {written} of {len(data)} bytes were written")


def _record(key: bytes) -> bytes:
    return key + xxhash.xxh3_64_digest(key)
