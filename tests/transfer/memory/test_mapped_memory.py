"""Mappings of real shared memory."""

import gc
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest

from kvstore.protocol.errors import Broken, Full, InvalidArgument
from kvstore.transfer.memory.mapped_memory import HUGE_PAGE_BYTES, MAX_REGION_BYTES, allocate, free_pages, map_slab

SIZE = 1 << 16


def memfd() -> int:
    fd = os.memfd_create("slab")
    os.truncate(fd, SIZE)
    return fd


def read_only(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").exists()


def test_writes_are_visible_through_another_mapping() -> None:
    fd = memfd()
    reader = read_only(fd)
    written, read = map_slab(fd, SIZE, writable=True), map_slab(reader, SIZE, writable=False)
    assert (is_open(fd), is_open(reader)) == (False, False)
    written.part(100, 3)[:] = b"abc"
    assert bytes(read.part(100, 3)) == b"abc"
    assert read.memory.readonly


@pytest.mark.parametrize("transparent_hugepages", [True, False])
def test_a_mapping_with_huge_pages_is_aligned(transparent_hugepages: bool) -> None:
    fd = os.memfd_create("slab")
    os.truncate(fd, 2 * HUGE_PAGE_BYTES)
    name = os.readlink(f"/proc/self/fd/{fd}")
    memory = np.frombuffer(map_slab(fd, 2 * HUGE_PAGE_BYTES, writable=True, transparent_hugepages=transparent_hugepages).memory, np.uint8)
    assert memory.ctypes.data % HUGE_PAGE_BYTES == 0
    [mapped] = re.findall(
        rf"^{memory.ctypes.data:x}-.*{re.escape(name)}\n(?:.*\n)*?VmFlags:(.*)$", Path("/proc/self/smaps").read_text(), re.M
    )
    assert ("hg" in mapped.split()) is transparent_hugepages


@pytest.mark.parametrize("populated", [False, True])
def test_only_a_populated_mapping_allocates_unused_pages(populated: bool) -> None:
    fd = memfd()
    slab = map_slab(os.dup(fd), SIZE, writable=True, populated=populated)
    assert (os.fstat(fd).st_blocks > 0) == populated
    slab.memory[SIZE - 1] = 1
    assert os.fstat(fd).st_blocks > 0
    os.close(fd)


def test_free_pages_zeroes_and_frees_memory() -> None:
    fd = memfd()
    written, read = map_slab(os.dup(fd), SIZE, writable=True), map_slab(os.dup(fd), SIZE, writable=False, populated=False)
    written.memory[:] = b"x" * SIZE
    free_pages(written.part(100, mmap.PAGESIZE))  # no whole page
    assert bytes(read.memory) == b"x" * SIZE
    free_pages(written.part(100, SIZE - 200))
    assert os.fstat(fd).st_blocks * 512 == 2 * mmap.PAGESIZE
    assert bytes(read.memory) == b"x" * mmap.PAGESIZE + bytes(SIZE - 2 * mmap.PAGESIZE) + b"x" * mmap.PAGESIZE
    os.close(fd)


def test_a_view_keeps_its_mapping_and_the_last_one_ends_it() -> None:
    fd = memfd()
    name = os.readlink(f"/proc/self/fd/{fd}")
    slab = map_slab(fd, SIZE, writable=True)
    slab.memory[0] = 7
    array = np.frombuffer(slab.part(0, 10), np.uint8)
    before = Path("/proc/self/maps").read_text().count(name)
    del slab
    gc.collect()
    assert array[0] == 7
    del array
    gc.collect()
    assert Path("/proc/self/maps").read_text().count(name) == before - 1


def test_a_descriptor_that_cannot_be_mapped_is_closed_and_told() -> None:
    fd = memfd()
    readonly = read_only(fd)
    with pytest.raises(Broken, match="cannot map a slab"):
        map_slab(readonly, SIZE, writable=True)
    assert not is_open(readonly)
    os.close(fd)


@pytest.mark.parametrize("size_bytes", [SIZE + 1, 1 << 40, (1 << 64) - 1, 0])
def test_a_mapping_beyond_the_file_is_refused(size_bytes: int) -> None:
    fd = memfd()
    with pytest.raises(Broken, match="its memory has 65536"):
        map_slab(fd, size_bytes, writable=True)
    assert not is_open(fd)


def test_allocated_memory_is_zeroed_shared_and_of_fixed_size() -> None:
    region = allocate(10_000)
    assert region.size_bytes == 10_000
    assert not any(region.memory)
    region.memory[9_999] = 7
    assert map_slab(read_only(region.fd), 10_000, writable=False).memory[9_999] == 7
    for size_bytes in (0, 20_000):
        with pytest.raises(PermissionError):
            os.ftruncate(region.fd, size_bytes)
    region.close()


def test_a_closed_regions_memory_lives_as_long_as_its_views() -> None:
    region = allocate(SIZE)
    name, fd = os.readlink(f"/proc/self/fd/{region.fd}"), region.fd
    others = Path("/proc/self/maps").read_text().count(name)
    view = region.memory[10:20]
    region.close()
    assert not is_open(fd)
    del region
    gc.collect()
    view[0] = 1
    assert Path("/proc/self/maps").read_text().count(name) == others
    del view
    gc.collect()
    assert Path("/proc/self/maps").read_text().count(name) == others - 1


@pytest.mark.parametrize("size_bytes", [-1, 0, MAX_REGION_BYTES + 1])
def test_a_region_of_no_or_too_many_bytes_is_refused(size_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match="a region is 1 byte to"):
        allocate(size_bytes)


def test_more_memory_than_the_machine_has_is_refused() -> None:
    with pytest.raises(Full, match="this machine has"):
        allocate(MAX_REGION_BYTES)
