"""Who waits until all blocks of a tenant that were undecided when he asked are so no more. Bookkeeping only.

A block counts at the first wait that began after it, and a wait is over once it and all before it have none left: so a decision costs a
search among the waits, however many there are. While a master is away they may be thousands, of whom most have been answered by their
deadline: these are forgotten.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

SPARE: Final = 64
"""Who was answered meanwhile is looked for once there are twice as many as after the last look, and so many."""


def never() -> bool:
    return False


@dataclass(slots=True)
class _Waiting:
    callback: Callable[[], None]
    is_over: Callable[[], bool]


class Waits:
    """Of one tenant, whose blocks have rising numbers."""

    def __init__(self) -> None:
        self._newest: list[int] = []
        """Of each wait, the number of the newest block then. Rising."""
        self._left: list[int] = []
        """Of each wait, the blocks that are waited for and that the one before does not wait for."""
        self._waiting: list[list[_Waiting]] = []
        self._blocks = 0
        """All that are waited for."""
        self._count = 0
        self._max_count = SPARE

    def __bool__(self) -> bool:
        return bool(self._newest)

    def add(self, newest: int, undecided: int, callback: Callable[[], None], is_over: Callable[[], bool]) -> None:
        """Wait for all blocks up to `newest`, of which so many are undecided: one at least. The callback is not needed any more once
        `is_over` says so."""
        if self._count >= self._max_count:
            self._forget_over()
        more = undecided - self._blocks
        if more or not self._newest:
            self._newest.append(newest)
            self._left.append(more)
            self._waiting.append([])
            self._blocks = undecided
        self._waiting[-1].append(_Waiting(callback, is_over))
        self._count += 1

    def take_off(self, numbers: Sequence[int]) -> list[Callable[[], None]]:
        """The blocks of these numbers are undecided no more; the callbacks whose time has come."""
        newest, left = self._newest, self._left
        if len(newest) == 1:  # as a rule
            count = sum(map(newest[0].__ge__, numbers))
            left[0] -= count
            self._blocks -= count
        else:
            for number in numbers:
                at = bisect_left(newest, number)
                if at < len(newest):
                    left[at] -= 1
                    self._blocks -= 1
        due = next((at for at, count in enumerate(left) if count), len(left))
        found = [one.callback for waiting in self._waiting[:due] for one in waiting]
        del newest[:due], left[:due], self._waiting[:due]
        self._count -= len(found)
        return found

    def _forget_over(self) -> None:
        """What only they waited for is waited for by the next, if there is one."""
        kept, passed = list[tuple[int, int, list[_Waiting]]](), 0
        for newest, left, waiting in zip(self._newest, self._left, self._waiting, strict=True):
            still = [one for one in waiting if not one.is_over()]
            passed += left
            if still:
                kept.append((newest, passed, still))
                passed = 0
        self._newest, self._left, self._waiting = [one[0] for one in kept], [one[1] for one in kept], [one[2] for one in kept]
        self._blocks -= passed
        self._count = sum(map(len, self._waiting))
        self._max_count = 2 * self._count + SPARE

    def check_integrity(self, numbers: Sequence[int]) -> None:
        """Assert that each waits for what is undecided up to its newest, of all these, and for something. For tests."""
        assert self._newest == sorted(set(self._newest))
        for newest, left in zip(self._newest, accumulate(self._left), strict=True):
            assert left == sum(number <= newest for number in numbers) > 0
        assert self._blocks == sum(self._left)
        assert self._count == sum(map(len, self._waiting))
        assert all(self._waiting)
