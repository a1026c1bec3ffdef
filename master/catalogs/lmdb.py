"""The catalog `lmdb:PATH`: a folder with one LMDB environment, for a master on one machine.

Every group is one LMDB transaction, synced before it is acknowledged. `PATH/owner.lock` is held with flock: a second
master is refused, and a killed one leaves no lock behind. `meta` holds `format`, `shards`, `partitions`, `identity`
and `epoch`; `values` holds segments of blocks and small records, by the keys of segments/log.py. Partitions but the
first have a folder each, PATH/partition-N."""

import fcntl
import logging
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import lmdb

from kvstore.master.catalogs.group_commit import Backoff, GroupCommit
from kvstore.master.catalogs.interface import IDENTITY_BYTES, Candidate, Catalog, Change, CommitStats, Done, Follower, Op, check_partitions
from kvstore.master.catalogs.segments.log import RECORDS, SEGMENTS, SegmentLog
from kvstore.master.catalogs.segments.merger import SegmentMerger
from kvstore.protocol.errors import CatalogUnavailable, ConfigError, Corrupt
from kvstore.protocol.partitions import SHARDS

FORMAT = b"1"
"""Layout of the environment. Another format is refused."""
MAP_BYTES = 16 * 1024**3
"""Initial map size. Only address space: the file grows with its content. Enough for some 200 million blocks."""
MAX_READERS = 126
"""Concurrent read transactions, LMDB's default; a master has far fewer threads."""
TABLE_BYTES = 64 * (2 + MAX_READERS)
"""Size of `lock.mdb` for MAX_READERS."""
FOLLOWER_GRACE_S = 1.0
"""Time that `close` waits for the follower's call under way."""
MEMORY_PAUSE_S = 1.0
"""Delay before the catalog is read again after a MemoryError."""

log = logging.getLogger("kvstore.master")


@dataclass(frozen=True, slots=True)
class _Environment:
    """An open LMDB environment and the handles of its two databases."""

    lmdb: Any
    values: Any
    meta: Any


@dataclass(frozen=True, slots=True, eq=False)
class _Ownership:
    log: SegmentLog
    merging: SegmentMerger


