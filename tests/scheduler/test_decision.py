"""The values that a dispatcher answers with."""

import pytest

from kvstore.scheduler.decision import Decision, Reason, Rejection


@pytest.mark.parametrize(("transfer_s", "ttft_s"), [(0.0, 6.0), (1.0, 6.0), (2.5, 6.5)])
def test_what_is_fetched_comes_while_the_request_waits(transfer_s: float, ttft_s: float) -> None:
    found = Decision(
        prefill=0,
        decode=0,
        prefix_blocks=2,
        transfer_from=None,
        transfer_blocks=0,
        transfer_s=transfer_s,
        queue_s=2.0,
        prefill_s=4.0,
        tbt_s=8.0,
    )
    assert found.ttft_s == ttft_s


def test_a_rejection_without_figures_has_none() -> None:
    assert Rejection(Reason.NO_INSTANCE) == Rejection(Reason.NO_INSTANCE, 0.0, 0.0)
