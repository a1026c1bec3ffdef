"""Removals: drops at the holders, their responses, and tombstones for unreachable nodes. Sans-I/O.

A removal completes once all holders have acknowledged the drop. While every node is settled (it has sent its inventory,
and dropped removed blocks) no tombstones are kept. An unreachable node may hold a removed block, even one that the
directory does not list. So a tombstone, in the catalog too, is kept until every known node is settled.

At most `limit` are kept. Beyond that the removal horizons of unreachable nodes rise (members.py): such a node must
drop all blocks up to its horizon when it returns, and needs no single tombstones. A forgotten node needs none
either, since unknown nodes have a horizon. Tombstones that horizons replace are deleted from the catalog only once
the horizons are durable."""

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
    """Tombstones, which are in Tenant.removed with their generation; loaded ones count. Not thread-safe."""

    def __init__(self, tenants: Tenants, members: Membership, *, limit: int) -> None:
        self._tenants = tenants
        self._members = members
        self._limit = limit
        self._count = sum(len(tenant.removed) for tenant in tenants)
        self._unwritten = 0

    @property
    def unwritten(self) -> int:
        """Raised horizons that are not durable yet; `horizons_written` is called once for each."""
        return self._unwritten

    def are_kept(self, generation: int) -> bool:
        """True if `remember` has to act for removals up to `generation`: a node is not settled."""
        return any(node.removal_horizon < generation and not node.is_settled for node in self._members)

    def remember(self, tenant: Tenant, key: bytes, generation: int) -> list[Op]:
        """Record the removal of all versions of a block up to `generation`; return operations that must be durable
        before the response.

        If this raises horizons, `unwritten` rises. Until they are durable, tombstones may exceed `limit` by those of
        the calls under way."""
        if not self.are_kept(generation):
            return []
        if key not in tenant.removed:
            if self._count >= self._limit and not self._unwritten:
                self._unwritten += 1
                return self._members.raise_horizons(generation)
            self._count += 1
        tenant.removed[key] = generation
        return [records.removed(tenant.prefix, key, generation)]

    def forget(self, name: str, generation: int) -> tuple[NodeMember, list[Op]]:
        """Forget the dead node `name`; if it returns it must drop blocks up to `generation`. Return it, and
        operations that must be durable before the response; `unwritten` has risen. Raises InvalidArgument: no such
        node, or it is alive."""
        node = self._members.forget(name)
        self._unwritten += 1
        return node, [self._members.raise_unknown_horizon(generation), records.delete_node(name)]

    def horizons_written(self) -> list[Op]:
        """Raised horizons are durable: drop the tombstones that they replace. Return operations that need no wait."""
        self._unwritten -= 1
        if self._unwritten:
            return []
        return self._drop_tombstones(min((node.removal_horizon for node in self._members if not node.is_settled), default=math.inf))

    def refused(self, tenant: Tenant, key: bytes, generation: int) -> list[Op]:
        """A holder keeps the block of `generation`, which is in use: only earlier versions stay removed."""
        if tenant.removed.get(key, 0) < generation:
            return []
        tenant.removed[key] = generation - 1
        return [records.removed(tenant.prefix, key, generation - 1)]

    def settle(self) -> list[Op]:
        """Drop all tombstones if every node is settled, and the horizons of settled nodes; return operations that
        need no wait."""
        ops = self._members.clear_horizons()
        if self._count and not self._unwritten and all(node.is_settled for node in self._members):
            ops += self._drop_tombstones(math.inf)
        return ops

    def check_integrity(self) -> None:
        """Assert that the count is correct. For tests; O(tenants)."""
        assert self._count == sum(len(tenant.removed) for tenant in self._tenants)
        assert self._unwritten >= 0

    def _drop_tombstones(self, up_to: float) -> list[Op]:
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
    """A planned removal. `flags` by key (1: it exists and may be removed); `ops` for the catalog; `commands` for the
    nodes.

    With `raises_horizons` call `Directory.horizons_written` when the operations are durable. Call `BlockRemover.over`
    once the nodes have responded."""

    flags: bytearray
    ops: list[Change]
    commands: NodeCommands
    raises_horizons: bool = False
    asked: list[bytes] = field(default_factory=list)
    """Keys with drops at nodes."""


