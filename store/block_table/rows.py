"""Rows of a node's blocks: allocation, and batch reads and writes of their columns.

A row is reused once its block is no longer referenced. Not thread-safe, except that a block may be destroyed in any
thread.
"""

from array import array
from collections.abc import Sequence
from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.store.block_table.block import DRAM, DROPPED, HELD, NOT_INDEXED, TIER_MASKS, Block, BlockColumns, block_type
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.tiers.slabs import make_slot
from kvstore.tiers.tier import Slot

Numbers = npt.NDArray[np.int64]
"""Rows of blocks, or slot indexes, in their order."""
Words = npt.NDArray[np.uint64]
"""Values of a column, in the order of the blocks."""
Values = Sequence[int] | Words | int
"""Values of a column, or one value for all."""
MADE_ROWS: Final = 1024
"""Rows appended at a time; one at a time takes ten times as long."""
_TIER_MASKS: Final = np.array(TIER_MASKS, np.uint8)
MAX_NAMES: Final = 4096
"""Cached Block subclasses by tenant and namespace. When full, the cache is cleared."""
FIRST_ROW: Final = 1
"""Not 0, so that every block is true."""


class BlockRows:
    """Makes blocks, each with a row of the columns."""

    def __init__(self) -> None:
        self.columns = BlockColumns()
        """Of all blocks of all tenants."""
        self.columns.lengthen(FIRST_ROW)
        self._named: dict[tuple[str, str], type[Block]] = {}
        self._made = FIRST_ROW
        """Rows used so far; those after it are new."""

    def make(
        self, tenant: str, key: bytes, size_bytes: int, generation: int, namespace: str = "", parent: bytes = b"", checksum: int = 0
    ) -> Block:
        """Make a block without copies."""
        block_of = self._named.get((tenant, namespace)) or self._name(tenant, namespace)
        columns = block_of.columns
        row = columns.free.pop() if columns.free else self._new_row()
        columns.sizes[row], columns.generations[row], columns.checksums[row] = size_bytes, generation, checksum
        columns.event_seqs[row] = columns.readers[row] = columns.held[row] = columns.states[row] = columns.hits[row] = 0
        columns.index_entries[row] = NOT_INDEXED
        columns.keys[row], columns.parents[row] = key, parent
        if columns.retention:
            columns.retention[row] = 0
        if columns.others:
            columns.others.pop(row, None)
        return block_of(row)

    def make_all(
        self,
        tenant: str,
        keys: Sequence[bytes],
        size_bytes: int,
        generations: Sequence[int],
        namespace: str,
        parents: Sequence[bytes],
        slots: Sequence[Slot],
    ) -> list[Block]:
        """Make blocks of one size with these DRAM slots; at least one."""
        block_of, numbers = self._named.get((tenant, namespace)) or self._name(tenant, namespace), self._take(len(keys))
        columns = block_of.columns
        rows = np.frombuffer(array("q", numbers), np.int64)
        slot_indexes, slot_generations, _, groups = zip(*slots, strict=True)
        for wide, values in (
            (columns.sizes, size_bytes),
            (columns.generations, generations),
            (columns.checksums, 0),
            (columns.event_seqs, 0),
            (columns.slot_indexes, slot_indexes),
            (columns.slot_generations, slot_generations),
        ):
            write(wide, rows, values)
        np.frombuffer(columns.groups, np.uint32)[rows] = array("I", groups)
        np.frombuffer(columns.readers, np.uint32)[rows] = 0
        np.frombuffer(columns.hits, np.uint32)[rows] = 0
        np.frombuffer(columns.index_entries, np.int32)[rows] = NOT_INDEXED
        np.frombuffer(columns.held, np.uint8)[rows] = HELD[DRAM]
        np.frombuffer(columns.states, np.uint8)[rows] = 0
        if columns.retention:
            write(columns.retention, rows, 0)
        if (np.diff(rows) == 1).all():
            columns.keys[numbers[0] : numbers[-1] + 1], columns.parents[numbers[0] : numbers[-1] + 1] = keys, parents
        else:
            for row, key, parent in zip(numbers, keys, parents, strict=True):
                columns.keys[row], columns.parents[row] = key, parent
        if columns.others:
            for row in numbers:
                columns.others.pop(row, None)
        return list(map(block_of, numbers))

    def _name(self, tenant: str, namespace: str) -> type[Block]:
        """Return the Block subclass of a tenant and namespace."""
        if len(self._named) >= MAX_NAMES:
            self._named.clear()
        found = self._named[tenant, namespace] = block_type(self.columns.named(tenant, namespace))
        return found

    def _new_row(self) -> int:
        row = self._made
        if row == len(self.columns):
            self.columns.lengthen(MADE_ROWS)
        self._made += 1
        return row

    def _take(self, count: int) -> list[int]:
        """Return `count` rows, reused ones first."""
        free = self.columns.free
        numbers = [free.pop() for _ in range(min(count, len(free)))]
        new = count - len(numbers)
        if self._made + new > len(self.columns):
            self.columns.lengthen(self._made + new - len(self.columns) + MADE_ROWS)
        numbers += range(self._made, self._made + new)
        self._made += new
        return numbers

    @property
    def in_use(self) -> int:
        """Number of rows that belong to a block."""
        return self._made - FIRST_ROW - len(self.columns.free)


