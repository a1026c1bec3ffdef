"""A deadline: the time that a whole operation has, however many steps it takes."""

import time
from typing import Final

from kvstore.protocol.errors import DeadlineExceeded

OVERDUE_S: Final = 1.0
"""What has a deadline of its own, as a call of gRPC, and has not ended so long after it never will: the thread that would say so may have
died of a want of memory."""


def seconds_shown(seconds: float) -> str:
    """For people: two digits below a second, else hundredths at most."""
    return f"{seconds:.2g} s" if seconds < 1 else f"{round(seconds, 2):g} s"


class Deadline:
    """A point in monotonic time that a whole operation shares, however many requests it takes."""

    __slots__ = ("at_ns", "timeout_s", "whole_s")

    def __init__(self, timeout_s: float, *, whole_s: float | None = None) -> None:
        """`whole_s`: the time of the operation that this is a part of, which the error names."""
        self.timeout_s = timeout_s
        self.whole_s = timeout_s if whole_s is None else whole_s
        self.at_ns = time.monotonic_ns() + int(timeout_s * 1e9)

    def left_s(self) -> float:
        """Seconds left; raises DeadlineExceeded when there are none."""
        left_ns = self.at_ns - time.monotonic_ns()
        if left_ns <= 0:
            raise self.exceeded()
        return left_ns / 1e9

    def up_to_s(self, seconds: float) -> float:
        """So much of what is left; 0.0 when nothing is."""
        return max(0.0, min(seconds, (self.at_ns - time.monotonic_ns()) / 1e9))

    def part(self, seconds: float) -> "Deadline":
        """A deadline within this one, after so many seconds at most."""
        return Deadline(self.up_to_s(seconds), whole_s=self.whole_s)

    def waited_s(self) -> float:
        """Seconds since it began."""
        return self.timeout_s - (self.at_ns - time.monotonic_ns()) / 1e9

    def exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no answer within the deadline of {seconds_shown(self.whole_s)}")
