"""Mappings of real shared memory."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from kvstore.client.slabs import SlabCache, SlabKey, map_slab
from kvstore.protocol.errors import Broken, StaleHandle

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


def test_what_is_written_through_one_mapping_is_read_through_another_without_a_descriptor() -> None:
    fd = memfd()
    reader = read_only(fd)
    written, read = map_slab(fd, SIZE, writable=True), map_slab(reader, SIZE, writable=False)
    assert (is_open(fd), is_open(reader)) == (False, False)
    written.part(100, 3)[:] = b"abc"
    assert bytes(read.part(100, 3)) == b"abc"
    assert read.memory.readonly


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


def test_places_beyond_the_end_are_refused() -> None:
    slab = map_slab(memfd(), SIZE, writable=False)
    assert len(slab.part(SIZE - 1, 1)) == 1
    with pytest.raises(Broken):
        slab.part(SIZE, 1)


def test_the_cache_tells_what_is_missing_each_once() -> None:
    cache = SlabCache()
    cache.map_now([(key(1), memfd(), SIZE)])
    assert cache.missing([key(1), key(2), key(2), key(1, writable=True)]) == [key(2), key(1, writable=True)]
    assert len(cache.get([key(1), key(1)])) == 2
    with pytest.raises(StaleHandle):
        cache.get([key(2)])


def test_a_new_process_of_a_node_ends_the_slabs_of_the_old_one_only() -> None:
    cache = SlabCache()
    cache.map_now([(key(1), memfd(), SIZE), (key(1, node=2), memfd(), SIZE)])
    cache.map_now([(key(5, epoch=2), memfd(), SIZE)])
    assert cache.missing([key(1), key(1, node=2), key(5, epoch=2)]) == [key(1)]
    cache.clear()
    assert len(cache) == 0


def test_when_one_cannot_be_mapped_no_descriptor_is_left() -> None:
    cache = SlabCache()
    fds = [memfd(), memfd()]
    bad = read_only(fds[0])
    with pytest.raises(Broken):
        cache.map_now([(key(1, writable=True), fds[0], SIZE), (key(2, writable=True), fds[1], SIZE), (key(3, writable=True), bad, SIZE)])
    assert not any(map(is_open, [*fds, bad]))


def test_announced_slabs_can_be_waited_for_and_a_failure_leaves_them_missing() -> None:
    cache = SlabCache()
    fd = memfd()
    bad = read_only(fd)
    good_key, bad_key = key(1, writable=True), key(2, writable=True)
    cache.announce([good_key, bad_key])
    waiting = cache.coming([good_key, bad_key, key(3)])
    assert [future.done() for future in waiting] == [False, False]
    cache.map_announced([(good_key, fd, SIZE), (bad_key, bad, SIZE)])
    assert [future.done() for future in waiting] == [True, True]
    assert cache.missing([good_key, bad_key]) == [bad_key]
    assert cache.coming([good_key, bad_key]) == []
