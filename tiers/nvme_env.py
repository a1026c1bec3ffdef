"""LMDB environment of the NVMe tier: opens, grows, re-opens and closes it. Knows neither slots nor checksums.

A folder holds `data.mdb` and `lock.mdb` (LMDB's) and `kvstore.lock`, held with flock by the one process that may use
it. Databases: `headers` and `values`, which belong to the caller, and the unnamed one with two records of this module:

    format    FORMAT: a folder of another format is refused
    openings  uint64, big-endian: how often the folder was opened

SIGBUS. LMDB reads through a memory map; a page of it behind the end of the file kills the process.

- The file is extended to the map's length (sparse) before the map is used. A file shorter than its meta pages claim is
  refused.
- The map is read-only (`writemap=False`): with a writable one a full disk is a SIGBUS instead of an error.
- A disk that answers EIO to a *read* is still a SIGBUS; a restart recovers the rest.
"""

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import lmdb

from kvstore.protocol.errors import Closed, ConfigError, TierFailed
from kvstore.protocol.settings import format_size
from kvstore.tiers.tier import TierFull

FORMAT = b"kvstore-nvme 2"
"""Version of the layout of headers and values."""

MAP_SLACK_BYTES = 64 << 20
"""Map space for the trees and for pages freed by the last two transactions, which LMDB does not reuse yet."""

MAP_SHARE = 16
"""The initial map is 1/MAP_SHARE of the capacity. The file is as long, and sparse."""

MAX_READERS = 512
"""Concurrent read transactions: LMDB's reader table, 64 bytes each. Far above a node's threads (`read_threads`); one
more fails like a broken device.
"""

