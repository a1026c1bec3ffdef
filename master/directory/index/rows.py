"""Table of blocks in columns: one row a block, no object per block.

A block takes 80 to 110 bytes: 45 in columns, 21 for its key (keys.py), 13 to 27 in the index (key_index.py). One
small object per block would cost as much again, and a million objects for the garbage collector. The directory
decides which holders are valid and visible; this table keeps rows, parents and holder sets consistent."""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from kvstore.master.catalogs.interface import BlockPuts
from kvstore.master.directory.index.holders import HINT, HolderSets, Pairs, has_holder, with_holder
from kvstore.master.directory.index.key_index import SMALL_BATCH, Found
from kvstore.master.directory.index.keys import NO_ROW, Bools
from kvstore.master.directory.index.lineage import NO_PARENT, Numbers, adopt_all
from kvstore.master.directory.index.tenants import Tenant, Tenants
from kvstore.master.directory.records import Version

T = TypeVar("T")
Tiers = npt.NDArray[np.uint8]

GROWTH_ROWS: Final = 1024
"""Rows added to the columns at a time."""


class Namespaces:
    """Interned namespace names, reference-counted by row: a name without blocks is dropped."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._rows: list[int] = []
        self._index: dict[str, int] = {}
        self._free: list[int] = []

    def __getitem__(self, index: int) -> str:
        return self._names[index]

    def __len__(self) -> int:
        return len(self._index)

    def names(self) -> list[str]:
        """Names by index; an unused index has a former name."""
        return list(self._names)

    def enter(self, name: str, count: int = 1) -> int:
        """Add `count` rows of `name`; return its index."""
        index = self._index.get(name)
        if index is None:
            index = self._new(name)
        self._rows[index] += count
        return index

    def leave(self, index: int, count: int = 1) -> None:
        self._rows[index] -= count
        if not self._rows[index]:
            del self._index[self._names[index]]
            self._free.append(index)

    def _new(self, name: str) -> int:
        if self._free:
            index = self._free.pop()
            self._names[index] = name
        else:
            index = len(self._names)
            self._names.append(name)
            self._rows.append(0)
        self._index[name] = index
        return index


class Rows:
    """The table. Queries read the columns directly, in C loops; only this class writes them. Not thread-safe.

    A removed block with children keeps its row, without holders, until the last child is removed: a parent's row is
    never given to another block, and a parent that returns finds its children. A row's parent is fixed when the row
    is made and existed before it, so there are no cycles. `replay` may see children first: there a row with children
    gets a parent only if that is none of its descendants."""

    def __init__(self, tenants: Tenants) -> None:
        self.tenants = tenants
        self.sets = HolderSets()
        self.namespaces = Namespaces()
        self.sizes, self.checksums, self.generations = array("Q", (0,)), array("Q", (0,)), array("Q", (0,))
        self.parents, self.children = array("I", (NO_PARENT,)), array("I", (0,))
        self.tenant_indexes, self.namespace_indexes = array("I", (0,)), array("I", (self.namespaces.enter(""),))
        self.holders = array("I", (0,))
        self.recorded = bytearray(1)
        """1: the catalog has a record of the block. RecordPolicy sets and reads it; `replay` sets it too."""
        self.keys = tenants.keys
        self.is_elsewhere: Callable[[bytes], bool] | None = None
        """With several partitions: True for a key of another partition. Such a parent has a row without holders, for
        its children's sake."""
        self._free = array("I")

    def __len__(self) -> int:
        """Upper bound of all row numbers, free rows and row 0 included."""
        return len(self.keys)

    def pairs(self, row: int) -> Pairs:
        return self.sets[self.holders[row]]

    def readable_at(self, tenant: Tenant, key: bytes) -> list[int]:
        """Return the node ids from which the block is readable."""
        return self.sets.readable_at(self.holders[tenant.rows.get(key)])

    def version(self, row: int) -> Version:
        parent = self.keys[self.parents[row]]
        return Version(self.sizes[row], self.checksums[row], self.generations[row], self.namespaces[self.namespace_indexes[row]], parent)

    def is_version(self, row: int, version: Version) -> bool:
        """Return True if the row has this size, checksum and generation."""
        return version[:3] == (self.sizes[row], self.checksums[row], self.generations[row])

    def insert(self, tenant: Tenant, key: bytes, version: Version, pairs: Pairs) -> int:
        """Set the version and holders of `key`; return its row. A new row gets its parent if that has a row."""
        row = tenant.rows.get(key)
        if row == NO_ROW:
            row = self._new(tenant, key, self._parent_row(tenant, key, version.parent))
        self._set(row, version, pairs)
        return row

    def insert_new(self, tenant: Tenant, puts: BlockPuts, pairs: Pairs) -> None:
        """As `insert`, for different keys without rows. `pairs` are the holders; those in `puts` are ignored."""
        if len(puts.keys) <= SMALL_BATCH:
            for key, *version in zip(puts.keys, *puts[2:7], strict=True):
                self.insert(tenant, key, Version._make(version), pairs)
            return
        count, free = len(puts.keys), min(len(self._free), len(puts.keys))
        rows = np.arange(len(self) - free, len(self) - free + count, dtype=np.uint32)
        holders = self.sets.enter(pairs, count)
        if free:
            rows[:free] = np.array(self._free[-free:], np.uint32)[::-1]
            del self._free[-free:]
            self._reuse(tenant, rows[:free], puts, holders)
        if free < count:
            new = _some(puts, range(free, count)) if free else puts
            held = array("I", (holders,)) * (count - free)
            self._append(tenant, new.keys, new.sizes, new.checksums, new.generations, new.namespaces, held)
        if any(puts.parents):
            self._adopt_new(tenant, rows, puts.parents)

    def _reuse(self, tenant: Tenant, rows: Numbers, puts: BlockPuts, holders: int) -> None:
        """Use free rows for the first blocks of `puts`, as `_append` does."""
        free = len(rows)
        self.keys.set_all(rows, puts.keys[:free])
        tenant.rows.insert_all(puts.keys[:free], rows)
        for wide, values in ((self.sizes, puts.sizes), (self.checksums, puts.checksums), (self.generations, puts.generations)):
            np.frombuffer(wide, np.uint64)[rows] = np.array(values[:free], np.uint64)
        names = {name: self.namespaces.enter(name, count) for name, count in Counter(puts.namespaces[:free]).items()}
        np.frombuffer(self.namespace_indexes, np.uint32)[rows] = list(map(names.__getitem__, puts.namespaces[:free]))
        np.frombuffer(self.tenant_indexes, np.uint32)[rows] = tenant.index
        np.frombuffer(self.holders, np.uint32)[rows] = holders

    def _adopt_new(self, tenant: Tenant, rows: Numbers, parents: Sequence[bytes]) -> None:
        """Set the parents of new rows, if these were inserted before them."""
        above = tenant.rows.find(parents)
        order = np.argsort(rows)
        near = order[np.minimum(np.searchsorted(rows, above, sorter=order), len(rows) - 1)]
        is_there = (above != NO_ROW) & ((rows[near] != above) | (near < np.arange(len(rows))))
        np.frombuffer(self.parents, np.uint32)[rows[is_there]] = above[is_there]
        np.add.at(np.frombuffer(self.children, np.uint32), above[is_there], 1)
        if self.is_elsewhere is not None:
            unknown_nodes = [parent if parent and self.is_elsewhere(parent) else b"" for parent in parents]
            self._adopt_parents(tenant, rows, unknown_nodes)

    def replay(self, tenant: Tenant, puts: BlockPuts) -> None:
        """Apply a catalog's records, in any order of blocks and parents.

        A missing parent gets a row without holders. The first recorded parent of a row stays. Holders become hints."""
        pairs_of = {holders: tuple((node_id, HINT) for node_id in holders) for holders in set(puts.holders)}
        found = np.array(tenant.rows.find(puts.keys), np.uint32)
        new = np.flatnonzero(found == NO_ROW).tolist()
        reusing, appending = new[: len(self._free)], new[len(self._free) :]
        for at in reusing:
            found[at] = self._new(tenant, puts.keys[at], NO_PARENT)
        if len(appending) == len(found):
            self._replay_new(tenant, puts, pairs_of)
            return
        if appending:
            self._replay_new(tenant, _some(puts, appending), pairs_of)
            known = np.flatnonzero(found != NO_ROW)
            found, puts = found[known], _some(puts, known.tolist())
        self._replay_known(tenant, puts, found, pairs_of)

    def _replay_new(self, tenant: Tenant, puts: BlockPuts, pairs_of: Mapping[tuple[int, ...], Pairs]) -> None:
        """`replay` of different keys without rows, appended."""
        sets = {holders: self.sets.enter(pairs_of[holders], count) for holders, count in Counter(puts.holders).items()}
        held = array("I", map(sets.__getitem__, puts.holders))
        first = self._append(tenant, puts.keys, puts.sizes, puts.checksums, puts.generations, puts.namespaces, held)
        end = first + len(puts.keys)
        self.recorded[first:end] = b"\1" * len(puts.keys)
        self._adopt_parents(tenant, np.arange(first, end, dtype=np.uint32), puts.parents)

    def _replay_known(self, tenant: Tenant, puts: BlockPuts, rows: Numbers, pairs_of: Mapping[tuple[int, ...], Pairs]) -> None:
        """`replay` of different keys that have these rows."""
        sets = {holders: self.sets.enter(pairs_of[holders], count) for holders, count in Counter(puts.holders).items()}
        names = {name: self.namespaces.enter(name, count) for name, count in Counter(puts.namespaces).items()}
        for wide, values in ((self.sizes, puts.sizes), (self.checksums, puts.checksums), (self.generations, puts.generations)):
            np.frombuffer(wide, np.uint64)[rows] = np.array(values, np.uint64)
        namespaces, held = np.frombuffer(self.namespace_indexes, np.uint32), np.frombuffer(self.holders, np.uint32)
        for column, leave in ((namespaces, self.namespaces.leave), (held, self.sets.leave)):
            for index, count in zip(*(found.tolist() for found in np.unique(column[rows], return_counts=True)), strict=True):
                leave(index, count)
        namespaces[rows] = list(map(names.__getitem__, puts.namespaces))
        held[rows] = list(map(sets.__getitem__, puts.holders))
        np.frombuffer(self.recorded, np.uint8)[rows] = 1
        del namespaces, held, column  # a column cannot grow while numpy views it
        self._adopt_parents(tenant, rows, puts.parents)

    def _adopt_parents(self, tenant: Tenant, rows: Numbers, parents: Sequence[bytes]) -> None:
        """Set the parents of rows without one. Missing parents get rows, all at once: half of a catalog's blocks
        precede their parents."""
        wanted = np.flatnonzero((np.frombuffer(self.parents, np.uint32)[rows] == NO_PARENT) & np.fromiter(map(bool, parents), bool))
        if not len(wanted):
            return
        keys = list(map(parents.__getitem__, wanted.tolist()))
        above = np.array(tenant.rows.find(keys), np.uint32)
        absent = np.flatnonzero(above == NO_ROW)
        if len(absent):
            unknown = list(map(keys.__getitem__, absent.tolist()))
            missing = {key: at for at, key in enumerate(dict.fromkeys(unknown))}
            nothing = [0] * len(missing)
            first = self._append(tenant, list(missing), nothing, nothing, nothing, [""] * len(missing), array("I", nothing))
            above[absent] = list(map(missing.__getitem__, unknown))
            above[absent] += first
        adopt_all(self.parents, self.children, rows[wanted], above)

    def _append(
        self,
        tenant: Tenant,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        checksums: Sequence[int],
        generations: Sequence[int],
        namespaces: Sequence[str],
        holders: "array[int]",
    ) -> int:
        """Append rows for different keys without rows and without parents; return the first. `holders` are the
        indexes of their sets, already entered."""
        first, end = len(self.keys), len(self.keys) + len(keys)
        while len(self.sizes) < end:
            self._make_rows()
        self.keys.extend(keys)
        tenant.rows.insert_all(keys, np.arange(first, end, dtype=np.uint32))
        for wide, values in ((self.sizes, sizes), (self.checksums, checksums), (self.generations, generations)):
            wide[first:end] = array("Q", values)
        names = {name: self.namespaces.enter(name, count) for name, count in Counter(namespaces).items()}
        self.namespace_indexes[first:end] = array("I", map(names.__getitem__, namespaces))
        self.tenant_indexes[first:end] = array("I", (tenant.index,)) * len(keys)
        self.holders[first:end] = holders
        return first

    def _set(self, row: int, version: Version, pairs: Pairs) -> None:
        """Set the row's version and holders."""
        self.sizes[row], self.checksums[row], self.generations[row] = version[:3]
        namespace_index = self.namespaces.enter(version.namespace)
        self.namespaces.leave(self.namespace_indexes[row])
        self.namespace_indexes[row] = namespace_index
        self.set_holders(row, pairs)

    def set_holders(self, row: int, pairs: Pairs) -> None:
        """Set the holders of the row's block."""
        index = self.sets.enter(pairs)
        self.sets.leave(self.holders[row])
        self.holders[row] = index

    def confirm_held(self, rows: Found, version_columns: Sequence[Sequence[int]], node_id: int, tiers: bytes) -> Bools:
        """Set the node's tiers for those rows, all different, that list it as a holder in the version of
        `version_columns` (sizes, checksums, generations). Return which these are; others, and NO_ROW, are unchanged."""
        is_known: Bools = rows != NO_ROW
        for wide, reported in zip((self.sizes, self.checksums, self.generations), version_columns, strict=True):
            is_known &= np.frombuffer(wide, np.uint64)[rows] == np.array(reported, np.uint64)
        holders = np.frombuffer(self.holders, np.uint32)[rows]
        others = [index for index in np.unique(holders[is_known]).tolist() if not has_holder(self.sets[index], node_id)]
        is_known &= ~np.isin(holders, others)
        self.set_tiers(rows[is_known], node_id, np.frombuffer(tiers, np.uint8)[is_known])
        return is_known

    def set_tiers(self, rows: Found, node_id: int, tiers: Tiers) -> None:
        """Set the node's tiers for these rows, all different, which list it as a holder."""
        holders = np.frombuffer(self.holders, np.uint32)
        changes = holders[rows].astype(np.uint64) << 8 | tiers
        kinds, which, counts = np.unique(changes, return_inverse=True, return_counts=True)
        former = [(kind >> 8, kind & 0xFF, count) for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True)]
        entered = [self.sets.enter(with_holder(self.sets[index], node_id, mask), count) for index, mask, count in former]
        holders[rows] = np.array(entered, np.uint32)[which]
        for index, _mask, count in former:
            self.sets.leave(index, count)

    def remove(self, row: int) -> None:
        """Remove the row's block. Frees the row, and every ancestor that only waited for it."""
        self.set_holders(row, ())
        self.recorded[row] = 0
        while row != NO_ROW and not self.holders[row] and not self.children[row]:
            parent = self.parents[row]
            self._release(row)
            if parent != NO_PARENT:
                self.children[parent] -= 1
            row = parent

    def remove_all(self, tenant: Tenant, rows: Numbers) -> None:
        """As `remove`, of different rows of one tenant."""
        held = np.frombuffer(self.holders, np.uint32)[rows]
        for index, count in zip(*(found.tolist() for found in np.unique(held, return_counts=True)), strict=True):
            self.sets.leave(index, count)
        np.frombuffer(self.holders, np.uint32)[rows] = 0
        np.frombuffer(self.recorded, np.uint8)[rows] = 0
        self._release_all(tenant, self._childless(rows.tolist()))

    def _childless(self, rows: Sequence[int]) -> Numbers:
        """Return those of these rows without holders that have no children, and the ancestors that only waited for
        them. Updates the counts of children."""
        holders, parents, children = self.holders, self.parents, self.children
        found: dict[int, None] = {}
        for first in rows:
            row = first
            while row != NO_ROW and not holders[row] and not children[row] and row not in found:
                found[row] = None
                row = parents[row]
                if row != NO_PARENT:
                    children[row] -= 1
        return np.fromiter(found, np.uint32, len(found))

    def _release_all(self, tenant: Tenant, rows: Numbers) -> None:
        """As `_release`, of different rows of the tenant."""
        if not len(rows):
            return
        tenant.rows.remove_all(list(map(self.keys.__getitem__, rows.tolist())), rows)
        namespaces = np.frombuffer(self.namespace_indexes, np.uint32)[rows]
        for index, count in zip(*(found.tolist() for found in np.unique(namespaces, return_counts=True)), strict=True):
            self.namespaces.leave(index, count)
        self.keys.clear_all(rows)
        np.frombuffer(self.parents, np.uint32)[rows] = NO_PARENT
        self._free.frombytes(rows.tobytes())

    def check_integrity(self) -> None:
        """Assert that rows, indexes, holder sets and child counts agree. For tests; O(rows)."""
        named = {row: tenant for tenant in self.tenants for _key, row in tenant.rows.items()}
        free = set(self._free)
        assert len(free) == len(self._free)
        assert free | named.keys() | {NO_ROW} == set(range(len(self)))
        assert len(free) + len(named) + 1 == len(self)
        children = [0] * len(self)
        for row, tenant in named.items():
            assert self.tenants.at(self.tenant_indexes[row]) is tenant
            assert self.holders[row] or self.children[row], "a row without holders has no children"
            children[self.parents[row]] += 1
        assert children[1:] == list(self.children[1 : len(self)])
        assert not any(self.holders[len(self) :])
        assert not any(self.holders[row] or self.recorded[row] for row in free)
        self.keys.check_integrity(named)
        for tenant in self.tenants:
            tenant.rows.check_integrity()
        self.sets.check_integrity(self.holders)

    def _parent_row(self, tenant: Tenant, key: bytes, parent: bytes) -> int:
        if not parent or parent == key:
            return NO_PARENT
        row = tenant.rows.get(parent)
        if row == NO_ROW and self.is_elsewhere is not None and self.is_elsewhere(parent):
            return self._new(tenant, parent, NO_PARENT)
        return row

    def _new(self, tenant: Tenant, key: bytes, parent: int) -> int:
        """Return a row for `key`, without holders."""
        if self._free:
            row = self._free.pop()
            self.keys.set(row, key)
        else:
            row = self.keys.append(key)
            if row == len(self.sizes):
                self._make_rows()
        self.tenant_indexes[row] = tenant.index
        self.namespace_indexes[row] = self.namespaces.enter("")
        tenant.rows.insert(key, row)
        self._adopt(row, parent)
        return row

    def _make_rows(self) -> None:
        """Extend the columns: one row at a time takes ten times as long."""
        for wide in (self.sizes, self.checksums, self.generations):
            wide.extend(bytes(GROWTH_ROWS))
        for column in (self.parents, self.children, self.tenant_indexes, self.namespace_indexes, self.holders):
            column.extend(bytes(GROWTH_ROWS))
        self.recorded.extend(bytes(GROWTH_ROWS))

    def _adopt(self, row: int, parent: int) -> None:
        self.parents[row] = parent
        if parent != NO_PARENT:
            self.children[parent] += 1

    def _release(self, row: int) -> None:
        self.tenants.at(self.tenant_indexes[row]).rows.remove(self.keys[row], row)
        self.namespaces.leave(self.namespace_indexes[row])
        self.keys.clear(row)
        self.parents[row] = NO_PARENT
        self._free.append(row)


def _some(puts: BlockPuts, indexes: Sequence[int]) -> BlockPuts:
    """Return the blocks with these indexes."""

    def some(column: Sequence[T]) -> list[T]:
        return [column[at] for at in indexes]

    _tenant, keys, sizes, checksums, generations, namespaces, parents, holders = puts
    columns = some(keys), some(sizes), some(checksums), some(generations), some(namespaces), some(parents), some(holders)
    return BlockPuts(puts.tenant, *columns)
