"""Long work in slices, each in a turn of the loop of its own: others are served in between. The loop is the only caller."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Work = Callable[[Sequence[bytes], Callable[[int], None]], None]
"""Does something with some keys, and calls what it is given with a number once that is done."""


@dataclass(frozen=True, slots=True)
class Turns:
    """`later` has a function called in a later turn; no further slice is begun once `is_wanted` says no."""

    later: Callable[[Callable[[], None]], None]
    is_wanted: Callable[[], bool]

    def of(self, slices: Iterator[Sequence[bytes]], work: Work, then: Callable[[int], None]) -> None:
        """Do `work` with one slice after the other, and call `then` with the sum of what it told."""
        total = 0

        def proceed() -> None:
            keys = next(slices, None) if self.is_wanted() else None
            if keys is None:
                then(total)
            elif keys:
                work(keys, count)
            else:
                self.later(proceed)

        def count(number: int) -> None:
            nonlocal total
            total += number
            self.later(proceed)

        proceed()