class LmdbCatalog(Catalog):
    """A catalog in one LMDB environment. One thread commits, another lists the records and ends with the election."""

    scheme: ClassVar[str] = "lmdb"

    def __init__(self, folder: Path, *, partitions: int = 1, map_bytes: int = MAP_BYTES, backoff: Backoff | None = None) -> None:
        """`folder` is created if its parent exists. A full map is doubled automatically. `partitions` is the
        cluster's number."""
        self._folder = folder
        self._partitions = partitions
        self._map_bytes = map_bytes
        self._environment: _Environment | None = None
        self._lock_fd: int | None = None
        self._identity = ""
        self._epoch = 0
        self._closing = threading.Event()
        self._following: threading.Thread | None = None
        self._shards = SHARDS
        self._committer: GroupCommit[_Ownership] = GroupCommit(
            self._commit, backoff=backoff or Backoff(first_s=0.05, longest_s=2.0), background=lambda owned: owned.merging.step()
        )

    def open(self, *, deadline_s: float) -> None:
        """See Catalog. Does not wait: raises CatalogUnavailable at once if another master has the folder open."""
        try:
            self._folder.mkdir(exist_ok=True)
            self._lock_fd = os.open(self._folder / "owner.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"lmdb:{self._folder}: {_why_no_folder(self._folder, error)}") from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._release_lock()
            raise CatalogUnavailable(f"lmdb:{self._folder}: another master has it open") from error
        try:
            data = self._folder / "data.mdb"
            if data.exists():
                # A map that an earlier owner filled and grew must not be too small for this one's epoch.
                self._map_bytes = max(self._map_bytes, 2 * data.stat().st_size)
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
        """See Catalog. No other master can have the folder open: the election follows the listing."""
        self._following = threading.Thread(target=self._notify, args=(follower,), name="catalog-follow", daemon=True)
        self._following.start()

    def commit(self, changes: Sequence[Change], done: Done) -> None:
        self._committer.submit(changes, done)

    @property
    def health(self) -> str:
        return self._committer.health

    @property
    def written(self) -> CommitStats:
        try:
            size_bytes = os.stat(self._folder / "data.mdb").st_size
        except OSError:
            size_bytes = 0
        return self._committer.written(size_bytes)

    def close(self) -> None:
        self._closing.set()
        if self._following is not None:
            self._following.join(FOLLOWER_GRACE_S)
        self._committer.close()
        self._close_environment()
        self._release_lock()

    def _open_environment(self) -> _Environment:
        try:
            _preallocate(self._folder / "lock.mdb")
            opened = lmdb.open(
                str(self._folder),
                map_size=self._map_bytes,
                max_dbs=2,
                max_readers=MAX_READERS,
                mode=0o600,
                writemap=False,  # it would turn a full disk into SIGBUS
                readahead=False,  # it would fetch 128 KiB for a record of 128 bytes
            )
            environment = _Environment(opened, opened.open_db(b"values"), opened.open_db(b"meta"))
        except (lmdb.Error, OSError) as error:
            raise ConfigError(f"lmdb:{self._folder}: cannot be opened as a catalog: {error}") from error
        return environment

    def _raise_epoch(self, environment: _Environment) -> int:
        with _disk_errors(self._folder), environment.lmdb.begin(db=environment.meta, write=True) as transaction:
            found = transaction.get(b"format")
            if found not in (None, FORMAT):
                raise ConfigError(f"lmdb:{self._folder}: written by another version of kvstore (format {found!r}, this one is {FORMAT!r})")
            if found is not None:
                check_partitions(f"lmdb:{self._folder}", int(transaction.get(b"partitions", b"1")), self._partitions)
            epoch = int(transaction.get(b"epoch", b"0")) + 1
            self._identity = transaction.get(b"identity", b"").decode() or secrets.token_hex(IDENTITY_BYTES)
            self._shards = int(transaction.get(b"shards", b"%d" % SHARDS))
            transaction.put(b"format", FORMAT)
            transaction.put(b"partitions", b"%d" % self._partitions)
            transaction.put(b"shards", b"%d" % self._shards)
            transaction.put(b"identity", self._identity.encode())
            transaction.put(b"epoch", b"%d" % epoch)
        return epoch

    def _notify(self, follower: Follower) -> None:
        while not self._closing.is_set():
            try:
                self._notify_once(follower)
                return
            except MemoryError:
                log.warning("lmdb:%s: not enough memory to read it: retrying", self._folder)
                self._closing.wait(MEMORY_PAUSE_S)

    def _notify_once(self, follower: Follower) -> None:
        segments = SegmentLog(self._shards)
        try:
            follower.begin()
            for key, value in self._all():
                if key.startswith(SEGMENTS):
                    follower.take(segments.first_read(key, value))
                else:
                    follower.take([Op(key.removeprefix(RECORDS), value)])
            follower.owned_by(None)
            self._committer.admit(_Ownership(segments, SegmentMerger(segments, self)))
            follower.elected(self._epoch)
        except Corrupt as damage:
            follower.deposed(damage)
        except (_ClosingError, lmdb.Error) as error:
            if not self._closing.is_set():
                follower.deposed(Corrupt(f"lmdb:{self._folder}: cannot be read: {error}"))

    def _all(self) -> Iterator[tuple[bytes, bytes]]:
        environment = self._environment
        assert environment is not None
        with environment.lmdb.begin(db=environment.values) as transaction, transaction.cursor() as cursor:
            for value in cursor:
                if self._closing.is_set():
                    raise _ClosingError
                yield value

    # In the committer's thread.

    def _commit(self, changes: Sequence[Change], owned: _Ownership) -> None:
        self.write(owned.log.append(changes))

    def read(self, begin: bytes, end: bytes, *, max_bytes: int) -> list[tuple[bytes, bytes]]:
        """See CatalogRecords. Not for the catalog's callers."""
        found: list[tuple[bytes, bytes]] = []
        environment = self._opened()
        with _disk_errors(self._folder), environment.lmdb.begin(db=environment.values) as transaction, transaction.cursor() as cursor:
            is_there = cursor.set_range(begin)
            while is_there and cursor.key() < end and max_bytes > 0:
                found.append(cursor.item())
                max_bytes -= len(found[-1][1])
                is_there = cursor.next()
        return found

    def write(self, values: Mapping[bytes, bytes | None]) -> None:
        """See CatalogRecords. Not for the catalog's callers."""
        environment = self._opened()
        with _disk_errors(self._folder):
            try:
                while not _applied(environment, values):
                    self._grow_map(environment)
            except lmdb.PanicError:
                # A meta page could not be written: this environment is unusable; a new one finds the last good page.
                self._close_environment()
                raise

    def _opened(self) -> _Environment:
        if self._environment is None:
            self._environment = self._open_environment()
        return self._environment

    def _grow_map(self, environment: _Environment) -> None:
        # LMDB moves the map: an open transaction would read freed memory. The listing is over by then.
        try:
            environment.lmdb.set_mapsize(2 * self._map_bytes)
        except lmdb.Error:
            self._close_environment()  # no address space: LMDB has unmapped the former map, and the environment is unusable
            raise
        self._map_bytes *= 2

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


def _preallocate(path: Path) -> None:
    """Allocate all blocks of LMDB's reader table. LMDB maps it writable and sparse: on a full disk its first page
    would be a SIGBUS."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as table:
        os.posix_fallocate(table.fileno(), 0, max(os.fstat(table.fileno()).st_size, TABLE_BYTES))


def _applied(environment: _Environment, values: Mapping[bytes, bytes | None]) -> bool:
    """Write the values in one synced transaction; return False if the map is full and nothing was written."""
    try:
        with environment.lmdb.begin(db=environment.values, write=True) as transaction:
            for key, value in values.items():
                if value is None:
                    transaction.delete(key)
                else:
                    transaction.put(key, value)
    except lmdb.MapFullError:
        return False
    return True


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Translate LMDB errors to CatalogUnavailable; the transaction under way was rolled back."""
    try:
        yield
    except lmdb.Error as error:
        raise CatalogUnavailable(f"lmdb:{folder}: not written: {error}") from error


def _why_no_folder(folder: Path, error: OSError) -> str:
    """Return why the folder cannot be made or opened, and what to do. A parent is not made: it may be an unmounted
    disk."""
    if not folder.parent.exists():
        return f"its parent {folder.parent} does not exist: mkdir -p {folder.parent}, or name another folder"
    if not folder.is_dir() and folder.exists():
        return "this is a file: name a folder"
    return f"this folder cannot be made or written: {error.strerror}"
