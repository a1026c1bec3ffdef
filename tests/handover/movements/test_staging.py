"""Promises of staging.py: buffers come back for the next request, within the limit, and go at the end."""

import pytest

from kvstore.handover.movements.staging import SMALLEST_BYTES, StagingPool
from kvstore.protocol.errors import Closed, Full
from kvstore.testing.transfer.waiting import assert_nothing_is_left


def test_what_is_over_the_limit_is_refused_and_nothing_is_taken() -> None:
    staging = StagingPool(2 * SMALLEST_BYTES)
    staging.take(SMALLEST_BYTES)
    with pytest.raises(Full, match="staging_bytes"):
        staging.take(2 * SMALLEST_BYTES)
    assert staging.taken_bytes == SMALLEST_BYTES
    staging.close()


def test_kept_buffers_of_other_sizes_make_room() -> None:
    staging = StagingPool(4 * SMALLEST_BYTES)
    small = [staging.take(1) for _ in range(3)]
    for region in small:
        staging.give_back(region)
    large = staging.take(4 * SMALLEST_BYTES)
    assert all(region.is_closed for region in small)
    assert (staging.taken_bytes, staging.kept_bytes) == (large.size_bytes, 0)
    staging.close()


def test_after_close_nothing_is_taken_and_nothing_is_left() -> None:
    def use() -> None:
        staging = StagingPool(4 * SMALLEST_BYTES)
        kept, taken = staging.take(1), staging.take(1)
        staging.give_back(kept)
        staging.close()
        staging.close()
        with pytest.raises(Closed):
            staging.take(1)
        staging.give_back(taken)

    assert_nothing_is_left(use)
