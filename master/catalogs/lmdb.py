"""The catalog `lmdb:PATH`: a folder with one LMDB environment, for a master on one machine.

Every group is one LMDB transaction, synced before it is acknowledged. `PATH/owner.lock` is held with flock, so a second master is
refused and a killed one leaves no trace. The records are in database `records`; `meta` holds `format`, `identity` and `epoch`.
"""

import fcntl
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import lmdb

from kvstore.master.catalogs.backoff import Backoff
from kvstore.master.catalogs.group_commit import Changes, GroupCommit
from kvstore.master.catalogs.interface import IDENTITY_BYTES, Catalog, Done, Op
from kvstore.protocol.errors import CatalogUnavailable, ConfigError

FORMAT = b"1"
"""Raised when the layout of the environment changes; another one is refused, not guessed at."""
MAP_BYTES = 16 * 1024**3
"""The map's first size. Address space only, the file grows with its content: room for some 60 million records of 128 bytes."""


@dataclass(frozen=True, slots=True)
class _Environment:
    """An open LMDB environment and the handles of its two databases."""

    lmdb: Any
    records: Any
    meta: Any


class LmdbCatalog(Catalog):
    """See Catalog. The writer is one thread of its own; `load` reads in the caller's."""

    scheme: ClassVar[str] = "lmdb"

    def __init__(self, folder: Path, *, map_bytes: int = MAP_BYTES, backoff: Backoff | None = None) -> None:
        """`folder` is created if its parent exists. A full map doubles `map_bytes` by itself."""
        self._folder = folder
        self._map_bytes = map_bytes
        self._environment: _Environment | None = None
        self._resizing = threading.Lock()
        self._lock_fd: int | None = None
        self._identity = ""
        self._load_count = 0
        self._committer = GroupCommit(self._write, backoff=backoff or Backoff(first_s=0.05, longest_s=2.0))

    def open(self, *, deadline_s: float) -> int:
        """See Catalog. Does not wait: a folder that another master has open is refused at once with CatalogUnavailable."""
        try:
            self._folder.mkdir(exist_ok=True)
            self._lock_fd = os.open(self._folder / "owner.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"lmdb:{self._folder}: cannot be a catalog's folder: {error.strerror}") from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._release_lock()
            raise CatalogUnavailable(f"lmdb:{self._folder}: another master has it open") from error
        try:
            self._environment = self._open_environment()
            epoch = self._raise_epoch(self._environment)
        except BaseException:
            self._close_environment()
            self._release_lock()
            raise
        self._committer.start()
        return epoch

    @property
    def identity(self) -> str:
        return self._identity

    def load(self) -> Iterator[tuple[bytes, bytes]]:
        """See Catalog; as of the first record taken. Until the iterator is exhausted or closed its read transaction stays open, and
        a full map cannot grow.
        """
        with self._resizing:
            if self._environment is None:
                raise CatalogUnavailable(f"lmdb:{self._folder}: not open")
            transaction = self._environment.lmdb.begin(db=self._environment.records)
            self._load_count += 1
        try:
            with transaction, transaction.cursor() as cursor:
                yield from cursor
        except lmdb.Error as error:
            raise CatalogUnavailable(f"lmdb:{self._folder}: closed while it was being read: {error}") from error
        finally:
            self._load_count -= 1

    def commit(self, ops: Sequence[Op], done: Done) -> None:
        self._committer.submit(ops, done)

    @property
    def health(self) -> str:
        return self._committer.health

    def close(self) -> None:
        self._committer.close()
        self._close_environment()
        self._release_lock()

    def _open_environment(self) -> _Environment:
        data = self._folder / "data.mdb"
        if data.exists():
            # A map that an earlier owner filled and grew must not be too small for this one's epoch.
            self._map_bytes = max(self._map_bytes, 2 * data.stat().st_size)
        try:
            # writemap would turn a full disk into SIGBUS; read-ahead would fetch 128 KiB for a record of 128 bytes.
            opened = lmdb.open(str(self._folder), map_size=self._map_bytes, max_dbs=2, mode=0o600, writemap=False, readahead=False)
            environment = _Environment(opened, opened.open_db(b"records"), opened.open_db(b"meta"))
        except lmdb.Error as error:
            raise ConfigError(f"lmdb:{self._folder}: cannot be opened as a catalog: {error}") from error
        return environment

    def _raise_epoch(self, environment: _Environment) -> int:
        with _disk_errors(self._folder), environment.lmdb.begin(db=environment.meta, write=True) as transaction:
            found = transaction.get(b"format", FORMAT)
            if found != FORMAT:
                raise ConfigError(f"lmdb:{self._folder}: written by another version of kvstore (format {found!r}, this one is {FORMAT!r})")
            epoch = int(transaction.get(b"epoch", b"0")) + 1
            self._identity = transaction.get(b"identity", b"").decode() or secrets.token_hex(IDENTITY_BYTES)
            transaction.put(b"format", FORMAT)
            transaction.put(b"identity", self._identity.encode())
            transaction.put(b"epoch", b"%d" % epoch)
        return epoch

    def _write(self, changes: Changes) -> None:
        if self._environment is None:
            self._environment = self._open_environment()
        with _disk_errors(self._folder):
            try:
                while not _applied(self._environment, changes):
                    self._grow_map(self._environment)
            except lmdb.PanicError:
                # A meta page could not be written. LMDB refuses this environment from now on; a fresh one finds the last good page.
                self._close_environment()
                raise

    def _grow_map(self, environment: _Environment) -> None:
        # LMDB moves the map: a transaction of this process that is open meanwhile would read freed memory.
        with self._resizing:
            if self._load_count:
                raise CatalogUnavailable(f"lmdb:{self._folder}: the map is full and grows once the load has ended")
            self._map_bytes *= 2
            environment.lmdb.set_mapsize(self._map_bytes)

    def _close_environment(self) -> None:
        with self._resizing:
            if self._environment is not None:
                self._environment.lmdb.close()
                self._environment = None

    def _release_lock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _applied(environment: _Environment, changes: Changes) -> bool:
    """Write the changes in one synced transaction; False when the map is full and nothing was written."""
    try:
        with environment.lmdb.begin(db=environment.records, write=True) as transaction:
            for key, value in changes.items():
                if value is None:
                    transaction.delete(key)
                else:
                    transaction.put(key, value)
    except lmdb.MapFullError:
        return False
    return True


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Translate what the disk refuses; the transaction under way was rolled back."""
    try:
        yield
    except lmdb.Error as error:
        raise CatalogUnavailable(f"lmdb:{folder}: not written: {error}") from error
