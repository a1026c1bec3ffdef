"""Shared memory: its size, its descriptors and what a client can do with them; and the pool that lends it to slabs."""

import fcntl
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.protocol.errors import ConfigError, TierFailed
from kvstore.tiers import memfd
from kvstore.tiers.huge_pages import HUGE_PAGE_BYTES
from kvstore.tiers.memfd import PAGE_BYTES, Memfd, MemfdPool


@pytest.fixture
def memory() -> Iterator[Memfd]:
    memory = Memfd(3 * PAGE_BYTES + 1)
    yield memory
    memory.close()


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """The process may open `count` more files inside."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def pages_of(memory: Memfd) -> int:
    """Number of present pages."""
    return os.fstat(memory.fd).st_blocks * 512 // PAGE_BYTES


@contextmanager
def descriptor(memory: Memfd, *, writable: bool) -> Iterator[int]:
    number = memory.export(writable=writable)
    yield number
    os.close(number)


def is_asking(memory: Memfd) -> bool:
    """Return True if the mapping requests huge pages: "hg" is among its VmFlags."""
    flags, found = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            begin, end = (int(address, 16) for address in line.split()[0].split("-"))
            found = begin <= memory.bytes.ctypes.data < end
        elif found and line.startswith("VmFlags:"):
            flags = line
    return "hg" in flags.split()


def test_a_smaller_size_gives_pages_back_and_keeps_the_rest(memory: Memfd) -> None:
    memory.bytes[:] = 7
    memory.resize(PAGE_BYTES + 1)
    assert memory.size_bytes == PAGE_BYTES + 1
    assert pages_of(memory) == 4
    memory.trim()
    assert pages_of(memory) == 2
    memory.resize(PAGE_BYTES + 1)
    assert (memory.bytes == 7).all()


def test_pages_given_back_are_zeros_for_whoever_maps_them(memory: Memfd) -> None:
    """A client that still maps the whole file is not killed by SIGBUS."""
    memory.bytes[:] = 7
    with descriptor(memory, writable=False) as number, mmap.mmap(number, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        memory.resize(PAGE_BYTES)
        memory.trim()
        assert mapped[:PAGE_BYTES] == b"\7" * PAGE_BYTES
        assert mapped[PAGE_BYTES:] == bytes(3 * PAGE_BYTES)


def test_a_reader_sees_what_is_written_and_cannot_write(memory: Memfd) -> None:
    with descriptor(memory, writable=False) as reader:
        memory.bytes[5] = 42
        mapped = mmap.mmap(reader, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ)
        assert mapped[5] == 42
        with pytest.raises(PermissionError):
            mmap.mmap(reader, PAGE_BYTES, mmap.MAP_SHARED, mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(reader, b"x", 0)
        mapped.close()


def test_no_client_can_change_the_size_of_memory(memory: Memfd) -> None:
    with descriptor(memory, writable=True) as writer, descriptor(memory, writable=True) as again:
        for size_bytes in (0, 10 * PAGE_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(writer, size_bytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(again, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


@pytest.mark.promise("least-privilege")
def test_another_user_cannot_open_the_memory_by_its_path(memory: Memfd) -> None:
    assert os.fstat(memory.fd).st_mode & 0o777 == 0o400


@pytest.mark.parametrize("advice", [memfd.MADV_POPULATE_WRITE, -1], ids=["populate", "older kernel"])
def test_prefaulting_makes_pages_present_and_changes_no_byte(memory: Memfd, monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    monkeypatch.setattr(memfd, "MADV_POPULATE_WRITE", advice)
    memory.bytes[0] = 1
    before = pages_of(memory)
    assert memory.touch(3 * PAGE_BYTES) == memory.size_bytes
    assert (before, pages_of(memory), memory.untouched_bytes) == (1, 3, 1)
    assert memory.touch(3 * PAGE_BYTES) == 1
    assert (pages_of(memory), memory.untouched_bytes, memory.touch(PAGE_BYTES)) == (4, 0, 0)
    assert memory.bytes[0] == 1
    assert not memory.bytes[1:].any()


def test_touching_ends_where_memory_was_made_smaller_or_closed(memory: Memfd) -> None:
    memory.touch(4 * PAGE_BYTES)
    memory.resize(PAGE_BYTES)
    memory.trim()
    assert (memory.touch(4 * PAGE_BYTES), pages_of(memory)) == (0, 1)
    memory.resize(2 * PAGE_BYTES)
    assert (memory.touch(4 * PAGE_BYTES), pages_of(memory)) == (PAGE_BYTES, 2)
    memory.close()
    memory.trim()
    assert memory.touch(PAGE_BYTES) == 0


def test_refused_memory_leaks_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=r"memory|large|Invalid"):
        Memfd(1 << 62)
    assert os.listdir("/proc/self/fd") == before


def test_bytes_trimmed_from_slabs_become_another_slab() -> None:
    pool = MemfdPool(8 * PAGE_BYTES, slab_bytes=4 * PAGE_BYTES)
    for slab in range(2):
        pool.acquire(slab, PAGE_BYTES, 3, "")
    pool.acquire(2, PAGE_BYTES, 2, "")
    assert [pool.memory(slab).size_bytes for slab in range(3)] == [3 * PAGE_BYTES, 3 * PAGE_BYTES, 2 * PAGE_BYTES]
    pool.check_integrity()
    pool.close()


def test_a_slab_larger_than_those_made_takes_their_place() -> None:
    pool = MemfdPool(8 * PAGE_BYTES, slab_bytes=2 * PAGE_BYTES)
    pool.acquire(0, PAGE_BYTES, 2, "")
    pool.acquire(1, 6 * PAGE_BYTES, 1, "")
    assert pool.memory(1).size_bytes == 6 * PAGE_BYTES
    pool.check_integrity()
    pool.close()


@pytest.mark.promise("tenant-isolation")
def test_no_tenant_gets_memory_that_held_anothers_bytes() -> None:
    pool = MemfdPool(4 * PAGE_BYTES, slab_bytes=4 * PAGE_BYTES)
    pool.acquire(0, PAGE_BYTES, 4, "red")
    pool.memory(0).bytes[:] = 1
    pool.release(0)
    pool.acquire(1, PAGE_BYTES, 4, "blue")
    assert not pool.memory(1).bytes.any()
    pool.check_integrity()
    pool.close()


@pytest.mark.promise("memory-bounded")
def test_discarded_memory_is_freed_while_a_client_maps_it() -> None:
    pool = MemfdPool(4 * PAGE_BYTES, slab_bytes=4 * PAGE_BYTES)
    pool.acquire(0, PAGE_BYTES, 4, "red")
    pool.memory(0).bytes[:] = 7
    with descriptor(pool.memory(0), writable=False) as number, mmap.mmap(number, 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
        assert os.fstat(number).st_blocks
        pool.release(0)
        pool.acquire(1, PAGE_BYTES, 4, "blue")
        assert os.fstat(number).st_blocks == 0
        assert mapped[:10] == bytes(10)
    pool.close()


def test_mapped_memory_serves_slabs_of_other_sizes_warm() -> None:
    """Of the tenant's own: 4 pages serve slots of 3, and of 1 again, and no page in use is reallocated."""
    pool = MemfdPool(4 * PAGE_BYTES, slab_bytes=4 * PAGE_BYTES)
    pool.prefault_step(4 * PAGE_BYTES)
    for slab, (slot_bytes, count, pages) in enumerate([(PAGE_BYTES, 4, 4), (4 * PAGE_BYTES, 1, 4), (3 * PAGE_BYTES, 1, 3)]):
        assert pool.acquire(slab, slot_bytes, count, "red") == count
        os.close(pool.memory(slab).export(writable=True))
        is_warm = pages_of(pool.memory(slab)) == 4
        pool.prefault_step(PAGE_BYTES)
        assert (is_warm, pages_of(pool.memory(slab))) == (True, pages)
        pool.check_integrity()
        pool.release(slab)
    pool.close()


