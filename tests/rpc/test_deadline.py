"""A deadline is one point in time for everything that shares it."""

import time

import pytest

from kvstore.protocol.errors import DeadlineExceeded
from kvstore.rpc.deadline import Deadline, format_seconds


@pytest.mark.parametrize("late_ns", [0, 1, 10**12])
def test_no_time_left_is_an_error_that_names_how_much_there_was(monkeypatch: pytest.MonkeyPatch, late_ns: int) -> None:
    now_ns = 1
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    deadline = Deadline(1.5)
    now_ns += 1_500_000_000 + late_ns
    with pytest.raises(DeadlineExceeded, match=r"1\.5 s"):
        deadline.left_s()


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.0692551, "0.069 s"), (0.5, "0.5 s"), (2.000004, "2 s"), (1.234, "1.23 s"), (3600, "3600 s")]
)
def test_seconds_are_told_in_few_digits(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


def test_a_part_ends_within_the_whole_and_names_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 0
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    whole = Deadline(3)
    assert whole.part(1).left_s() == 1
    now_ns = 2_930_000_000
    last = whole.part(1)
    assert last.timeout_s == last.left_s() == pytest.approx(0.07)
    now_ns = 3_000_000_000
    with pytest.raises(DeadlineExceeded, match=r"^no answer within the deadline of 3 s$"):
        last.left_s()
    with pytest.raises(DeadlineExceeded, match=r"of 3 s$"):
        whole.part(1).part(1).left_s()
