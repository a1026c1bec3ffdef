"""Puts that wait for room, first come first served, each until its deadline. Pure; `now_ns` is passed in."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Waiting:
    """`attempt` tries again and says whether it is done; `give_up` is called instead when the deadline is over. Neither raises."""

    owner: object
    deadline_ns: int
    attempt: Callable[[], bool]
    give_up: Callable[[], None]


class WaitingRoom:
    """Only the first in line is tried: a later, smaller request that overtakes could starve a large one for ever."""

    def __init__(self) -> None:
        self._line: deque[Waiting] = deque()

    def add(self, waiting: Waiting) -> None:
        self._line.append(waiting)

    def retry(self) -> None:
        """Room may have been made: serve the line as far as it goes. An attempt may itself end connections, or call this again."""
        while self._line:
            first = self._line.popleft()
            if not first.attempt():
                self._line.appendleft(first)
                return

    def expire(self, *, now_ns: int) -> int:
        """Send away those whose deadline is over; returns how many."""
        late = [waiting for waiting in self._line if waiting.deadline_ns <= now_ns]
        self._line = deque(waiting for waiting in self._line if waiting.deadline_ns > now_ns)
        for waiting in late:
            waiting.give_up()
        if late:
            self.retry()
        return len(late)

    def forget_owner(self, owner: object) -> None:
        """The asker is gone: nobody is told."""
        self._line = deque(waiting for waiting in self._line if waiting.owner is not owner)

    def __len__(self) -> int:
        return len(self._line)
