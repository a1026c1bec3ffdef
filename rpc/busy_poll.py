"""Adaptive busy polling: decides whether a waiting thread polls for a while before it sleeps.

A wake-up costs more than most messages: 6 us on the same processor, 30 to 50 us for an idle virtual one, and the thread
then runs with cold caches. After short waits a thread polls for up to `max_ns`. A poll in vain turns polling off, and
each one in a row doubles the number of short waits before the next try (as the halt polling of hypervisors). So an idle
daemon never polls, and one on a busy machine, whose peers need the processor, hardly ever.
"""

import os
from typing import Final

from kvstore.rpc.gil_contention import GilContention

WORTH_FACTOR: Final = 2
"""A wait of up to this many times `max_ns` counts as short: most of it was the wake-up."""
MAX_RESTS: Final = 256
"""Highest number of short waits before polling is tried again."""


class BusyPoll:
    """Polling state of one thread, or of several alike. Lock-free: a lost update only makes the estimate worse."""

    __slots__ = ("_in_vain", "_rests", "gil", "is_on", "max_ns")

    def __init__(self, max_us: int, *, processors: int | None = None, gil: GilContention | None = None) -> None:
        """`max_us`: longest poll, 0 for never.

        With one processor (`processors`; default: those of this process) it never polls.

        `gil`: the process's GIL contention.
        """
        self.gil = gil or GilContention()
        available = processors if processors is not None else len(os.sched_getaffinity(0))
        self.max_ns = max_us * 1000 if available > 1 else 0
        self.is_on = False
        """True if the next wait begins with a poll."""
        self._in_vain = 0
        self._rests = 0

    def found(self) -> None:
        """Record a message that arrived during a poll."""
        self._in_vain = 0

    def missed(self) -> None:
        """Record a poll of `max_ns` without a message."""
        self.is_on = False
        self._rests = min(1 << self._in_vain, MAX_RESTS)
        self._in_vain += self._rests < MAX_RESTS

    def slept(self, waited_ns: int) -> None:
        """Record a message that arrived after a sleep, `waited_ns` after the wait began."""
        if waited_ns < WORTH_FACTOR * self.max_ns:
            self._rests -= 1
            self.is_on = self._rests <= 0