class BlockRemover:
    """Plans removals and applies nodes' responses. Not thread-safe."""

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
        self._events, self._replication, self._targets, self._removals = publishing, replication, targets, removals
        self._master_epoch = parts.master_epoch

    def plan(self, tenant: str, keys: Sequence[bytes], *, force: bool) -> Removal:
        """Plan drops of these blocks at live holders; pass their responses to `dropped`. Blocks that only dead nodes
        hold are deleted at once.

        Pinned blocks are refused, unless `force`, which also unpins them."""
        owner, unwritten, generation = self._tenants.lookup(tenant), self._removals.unwritten, self._reservations.last_generation
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
        removal.raises_horizons = self._removals.unwritten > unwritten
        return removal

    def dropped(self, node_id: int, tenant: str, keys: Sequence[bytes], generations: Sequence[int], flags: bytes) -> list[Change]:
        """Apply a node's response to a Drop, before its own events; return catalog operations."""
        owner = self._tenants.lookup(tenant)
        ops: list[Change] = self._events.remove_holder_all(node_id, owner, list(compress(keys, flags)), list(compress(generations, flags)))
        for key, generation, flag in zip(keys, generations, flags, strict=True):
            if not flag:
                ops += self._removals.refused(owner, key, generation)
        return ops

    def over(self, tenant: str, removal: Removal) -> None:
        """Every node has responded, or will not: remaining blocks may be copied and claimed again. Checks their
        replica targets."""
        owner = self._tenants.lookup(tenant)
        for key in removal.asked:
            left = owner.removing.pop(key) - 1
            if left:
                owner.removing[key] = left
            if owner.targets:
                self._targets.recheck(tenant, key)

    def _plan_one(self, removal: Removal, owner: Tenant, drops: "_Drops", key: bytes, row: int, *, force: bool) -> None:
        self._replication.cancel(owner, key)
        readable, dead = drops.holders(row)
        if dead:
            removal.ops.extend(self._events.strip_holders(owner, key, dead))
            drops.forget_sets()
        asked = drops.generations(key, row, readable)
        if asked:
            # Responses are applied when all nodes have responded: no node may become a holder again meanwhile.
            owner.removing[key] = owner.removing.get(key, 0) + 1
            removal.asked.append(key)
        elif owner.targets.pop(key, None) is not None:  # else it ends with the last holder's response
            removal.ops.append(records.delete_target(owner.prefix, key))
        for node_id, generation in asked.items():
            removal.commands.drop(node_id, owner, key, generation, force=force)


class _Drops:
    """Holders that must drop a tenant's blocks. Most blocks of a batch have one holder set, which is resolved once."""

    def __init__(self, rows: Rows, owner: Tenant) -> None:
        self._rows, self._owner = rows, owner
        self._of_set: dict[int, tuple[list[int], list[int]]] = {}

    def holders(self, row: int) -> tuple[list[int], list[int]]:
        """Return the row's reachable holders, and the others."""
        index = self._rows.holders[row]
        if index not in self._of_set:
            readable = self._rows.sets.readable_at(index)
            self._of_set[index] = readable, [node_id for node_id, _state in self._rows.sets[index] if node_id not in readable]
        return self._of_set[index]

    def forget_sets(self) -> None:
        """Drop the cache: rows have changed sets, and an index may be reused."""
        self._of_set.clear()

    def generations(self, key: bytes, row: int, readable: Sequence[int]) -> dict[int, int]:
        """Return, by node, the generation up to which it must drop the key: of its block, or else of its pending
        commit."""
        waiting = {one.node_id: one.version.generation for one in self._owner.pending[key]} if self._owner.pending else {}
        return waiting | dict.fromkeys(readable, self._rows.generations[row])
