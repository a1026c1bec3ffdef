"""Real files, with and without O_DIRECT, full disks by RLIMIT_FSIZE; a device that fails is the kernel's answer replaced."""

import errno
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.protocol.errors import TierFailed
from kvstore.tiers.placements import PAGE_BYTES, PageRun
from kvstore.tiers.tier import TierFull
from kvstore.tiers.value_file import DIRECT_BYTES, MAX_JOINED, PIECE_BYTES, FilePiece, ValueFile, joined, pieces_of
from tests.tiers.test_nvme_env import file_size_limit

SIZES = [1, 4096, 5000, DIRECT_BYTES - 1, DIRECT_BYTES, DIRECT_BYTES + 1, 3 * PIECE_BYTES + 777]
PAGES = 2048


@pytest.fixture
def open_file(tmp_path: Path) -> Iterator[Callable[..., ValueFile]]:
    opened: list[ValueFile] = []

    def open_one(*, direct: bool = True, pages: int = PAGES) -> ValueFile:
        with pytest.MonkeyPatch.context() as patch:
            if not direct:
                refuse(patch, "open", errno.EINVAL, lambda path, flags, *_: bool(flags & os.O_DIRECT))
            opened.append(ValueFile(tmp_path / "values"))
        opened[-1].grow(pages)
        return opened[-1]

    yield open_one
    for file in opened:
        file.close()


def refuse(patch: pytest.MonkeyPatch, name: str, code: int, when: Callable[..., bool] = lambda *_: True) -> None:
    """The system call fails with that error where `when` says so of its arguments."""
    real = getattr(os, name)

    def call(*arguments: Any) -> Any:
        if when(*arguments):
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    patch.setattr(os, name, call)


def aligned(size_bytes: int, shift_bytes: int = 0) -> memoryview:
    """Writable memory that begins so many bytes behind a page's first."""
    return memoryview(mmap.mmap(-1, size_bytes + shift_bytes))[shift_bytes:]


def fill(memory: memoryview, seed: int) -> bytes:
    memory[:] = (bytes([seed]) + os.urandom(4096)) * (len(memory) // 4097) + bytes([seed]) * (len(memory) % 4097)
    return bytes(memory)


def write(file: ValueFile, runs: tuple[PageRun, ...], value: memoryview) -> None:
    for group in joined(pieces_of(runs, value)):
        file.write(group)


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("shift_bytes", [0, 64])
@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_value_is_read_as_it_was_written(open_file: Callable[..., ValueFile], size_bytes: int, shift_bytes: int, is_direct: bool) -> None:
    """Its neighbours stay as they are, and what fills its last page is zeros."""
    file = open_file(direct=is_direct)
    assert file.is_direct == is_direct
    pages = -(-size_bytes // PAGE_BYTES)
    before, runs, after = (PageRun(2, 3),), (PageRun(3, 3 + pages),), (PageRun(3 + pages, 4 + pages),)
    for neighbour in (before, after):
        write(file, neighbour, memoryview(b"n" * PAGE_BYTES))
    source, destination = aligned(size_bytes, shift_bytes), aligned(size_bytes, shift_bytes)
    data = fill(source, 7)
    write(file, runs, source)
    file.sync()
    pieces = pieces_of(runs, destination)
    file.prefetch(pieces)
    assert all(map(file.read, pieces))
    assert destination == data
    raw = file._path.read_bytes()[2 * PAGE_BYTES : (4 + pages) * PAGE_BYTES]
    assert raw == b"n" * PAGE_BYTES + data + bytes(-size_bytes % PAGE_BYTES) + b"n" * PAGE_BYTES
    assert file.written_bytes == (pages + 2) * PAGE_BYTES


def test_short_neighbours_are_joined_and_large_values_are_not() -> None:
    def piece(page: int, pages: int, is_large: bool = False) -> FilePiece:
        return FilePiece(page * PAGE_BYTES, (page + pages) * PAGE_BYTES, memoryview(b""), is_large)

    assert joined([]) == []
    pieces = [piece(0, 1), piece(1, 2), piece(4, 1), piece(5, 40, is_large=True), piece(45, 1), piece(46, 1)]
    assert joined(pieces) == [pieces[:2], pieces[2:3], pieces[3:4], pieces[4:]]
    many = [piece(number, 1) for number in range(MAX_JOINED + 1)]
    assert list(map(len, joined(many))) == [MAX_JOINED, 1]
    long = [piece(number * 31, 31) for number in range(17)]
    assert list(map(len, joined(long))) == [16, 1]


def test_the_file_is_its_users_alone_and_keeps_its_pages(open_file: Callable[..., ValueFile]) -> None:
    file = open_file(pages=10)
    assert stat.S_IMODE(file._path.stat().st_mode) == 0o600
    assert file._path.stat().st_blocks * 512 >= 10 * PAGE_BYTES
    file.grow(20)
    file.shrink(15)
    file.close()
    file.close()
    again = open_file(pages=16)
    assert again.pages == 16


def test_without_o_direct_reads_use_the_page_cache(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, "preadv", errno.EINVAL)
        file = ValueFile(tmp_path / "values")
    assert not file.is_direct
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_disk_without_room_to_grow_leaves_the_file_as_it_was(open_file: Callable[..., ValueFile]) -> None:
    file = open_file(pages=10)
    with file_size_limit(15 * PAGE_BYTES), pytest.raises(TierFull, match=r"cannot grow beyond \S+ \S+: File too large"):
        file.grow(20)
    assert file.pages == 10
    for code, kind in ((errno.ENOSPC, TierFull), (errno.EDQUOT, TierFull), (errno.EIO, TierFailed)):
        with pytest.MonkeyPatch.context() as patch:
            refuse(patch, "posix_fallocate", code)
            refuse(patch, "ftruncate", errno.EIO)
            with pytest.raises(kind, match="cannot grow"):
                file.grow(20)
    file.grow(20)
    assert file.pages == 20


@pytest.mark.parametrize("size_bytes", [4096, DIRECT_BYTES])
def test_a_write_that_fails_or_is_cut_short_says_so(open_file: Callable[..., ValueFile], size_bytes: int) -> None:
    file = open_file()
    runs, value = (PageRun(0, size_bytes // PAGE_BYTES),), aligned(size_bytes)
    for code, kind in ((errno.ENOSPC, TierFull), (errno.EIO, TierFailed)):
        with pytest.MonkeyPatch.context() as patch:
            refuse(patch, "pwritev", code)
            with pytest.raises(kind, match="cannot be written"):
                write(file, runs, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *_: 512)
        with pytest.raises(TierFull, match=f"512 of {size_bytes} bytes were written"):
            write(file, runs, value)
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, "fdatasync", errno.EIO)
        with pytest.raises(TierFailed, match="cannot be synced: Input/output error"):
            file.sync()
    write(file, runs, value)


@pytest.mark.parametrize("size_bytes", [4096, DIRECT_BYTES, DIRECT_BYTES + 5])
def test_a_failed_read_raises_and_one_behind_the_end_is_short(open_file: Callable[..., ValueFile], size_bytes: int) -> None:
    file = open_file(pages=64)
    [piece] = pieces_of((PageRun(0, 33),), aligned(size_bytes))
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch, "preadv", errno.EIO)
        refuse(patch, "posix_fadvise", errno.EIO)
        file.prefetch([piece])
        with pytest.raises(TierFailed, match="cannot be read: Input/output error"):
            file.read(piece)
    assert file.read(piece)
    [behind] = pieces_of((PageRun(64, 97),), aligned(size_bytes))
    assert not file.read(behind)
