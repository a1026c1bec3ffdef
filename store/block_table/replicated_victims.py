"""Victims with a replica on another node: they are evicted before colder blocks, so that a last replica is evicted
last.

Evictions are counted by group. After some of them the master is queried about the group's coldest blocks. Those with
another replica are preferred victims until they are read again or the answer is too old. An eviction never waits for an
answer. Without replicas, as with one node, queries become rare. It sends nothing and keeps no eviction order.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.store.block_table.block import Block

LOOK_AHEAD: Final = 64
"""Coldest blocks of a group per query. A replicated block is evicted at most this much earlier than its order."""
QUERY_INTERVAL: Final = 16
"""Evictions of a group between queries while answers find replicas: a quarter of the queried blocks."""
MAX_QUERY_INTERVAL: Final = 4096
"""Upper bound of that interval, which doubles with each answer that finds none."""
MAX_AGE_NS: Final = 10_000_000_000
"""Validity of an answer: the other replica may have been evicted since."""


@dataclass(slots=True)
class _VictimGroup:
    """Query state of a group. `victims` are replicated blocks with their last access at the time of the query, coldest
    first."""

    victims: deque[tuple[Block, int]] = field(default_factory=deque)
    due_in: int = 1
    every: int = QUERY_INTERVAL
    is_queried: bool = False
    until_ns: int = 0


class ReplicatedVictims:
    """Preferred victims of one tier. Not thread-safe: called from the node's loop."""

    def __init__(self, index: int) -> None:
        """`index` is the tier's."""
        self._index = index
        self._groups: dict[int, _VictimGroup] = {}
        self._due: set[int] = set()

    def __len__(self) -> int:
        """Number of preferred victims."""
        return sum(len(group.victims) for group in self._groups.values())

    def next(self, group: int, may_leave: Callable[[Block], bool]) -> Block | None:
        """Count one eviction and return the group's preferred victim, or None. It stays preferred until it is evicted."""
        state = self._count(group, 1)
        while state.victims:
            block, access = state.victims[0]
            if block.is_in(self._index) and not block.is_dropped and block.last_access == access and may_leave(block):
                return block
            state.victims.popleft()
        return None

    def count_evictions(self, group: int, count: int) -> None:
        """Count evictions of the group that were not preferred victims."""
        if count:
            self._count(group, count)

    def _count(self, group: int, count: int) -> _VictimGroup:
        state = self._groups.get(group)
        if state is None:
            state = self._groups[group] = _VictimGroup()
        state.due_in -= count
        if state.due_in <= 0 and not state.is_queried:
            self._due.add(group)
        return state

    def has_any(self, group: int) -> bool:
        """Return True if `next` may return a block of the group."""
        state = self._groups.get(group)
        return state is not None and bool(state.victims)

    def take_due(self) -> set[int]:
        """Return the groups to query; `set_answer` follows for each, or `forget`."""
        due, self._due = self._due, set()
        for group in due:
            self._groups[group].is_queried = True
        return due

    def set_answer(self, group: int, blocks: Sequence[tuple[Block, int]], flags: bytes, *, now_ns: int) -> None:
        """Apply an answer: `flags` marks the blocks with another replica. `blocks` have their last access at the time
        of the query."""
        state = self._groups.get(group)
        if state is None:
            return  # forgotten when the link broke
        state.victims = deque(pair for pair, flag in zip(blocks, flags, strict=True) if flag)
        state.every = QUERY_INTERVAL if state.victims else min(2 * state.every, MAX_QUERY_INTERVAL)
        state.due_in, state.is_queried, state.until_ns = state.every, False, now_ns + MAX_AGE_NS

    def forget(self) -> None:
        """Forget all answers and queries, because the link to the master is lost."""
        self._groups.clear()
        self._due.clear()

    def expire(self, *, now_ns: int) -> None:
        """Forget groups whose answer is too old."""
        for group, state in list(self._groups.items()):
            if not state.until_ns:
                state.until_ns = now_ns + MAX_AGE_NS
            elif state.until_ns <= now_ns and not state.is_queried and group not in self._due:
                del self._groups[group]