DEVICE_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Write errors that mean a full device, not a broken one: disk, quota and RLIMIT_FSIZE."""

TABLE_BYTES = 64 * (2 + MAX_READERS)
"""Size of `lock.mdb` for MAX_READERS readers."""

PROBE_BYTES = 1 << 20
"""A device with less free space than this counts as full."""

Begin = Callable[[lmdb.Environment, bool], AbstractContextManager[Any]]
"""Starts a transaction of an environment, a write transaction if the flag is set. It commits on exit without an
exception.
"""


def begin_transaction(environment: lmdb.Environment, write: bool) -> AbstractContextManager[Any]:
    """Default `Begin`. Tests pass another one to inject disk faults."""
    transaction: AbstractContextManager[Any] = environment.begin(write=write, buffers=True)
    return transaction


class Environment:
    """One LMDB environment that survives a full map and a broken transaction.

    Threads: any number may be in `read`; `write` and `close` are mutually exclusive. No read transaction is open while
    the map is grown or the environment re-opened, as LMDB requires.
    """

    def __init__(self, directory: str | os.PathLike[str], *, capacity_bytes: int, sync: bool, begin: Begin = begin_transaction) -> None:
        """Open the folder, creating it in its parent if missing, for `capacity_bytes` of values.

        With `sync` a write is on the device on return. Without it a power cut may lose the newest writes or all of
        them; a crash of the process loses nothing.

        Raises:
            ConfigError: the folder is unusable.
        """
        self.failure = ""
        self.written_bytes = 0
        """Bytes that transactions wrote to the device since it was opened."""
        self._path = Path(directory)
        self._sync = sync
        self._begin = begin
        self._map_lock = _SharedExclusiveLock()
        self._writing = threading.Lock()
        self._environment: Any = None
        self._map_bytes = 0
        self._lock_descriptor = _lock_folder(self._path)
        # A header of a value of 4 KiB takes 100 to 250 bytes, by its tag. The map grows if all values are stored in LMDB.
        map_bytes = capacity_bytes // MAP_SHARE + MAP_SLACK_BYTES
        try:
            _check_capacity(self._path, capacity_bytes)
            self._open(map_bytes, create=True)
        except (lmdb.Error, OSError) as error:
            os.close(self._lock_descriptor)
            is_too_long = isinstance(error, OSError) and error.errno == errno.EFBIG
            hint = (
                f": {format_size(map_bytes)}, 1/{MAP_SHARE} of its capacity; ext4 has files of up to 16 TiB, XFS of more"
                if is_too_long
                else ""
            )
            raise ConfigError(f"the NVMe folder {self._path} cannot be opened: {error}{hint}") from error
        except BaseException:
            os.close(self._lock_descriptor)
            raise

    @contextmanager
    def read(self) -> Iterator[Any]:
        """Begin a read transaction. Its values are memoryviews into the map, valid until it ends. Keep it short: it
        prevents the reuse of all pages freed meanwhile.

        Raises:
            TierFailed: LMDB cannot read this page, or anything after a failed write.
            Closed: `close` was called.
        """
        with self._map_lock.shared():
            try:
                with self._begin(self._require_open(), False) as transaction:
                    yield transaction
            except lmdb.Error as error:
                raise TierFailed(f"{self._path} cannot be read: {error}") from error

    def write(self, apply: Callable[[Any], None]) -> None:
        """Run `apply` in one write transaction and commit it atomically.

        `apply` runs again, in a new transaction, after the map was grown and after the environment was re-opened: once
        each.

        Raises:
            TierFull: the device or the map's limit is full; nothing was written, later writes may succeed.
            TierFailed: the device failed again after re-opening; the environment is out of order from now on.
            Closed: `close` was called.
        """
        with self._writing, self._bytes_counted():
            is_grown = is_reopened = False
            while True:
                try:
                    with self._begin(self._require_open(), True) as transaction:
                        self._apply_or_abort(apply, transaction)
                    return
                except lmdb.MapFullError as error:
                    if is_grown:
                        raise TierFull(f"{self._path}: the map is full") from error
                    self._grow()
                    is_grown = True
                except lmdb.Error as error:
                    is_full = is_reopened and self._device_is_full(error)
                    if is_reopened and not is_full:
                        with self._map_lock.exclusive():
                            raise self._mark_failed(error) from error
                    # LMDB panics after a failed write of a meta page, for readers too: re-open before the next transaction.
                    self._reopen()
                    if is_full or self._device_is_full(error):
                        raise TierFull(f"{self._path}: {error}") from error
                    is_reopened = True

    def close(self) -> None:
        """Wait for transactions to end, close, and unlock the folder. A second close is a no-op."""
        with self._writing, self._map_lock.exclusive():
            self._close_environment()
            if self._lock_descriptor >= 0:
                os.close(self._lock_descriptor)
                self._lock_descriptor = -1

    @contextmanager
    def _bytes_counted(self) -> Iterator[None]:
        """Count the bytes that this thread writes, by the kernel: LMDB does not report the pages it writes."""
        before = _written_by_thread()
        try:
            yield
        finally:
            self.written_bytes += _written_by_thread() - before

    def _apply_or_abort(self, apply: Callable[[Any], None], transaction: Any) -> None:
        try:
            apply(transaction)
        except BaseException:
            # py-lmdb's abort waits until no thread is inside LMDB: two busy readers would starve it.
            with self._map_lock.exclusive():
                transaction.abort()
            raise

    @property
    def _data_path(self) -> Path:
        return self._path / "data.mdb"

    def _require_open(self) -> Any:
        if self._environment is not None:
            return self._environment
        raise TierFailed(self.failure) if self.failure else Closed(f"the NVMe folder {self._path} was closed")

    def _open(self, map_bytes: int, *, create: bool) -> None:
        _preallocate(self._path / "lock.mdb")
        environment = lmdb.open(
            str(self._path),
            map_size=map_bytes // os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PAGE_SIZE"),
            max_dbs=2,
            max_readers=MAX_READERS,
            create=create,
            mode=0o600,
            sync=self._sync,
            # Keeps the last transaction through a power cut, at less cost than the noise of the measurement.
            metasync=self._sync,
            # Reads are of whole values at random offsets: read-ahead would be wasted.
            readahead=False,
        )
        try:
            for name in ("data.mdb", "lock.mdb"):
                (self._path / name).chmod(
                    0o600
                )  # an earlier release created them with the umask's mode, and they hold values of all tenants
            self._extend_file(environment)
            environment.reader_check()
            if create:
                self.openings = _stamp(environment, self._path)
            self.headers = environment.open_db(b"headers", create=create)
            self.values = environment.open_db(b"values", create=create)
        except BaseException:
            environment.close()
            raise
        self._environment = environment
        self._map_bytes = environment.info()["map_size"]

    def _extend_file(self, environment: Any) -> None:
        info = environment.info()
        claimed_bytes = (info["last_pgno"] + 1) * environment.stat()["psize"]
        file_bytes = self._data_path.stat().st_size
        if file_bytes < claimed_bytes:
            raise ConfigError(
                f"{self._data_path} is truncated: {format_size(file_bytes)} of {format_size(claimed_bytes)} are left; "
                "move the folder away to start with an empty tier"
            )
        os.truncate(self._data_path, max(file_bytes, info["map_size"]))

    def _grow(self) -> None:
        try:
            disk = os.statvfs(self._path)
            bound_bytes = self._data_path.stat().st_blocks * 512 + disk.f_bavail * disk.f_frsize
            grown_bytes = min(2 * self._map_bytes, bound_bytes) // disk.f_frsize * disk.f_frsize
            if grown_bytes <= self._map_bytes:
                raise TierFull(f"{self._path}: the disk has no space for a larger map")
            with self._map_lock.exclusive():
                os.truncate(self._data_path, grown_bytes)
                self._map_at_length(grown_bytes)
        except OSError as error:
            raise TierFull(f"{self._path}: the map cannot grow: {error}") from error

    def _map_at_length(self, map_bytes: int) -> None:
        try:
            self._environment.set_mapsize(map_bytes)
        except lmdb.Error as error:
            self._reopen_same_size()  # out of address space: LMDB has already unmapped the environment
            raise TierFull(f"{self._path}: the map cannot grow: {error}") from error
        self._map_bytes = map_bytes

    def _device_is_full(self, error: Exception) -> bool:
        if getattr(error, "code", 0) in DEVICE_FULL:
            return True
        # LMDB reports EIO for a short write, which also happens when the disk becomes full: probe the disk. The probe begins at
        # the map's end, so that it meets a limit on file length too.
        try:
            os.posix_fallocate(self._lock_descriptor, self._data_path.stat().st_size, PROBE_BYTES)
        except OSError as refused:
            return refused.errno in DEVICE_FULL
        finally:
            with suppress(OSError):  # may fail on a broken device
                os.ftruncate(self._lock_descriptor, 0)
        return False

    def _reopen(self) -> None:
        with self._map_lock.exclusive():
            self._reopen_same_size()

    def _reopen_same_size(self) -> None:
        """Re-open with the current map size. Called while no reader is inside."""
        self._close_environment()
        try:
            self._open(self._map_bytes, create=False)
        except (lmdb.Error, OSError, ConfigError) as error:
            raise self._mark_failed(error) from error

    def _mark_failed(self, error: Exception) -> TierFailed:
        """Mark the environment as out of order and close it. Called while no reader is inside, as closing unmaps the
        file.
        """
        self.failure = f"{self._path}: out of order: {error}"
        self._close_environment()
        return TierFailed(self.failure)

    def _close_environment(self) -> None:
        if self._environment is not None:
            self._environment.close()
            self._environment = None


class _SharedExclusiveLock:
    """Reader-writer lock; exclusive sections (growing, re-opening, closing) take precedence over new readers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._shared_count = 0
        self._is_exclusive = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_exclusive)
            self._shared_count += 1
        try:
            yield
        finally:
            with self._changed:
                self._shared_count -= 1
                self._changed.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Called by one thread at a time: `Environment` holds its write lock."""
        with self._changed:
            self._is_exclusive = True
            self._changed.wait_for(lambda: self._shared_count == 0)
        try:
            yield
        finally:
            with self._changed:
                self._is_exclusive = False
                self._changed.notify_all()


def _lock_folder(path: Path) -> int:
    """Return a descriptor that locks the folder for this process until it is closed.

    The parent is not created: if it is missing, a disk is not mounted or the name is wrong, and values would go to the
    root disk.
    """
    parent = path.absolute().parent
    try:
        parent.stat()
    except FileNotFoundError:
        raise ConfigError(f"the NVMe folder {path} cannot be created: {parent} does not exist; mount its disk, or mkdir -p it") from None
    except OSError as error:
        raise ConfigError(f"the NVMe folder {path} cannot be written: {error.strerror}") from error
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path / "kvstore.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"the NVMe folder {path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigError(f"the NVMe folder {path} is in use by another node") from error
    return descriptor


def _preallocate(path: Path) -> None:
    """Allocate all blocks of LMDB's reader table before LMDB maps it, writable and sparse: on a full disk its pages
    would be a SIGBUS.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as table:
        os.posix_fallocate(table.fileno(), 0, max(os.fstat(table.fileno()).st_size, TABLE_BYTES))


