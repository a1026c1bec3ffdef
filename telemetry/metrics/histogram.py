"""Histograms of durations: bucket counts, and a log of measurements not counted yet.

A hot path only appends to the log, from any thread. The log is folded into the buckets when it is long, or when the
histogram is read. Counting a sorted batch of a thousand costs less than counting each.
"""

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from operator import add
from typing import Final, NamedTuple

BOUNDS_S: Final = (
    *(1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of the buckets: from a shared-memory read, which takes 3 us, to the default deadline of a call."""
AGE_BOUNDS_S: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0, 7 * 24 * 3600.0)
"""Bounds for ages of blocks."""
ANSWER_BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
"""Bounds for answers of engines: from the first token of a cached prompt to the last token of a long answer."""


MAX_LOGGED: Final = 1000
"""Log length at which `record` folds."""


class HistogramSnapshot(NamedTuple):
    """Snapshot of a histogram: counts per bucket (not cumulative; the last one is unbounded), and the sum."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float


def sum_of(parts: Iterable[HistogramSnapshot]) -> HistogramSnapshot:
    """Sum of histograms with equal bounds; at least one."""
    first, *others = parts
    for one in others:
        assert one.bounds_s == first.bounds_s
        first = HistogramSnapshot(first.bounds_s, tuple(map(add, first.counts, one.counts)), first.sum_s + one.sum_s)
    return first


class Histogram:
    """Histogram of durations. `record` is thread-safe."""

    __slots__ = ("_bounds_ns", "_bounds_s", "_counts", "_folding", "_slowest_ns", "_sum_ns", "log")

    def __init__(self, bounds_s: tuple[float, ...] = BOUNDS_S) -> None:
        self._bounds_s = bounds_s
        self._bounds_ns = [round(bound * 1e9) for bound in bounds_s]
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_ns = 0
        self._slowest_ns = 0
        self._folding = threading.Lock()
        self.log: list[int] = []
        """Measurements in ns. Callers that append directly must `fold` from time to time."""

    def record(self, elapsed_ns: int) -> None:
        """Add a measurement. For hot paths."""
        log = self.log
        log.append(elapsed_ns)
        if len(log) >= MAX_LOGGED:
            self.fold()

    def observe(self, elapsed_ns: int, times: int) -> None:
        """Add a measurement with weight `times`. For a single thread: concurrent calls may lose one."""
        self._counts[bisect_left(self._bounds_ns, elapsed_ns)] += times
        self._sum_ns += elapsed_ns * times

    def fold(self) -> None:
        """Count the log and empty it. Returns at once if another call does so, in another thread or in an interrupted
        frame.

        The lock is taken only by `with`, where CPython runs no signal handler before the block is entered. A handler
        that raises after `acquire` would leave the lock held, and the histogram would never count again.
        """
        if self._folding.locked():
            return
        with self._folding:
            taken = self.log[:]
            del self.log[: len(taken)]  # keeps concurrent appends
            if taken:
                taken.sort()
                self._sum_ns += sum(taken)
                self._slowest_ns = max(self._slowest_ns, taken[-1])
                below = 0
                for index, bound_ns in enumerate(self._bounds_ns):
                    if below == len(taken):
                        break
                    upto = bisect_right(taken, bound_ns, below)
                    self._counts[index] += upto - below
                    below = upto
                self._counts[-1] += len(taken) - below

    def counts(self) -> HistogramSnapshot:
        self.fold()
        return HistogramSnapshot(self._bounds_s, tuple(self._counts), self._sum_ns / 1e9)

    def slowest_ns(self) -> int:
        """Slowest measurement since `forget_slowest`; 0: none."""
        self.fold()
        return self._slowest_ns

    def forget_slowest(self) -> None:
        self.fold()
        self._slowest_ns = 0


class Histograms(dict[str, Histogram]):
    """Histograms by name, created on first access."""

    def __missing__(self, name: str) -> Histogram:
        return self.setdefault(name, Histogram())

    def read(self) -> dict[tuple[str, ...], HistogramSnapshot]:
        """Snapshots by name, as a label's value."""
        return {(name,): histogram.counts() for name, histogram in list(self.items())}
