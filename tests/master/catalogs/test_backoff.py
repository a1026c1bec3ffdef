"""Promises of backoff.py."""

from kvstore.master.catalogs.group_commit import Backoff


def test_delays_double_up_to_the_longest() -> None:
    backoff = Backoff(first_s=1, longest_s=5, jitter=lambda: 1.0)
    assert [backoff.next_s() for _try in range(5)] == [1, 2, 4, 5, 5]


def test_jitter_takes_at_most_half_of_a_delay_away() -> None:
    assert Backoff(first_s=1, longest_s=5, jitter=lambda: 0.0).next_s() == 0.5


def test_after_a_success_delays_start_again() -> None:
    backoff = Backoff(first_s=1, longest_s=5, jitter=lambda: 1.0)
    backoff.next_s()
    backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == 1