def _check_capacity(path: Path, capacity_bytes: int) -> None:
    disk = os.statvfs(path)
    disk_bytes = disk.f_blocks * disk.f_frsize
    if not 1 <= capacity_bytes <= disk_bytes:
        raise ConfigError(
            f"an NVMe capacity in {path} must be from 1 byte to {format_size(disk_bytes)} (the disk), not {format_size(capacity_bytes)}"
        )


def _stamp(environment: Any, path: Path) -> int:
    """Mark a new folder as ours, refuse a foreign one, and return the number of openings, from 1."""
    with environment.begin(write=True) as transaction:
        found = transaction.get(b"format")
        if found is None and transaction.stat(environment.open_db(None, txn=transaction))["entries"] == 0:
            transaction.put(b"format", FORMAT)
        elif found != FORMAT:
            raise ConfigError(f"{path} holds an LMDB of another format ({found!r}, not {FORMAT!r}); name another folder")
        openings: int = int.from_bytes(transaction.get(b"openings", b"")) + 1
        transaction.put(b"openings", openings.to_bytes(8))
    return openings


def _written_by_thread() -> int:
    """Return the bytes of all write calls of this thread, or 0 if the kernel does not count them."""
    try:
        counts = Path("/proc/thread-self/io").read_text()
    except OSError:
        return 0
    return int(counts.partition("wchar:")[2].split()[0])
