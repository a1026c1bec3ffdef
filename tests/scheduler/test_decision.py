"""The values that a dispatcher answers with."""

from kvstore.scheduler.decision import Decision, Reason, Rejection


def test_the_time_to_the_first_token_is_the_sum_of_its_parts() -> None:
    found = Decision(
        prefill=0, decode=0, prefix_blocks=2, transfer_from=None, transfer_blocks=0, transfer_s=1.0, queue_s=2.0, prefill_s=4.0, tbt_s=8.0
    )
    assert found.ttft_s == 7.0


def test_a_rejection_without_figures_has_none() -> None:
    assert Rejection(Reason.NO_INSTANCE) == Rejection(Reason.NO_INSTANCE, 0.0, 0.0)
