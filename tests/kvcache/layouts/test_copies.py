"""Copies between regions of plain memory, against one slice after the other."""

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
