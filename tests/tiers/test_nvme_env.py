"""Promises of nvme_env.py, one a test: real LMDB, full disks by RLIMIT_FSIZE; faked are a failing device, and one without a page left."""

import errno
import os
import resource
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import lmdb
import pytest

from kvstore.protocol.errors import Closed, ConfigError, TierFailed
from kvstore.testing.transfer.awaited import PATIENCE_S, eventually, in_background
from kvstore.tiers import nvme_env
from kvstore.tiers.nvme_env import TABLE_BYTES, Environment, begin_transaction
from kvstore.tiers.tier import TierFull
from tests.address_space import address_space_limit

MIB = 1 << 20
READ_THREADS = 256
"""Maximum of the setting `read_threads`."""


class Faults:
    """Begins real transactions; each writing one fails before its commit while `errors` lasts."""

    def __init__(self, *errors: Exception, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.errors = list(errors)
        self.meanwhile = meanwhile

    @contextmanager
    def __call__(self, environment: lmdb.Environment, write: bool) -> Iterator[Any]:
        with begin_transaction(environment, write) as transaction:
            yield transaction
            if write and self.errors:
                self.meanwhile()
                raise self.errors.pop(0)


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """The kernel refuses to write any file behind `limit_bytes`. (Python ignores the signal that goes with it.)"""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def open_environment(tmp_path: Path) -> Iterator[Callable[..., Environment]]:
    """Opens tmp_path/"nvme" with a map of a little over 2.25 MiB, and closes it after the test."""
    opened: list[Environment] = []

    def open_one(**settings: Any) -> Environment:
        opened.append(Environment(tmp_path / "nvme", **{"capacity_bytes": 36 * MIB, "sync": False, **settings}))
        return opened[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme_env, "MAP_SLACK_BYTES", 64 << 10)
        yield open_one
    for environment in opened:
        environment.close()


def put(environment: Environment, key: bytes, value: bytes) -> None:
    environment.write(lambda transaction: transaction.put(key, value, db=environment.values))


def get(environment: Environment, key: bytes) -> bytes | None:
    with environment.read() as transaction:
        value = transaction.get(key, db=environment.values)
        return None if value is None else bytes(value)


def test_a_folder_belongs_to_one_owner_until_it_is_closed(open_environment: Callable[..., Environment]) -> None:
    first = open_environment()
    with pytest.raises(ConfigError, match="in use by another node"):
        open_environment()
    first.close()
    open_environment()


@pytest.mark.promise("least-privilege")
def test_files_are_readable_by_their_owner_only(open_environment: Callable[..., Environment], tmp_path: Path) -> None:
    folder = tmp_path / "nvme"
    folder.mkdir()
    folder.chmod(0o755)
    umask = os.umask(0o022)
    try:
        for _ in range(2):
            environment = open_environment()
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
            assert modes == dict.fromkeys(["data.mdb", "lock.mdb", "kvstore.lock"], 0o600)
            environment.close()
            for path in folder.iterdir():
                path.chmod(0o600 if path.name == "kvstore.lock" else 0o644)
    finally:
        os.umask(umask)


def test_a_folder_without_parent_is_refused(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with pytest.raises(ConfigError, match=f"cannot be created: {disk} does not exist; mount its disk"):
        Environment(disk / "nvme", capacity_bytes=1, sync=False)
    assert not disk.exists()


def test_no_space_for_the_reader_table_is_a_config_error(
    open_environment: Callable[..., Environment], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(ConfigError, match=r"cannot be opened: .*No space left on device"):
            open_environment()
    assert not (tmp_path / "nvme" / "data.mdb").exists()
    open_environment()
    table = (tmp_path / "nvme" / "lock.mdb").stat()
    assert table.st_blocks * 512 >= table.st_size == TABLE_BYTES


def test_a_map_longer_than_the_maximum_file_is_refused(open_environment: Callable[..., Environment]) -> None:
    with file_size_limit(2 * MIB), pytest.raises(ConfigError, match=r"File too large.*: 2\.3 MiB, 1/16 of its capacity"):
        open_environment()
    open_environment()


def test_all_readers_that_a_node_may_have_read_at_once(open_environment: Callable[..., Environment]) -> None:
    environment = open_environment()
    put(environment, b"key", b"value")
    with ExitStack() as reading:
        found = [reading.enter_context(environment.read()).get(b"key", db=environment.values) for _ in range(READ_THREADS + 2)]
        assert found == [b"value"] * (READ_THREADS + 2), "the mover's thread and the loop read, too"


def test_a_file_that_is_not_lmdb_is_refused(open_environment: Callable[..., Environment], tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nvme" / "data.mdb").write_bytes(b"x" * 9000)
    with pytest.raises(ConfigError, match=r"cannot be opened: .*not an LMDB file"):
        open_environment()


def test_another_programs_lmdb_is_refused_and_left_as_it_was(open_environment: Callable[..., Environment], tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "nvme")) as foreign, foreign.begin(write=True) as transaction:
        transaction.put(b"theirs", b"1")
    with pytest.raises(ConfigError, match="another format"):
        open_environment()
    with lmdb.open(str(tmp_path / "nvme")) as foreign, foreign.begin() as transaction:
        assert list(transaction.cursor()) == [(b"theirs", b"1")]


def test_a_truncated_file_is_refused_by_name(open_environment: Callable[..., Environment], tmp_path: Path) -> None:
    environment = open_environment()
    put(environment, b"key", b"v" * 100_000)
    environment.close()
    os.truncate(tmp_path / "nvme" / "data.mdb", 50_000)
    with pytest.raises(ConfigError, match=r"data\.mdb is truncated: 48\.8 KiB of .* move the folder away"):
        open_environment()


def test_the_file_covers_the_map_and_the_reader_table(open_environment: Callable[..., Environment], tmp_path: Path) -> None:
    open_environment()
    assert (tmp_path / "nvme" / "data.mdb").stat().st_size >= 2.25 * MIB
    readers = (tmp_path / "nvme" / "lock.mdb").stat()
    assert readers.st_blocks * 512 >= readers.st_size


def test_a_write_that_raises_leaves_nothing_behind(open_environment: Callable[..., Environment]) -> None:
    environment = open_environment()

    def half(transaction: Any) -> None:
        transaction.put(b"key", b"half", db=environment.values)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        environment.write(half)
    assert get(environment, b"key") is None


def test_a_full_map_grows_and_readers_meanwhile_see_whole_values(open_environment: Callable[..., Environment]) -> None:
    environment = open_environment()
    done = threading.Event()
    seen: set[bytes | None] = set()

    def read_on() -> None:
        while not done.is_set():
            seen.add(get(environment, b"0"))

    put(environment, b"0", b"v" * 5000)
    readers = [threading.Thread(target=read_on) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for i in range(1, 17):
            put(environment, b"%d" % i, bytes([i]) * MIB)
    finally:
        done.set()
    for reader in readers:
        reader.join()
    assert seen == {b"v" * 5000}
    assert [get(environment, b"%d" % i) for i in range(1, 17)] == [bytes([i]) * MIB for i in range(1, 17)]


def test_a_write_beyond_twice_the_map_raises_tier_full(open_environment: Callable[..., Environment]) -> None:
    environment = open_environment()

    def flood(transaction: Any) -> None:
        for i in range(16):
            transaction.put(b"%d" % i, b"v" * MIB, db=environment.values)

    with pytest.raises(TierFull, match="the map is full"):
        environment.write(flood)
    assert get(environment, b"0") is None
    put(environment, b"0", b"small")


@pytest.mark.promise("resources-exhausted")
def test_out_of_address_space_raises_tier_full_and_recovers(open_environment: Callable[..., Environment]) -> None:
    environment = open_environment(capacity_bytes=16 * 36 * MIB)
    value, keys = b"v" * MIB, [b"%d" % number for number in range(48)]
    with address_space_limit(16 * MIB), pytest.raises(TierFull, match="cannot grow: mdb_env_set_mapsize: Cannot allocate memory"):
        for key in keys:
            put(environment, key, value)
    assert environment.failure == ""
    assert get(environment, keys[0]) == value
    for key in keys:
        put(environment, key, value)
    assert get(environment, keys[-1]) == value


@pytest.mark.promise("resources-exhausted")
@pytest.mark.parametrize(("limit_bytes", "answer"), [(2 * 4096, "File too large"), (64 << 10, "Input/output error")])
def test_a_full_device_accepts_writes_again_once_it_has_space(
    open_environment: Callable[..., Environment], limit_bytes: int, answer: str
) -> None:
    """Refused before its first page, or cut short in the middle, which LMDB calls an I/O error."""
    environment = open_environment()
    put(environment, b"old", b"old")
    with file_size_limit(limit_bytes), pytest.raises(TierFull, match=answer):
        put(environment, b"key", b"v" * 100_000)
    assert get(environment, b"key") is None
    assert get(environment, b"old") == b"old"
    put(environment, b"key", b"v" * 100_000)
    assert get(environment, b"key") == b"v" * 100_000


@pytest.mark.parametrize("error", [lmdb.Error("pwrite: Input/output error"), lmdb.PanicError("begin"), lmdb.BadTxnError("put")])
def test_one_failure_of_the_device_is_outlived_by_re_opening(open_environment: Callable[..., Environment], error: Exception) -> None:
    environment = open_environment(begin=Faults(error))
    put(environment, b"key", b"value")
    assert get(environment, b"key") == b"value"
    assert environment.failure == ""


def test_a_second_failure_in_a_row_is_for_good(open_environment: Callable[..., Environment]) -> None:
    environment = open_environment(begin=Faults(lmdb.Error("pwrite: Input/output error"), lmdb.Error("pwrite: Input/output error")))
    with pytest.raises(TierFailed, match="out of order: pwrite: Input/output error"):
        put(environment, b"key", b"value")
    assert "out of order" in environment.failure
    with pytest.raises(TierFailed, match="out of order"):
        put(environment, b"key", b"value")
    with pytest.raises(TierFailed, match="out of order"):
        get(environment, b"key")


@pytest.mark.promise("resources-exhausted")
def test_readers_leave_the_map_before_a_failed_device_is_closed(
    open_environment: Callable[..., Environment], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = open_environment(begin=Faults(lmdb.Error("pwrite: Input/output error"), lmdb.Error("pwrite: Input/output error")))
    is_inside, is_over, is_open = threading.Event(), threading.Event(), list[bool]()

    def read() -> None:
        with environment.read():
            is_inside.set()
            eventually(lambda: environment._map_lock._is_exclusive or is_over.is_set(), "the writer waits for readers, or is over")
            is_open.append(environment._environment is not None)

    def write() -> None:
        try:
            put(environment, b"key", b"value")
        finally:
            is_over.set()

    reader = threading.Thread(target=read)
    asked: list[Exception] = []

    def is_not_full(error: Exception) -> bool:
        """Comes between the re-opening, for which readers have left, and what is made of the second failure."""
        asked.append(error)
        if len(asked) == 2:
            reader.start()
            is_inside.wait()
        return False

    monkeypatch.setattr(environment, "_device_is_full", is_not_full)
    with pytest.raises(TierFailed, match="out of order"):
        in_background(write).result(PATIENCE_S)
    reader.join()
    assert is_open == [True]
    assert "out of order" in environment.failure


def test_a_data_file_missing_on_reopen_is_not_an_empty_tier(open_environment: Callable[..., Environment], tmp_path: Path) -> None:
    gone = Faults(lmdb.Error("pwrite: Input/output error"), meanwhile=(tmp_path / "nvme" / "data.mdb").unlink)
    environment = open_environment(begin=gone)
    with pytest.raises(TierFailed):
        put(environment, b"key", b"value")
    assert environment.failure


def test_a_closed_environment_says_so_and_closes_twice(open_environment: Callable[..., Environment]) -> None:
    environment = open_environment()
    environment.close()
    environment.close()
    with pytest.raises(Closed):
        put(environment, b"key", b"value")
    with pytest.raises(Closed):
        get(environment, b"key")
