"""How long things took: a list of counts by bucket, which the thread that measures owns and others only read.

Nothing locks: of threads that share one now and then a measurement may get lost, and none is ever torn.
"""

from bisect import bisect_left
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


class Counts(NamedTuple):
    """A histogram as it was: how many measurements lie in each bucket (not cumulative; the last one has no bound), and their sum."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float


def sum_of(parts: Iterable[Counts]) -> Counts:
    """All of them as one; at least one, and all with the same bounds."""
    first, *others = parts
    for one in others:
        assert one.bounds_s == first.bounds_s
        first = Counts(first.bounds_s, tuple(map(add, first.counts, one.counts)), first.sum_s + one.sum_s)
    return first


class Histogram:
    """See the module."""

    __slots__ = ("_bounds_ns", "_bounds_s", "_counts", "_sum_ns")

    def __init__(self, bounds_s: tuple[float, ...] = BOUNDS_S) -> None:
        self._bounds_s = bounds_s
        self._bounds_ns = [round(bound * 1e9) for bound in bounds_s]
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_ns = 0

    def observe(self, elapsed_ns: int, times: int = 1) -> None:
        """It took so long; `times`: as one measurement that stands for so many."""
        self._counts[bisect_left(self._bounds_ns, elapsed_ns)] += times
        self._sum_ns += elapsed_ns * times

    def counts(self) -> Counts:
        return Counts(self._bounds_s, tuple(self._counts), self._sum_ns / 1e9)


class Histograms:
    """One for each of a few names, made when the name first comes."""

    __slots__ = ("_by_name",)

    def __init__(self) -> None:
        self._by_name: dict[str, Histogram] = {}

    def observe(self, name: str, elapsed_ns: int, times: int = 1) -> None:
        histogram = self._by_name.get(name)
        if histogram is None:
            histogram = self._by_name.setdefault(name, Histogram())
        histogram.observe(elapsed_ns, times)

    def read(self) -> dict[tuple[str, ...], Counts]:
        """By the name, as the value of a label."""
        return {(name,): histogram.counts() for name, histogram in list(self._by_name.items())}
