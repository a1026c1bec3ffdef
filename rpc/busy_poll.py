"""Adaptive busy polling: whether a thread that waits for a message looks again and again for a while before it sleeps.

To be woken up costs more than most messages of this project: 6 us on the processor of who wakes, 30 to 50 us where an idle one of a
virtual machine has to be woken for it, and what follows runs with cold caches. Who has just been answered soon is likely to be again, so
it stays awake for as long as such an answer takes; the first time that this comes to nothing it sleeps as before, and does not try again
before more and more waits have been short ones (the halt polling of hypervisors adapts in this way). So an idle daemon polls never, and
one on a busy machine, where the peer lacks the processor that polling takes, hardly ever.
"""

import os
from typing import Final

from kvstore.rpc.gil_contention import GilContention

WORTH_FACTOR: Final = 2
"""A sleep of up to so many times `max_ns`, most of which was the waking up, would have been spared."""
MAX_RESTS: Final = 256
"""Short waits after which it is tried again, at most; from 1 it doubles with each time in a row that was in vain."""


class BusyPoll:
    """What a thread, or several of one kind, learn from their waits. No lock: what threads overwrite of one another is a guess less."""

    __slots__ = ("_in_vain", "_rests", "gil", "is_on", "max_ns")

    def __init__(self, max_us: int, *, processors: int | None = None, gil: GilContention | None = None) -> None:
        """`max_us` is how long it may look, 0 for never. With fewer than two `processors` (default: those that this process may use) it
        never does either: the peer could not run meanwhile. `gil`: what is known of other threads that compute."""
        self.gil = gil or GilContention()
        available = processors if processors is not None else len(os.sched_getaffinity(0))
        self.max_ns = max_us * 1000 if available > 1 else 0
        self.is_on = False
        """The next wait begins with looking for `max_ns`."""
        self._in_vain = 0
        self._rests = 0

    def found(self) -> None:
        """It came while somebody looked."""
        self._in_vain = 0

    def missed(self) -> None:
        """Somebody looked for `max_ns`, and it did not come."""
        self.is_on = False
        self._rests = min(1 << self._in_vain, MAX_RESTS)
        self._in_vain += self._rests < MAX_RESTS

    def slept(self, waited_ns: int) -> None:
        """It came after a sleep, so long after the wait began."""
        if waited_ns < WORTH_FACTOR * self.max_ns:
            self._rests -= 1
            self.is_on = self._rests <= 0
