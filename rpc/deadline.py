"""A deadline: the time that a whole operation has, however many steps it takes."""

import time
from typing import Final

from kvstore.protocol.errors import DeadlineExceeded

OVERDUE_S: Final = 1.0
"""What has a deadline of its own, as a call of gRPC, and has not ended so long after it never will: the thread that would say so may have
died of a want of memory."""


class Deadline:
    """A point in monotonic time that a whole operation shares, however many requests it takes."""

    __slots__ = ("at_ns", "timeout_s")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
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

    def waited_s(self) -> float:
        """Seconds since it began."""
        return self.timeout_s - (self.at_ns - time.monotonic_ns()) / 1e9

    def exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"no answer within the deadline of {self.timeout_s:g} s")
