"""Resources shared by the two sides of a rank, and their release."""

import pytest

from kvstore.protocol.errors import DeadlineExceeded
from tests.handover.scene import executor, layout_of
from tests.handover.test_failures import check_next


def test_engine_keeps_nothing_after_its_transceiver() -> None:
    with executor(layout_of(), "pull") as source, executor(layout_of(), "pull") as destination:
        check_next(source, destination, b"r")
        assert destination.ranks[0].engine_peers()
        destination.ranks[0].transceiver.close()
        assert not destination.ranks[0].engine_peers()


@pytest.mark.parametrize("busy", [0, 3])
def test_persistent_reader_keeps_only_one_region_open(busy: int) -> None:
    with executor(layout_of(order="vllm-flash-hnd"), "pull", fence_timeout_s=0.05) as source:
        resources = source.ranks[0].transceiver._requests.resources
        resources.close()
        regions = resources.readable_pool().regions
        closed = list[int]()
        for number, region in enumerate(regions):
            region.on_close(lambda _, number=number: closed.append(number))  # type: ignore[misc]
        regions[busy].hold()
        with pytest.raises(DeadlineExceeded):
            resources.close()
        assert all(region.is_closed for region in regions)
        assert closed == [number for number in range(len(regions)) if number != busy]
        regions[busy].release()
        resources.close()
        assert len(closed) == len(regions) == 4
