"""Copies between regions of plain memory, against one slice after the other."""

import mmap

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.kvcache.layouts.copies import Copies, as_bytes
from kvstore.protocol.errors import InvalidArgument


def copies(*rows: tuple[int, int, int, int, int]) -> Copies:
    return Copies(*np.array(rows, np.int64).reshape(-1, 5).T)


def noise(size_bytes: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


@given(data=st.data())
@settings(max_examples=40)
def test_many_copies_do_what_one_after_the_other_would(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.sampled_from([1, 3, 64]), max_size=12))
    ends = np.cumsum([0, *lengths])
    rows = [
        (data.draw(st.integers(0, 1)), data.draw(st.integers(0, 200 - length)), 1, int(start), length)
        for start, length in zip(ends, lengths, strict=False)
    ]
    sources, destinations = [noise(200, 0), noise(200, 1)], [noise(5, 2), noise(12 * 64, 3)]
    expected = [region.copy() for region in destinations]
    for source, offset, destination, at, length in rows:
        expected[destination][at : at + length] = sources[source][offset : offset + length]
    found = copies(*rows)
    found.apply(sources, destinations)
    assert found.total_bytes == sum(lengths)
    for region, wanted in zip(destinations, expected, strict=True):
        assert np.array_equal(region, wanted)


def test_copies_larger_than_what_is_copied_at_once_arrive_whole() -> None:
    size_bytes = 3 << 18
    source, destination = noise(2 * size_bytes, 0), np.zeros(2 * size_bytes, np.uint8)
    copies((0, 0, 0, size_bytes, size_bytes), (0, size_bytes, 0, 0, size_bytes)).apply([source], [destination])
    assert np.array_equal(destination, np.roll(source, size_bytes))


def test_any_contiguous_buffer_is_a_region() -> None:
    mapped = mmap.mmap(-1, 4096)
    array = np.zeros((2, 8), np.int32)
    copies((0, 1, 0, 0, 2), (0, 0, 1, 60, 4)).apply([b"\x01\x02\x03\x04"], [mapped, array])
    assert mapped[:3] == b"\x02\x03\x00"
    assert array[1, 7] == 0x04030201


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ((1, 0, 0, 0, 4), "region 1, but there are 1 regions"),
        ((0, 0, 1, 0, 4), "region 1, but there are 1 regions"),
        ((0, 5, 0, 0, 4), "byte 9 of region 0, which has 8"),
        ((0, 0, 0, 5, 4), "byte 9 of region 0, which has 8"),
        ((0, 0, 0, 0, 9), "byte 9 of region 0, which has 8"),
    ],
)
def test_copies_outside_of_a_region_are_refused(row: tuple[int, int, int, int, int], reason: str) -> None:
    destination = np.zeros(8, np.uint8)
    with pytest.raises(InvalidArgument, match=reason):
        copies(row).apply([noise(8, 0)], [destination])
    assert not destination.any()


def test_read_only_memory_is_not_written() -> None:
    destination = bytes(8)
    with pytest.raises(InvalidArgument, match="region 0 is written to, but is read-only"):
        copies((0, 0, 0, 0, 4)).apply([noise(8, 0)], [destination])
    assert destination == bytes(8)


def test_what_is_no_contiguous_buffer_is_refused() -> None:
    for region in (np.zeros((4, 4), np.uint8)[:, :2], memoryview(bytes(8))[::2], "text", None):
        with pytest.raises(InvalidArgument, match="contiguous buffer"):
            as_bytes(region)
