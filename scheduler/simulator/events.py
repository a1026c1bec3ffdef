"""Simulated time: what happens next, in order. It knows nothing of what happens."""

import heapq
from collections.abc import Callable
from typing import TypeAlias

Action: TypeAlias = Callable[[], None]


class Event:
    """One action at one time; cancelled, it never happens."""

    __slots__ = ("action", "at_s")

    def __init__(self, at_s: float, action: Action) -> None:
        self.at_s = at_s
        self.action: Action | None = action

    def cancel(self) -> None:
        """It will not happen. A second call, or one after it happened, changes nothing."""
        self.action = None


class EventQueue:
    """Actions by time; those of one moment in the order they were asked for, so that a run repeats exactly."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Event]] = []
        self._asked = 0

    def at(self, at_s: float, action: Action) -> Event:
        """`action` will be called at `at_s`, not before now."""
        assert at_s >= self.now_s, (at_s, self.now_s)
        event = Event(at_s, action)
        self._asked += 1
        heapq.heappush(self._heap, (at_s, self._asked, event))
        return event

    def run(self) -> None:
        """Until nothing is left to happen."""
        heap = self._heap
        while heap:
            at_s, _, event = heapq.heappop(heap)
            if event.action is not None:
                self.now_s = at_s
                event.action()

    def __len__(self) -> int:
        """What is still to happen, the cancelled included."""
        return len(self._heap)
