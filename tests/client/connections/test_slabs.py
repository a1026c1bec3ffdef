"""Mappings of real shared memory."""

import os
from pathlib import Path

import pytest

from kvstore.client.connections.slabs import SlabCache, SlabKey
from kvstore.protocol.errors import Broken

SIZE = 1 << 16


def memfd() -> int:
    fd = os.memfd_create("slab")
    os.truncate(fd, SIZE)
    return fd


def read_only(fd: int) -> int:
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def key(slab: int, *, epoch: int = 1, node: int = 1, writable: bool = False) -> SlabKey:
    return SlabKey(node, epoch, slab, writable)


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").exists()


@pytest.mark.promise("memory-bounded")
def test_freed_slabs_are_unmapped_when_unused() -> None:
    cache, fd = SlabCache(), memfd()
    name = os.readlink(f"/proc/self/fd/{fd}")
    cache.map_now([(key(1, writable=True), fd, SIZE), (key(2), memfd(), SIZE), (key(3, epoch=2, node=2), memfd(), SIZE)])
    assert sorted(cache.held(1, 1)) == [1, 2]
    others = Path("/proc/self/maps").read_text().count(name) - 2
    [slab] = cache.get([key(1)])
    view = slab.part(0, 10)
    del slab
    cache.drop(1, 1, [1, 9])
    assert cache.held(1, 1) == [2]
    assert cache.has_dropped
    cache.unmap_dropped()
    assert len(bytes(view)) == 10
    del view
    assert cache.held(2, 2) == [3]
    assert Path("/proc/self/maps").read_text().count(name) == others + 1


def test_when_one_cannot_be_mapped_no_descriptor_is_left() -> None:
    cache = SlabCache()
    fds = [memfd(), memfd()]
    bad = read_only(fds[0])
    with pytest.raises(Broken):
        cache.map_now([(key(1, writable=True), fds[0], SIZE), (key(2, writable=True), fds[1], SIZE), (key(3, writable=True), bad, SIZE)])
    assert not any(map(is_open, [*fds, bad]))


def test_closed_client_leaks_no_descriptor() -> None:
    cache, fd = SlabCache(), memfd()
    cache.announce([(key(1, writable=True), fd, SIZE)])
    cache.close()
    assert not is_open(fd)


def test_failed_mapping_wakes_its_waiters(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(fd: int, *_: object, **__: object) -> None:
        os.close(fd)
        raise MemoryError

    monkeypatch.setattr("kvstore.client.connections.slabs.map_slab", no_memory)
    cache, fds = SlabCache(), [memfd(), memfd()]
    found = [(key(slab, writable=True), fd, SIZE) for slab, fd in enumerate(fds)]
    cache.announce(found)
    waiting = cache.pending([announced for announced, _, _ in found])
    with pytest.raises(MemoryError):
        cache.map_announced()
    assert [one.is_set() for one in waiting] == [True, True]
    assert not any(map(is_open, fds))