def rows_of(blocks: Sequence[Block]) -> Numbers:
    """Return the rows of blocks of one BlockRows."""
    return np.frombuffer(array("q", blocks), np.int64)  # a third of np.array's time


def keys_of(blocks: Sequence[Block]) -> list[bytes]:
    """Return the keys of blocks of one BlockRows."""
    return list(map(blocks[0].columns.keys.__getitem__, blocks)) if blocks else []


def read(column: "array[int]", rows: Numbers) -> Words:
    """Return a copy of the rows' values. A column with an exported buffer cannot be lengthened."""
    return np.frombuffer(column, np.uint64)[rows]


def write(column: "array[int]", rows: Numbers, values: Values) -> None:
    """Set the rows' values in a column of words."""
    if not isinstance(values, int | np.ndarray):
        values = np.frombuffer(array("Q", values), np.uint64)  # half of np.array's time
    np.frombuffer(column, np.uint64)[rows] = values


def slot_indexes_in(columns: BlockColumns, rows: Numbers) -> Numbers:
    """Return the DRAM slot indexes of blocks that all have a DRAM copy."""
    assert (np.frombuffer(columns.held, np.uint8)[rows] & HELD[DRAM]).all()
    return np.frombuffer(columns.slot_indexes, np.int64)[rows]


def slot_indexes_of(blocks: Sequence[Block]) -> Numbers:
    """As `slot_indexes_in`; at least one block."""
    return slot_indexes_in(blocks[0].columns, rows_of(blocks))


def slots_of(blocks: Sequence[Block]) -> list[Slot]:
    """Return the DRAM slots of blocks that all have one; at least one block."""
    columns, rows = blocks[0].columns, rows_of(blocks)
    words = slot_indexes_in(columns, rows), read(columns.slot_generations, rows), read(columns.sizes, rows), groups_in(columns, rows)
    return list(map(make_slot, zip(*(column.tolist() for column in words), strict=True)))


def groups_in(columns: BlockColumns, rows: Numbers) -> npt.NDArray[np.uint32]:
    """Return the groups of the DRAM slots."""
    return np.frombuffer(columns.groups, np.uint32)[rows]


def tier_masks(columns: BlockColumns, rows: Numbers) -> npt.NDArray[np.uint8]:
    """Return `tier_mask` of each block; 0 for dropped ones."""
    is_dropped = np.frombuffer(columns.states, np.uint8)[rows] & DROPPED != 0
    return np.where(is_dropped, np.uint8(0), _TIER_MASKS[np.frombuffer(columns.held, np.uint8)[rows]])


def decided(blocks: Sequence[Block]) -> list[Block]:
    """Return the committed blocks; at least one block."""
    return list(compress(blocks, (read(blocks[0].columns.generations, rows_of(blocks)) != UNCOMMITTED).tolist()))


def is_in(columns: BlockColumns, rows: Numbers, tier: int) -> npt.NDArray[np.bool_]:
    """Return for each block whether the tier has a copy."""
    found: npt.NDArray[np.bool_] = np.frombuffer(columns.held, np.uint8)[rows] & HELD[tier] != 0
    return found


def are_any_dropped(blocks: Sequence[Block]) -> bool:
    """Return True if one of the blocks was dropped; at least one block."""
    states = np.frombuffer(blocks[0].columns.states, np.uint8)[rows_of(blocks)]
    return bool((states & DROPPED).any())


def mark_dropped(columns: BlockColumns, rows: Numbers) -> None:
    """Mark all as dropped."""
    np.frombuffer(columns.states, np.uint8)[rows] |= DROPPED


def clear_copies(columns: BlockColumns, rows: Numbers, tier: int) -> None:
    """Clear all copies in that tier."""
    np.frombuffer(columns.held, np.uint8)[rows] &= ~HELD[tier] & 0xFF
