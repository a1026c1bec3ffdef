"""Deadline of an operation, shared by all of its steps."""

import time
from typing import Final

from kvstore.protocol.errors import DeadlineExceeded

OVERDUE_S: Final = 1.0
"""A gRPC call that has not ended this long after its deadline never will: the thread that completes it may have died.
"""


def format_seconds(seconds: float) -> str:
    """Format a duration: two significant digits below a second, else at most two decimals."""
    return f"{seconds:.2g} s" if seconds < 1 else f"{round(seconds, 2):g} s"


class Deadline:
    """A point in monotonic time by which a whole operation must end."""

    __slots__ = ("at_ns", "timeout_s", "whole_s")

    def __init__(self, timeout_s: float, *, whole_s: float | None = None) -> None:
        """`whole_s`: the time of the whole operation if this is a part of it, for the error."""
        self.timeout_s = timeout_s
        self.whole_s = timeout_s if whole_s is None else whole_s
        self.at_ns = time.monotonic_ns() + int(timeout_s * 1e9)

    def left_s(self) -> float:
        """Return the seconds left. Raises DeadlineExceeded if there are none."""
        left_ns = self.at_ns - time.monotonic_ns()
        if left_ns <= 0:
            raise self.exceeded()
        return left_ns / 1e9

    def up_to_s(self, seconds: float) -> float:
        """Return `seconds`, or what is left if that is less; 0.0 when nothing is."""
        return max(0.0, min(seconds, (self.at_ns - time.monotonic_ns()) / 1e9))

    def part(self, seconds: float) -> "Deadline":
        """Return a deadline after at most `seconds`, within this one."""
        return Deadline(self.up_to_s(seconds), whole_s=self.whole_s)

    def waited_s(self) -> float:
        """Return the seconds since its start."""
        return self.timeout_s - (self.at_ns - time.monotonic_ns()) / 1e9

    def exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no answer within the deadline of {format_seconds(self.whole_s)}")