def test_a_pool_beyond_the_descriptor_limit_is_a_config_error() -> None:
    with descriptors_left(3), pytest.raises(ConfigError, match=r"2 slabs of shared memory: .*Too many open files"):
        MemfdPool(2 * PAGE_BYTES, slab_bytes=PAGE_BYTES)


def test_acquire_raises_tier_failed_and_changes_nothing() -> None:
    pool = MemfdPool(8 * PAGE_BYTES, slab_bytes=4 * PAGE_BYTES)
    for slab in range(2):
        pool.acquire(slab, 3 * PAGE_BYTES, 1, "")
    with descriptors_left(0), pytest.raises(TierFailed, match="no shared memory of"):
        pool.acquire(2, 2 * PAGE_BYTES, 1, "")
    pool.check_integrity()
    assert pool.acquire(2, 2 * PAGE_BYTES, 1, "") == 1
    pool.close()


def test_without_enough_huge_pages_a_pool_takes_normal_ones() -> None:
    pool = MemfdPool(1 << 44, slab_bytes=1 << 44, hugepages=True)
    assert not pool.hugepages
    assert pool.acquire(0, 100, 1, "") == 1
    pool.close()


def test_huge_pages_are_used_when_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    # Few machines have huge pages set aside: ordinary pages stand in for them, all else is as it would be.
    monkeypatch.setattr(memfd, "MFD_HUGETLB", 0)
    pool = MemfdPool(3 << 20, slab_bytes=3 << 20, hugepages=True)
    assert pool.hugepages
    pool.prefault_step(8 * HUGE_PAGE_BYTES)
    pool.acquire(0, 3 << 19, 1, "")
    assert pages_of(pool.memory(0)) * PAGE_BYTES == HUGE_PAGE_BYTES
    assert pool.memory(0).max_size_bytes == HUGE_PAGE_BYTES, "what was given back may be another's"
    pool.close()


