"""Long work in slices, each in a turn of the loop of its own: others are served in between. The loop is the only caller."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Work = Callable[[Sequence[bytes], Callable[[int], None]], None]
"""Does something with some keys, and calls what it is given with a number once that is done."""


@dataclass(frozen=True, slots=True)
class TimeSlicer:
    """`later` has a function called in a later turn; no further slice is begun once `is_wanted` says no."""

    later: Callable[[Callable[[], None]], None]
    is_wanted: Callable[[], bool]

    def of(self, slices: Iterator[Sequence[bytes]], work: Work, then: Callable[[int], None]) -> None:
        """Do `work` with one slice after the other, and call `then` with the sum of what it told."""
        _Run(self, slices, work, then).proceed()


class _Run:
    """An object, for functions that call one another in turn are a cycle: all of a request would be left to the collector."""

    __slots__ = ("_slices", "_then", "_total", "_turns", "_work")

    def __init__(self, turns: TimeSlicer, slices: Iterator[Sequence[bytes]], work: Work, then: Callable[[int], None]) -> None:
        self._turns = turns
        self._slices = slices
        self._work = work
        self._then = then
        self._total = 0

    def proceed(self) -> None:
        keys = next(self._slices, None) if self._turns.is_wanted() else None
        if keys is None:
            self._then(self._total)
        elif keys:
            self._work(keys, self._count)
        else:
            self._turns.later(self.proceed)

    def _count(self, number: int) -> None:
        self._total += number
        self._turns.later(self.proceed)
