"""Continuous batching, counted: which sequences decode together, what context they have, and which of them end after how many steps.

Each step gives every member a token. Who joins, when, within what room, and how long a step takes is decided by who owns the batch: the
simulator's decode loop, the server under pressure, the stand-in engine. Not thread-safe, but for `len` and `context_tokens`.
"""

import heapq
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _MemberOrder(NamedTuple):
    """Of a member, ordered by its end and then by when it joined."""

    end: int
    """The step after which it ends, counted from the batch's first."""
    joined: int
    final_tokens: int
    """Of its context, when it ends."""


class RunningBatch(Generic[T]):
    """See the module. Members are told apart by identity or their own equality: they must be hashable and in the batch once."""

    def __init__(self) -> None:
        self.context_tokens = 0
        """Of all members together."""
        self._places: dict[T, _MemberOrder] = {}
        self._ends: list[tuple[_MemberOrder, T]] = []
        """A heap of the same."""
        self._steps = 0
        self._joined = 0

    def __len__(self) -> int:
        return len(self._places)

    def members(self) -> list[T]:
        """In the order in which they joined."""
        return list(self._places)

    @property
    def steps_to_next_end(self) -> int:
        """After which the first member ends. There must be one."""
        return self._ends[0][0].end - self._steps

    @property
    def longest_steps(self) -> int:
        """After which the last one has ended; 0 if there is none."""
        return max((place.end for place in self._places.values()), default=self._steps) - self._steps

    def join(self, member: T, *, context_tokens: int, steps: int) -> None:
        """One of `context_tokens` takes part from the next step on and ends after `steps` (at least 1) of them."""
        assert steps >= 1, steps
        self._joined += 1
        place = self._places[member] = _MemberOrder(self._steps + steps, self._joined, context_tokens + steps)
        self.context_tokens += context_tokens
        heapq.heappush(self._ends, (place, member))

    def advance(self, steps: int = 1) -> list[T]:
        """`steps` steps are over, no more than until the first end; those that ended with them, which leave, in the order they joined."""
        self._steps += steps
        self.context_tokens += steps * len(self._places)
        ended = []
        while self._ends and self._ends[0][0].end <= self._steps:
            ended.append(self._ends[0][1])
            self.leave(ended[-1])
        return ended

    def leave(self, member: T) -> int:
        """Out of the batch; how many steps it lacks. It must be a member."""
        place = self._places.pop(member)
        lacking = place.end - self._steps
        self.context_tokens -= place.final_tokens - lacking
        if self._ends[0][0] is place:
            heapq.heappop(self._ends)
        else:
            self._ends = [other for other in self._ends if other[0] is not place]
            heapq.heapify(self._ends)
        return lacking

    def check_integrity(self) -> None:
        """Asserts that the sum is that of the members, none of whom has ended. For tests."""
        assert self.context_tokens == sum(place.final_tokens - (place.end - self._steps) for place in self._places.values())
        assert all(place.end > self._steps for place in self._places.values())
        assert dict(self._ends) == {place: member for member, place in self._places.items()}
