"""The catalog `lmdb:PATH`: a folder with one LMDB environment, for a master on one machine.

Every group is one LMDB transaction, synced before it is acknowledged. `PATH/owner.lock` is held with flock, so a second master is
refused and a killed one leaves no trace. The records are in database `records`; `meta` holds `format`, `identity` and `epoch`.
"""

import fcntl
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import lmdb

from kvstore.master.catalogs.backoff import Backoff
from kvstore.master.catalogs.block_records import as_changes, as_records
from kvstore.master.catalogs.group_commit import GroupCommit
from kvstore.master.catalogs.interface import IDENTITY_BYTES, Candidate, Catalog, Change, Done, Follower
from kvstore.protocol.errors import CatalogUnavailable, ConfigError, Corrupt

FORMAT = b"1"
"""Raised when the layout of the environment changes; another one is refused, not guessed at."""
MAP_BYTES = 16 * 1024**3
"""The map's first size. Address space only, the file grows with its content: room for some 60 million records of 128 bytes."""


FOLLOWER_GRACE_S = 1.0
"""How long `close` waits for a call of the follower that is under way."""


@dataclass(frozen=True, slots=True)
class _Environment:
    """An open LMDB environment and the handles of its two databases."""

    lmdb: Any
    records: Any
    meta: Any


class LmdbCatalog(Catalog):
    """See Catalog. The writer is one thread of its own, the reader another, which ends with the election."""

    scheme: ClassVar[str] = "lmdb"

    def __init__(self, folder: Path, *, map_bytes: int = MAP_BYTES, backoff: Backoff | None = None) -> None:
        """`folder` is created if its parent exists. A full map doubles `map_bytes` by itself."""
        self._folder = folder
        self._map_bytes = map_bytes
        self._environment: _Environment | None = None
        self._lock_fd: int | None = None
        self._identity = ""
        self._epoch = 0
        self._closing = threading.Event()
        self._following: threading.Thread | None = None
        self._committer: GroupCommit[str] = GroupCommit(self._write, backoff=backoff or Backoff(first_s=0.05, longest_s=2.0))

    def open(self, *, deadline_s: float) -> None:
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
            self._epoch = self._raise_epoch(self._environment)
        except BaseException:
            self._close_environment()
            self._release_lock()
            raise
        self._committer.start()

    @property
    def identity(self) -> str:
        return self._identity

    def follow(self, me: Candidate, follower: Follower) -> None:
        """Nobody else can have the folder open: the election follows the listing."""
        self._following = threading.Thread(target=self._tell, args=(follower,), name="catalog-follow", daemon=True)
        self._following.start()

    def commit(self, changes: Sequence[Change], done: Done) -> None:
        self._committer.submit(changes, done)

    @property
    def health(self) -> str:
        return self._committer.health

    def close(self) -> None:
        self._closing.set()
        if self._following is not None:
            self._following.join(FOLLOWER_GRACE_S)
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

    def _tell(self, follower: Follower) -> None:
        try:
            follower.begin()
            for changes in as_changes(self._read()):
                follower.take(changes)
            follower.owned_by(None)
            self._committer.admit("the folder")
            follower.elected(self._epoch)
        except Corrupt as damage:
            follower.deposed(damage)
        except (_ClosingError, lmdb.Error) as error:
            if not self._closing.is_set():
                follower.deposed(Corrupt(f"lmdb:{self._folder}: cannot be read: {error}"))

    def _read(self) -> Iterator[tuple[bytes, bytes]]:
        environment = self._environment
        assert environment is not None
        with environment.lmdb.begin(db=environment.records) as transaction, transaction.cursor() as cursor:
            for record in cursor:
                if self._closing.is_set():
                    raise _ClosingError
                yield record

    def _write(self, changes: Sequence[Change], _owned: str) -> None:
        records = as_records(changes)
        if self._environment is None:
            self._environment = self._open_environment()
        with _disk_errors(self._folder):
            try:
                while not _applied(self._environment, records):
                    self._grow_map(self._environment)
            except lmdb.PanicError:
                # A meta page could not be written. LMDB refuses this environment from now on; a fresh one finds the last good page.
                self._close_environment()
                raise

    def _grow_map(self, environment: _Environment) -> None:
        # LMDB moves the map: a transaction of this process that is open meanwhile would read freed memory. The listing is over by then.
        self._map_bytes *= 2
        environment.lmdb.set_mapsize(self._map_bytes)

    def _close_environment(self) -> None:
        if self._environment is not None:
            self._environment.lmdb.close()
            self._environment = None

    def _release_lock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


class _ClosingError(Exception):
    """The catalog is being closed."""


def _applied(environment: _Environment, records: Mapping[bytes, bytes | None]) -> bool:
    """Write the records in one synced transaction; False when the map is full and nothing was written."""
    try:
        with environment.lmdb.begin(db=environment.records, write=True) as transaction:
            for key, value in records.items():
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
