"""Promises of deletion_log.py, one a test: real files, a real full disk by RLIMIT_FSIZE."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError, TierFailed
from kvstore.tiers.deletion_log import MAX_LOGGED_DELETIONS, RECORD_BYTES, DeletionLog
from kvstore.tiers.tier import TierFull


def ids(*numbers: int) -> list[bytes]:
    return [number.to_bytes(8) for number in numbers]


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
def path(tmp_path: Path) -> Path:
    return tmp_path / "removed.ids"


@pytest.fixture
def open_file(path: Path) -> Iterator[Callable[..., DeletionLog]]:
    opened: list[DeletionLog] = []

    def open_one(*, sync: bool = True) -> DeletionLog:
        opened.append(DeletionLog(path, sync=sync))
        return opened[-1]

    yield open_one
    for file in opened:
        file.close()


@pytest.mark.parametrize("sync", [True, False])
def test_added_ids_survive_reopening_until_cleared(open_file: Callable[..., DeletionLog], sync: bool) -> None:
    first = open_file(sync=sync)
    assert first.ids == set()
    first.add(ids(0, 7))
    first.add(ids(7, 1 << 63))
    first.add(ids(0))
    second = open_file()
    assert second.ids == set(ids(0, 7, 1 << 63)) == first.ids
    second.add(ids(8))
    second.clear()
    assert second.ids == set() == open_file().ids
    second.clear()
    second.add(ids(9))
    assert open_file().ids == set(ids(9))


def test_it_takes_its_room_at_once_and_no_more_than_that(open_file: Callable[..., DeletionLog], path: Path) -> None:
    file = open_file(sync=False)
    assert path.stat().st_size == MAX_LOGGED_DELETIONS * RECORD_BYTES <= path.stat().st_blocks * 512
    file.add(ids(*range(MAX_LOGGED_DELETIONS)))
    with pytest.raises(TierFull, match="already wait for LMDB"):
        file.add(ids(MAX_LOGGED_DELETIONS))
    file.add(ids(5))
    assert len(open_file().ids) == MAX_LOGGED_DELETIONS


def test_a_record_that_was_torn_is_none_and_its_neighbours_are(open_file: Callable[..., DeletionLog], path: Path) -> None:
    open_file().add(ids(1, 2, 3))
    with path.open("r+b") as raw:
        raw.seek(RECORD_BYTES + 12)
        raw.write(b"\0\0\0\0")
    damaged = open_file()
    assert damaged.ids == set(ids(1, 3))
    damaged.add(ids(4))
    assert open_file().ids == set(ids(1, 3, 4))


@pytest.mark.parametrize("number", [59, 10_898])
def test_the_last_record_is_found_if_its_digest_ends_in_zeros(open_file: Callable[..., DeletionLog], path: Path, number: int) -> None:
    """As all that lies behind it is."""
    open_file().add(ids(0, number))
    assert path.read_bytes()[: 2 * RECORD_BYTES].endswith(b"\0" if number == 59 else b"\0\0")
    again = open_file()
    assert again.ids == set(ids(0, number))
    again.add(ids(1))
    assert open_file().ids == set(ids(0, 1, number))


def test_a_failed_write_raises_and_keeps_the_ids(open_file: Callable[..., DeletionLog]) -> None:
    file = open_file()
    file.add(ids(1))
    with file_size_limit(RECORD_BYTES), pytest.raises(TierFailed, match="cannot be logged: File too large"):
        file.add(ids(2))
    with file_size_limit(2 * RECORD_BYTES), pytest.raises(TierFull, match="16 of 32 bytes were written"):
        file.add(ids(2, 3))
    with file_size_limit(0):
        file.clear()
    assert file.ids == set(ids(1))
    file.add(ids(2, 3))
    assert open_file().ids == set(ids(1, 2, 3))


def test_an_unwritable_path_is_refused(tmp_path: Path, path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        DeletionLog(tmp_path, sync=False)
    before = len(os.listdir("/proc/self/fd"))
    with file_size_limit(RECORD_BYTES), pytest.raises(ConfigError, match="cannot be allocated: File too large"):
        DeletionLog(path, sync=False)
    assert len(os.listdir("/proc/self/fd")) == before
