"""Long work in time slices of the loop, with other requests served in between. The loop is the only caller."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Work = Callable[[Sequence[bytes], Callable[[int], None]], None]
"""Processes some keys, and calls its callback with a number once that is done."""


@dataclass(frozen=True, slots=True)
class TimeSlicer:
    """Runs work slice by slice. `later` schedules a call in the loop; no further slice begins once `is_wanted`
    returns False."""

    later: Callable[[Callable[[], None]], None]
    is_wanted: Callable[[], bool]

    def of(self, slices: Iterator[Sequence[bytes]], work: Work, then: Callable[[int], None]) -> None:
        """Call `work` for each slice, one after the other, and `then` with the sum of its numbers."""
        _Run(self, slices, work, then).proceed()


class _Run:
    """One run. An object, since nested functions that call one another are a reference cycle, which only the garbage
    collector frees."""

    __slots__ = ("_slicer", "_slices", "_then", "_total", "_work")

    def __init__(self, slicer: TimeSlicer, slices: Iterator[Sequence[bytes]], work: Work, then: Callable[[int], None]) -> None:
        self._slicer = slicer
        self._slices = slices
        self._work = work
        self._then = then
        self._total = 0

    def proceed(self) -> None:
        keys = next(self._slices, None) if self._slicer.is_wanted() else None
        if keys is None:
            self._then(self._total)
        elif keys:
            self._work(keys, self._count)
        else:
            self._slicer.later(self.proceed)

    def _count(self, number: int) -> None:
        self._total += number
        self._slicer.later(self.proceed)
