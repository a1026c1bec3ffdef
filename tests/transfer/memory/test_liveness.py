"""Promises of liveness.py, seen through a mapping as peers have it."""

import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.protocol.errors import Full
from kvstore.transfer.memory.mapping import map_slab
from kvstore.transfer.shm.target import CLOSED_COUNT, LiveRegions


@pytest.fixture
def regions() -> Iterator[LiveRegions]:
    regions = LiveRegions(3)
    yield regions
    regions.close()


def read_only(regions: LiveRegions) -> int:
    return os.open(f"/proc/self/fd/{regions.fd}", os.O_RDONLY | os.O_CLOEXEC)


def as_seen(regions: LiveRegions) -> npt.NDArray[np.uint64]:
    return np.frombuffer(map_slab(read_only(regions), regions.size_bytes, writable=False).memory, np.uint64)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    lowest_free = os.dup(0)
    os.close(lowest_free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_open_regions_stand_at_their_place_and_closed_ones_do_not(regions: LiveRegions) -> None:
    table = as_seen(regions)
    places = [regions.add(region_id) for region_id in (7, 8)]
    assert [int(table[place]) for place in places] == [7, 8]
    regions.remove(places[0])
    assert [int(table[place]) for place in places] == [0, 8]


def test_a_full_table_says_so_and_takes_another_once_one_is_closed(regions: LiveRegions) -> None:
    places = [regions.add(region_id) for region_id in (1, 2, 3)]
    with pytest.raises(Full, match="close some"):
        regions.add(4)
    regions.remove(places[1])
    assert regions.add(4) == places[1]
    with pytest.raises(Full):
        regions.add(5)


def test_whoever_has_a_read_only_descriptor_cannot_write_to_the_table_by_any_way(regions: LiveRegions) -> None:
    fd = read_only(regions)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, regions.size_bytes)
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(again, regions.size_bytes)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"\1", 0)
    for size_bytes in (0, 2 * regions.size_bytes):
        with pytest.raises(PermissionError):
            os.ftruncate(again, size_bytes)
    os.close(again)
    os.close(fd)


def test_without_a_descriptor_left_it_says_so() -> None:
    with no_descriptor_left(), pytest.raises(Full, match="no descriptor is left"):
        LiveRegions()


def test_a_forked_child_closes_no_region_of_its_parents(regions: LiveRegions, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, place = as_seen(regions), regions.add(7)
    with monkeypatch.context() as patch:
        patch.setattr("os.getpid", lambda: -1)
        regions.remove(place)
    assert (seen[place], seen[CLOSED_COUNT]) == (7, 0)
