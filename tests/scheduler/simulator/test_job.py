"""Promises of job.py."""

from tests.scheduler.simulator.parts import job


def test_what_a_request_waited_for_is_told_apart() -> None:
    found = job(tokens=100, output=5)
    found.queued_s, found.ready_s = 1.0, 6.0
    found.begin_prefill(head_s=4.0, now_s=6.0)
    assert (found.queue_s, found.fetch_s) == (3.0, 2.0)
    # First in its queue from the beginning.
    found.begin_prefill(head_s=0.0, now_s=6.0)
    assert (found.queue_s, found.fetch_s) == (0.0, 5.0)
    # The blocks were there before it was the first.
    found.begin_prefill(head_s=8.0, now_s=9.0)
    assert (found.queue_s, found.fetch_s) == (8.0, 0.0)
    assert found.cache_tokens == 105
