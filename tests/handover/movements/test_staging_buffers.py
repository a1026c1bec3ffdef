"""Promises of staging_buffers.py: buffers come back for the next request, within the limit, and go at the end."""

import pytest

from kvstore.handover.movements.staging_buffers import SMALLEST_BYTES, StagingPool
from kvstore.protocol.errors import Closed, Full
from kvstore.testing.transfer.awaited import assert_nothing_is_left


def test_what_is_over_the_limit_is_refused_and_nothing_is_taken() -> None:
    staging = StagingPool(2 * SMALLEST_BYTES)
    staging.take(SMALLEST_BYTES)
    with pytest.raises(Full, match="staging_bytes"):
        staging.take(2 * SMALLEST_BYTES)
    assert staging.taken_bytes == SMALLEST_BYTES
    staging.close()


def test_after_close_nothing_is_taken_and_nothing_is_left() -> None:
    def use() -> None:
        staging = StagingPool(4 * SMALLEST_BYTES)
        kept, taken = staging.take(1), staging.take(1)
        staging.release(kept)
        staging.close()
        staging.close()
        with pytest.raises(Closed):
            staging.take(1)
        staging.release(taken)

    assert_nothing_is_left(use)
