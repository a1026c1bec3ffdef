"""A deadline is one point in time for everything that shares it."""

import time

import pytest

from kvstore.protocol.errors import DeadlineExceeded
from kvstore.rpc.deadline import Deadline


def test_time_runs_down(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 5_000_000_000
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    deadline = Deadline(2.5)
    assert deadline.left_s() == 2.5
    now_ns += 2_000_000_000
    assert deadline.left_s() == 0.5
    assert deadline.waited_s() == 2.0


@pytest.mark.parametrize("late_ns", [0, 1, 10**12])
def test_no_time_left_is_an_error_that_names_how_much_there_was(monkeypatch: pytest.MonkeyPatch, late_ns: int) -> None:
    now_ns = 1
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    deadline = Deadline(1.5)
    now_ns += 1_500_000_000 + late_ns
    with pytest.raises(DeadlineExceeded, match=r"1\.5 s"):
        deadline.left_s()


def test_a_deadline_without_time_is_over_from_the_start() -> None:
    with pytest.raises(TimeoutError):
        Deadline(0).left_s()


def test_as_much_as_is_left_is_given_and_nothing_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    deadline = Deadline(1.5)
    assert (deadline.up_to_s(1), deadline.up_to_s(2)) == (1, 1.5)
    now_ns = 1_500_000_001
    assert deadline.up_to_s(1) == 0.0
