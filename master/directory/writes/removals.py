"""Removals: which nodes are to drop what, what their answers come to, and the tombstones for absent nodes. Sans-I/O.

A block is gone once its holders have said that they dropped it. While every node is settled (it has told its inventory, and dropped what
was removed) no tombstone is kept. While one is away it may hold what is removed, even if the directory has forgotten that it does. So
the removal is kept, in the catalog too, until every node that is known is settled.

As many as `limit` are kept. When there are more, the floors of the nodes that are away rise (members.py): such a node must drop
all that it has up to there when it returns, and single removals need not be remembered for it. Nor need they for a node that is
forgotten, since strangers have a floor too. What floors stand in for is deleted from the catalog only once they are in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

from kvstore.master.catalogs.interface import Change, Op
from kvstore.master.directory import records
from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.index.queries import DirectoryQueries
from kvstore.master.directory.index.rows import Rows
from kvstore.master.directory.index.tenants import Tenant, Tenants
from kvstore.master.directory.membership.members import Membership, NodeMember
from kvstore.master.directory.placement.commands import NodeCommands
from kvstore.master.directory.placement.replica_targets import ReplicaTargets
from kvstore.master.directory.placement.replication import ReplicaPlanner
from kvstore.master.directory.writes.block_events import BlockEventWriter
from kvstore.master.directory.writes.reservations import DirectoryReservations


class RemovedKeys:
    """Keys are in Tenant.removed, up to which generation; those that are there already count. Not thread-safe."""

    def __init__(self, tenants: Tenants, members: Membership, *, limit: int) -> None:
        self._tenants = tenants
        self._members = members
        self._limit = limit
        self._count = sum(len(tenant.removed) for tenant in tenants)
        self._unwritten = 0

    @property
    def unwritten(self) -> int:
        """How often floors have risen without being durable yet: `floors_written` is to be called as often."""
        return self._unwritten

    def are_kept(self, generation: int) -> bool:
        """Whether `remember` has anything to do for removals up to `generation`: a node is not settled."""
        return any(node.floor < generation and not node.is_settled for node in self._members)

    def remember(self, tenant: Tenant, key: bytes, generation: int) -> list[Op]:
        """A block is being removed, with all its versions up to `generation`; operations that must be durable before that is said.

        If floors rise for it, so does `unwritten`. Until they are written more than `limit` may be kept: those of the calls under way.
        """
        if not self.are_kept(generation):
            return []
        if key not in tenant.removed:
            if self._count >= self._limit and not self._unwritten:
                self._unwritten += 1
                return self._members.raise_floors(generation)
            self._count += 1
        tenant.removed[key] = generation
        return [records.removed(tenant.prefix, key, generation)]

    def forget(self, name: str, generation: int) -> tuple[NodeMember, list[Op]]:
        """The dead node `name` is known no more; what it has up to `generation` must go if it ever returns. It, and operations that
        must be durable before that is said; `unwritten` has risen. Raises InvalidArgument: no node has the name, or it is alive.
        """
        node = self._members.forget(name)
        self._unwritten += 1
        return node, [self._members.raise_strangers_floor(generation), records.delete_node(name)]

    def floors_written(self) -> list[Op]:
        """Floors that have risen are durable: the removals that they stand in for are kept no more. Operations nobody waits for."""
        self._unwritten -= 1
        if self._unwritten:
            return []
        return self._let_go(min((node.floor for node in self._members if not node.is_settled), default=math.inf))

    def refused(self, tenant: Tenant, key: bytes, generation: int) -> list[Op]:
        """A holder keeps the block of `generation` (it is in use): it is not removed after all, only what was there before it."""
        if tenant.removed.get(key, 0) < generation:
            return []
        tenant.removed[key] = generation - 1
        return [records.removed(tenant.prefix, key, generation - 1)]

    def settle(self) -> list[Op]:
        """Forget all of them, if every node is settled by now, and the floors of those that are; operations nobody waits for."""
        ops = self._members.clear_floors()
        if self._count and not self._unwritten and all(node.is_settled for node in self._members):
            ops += self._let_go(math.inf)
        return ops

    def check_integrity(self) -> None:
        """Assert that the count is right. For tests; O(tenants)."""
        assert self._count == sum(len(tenant.removed) for tenant in self._tenants)
        assert self._unwritten >= 0

    def _let_go(self, up_to: float) -> list[Op]:
        ops = []
        for tenant in self._tenants:
            covered = [key for key, generation in tenant.removed.items() if generation <= up_to]
            for key in covered:
                del tenant.removed[key]
            ops += [records.removed(tenant.prefix, key, None) for key in covered]
        self._count -= len(ops)
        return ops


@dataclass(slots=True)
class Removal:
    """A planned remove. `flags` (1: it was there and may go) by key; `ops` for the catalog; `commands` for the nodes.

    With `raises_floors` call `Directory.floors_written` when the operations are durable; and `BlockRemover.over`
    once the nodes have answered.
    """

    flags: bytearray
    ops: list[Change]
    commands: NodeCommands
    raises_floors: bool = False
    asked: list[bytes] = field(default_factory=list)
    """Keys that nodes are asked to drop."""


class BlockRemover:
    """See the module. Not thread-safe."""

    def __init__(
        self,
        parts: DirectoryParts,
        queries: DirectoryQueries,
        reservations: DirectoryReservations,
        publishing: BlockEventWriter,
        replication: ReplicaPlanner,
        targets: ReplicaTargets,
        removals: RemovedKeys,
    ) -> None:
        self._rows, self._tenants, self._queries, self._reservations = parts.rows, parts.tenants, queries, reservations
        self._publishing, self._replication, self._targets, self._removals = publishing, replication, targets, removals
        self._master_epoch = parts.master_epoch

    def plan(self, tenant: str, keys: Sequence[bytes], *, force: bool) -> Removal:
        """Ask live holders to drop these blocks; their answers go to `dropped`. What only dead nodes hold is deleted at once.

        Pinned blocks are refused, unless `force`, which also unpins them.
        """
        owner, unwritten, generation = self._tenants.asked(tenant), self._removals.unwritten, self._reservations.last_generation
        removal = Removal(bytearray(self._queries.exists(tenant, keys)), [], NodeCommands(self._master_epoch))
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
