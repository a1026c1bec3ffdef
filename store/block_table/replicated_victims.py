"""Blocks of a tier that may leave before colder ones, for another node holds them as well: so the last copy of a block leaves last.

Evictions of a group are counted. After some of them its coldest blocks are to be asked about; those of which the master says that they are
elsewhere are spares until they are read again, or the answer is old. An eviction only takes the next spare: it waits for no answer, and
costs nothing where there are none. Where answers name none, as with one node, questions become rare. It sends nothing and knows no order.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.store.block_table.block import Block

LOOK_AHEAD: Final = 64
"""Of a group's coldest blocks so many are asked about at once: no block leaves for its copies before one that is this much colder."""
ASK_EVERY: Final = 16
"""Evictions of a group between two questions where the last answer named a spare: a quarter of what was looked at has left by then."""
MAX_ASK_EVERY: Final = 4096
"""The same at most: doubled with each answer that names none."""
MAX_AGE_NS: Final = 10_000_000_000
"""What the master said counts for so long: the other holder may be gone since."""


@dataclass(slots=True)
class _VictimGroup:
    """`spares` are blocks with their last access when they were asked about, coldest first."""

    spares: deque[tuple[Block, int]] = field(default_factory=deque)
    due_in: int = 1
    every: int = ASK_EVERY
    is_asked: bool = False
    until_ns: int = 0


class ReplicatedVictims:
    """Of one tier. Not thread-safe: the node's loop is the only caller."""

    def __init__(self, index: int) -> None:
        """`index` is the tier's."""
        self._index = index
        self._groups: dict[int, _VictimGroup] = {}
        self._due: set[int] = set()

    def __len__(self) -> int:
        """Blocks that may leave first, as far as is known."""
        return sum(len(group.spares) for group in self._groups.values())

    def next(self, group: int, may_leave: Callable[[Block], bool]) -> Block | None:
        """A block of the group is about to leave: which may leave first, None where none is known. It is a spare until it has left."""
        state = self._leaving(group, 1)
        while state.spares:
            block, access = state.spares[0]
            if block.is_in(self._index) and not block.is_gone and block.last_access == access and may_leave(block):
                return block
            state.spares.popleft()
        return None

    def have_left(self, group: int, count: int) -> None:
        """So many blocks of the group have left that were no spares."""
        if count:
            self._leaving(group, count)

    def _leaving(self, group: int, count: int) -> _VictimGroup:
        state = self._groups.get(group)
        if state is None:
            state = self._groups[group] = _VictimGroup()
        state.due_in -= count
        if state.due_in <= 0 and not state.is_asked:
            self._due.add(group)
        return state

    def has_any(self, group: int) -> bool:
        """Whether `next` may give one of the group."""
        state = self._groups.get(group)
        return state is not None and bool(state.spares)

    def begin_asking(self, group: int) -> bool:
        """The group is asked about ahead of its evictions: `told` follows, or `forget`. False: it is being asked about already."""
        state = self._groups.setdefault(group, _VictimGroup())
        if state.is_asked:
            return False
        state.is_asked = True
        self._due.discard(group)
        return True

    def take_due(self) -> set[int]:
        """Groups whose coldest blocks are to be asked about: `told` follows for each, or `forget`."""
        due, self._due = self._due, set()
        for group in due:
            self._groups[group].is_asked = True
        return due

    def told(self, group: int, blocks: Sequence[tuple[Block, int]], flags: bytes, *, now_ns: int) -> None:
        """The answer: of blocks, with their last access when they were asked about, which another node holds as well (1)."""
        state = self._groups.get(group)
        if state is None:
            return  # forgotten with the link, which broke as somebody asked
        state.spares = deque(pair for pair, flag in zip(blocks, flags, strict=True) if flag)
        state.every = ASK_EVERY if state.spares else min(2 * state.every, MAX_ASK_EVERY)
        state.due_in, state.is_asked, state.until_ns = state.every, False, now_ns + MAX_AGE_NS

    def forget(self) -> None:
        """Nothing is known any more, and no question is answered: the master is gone."""
        self._groups.clear()
        self._due.clear()

    def expire(self, *, now_ns: int) -> None:
        """Forget groups whose answer is old."""
        for group, state in list(self._groups.items()):
            if not state.until_ns:
                state.until_ns = now_ns + MAX_AGE_NS
            elif state.until_ns <= now_ns and not state.is_asked and group not in self._due:
                del self._groups[group]
