"""How long to wait before the next try: bounded exponential with jitter, so that peers which failed together do not return together."""

import random
from collections.abc import Callable


class Backoff:
    """Delays that double from `first_s` to at most `longest_s`, each scaled by 0.5 to 1.0 at random.

    `jitter` gives numbers in [0, 1). Not thread-safe: one loop of tries owns it.
    Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015 ("equal jitter").
    """

    def __init__(self, *, first_s: float, longest_s: float, jitter: Callable[[], float] = random.random) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._jitter = jitter
        self._ceiling_s = first_s

    def next_s(self) -> float:
        """The delay before the next try, in seconds."""
        delay_s = self._ceiling_s * (0.5 + 0.5 * self._jitter())
        self._ceiling_s = min(self._ceiling_s * 2, self._longest_s)
        return delay_s

    def reset(self) -> None:
        """A try succeeded: the next failure starts from `first_s` again."""
        self._ceiling_s = self._first_s
