"""Eviction-policy states of a tenant's blocks, kept in a column of the visible blocks.

A policy knows keys only. A dict of its own would take 40 to 80 bytes per block; the table's dict finds the blocks.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice, repeat
from typing import Any

from kvstore.store.block_table.block import Block, BlockColumns
from kvstore.store.block_table.rows import FIRST_ROW


class BlockStates:
    """Policy states (tiers/policies/interface.py) by key. A block is visible before its key has a state,
    and until it has none.

    Keys without a visible block, such as blocks of several values, are kept in a dict.
    """

    __slots__ = ("_blocks", "_column", "_count", "_others", "get")

    def __init__(self, blocks: Mapping[bytes, Block], columns: BlockColumns) -> None:
        """`blocks` are the tenant's visible ones, in these columns."""
        self._blocks = blocks
        self._column = columns.policy_states
        self._others: dict[bytes, Any] = {}
        self._count = 0
        """Number of states in the column."""
        self.get = _getter(blocks, columns, self._others)

    def __len__(self) -> int:
        return self._count + len(self._others)

    def __contains__(self, key: bytes) -> bool:
        return self.get(key) is not None

    def __getitem__(self, key: bytes) -> Any:
        state = self.get(key)
        if state is None:
            raise KeyError(key)
        return state

    def __setitem__(self, key: bytes, state: Any) -> None:
        block = self._blocks.get(key)
        if block is None or (self._others and key in self._others):
            self._others[key] = state
            return
        self._count += self._column[block] is None
        self._column[block] = state

    def __delitem__(self, key: bytes) -> None:
        if self._others and key in self._others:
            del self._others[key]
            return
        self._column[self._blocks[key]] = None
        self._count -= 1

    def items(self) -> Iterator[tuple[bytes, Any]]:
        return self.scan(len(self._blocks))

    def scan(self, max_passed: int) -> Iterator[tuple[bytes, Any]]:
        """Iterate over the states, examining at most `max_passed` of the tenant's blocks."""
        keys = islice(self._blocks, max_passed)
        yield from ((key, state) for key in keys if key not in self._others and (state := self.get(key)) is not None)
        yield from self._others.items()

    def found(self, keys: Sequence[bytes]) -> Iterator[Any]:
        """As `get` of each key of a visible block."""
        return map(self._column.__getitem__, map(self._blocks.get, keys, repeat(_NO_ROW)))

    def set_all(self, keys: Sequence[bytes], state: Any) -> None:
        for block in map(self._blocks.__getitem__, keys):
            self._column[block] = state
        self._count += len(keys)

    def are_new(self, keys: Collection[bytes]) -> bool:
        return not any(self.found(list(keys))) and self._others.keys().isdisjoint(keys)


def _getter(blocks: Mapping[bytes, Block], columns: BlockColumns, others: Mapping[bytes, Any]) -> Callable[[bytes], Any]:
    """Return `get` as a closure. Policies call it several times per block; a method takes half as long again."""
    find, column = blocks.get, columns.policy_states

    def get(key: bytes) -> Any:
        block = find(key)
        if block is not None and (state := column[block]) is not None:
            return state
        return others.get(key) if others else None

    return get


_NO_ROW = FIRST_ROW - 1
"""Row whose column is always empty."""
