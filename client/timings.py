"""How long a client's calls take.

Those that may be over within microseconds are timed now and then: one in PERIOD, which stands for those since the one before. To time each
would cost more than 2 % of a read of shared memory; to count down costs 40 ns. All others are timed each.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

from kvstore.telemetry.metrics.histogram import Histograms

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

PERIOD: Final = 61
"""A prime: a caller that does the same few things in turn is not to have always the same one timed."""


class Timings:
    """Threads may share it: see Histogram."""

    def __init__(self) -> None:
        self.durations = Histograms()
        self.untimed = 0
        """Quick calls until the next that is timed. The caller counts it down, and has the call sampled once it is below 0."""
        self._weight = 1

    def sample(self, name: str, call: Callable[[], T]) -> T:
        """Make a quick call, once more from the beginning, and time it."""
        self.untimed = PERIOD  # which the call itself counts down first
        weight, self._weight = self._weight, PERIOD  # for how many calls this one stands
        began_ns = time.monotonic_ns()
        try:
            return call()
        finally:
            self.durations[name].observe(time.monotonic_ns() - began_ns, weight)


def timed(method: F) -> F:
    """A client's method that is timed under its name, whatever comes of it."""
    name = method.__name__

    @functools.wraps(method)
    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_ns = time.monotonic_ns()
        try:
            return method(self, *args, **kwargs)
        finally:
            self._timings.durations[name].record(time.monotonic_ns() - began_ns)

    return cast(F, measured)


def timed_async(method: F) -> F:
    """As `timed`, of a coroutine function."""
    name = method.__name__

    @functools.wraps(method)
    async def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_ns = time.monotonic_ns()
        try:
            return await method(self, *args, **kwargs)
        finally:
            self._timings.durations[name].record(time.monotonic_ns() - began_ns)

    return cast(F, measured)
