"""Makes a node's blocks, each with a row of the columns, one or many at a time, and reads and writes what many of them have at once.

A row is a block's from when it is made until nobody knows the block any more: then it is the next one's. Not thread-safe, but that a block
may end in any thread.
"""

from array import array
from collections.abc import Sequence
from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.store.block_table.block import DRAM, GONE, HELD, NOT_SHOWN, TIER_MASKS, Block, BlockColumns, block_type
from kvstore.store.block_table.uncommitted import UNDECIDED
from kvstore.tiers.slabs import make_slot
from kvstore.tiers.tier import Slot

Numbers = npt.NDArray[np.int64]
"""Rows of blocks, in their order."""
Words = npt.NDArray[np.uint64]
"""Of blocks, in their order, what is in a column."""
Values = Sequence[int] | Words | int
"""The same as numbers, or what is the same for all of them."""
MADE_ROWS: Final = 1024
"""Rows that the columns are lengthened by: one at a time takes ten times as long."""
_TIER_MASKS: Final = np.array(TIER_MASKS, np.uint8)
MAX_NAMES: Final = 4096
"""Tenants' namespaces whose blocks have their class in common: beyond that all are forgotten, and blocks that come have others."""
FIRST_ROW: Final = 1
"""No block is false."""


class BlockRows:
    """See the module."""

    def __init__(self) -> None:
        self.columns = BlockColumns()
        """Of all blocks, whoever's."""
        self.columns.lengthen(FIRST_ROW)
        self._named: dict[tuple[str, str], type[Block]] = {}
        self._made = FIRST_ROW
        """Rows that were anybody's so far; the others of the columns are still to be used."""

    def make(
        self, tenant: str, key: bytes, size_bytes: int, generation: int, namespace: str = "", parent: bytes = b"", checksum: int = 0
    ) -> Block:
        """A new block that is nowhere."""
        block_of = self._named.get((tenant, namespace)) or self._name(tenant, namespace)
        columns = block_of.columns
        row = columns.free.pop() if columns.free else self._new_row()
        columns.sizes[row], columns.generations[row], columns.checksums[row] = size_bytes, generation, checksum
        columns.event_seqs[row] = columns.readers[row] = columns.held[row] = columns.states[row] = columns.hits[row] = 0
        columns.shown[row] = NOT_SHOWN
        columns.keys[row], columns.parents[row] = key, parent
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
        """As `make`, of many blocks of one size that have these slots in DRAM; there is at least one."""
        block_of, numbers = self._named.get((tenant, namespace)) or self._name(tenant, namespace), self._take(len(keys))
        columns = block_of.columns
        rows = np.frombuffer(array("q", numbers), np.int64)
        places, slot_generations, _, groups = zip(*slots, strict=True)
        for wide, values in (
            (columns.sizes, size_bytes),
            (columns.generations, generations),
            (columns.checksums, 0),
            (columns.event_seqs, 0),
            (columns.places, places),
            (columns.slot_generations, slot_generations),
        ):
            write(wide, rows, values)
        np.frombuffer(columns.groups, np.uint32)[rows] = array("I", groups)
        np.frombuffer(columns.readers, np.uint32)[rows] = 0
        np.frombuffer(columns.hits, np.uint32)[rows] = 0
        np.frombuffer(columns.shown, np.int32)[rows] = NOT_SHOWN
        np.frombuffer(columns.held, np.uint8)[rows] = HELD[DRAM]
        np.frombuffer(columns.states, np.uint8)[rows] = 0
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
        """The blocks of these."""
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
        """So many rows: those that are free, and others."""
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
        """Rows that are a block's."""
        return self._made - FIRST_ROW - len(self.columns.free)


def rows_of(blocks: Sequence[Block]) -> Numbers:
    """Those of blocks made by one BlockRows."""
    return np.frombuffer(array("q", blocks), np.int64)  # in a third of the time that numpy takes for them


def keys_of(blocks: Sequence[Block]) -> list[bytes]:
    """Of blocks made by one BlockRows."""
    return list(map(blocks[0].columns.keys.__getitem__, blocks)) if blocks else []


def read(column: "array[int]", rows: Numbers) -> Words:
    """What is in a column of words, as a copy: a column that is looked at cannot be lengthened."""
    return np.frombuffer(column, np.uint64)[rows]


def write(column: "array[int]", rows: Numbers, values: Values) -> None:
    """Put it into a column of words."""
    if not isinstance(values, int | np.ndarray):
        values = np.frombuffer(array("Q", values), np.uint64)  # in half the time that numpy takes for numbers
    np.frombuffer(column, np.uint64)[rows] = values


def places_in(columns: BlockColumns, rows: Numbers) -> Numbers:
    """The indexes of the slots in DRAM, of blocks that have one there."""
    assert (np.frombuffer(columns.held, np.uint8)[rows] & HELD[DRAM]).all()
    return np.frombuffer(columns.places, np.int64)[rows]


def places_of(blocks: Sequence[Block]) -> Numbers:
    """As `places_in`; there is at least one."""
    return places_in(blocks[0].columns, rows_of(blocks))


def slots_of(blocks: Sequence[Block]) -> list[Slot]:
    """Those in DRAM, of blocks that have one there; there is at least one."""
    columns, rows = blocks[0].columns, rows_of(blocks)
    words = places_in(columns, rows), read(columns.slot_generations, rows), read(columns.sizes, rows), groups_in(columns, rows)
    return list(map(make_slot, zip(*(column.tolist() for column in words), strict=True)))


def groups_in(columns: BlockColumns, rows: Numbers) -> npt.NDArray[np.uint32]:
    """The groups of the slots in DRAM."""
    return np.frombuffer(columns.groups, np.uint32)[rows]


def tier_masks(columns: BlockColumns, rows: Numbers) -> npt.NDArray[np.uint8]:
    """What `tier_mask` of each block is; 0 of one that is gone."""
    is_gone = np.frombuffer(columns.states, np.uint8)[rows] & GONE != 0
    return np.where(is_gone, np.uint8(0), _TIER_MASKS[np.frombuffer(columns.held, np.uint8)[rows]])


def decided(blocks: Sequence[Block]) -> list[Block]:
    """Those that the master has decided about; there is at least one."""
    return list(compress(blocks, (read(blocks[0].columns.generations, rows_of(blocks)) != UNDECIDED).tolist()))


def is_in(columns: BlockColumns, rows: Numbers, tier: int) -> npt.NDArray[np.bool_]:
    """Whether there is a copy of it in that tier, of each."""
    found: npt.NDArray[np.bool_] = np.frombuffer(columns.held, np.uint8)[rows] & HELD[tier] != 0
    return found


def are_any_gone(blocks: Sequence[Block]) -> bool:
    """Whether one of them is gone; there is at least one."""
    states = np.frombuffer(blocks[0].columns.states, np.uint8)[rows_of(blocks)]
    return bool((states & GONE).any())


def have_gone(columns: BlockColumns, rows: Numbers) -> None:
    """All of them are gone."""
    np.frombuffer(columns.states, np.uint8)[rows] |= GONE


def have_left(columns: BlockColumns, rows: Numbers, tier: int) -> None:
    """None of them has a copy in that tier any more."""
    np.frombuffer(columns.held, np.uint8)[rows] &= ~HELD[tier] & 0xFF
