"""Removing blocks: which nodes are to drop what, and what their answers come to. Sans-I/O.

A block is gone once its holders have said that they dropped it. What nodes hold that are away is kept in mind by removals.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

from kvstore.master.catalogs.interface import Change
from kvstore.master.directory import records
from kvstore.master.directory.commands import Commands
from kvstore.master.directory.keys import NO_ROW
from kvstore.master.directory.publishing import Publishing
from kvstore.master.directory.queries import Queries
from kvstore.master.directory.removals import Removals
from kvstore.master.directory.replication import Replication
from kvstore.master.directory.reservations import Reservations
from kvstore.master.directory.rows import Rows
from kvstore.master.directory.targets import Targets
from kvstore.master.directory.tenants import Tenant, Tenants


@dataclass(slots=True)
class Removal:
    """A planned remove. `flags` (1: it was there and may go) by key; `ops` for the catalog; `commands` for the nodes.

    With `raises_floors` call `Directory.floors_written` when the operations are durable; and `Removing.over` once the nodes have answered.
    """

    flags: bytearray
    ops: list[Change]
    commands: Commands
    raises_floors: bool = False
    asked: list[bytes] = field(default_factory=list)
    """Keys that nodes are asked to drop."""


class Removing:
    """See the module. Not thread-safe."""

    def __init__(
        self,
        rows: Rows,
        tenants: Tenants,
        queries: Queries,
        reservations: Reservations,
        publishing: Publishing,
        replication: Replication,
        targets: Targets,
        removals: Removals,
        master_epoch: int,
    ) -> None:
        self._rows, self._tenants, self._queries, self._reservations = rows, tenants, queries, reservations
        self._publishing, self._replication, self._targets, self._removals = publishing, replication, targets, removals
        self._master_epoch = master_epoch

    def plan(self, tenant: str, keys: Sequence[bytes], *, force: bool) -> Removal:
        """Ask live holders to drop these blocks; their answers go to `dropped`. What only dead nodes hold is deleted at once.

        Pinned blocks are refused, unless `force`, which also unpins them.
        """
        owner, unwritten, generation = self._tenants.asked(tenant), self._removals.unwritten, self._reservations.last_generation
        removal = Removal(bytearray(self._queries.exists(tenant, keys)), [], Commands(self._master_epoch))
        are_kept = self._removals.are_kept(generation)
        drops = _Drops(self._rows, owner)
        for index, (key, row) in enumerate(zip(keys, owner.rows.find(keys).tolist(), strict=True)):
            if key in owner.pins:
                if not force:
                    removal.flags[index] = 0
                    continue
                del owner.pins[key]
                removal.ops.append(records.unpin(owner.prefix, key))
            if are_kept and (row != NO_ROW or key in owner.pending):
                removal.ops += self._removals.remember(owner, key, generation)
            self._plan_one(removal, owner, drops, key, row, force=force)
        removal.raises_floors = self._removals.unwritten > unwritten
        return removal

    def dropped(self, node_id: int, tenant: str, keys: Sequence[bytes], generations: Sequence[int], flags: bytes) -> list[Change]:
        """A node's answer to a Drop: what it dropped is gone now, before its own event says so; operations for the catalog."""
        owner = self._tenants.asked(tenant)
        ops: list[Change] = self._publishing.gone_all(node_id, owner, list(compress(keys, flags)), list(compress(generations, flags)))
        for key, generation, flag in zip(keys, generations, flags, strict=True):
            if not flag:
                ops += self._removals.refused(owner, key, generation)
        return ops

    def over(self, tenant: str, removal: Removal) -> None:
        """Every node has answered, or will not: the blocks may be copied and claimed again as far as they are still there, and are where
        one holder has dropped them and another one uses them."""
        owner = self._tenants.asked(tenant)
        for key in removal.asked:
            left = owner.removing.pop(key) - 1
            if left:
                owner.removing[key] = left
            if owner.targets:
                self._targets.look_again(tenant, key)

    def _plan_one(self, removal: Removal, owner: Tenant, drops: "_Drops", key: bytes, row: int, *, force: bool) -> None:
        self._replication.cancel(owner, key)
        readable, dead = drops.holders(row)
        if dead:
            removal.ops.extend(self._publishing.strip(owner, key, dead))
            drops.forget_sets()
        asked = drops.generations(key, row, readable)
        if asked:
            # What a node answers is taken in when all have answered: it must not have come by the block again meanwhile.
            owner.removing[key] = owner.removing.get(key, 0) + 1
            removal.asked.append(key)
        elif owner.targets.pop(key, None) is not None:  # else it ends with the last holder's answer
            removal.ops.append(records.delete_target(owner.prefix, key))
        for node_id, generation in asked.items():
            removal.commands.drop(node_id, owner, key, generation, force=force)


class _Drops:
    """Which nodes are asked to drop a tenant's blocks. Most blocks of a batch have the same set of holders, which is looked at once."""

    def __init__(self, rows: Rows, owner: Tenant) -> None:
        self._rows, self._owner = rows, owner
        self._of_set: dict[int, tuple[list[int], list[int]]] = {}

    def holders(self, row: int) -> tuple[list[int], list[int]]:
        """The row's holders that can be asked, and those that cannot."""
        index = self._rows.holders[row]
        if index not in self._of_set:
            readable = self._rows.sets.readable_at(index)
            self._of_set[index] = readable, [node_id for node_id, _state in self._rows.sets[index] if node_id not in readable]
        return self._of_set[index]

    def forget_sets(self) -> None:
        """Rows were given other sets of holders: the number of one may be another's by now."""
        self._of_set.clear()

    def generations(self, key: bytes, row: int, readable: Sequence[int]) -> dict[int, int]:
        """By node the generation up to which it is asked to drop the key: of what it holds, or else of what waits for the catalog."""
        waiting = {one.node_id: one.version.generation for one in self._owner.pending[key]} if self._owner.pending else {}
        return waiting | dict.fromkeys(readable, self._rows.generations[row])
