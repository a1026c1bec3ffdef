"""Promises of arguments.py: what callers pass is checked, with what to do, and copied."""

import pytest

from kvstore.handover.transceiver import block_indexes, check_regions
from kvstore.protocol.errors import InvalidArgument
from kvstore.transfer.memory.region import Region
from tests.handover.scene import layout_of

LAYOUT = layout_of(pool_blocks=8, order="vllm-flash")


def region(size_bytes: int) -> Region:
    return Region(memoryview(bytearray(size_bytes)))


@pytest.mark.parametrize(("blocks", "tokens"), [([1], 17), ([1], 0), ([], 1), ([8], 1), ([-1], 1)])
def test_too_few_blocks_or_those_outside_of_the_pool_are_refused(blocks: list[int], tokens: int) -> None:
    with pytest.raises(InvalidArgument):
        block_indexes(blocks, LAYOUT, tokens=tokens)


def test_the_regions_are_as_many_and_as_large_as_the_layouts() -> None:
    sizes = [LAYOUT.region_bytes(0, number) for number in range(LAYOUT.region_count(0))]
    check_regions(LAYOUT, 0, [region(size + 1) for size in sizes])
    for wrong in ([], [region(size) for size in sizes[1:]], [region(size - 1) for size in sizes]):
        with pytest.raises(InvalidArgument, match="the pool of rank 0 has 4 regions"):
            check_regions(LAYOUT, 0, wrong)
    with pytest.raises(InvalidArgument, match="rank 1"):
        check_regions(LAYOUT, 1, [])