@pytest.mark.parametrize("transparent_hugepages", [True, False])
def test_memfd_with_huge_pages_is_aligned(transparent_hugepages: bool) -> None:
    memory = Memfd(4 * HUGE_PAGE_BYTES, transparent_hugepages=transparent_hugepages)
    memory.resize(3 * HUGE_PAGE_BYTES + 1)
    with descriptor(memory, writable=True) as writer:
        os.pwrite(writer, b"*", 3 * HUGE_PAGE_BYTES)
    assert (memory.size_bytes, memory.bytes[-1]) == (3 * HUGE_PAGE_BYTES + 1, ord("*"))
    assert is_asking(memory) is transparent_hugepages
    assert memory.bytes.ctypes.data % HUGE_PAGE_BYTES == 0 or not transparent_hugepages
    memory.close()
    small = Memfd(HUGE_PAGE_BYTES - PAGE_BYTES, transparent_hugepages=transparent_hugepages)
    assert not is_asking(small)
    small.close()


@pytest.mark.promise("tenant-isolation")
def test_descriptors_are_bounded_and_spares_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memfd, "MAX_MEMFDS", 3)
    before = len(os.listdir("/proc/self/fd"))
    pool = MemfdPool(8 * PAGE_BYTES, slab_bytes=4 * PAGE_BYTES)
    for slab, tenant in enumerate("abc"):
        assert pool.acquire(slab, PAGE_BYTES, 1, tenant) == 1
    assert pool.acquire(3, PAGE_BYTES, 1, "d") == 0
    pool.release(1)
    assert pool.acquire(3, PAGE_BYTES, 1, "d") == 1
    assert len(os.listdir("/proc/self/fd")) - before == 2 * 3
    pool.check_integrity()
    pool.close()


def test_half_of_the_descriptors_are_left_to_others() -> None:
    with descriptors_left(50):
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        pool = MemfdPool(PAGE_BYTES * 1000, slab_bytes=PAGE_BYTES * 1000)
        assert pool._max_memfds == allowed
    pool.close()
