"""Promises of arguments.py: what callers pass is checked, with what to do, and copied."""

from typing import Any

import numpy as np
import pytest

from kvstore.handover.transceiver import block_indexes, check_deadline, check_regions, check_request_id
from kvstore.protocol.errors import InvalidArgument
from kvstore.transfer.memory.region import Region
from tests.handover.scene import layout_of

LAYOUT = layout_of(pool_blocks=8, order="vllm-flash")


def region(size_bytes: int) -> Region:
    return Region(memoryview(bytearray(size_bytes)))


def test_a_request_id_is_one_to_255_bytes() -> None:
    check_request_id(b"r")
    check_request_id(bytes(255))
    wrong: Any
    for wrong in (b"", bytes(256), "text", 7):
        with pytest.raises(InvalidArgument, match="1 to 255 bytes"):
            check_request_id(wrong)


def test_blocks_are_copied_as_64_bit_indexes() -> None:
    given = np.array([3, 7], np.uint32)
    found = block_indexes(given, LAYOUT, tokens=32)
    given[0] = 0
    assert (found.dtype, found.tolist()) == (np.dtype(np.int64), [3, 7])
    assert block_indexes([1, 2, 3], LAYOUT, tokens=1).tolist() == [1, 2, 3]


@pytest.mark.parametrize(("blocks", "tokens"), [([1], 17), ([1], 0), ([], 1), ([8], 1), ([-1], 1)])
def test_too_few_blocks_or_those_outside_of_the_pool_are_refused(blocks: list[int], tokens: int) -> None:
    with pytest.raises(InvalidArgument):
        block_indexes(blocks, LAYOUT, tokens=tokens)


def test_a_deadline_is_positive_and_at_most_an_hour() -> None:
    check_deadline(0.001)
    check_deadline(3600)
    for wrong in (0, -1, 3600.1, float("nan")):
        with pytest.raises(InvalidArgument, match="at most 3600 s"):
            check_deadline(wrong)


def test_the_regions_are_as_many_and_as_large_as_the_layouts() -> None:
    sizes = [LAYOUT.region_bytes(0, number) for number in range(LAYOUT.region_count(0))]
    check_regions(LAYOUT, 0, [region(size + 1) for size in sizes])
    for wrong in ([], [region(size) for size in sizes[1:]], [region(size - 1) for size in sizes]):
        with pytest.raises(InvalidArgument, match="the pool of rank 0 has 4 regions"):
            check_regions(LAYOUT, 0, wrong)
    with pytest.raises(InvalidArgument, match="rank 1"):
        check_regions(LAYOUT, 1, [])
