"""Signals at random moments whose handler raises, as Ctrl-C does: in the main thread of a program that a test starts for it."""

import random
import signal
from collections.abc import Callable

MAX_OF_ONE = 50
"""Limit of signals in one operation. On a machine whose handler takes longer than the interval between signals, nothing else would run.
Handlers would be interrupted by handlers until the stack is full."""


class Struck(BaseException):
    """Raised by the handler: no Exception, like KeyboardInterrupt."""


class Striker:
    """Counts the signals. `struck` runs something under them; what the handler raises ends there."""

    def __init__(self, seed: int) -> None:
        self.count = 0
        self._is_inside = False
        self._left = 0
        self._again_s = 0.0
        self._random = random.Random(seed)
        signal.signal(signal.SIGALRM, self._strike)

    def _strike(self, number: int, frame: object) -> None:
        if self._is_inside:  # one that was under way when the timer was stopped comes late
            self.count += 1
            if self._left:
                self._left -= 1
                signal.setitimer(signal.ITIMER_REAL, self._again_s)
            raise Struck

    def struck(self, operation: Callable[[], object], *, within_s: float) -> bool:
        """Run it; the first signal comes at a random moment within `within_s`, half the time with more, each 20 us after the one before.
        Was it struck?"""
        first_s = self._random.uniform(1e-6, within_s)
        self._left, self._again_s = (MAX_OF_ONE - 1, 20e-6) if self._random.random() < 0.5 else (0, 0.0)
        try:
            try:
                self._is_inside = True
                signal.setitimer(signal.ITIMER_REAL, first_s)
                operation()
            finally:
                self._is_inside = False
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Struck:
            return True
        return False
