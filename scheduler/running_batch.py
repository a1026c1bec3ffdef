"""Continuous batching as counts: the sequences decoded together, their context, and the step after which each ends.

Each step gives every member a token. The owner decides admission, limits and step times: the simulator's decode loop,
the server under pressure, or the fake engine. Not thread-safe, except `len` and `context_tokens`.
"""

import heapq
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _MemberOrder(NamedTuple):
    """Sort key of a member: by its end, then by its joining."""

    end: int
    """Step after which it ends, counted from the batch's first."""
    joined: int
    final_tokens: int
    """Its context at the end."""


class RunningBatch(Generic[T]):
    """Sequences that are decoded together. Members are hashable, and in the batch once."""

    def __init__(self) -> None:
        self.context_tokens = 0
        """Context of all members."""
        self._members: dict[T, _MemberOrder] = {}
        self._ends: list[tuple[_MemberOrder, T]] = []
        """Heap of the members by end."""
        self._steps = 0
        self._joined = 0

    def __len__(self) -> int:
        return len(self._members)

    def members(self) -> list[T]:
        """Members in order of joining."""
        return list(self._members)

    @property
    def steps_to_next_end(self) -> int:
        """Steps until the first member ends. The batch must not be empty."""
        return self._ends[0][0].end - self._steps

    @property
    def longest_steps(self) -> int:
        """Steps until the last member ends; 0 if empty."""
        return max((order.end for order in self._members.values()), default=self._steps) - self._steps

    def join(self, member: T, *, context_tokens: int, steps: int) -> None:
        """Add a member of `context_tokens` from the next step on, for `steps` (at least 1) steps."""
        assert steps >= 1, steps
        self._joined += 1
        order = self._members[member] = _MemberOrder(self._steps + steps, self._joined, context_tokens + steps)
        self.context_tokens += context_tokens
        heapq.heappush(self._ends, (order, member))

    def advance(self, steps: int = 1) -> list[T]:
        """Advance by `steps`, at most to the first end: the members that ended and left, in order of joining."""
        self._steps += steps
        self.context_tokens += steps * len(self._members)
        ended = []
        while self._ends and self._ends[0][0].end <= self._steps:
            ended.append(self._ends[0][1])
            self.leave(ended[-1])
        return ended

    def leave(self, member: T) -> int:
        """Remove a member: the steps it lacks."""
        order = self._members.pop(member)
        lacking = order.end - self._steps
        self.context_tokens -= order.final_tokens - lacking
        if self._ends[0][0] is order:
            heapq.heappop(self._ends)
        else:
            self._ends = [other for other in self._ends if other[0] is not order]
            heapq.heapify(self._ends)
        return lacking

    def check_integrity(self) -> None:
        """Assert that the sum is that of the members, none of which has ended. For tests."""
        assert self.context_tokens == sum(order.final_tokens - (order.end - self._steps) for order in self._members.values())
        assert all(order.end > self._steps for order in self._members.values())
        assert dict(self._ends) == {order: member for member, order in self._members.items()}
