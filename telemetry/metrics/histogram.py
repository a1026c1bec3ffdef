"""How long things took: counts by bucket, and a log of what is not in its bucket yet.

Whoever measures on a hot path appends to the log and no more, from any thread; the log goes into the buckets when it is long, or when
somebody reads. Sorted, a thousand measurements are counted in less than each would take by itself.
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
"""Upper bounds of the buckets: from a read of shared memory, which takes 3 us, to a call's usual deadline."""
AGE_BOUNDS_S: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0, 7 * 24 * 3600.0)
"""Of ages of blocks."""
ANSWER_BOUNDS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
"""Of answers of engines: from the first token of a cached prompt to the last one of a long answer."""


MAX_LOGGED: Final = 1000
"""Measurements in a log that `record` writes."""


class HistogramSnapshot(NamedTuple):
    """A histogram as it was: how many measurements lie in each bucket (not cumulative; the last one has no bound), and their sum."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float


def sum_of(parts: Iterable[HistogramSnapshot]) -> HistogramSnapshot:
    """All of them as one; at least one, and all with the same bounds."""
    first, *others = parts
    for one in others:
        assert one.bounds_s == first.bounds_s
        first = HistogramSnapshot(first.bounds_s, tuple(map(add, first.counts, one.counts)), first.sum_s + one.sum_s)
    return first


class Histogram:
    """See the module."""

    __slots__ = ("_bounds_ns", "_bounds_s", "_counts", "_folding", "_slowest_ns", "_sum_ns", "log")

    def __init__(self, bounds_s: tuple[float, ...] = BOUNDS_S) -> None:
        self._bounds_s = bounds_s
        self._bounds_ns = [round(bound * 1e9) for bound in bounds_s]
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_ns = 0
        self._slowest_ns = 0
        self._folding = threading.Lock()
        self.log: list[int] = []
        """In ns. Who appends without `record` folds it now and then."""

    def record(self, elapsed_ns: int) -> None:
        """It took so long. For hot paths."""
        log = self.log
        log.append(elapsed_ns)
        if len(log) >= MAX_LOGGED:
            self.fold()

    def observe(self, elapsed_ns: int, times: int) -> None:
        """It took so long, and stands for `times` measurements. For one thread: of several, one now and then gets lost."""
        self._counts[bisect_left(self._bounds_ns, elapsed_ns)] += times
        self._sum_ns += elapsed_ns * times

    def fold(self) -> None:
        """Empty the log. While another call does, in another thread or below a signal's handler, there is nothing to do.

        The lock is taken by `with` alone, between which and its block CPython looks for no signals: what a handler raised after a call of
        `acquire` would leave it taken, and nothing would be counted any more.
        """
        if self._folding.locked():
            return
        with self._folding:
            taken = self.log[:]
            del self.log[: len(taken)]  # not what others have appended since
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
        """Of what has been recorded since `forget_slowest`; 0: nothing."""
        self.fold()
        return self._slowest_ns

    def forget_slowest(self) -> None:
        self.fold()
        self._slowest_ns = 0


class Histograms(dict[str, Histogram]):
    """One for each of a few names, made when it is first asked for."""

    def __missing__(self, name: str) -> Histogram:
        return self.setdefault(name, Histogram())

    def read(self) -> dict[tuple[str, ...], HistogramSnapshot]:
        """By the name, as the value of a label."""
        return {(name,): histogram.counts() for name, histogram in list(self.items())}
