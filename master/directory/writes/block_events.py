"""Applies nodes' block events to the directory: rows, catalog operations and commands to nodes. Sans-I/O.

A commit is visible once the catalog has it: `plan` queues it (Tenant.pending) and returns operations; `apply`, once
they are durable, enters it. An eviction is visible at once, and its deletion is committed later. The last operation for
a key always describes its full known state, so the catalog is correct in any order of events.

Of two versions of a key the higher generation wins, and the loser's node gets a forced drop, even if it is read or
pinned: open reads continue, and a kept one would be visible on its host and unknown to the directory until the next
inventory. A readable version is replaced only when its successor is durable."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from typing import Final

import numpy as np

from kvstore.master.catalogs.interface import BlockPuts, Change
from kvstore.master.directory import records
from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.holders import HINT, TIERS, has_holder, with_holder, without_holder
from kvstore.master.directory.index.key_index import SMALL_BATCH, Found
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.index.tenants import Pending, PendingBatch, Tenant
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.directory.placement.commands import NodeCommands
from kvstore.master.directory.records import Version
from kvstore.master.directory.writes.record_policy import DURABLE_TIERS
from kvstore.master.directory.writes.reservations import DirectoryReservations
from kvstore.protocol.catalog_messages import EVENT_COMMIT, EVENT_MOVED, EVENT_REMOVED, PHASE_SYNC_BEGIN, PHASE_SYNC_END, Publish
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.frames import MAX_BATCH
from kvstore.protocol.node_states import ALIVE, SYNCING

MIN_NEW: Final = 4
"""Commits applied as a batch; smaller batches take longer than one by one."""
MAX_GENERATION: Final = 1 << 62
"""Upper bound of valid generations: they start at the wall clock in ns, which reaches it in 2116. Later grants
follow the highest one seen, so an invented one could leave none."""
_MASKS: Final = bytes(tiers & TIERS for tiers in range(256))


@dataclass(slots=True)
class PublishPlan:
    """Effects of one Publish. `commands` may be sent at once; pass the plan to `apply` when `ops` are durable."""

    ticket: int
    node_id: int
    epoch: int
    commands: NodeCommands
    ops: list[Change] = field(default_factory=list)
    commits: list[tuple[Tenant, bytes]] = field(default_factory=list)
    batch: PendingBatch | None = None
    """All commits, if they were taken as a batch."""
    owed: int = 0
    """Removed blocks that the node named. Call `drops_acknowledged` when it has acknowledged their drops."""


@dataclass(slots=True)
class PublishEffects:
    """Effects of `apply`: operations that need no wait, and commands to nodes."""

    commands: NodeCommands
    ops: list[Change] = field(default_factory=list)


class BlockEventWriter:
    """Applies block events. Not thread-safe."""

    def __init__(self, parts: DirectoryParts, reservations: DirectoryReservations) -> None:
        self._rows, self._tenants, self._members, self._reservations = parts.rows, parts.tenants, parts.members, reservations
        self._record_policy = parts.record_policy
        self._master_epoch = parts.master_epoch
        self._next_ticket = 1

    def registered(self, node: NodeMember, *, same_process: bool) -> None:
        """Turn the node's blocks into hints, until its inventory confirms them. A new process has lost all blocks
        that are not on NVMe."""

        def known(state: int) -> int | None:
            tiers = state & TIERS
            kept = tiers if same_process else tiers & DURABLE_TIERS
            return None if tiers and not kept else kept | HINT

        self._rows.sets.rewrite(node.node_id, known)

    def write_off(self, node_id: int) -> None:
        """Remove the node from all holder sets. `Directory.delete_unheld` deletes its rows."""
        self._rows.sets.rewrite(node_id, lambda _state: None)

    def plan(self, node_id: int, message: Publish) -> PublishPlan:
        """Plan a node's events, in order.

        Raises StaleEpoch (the registration is over) or InvalidArgument (a wrong index, kind or tenant); nothing has
        changed then."""
        node = self._members.check(node_id, message.epoch)
        _check_columns(message, max(MAX_GENERATION, self._reservations.last_generation))
        tenants = [self._tenants.of(name) for name in message.tenants]
        plan = PublishPlan(self._next_ticket, node_id, message.epoch, NodeCommands(self._master_epoch))
        self._next_ticket += 1
        if message.phase == PHASE_SYNC_BEGIN:
            node.state = SYNCING
            self._rows.sets.rewrite(node_id, lambda state: state | HINT)
        self._take_in(plan, node, message, tenants)
        node.owed += plan.owed
        if message.phase == PHASE_SYNC_END and node.state == SYNCING:
            node.state = ALIVE
            self._rows.sets.rewrite(node_id, lambda state: None if state & HINT else state)
            self._resend_pins(plan)
        return plan

    def drops_acknowledged(self, plan: PublishPlan) -> None:
        """The node has acknowledged all drops of removed blocks of the plan."""
        node = self._members.get(plan.node_id)
        if node is not None and node.epoch == plan.epoch:
            node.owed -= plan.owed

    def apply(self, plan: PublishPlan) -> PublishEffects:
        """The plan's operations are durable: make its commits visible, unless the node has registered again."""
        effects = PublishEffects(NodeCommands(self._master_epoch))
        node = self._members.get(plan.node_id)
        is_current = node is not None and node.epoch == plan.epoch and not node.written_off
        if is_current and self._enter_new(effects, plan):
            return effects
        for tenant, key in plan.commits:
            queued = tenant.pending[key]
            if len(queued) == 1 and queued[0].ticket == plan.ticket:  # as a rule
                waiting = queued[0]
                tenant.pending[key] = ()
            elif (found := next((one for one in queued if one.ticket == plan.ticket), None)) is not None:
                waiting = found
                _unqueue(tenant, key, lambda one: one.ticket == plan.ticket)
            else:
                continue
            if is_current:
                self._enter(effects, tenant, key, waiting)
            else:
                effects.ops += self._record_policy.ops(tenant, key)
        return effects

    def remove_holder(self, node_id: int, tenant: Tenant, key: bytes, generation: int) -> list[Change]:
        """`node_id` no longer has `key` in this generation or an older one. Applies at once, also to pending
        commits."""
        queued = _unqueue(tenant, key, lambda one: one.node_id == node_id and one.version.generation <= generation)
        row = tenant.rows.get(key, NO_ROW)
        held = self._rows.generations[row] <= generation and self._drop_holder(tenant, key, node_id)
        if not queued and not held:
            return []
        ops = self._record_policy.ops(tenant, key)
        if key not in tenant.pending and not self._rows.pairs(tenant.rows.get(key, NO_ROW)):
            ops += self._delete_pin_and_target(tenant, key)
        return ops

    def remove_holder_all(self, node_id: int, tenant: Tenant, keys: Sequence[bytes], generations: Sequence[int]) -> list[Change]:
        """As `remove_holder`, for each. Blocks without another holder are removed as a batch."""
        if len(keys) <= SMALL_BATCH or tenant.pending.has_any(keys) or len(set(keys)) < len(keys):
            return [
                op for key, generation in zip(keys, generations, strict=True) for op in self.remove_holder(node_id, tenant, key, generation)
            ]
        rows = tenant.rows.find(keys)
        is_held = np.frombuffer(self._rows.generations, np.uint64)[rows] <= np.array(generations, np.uint64)
        held = np.frombuffer(self._rows.holders, np.uint32)[rows]
        theirs = [index for index in np.unique(held).tolist() if has_holder(self._rows.sets[index], node_id)]
        is_held &= np.isin(held, theirs)
        is_last = is_held & np.isin(held, [index for index in theirs if len(self._rows.sets[index]) == 1])
        left = np.flatnonzero(is_held & ~is_last).tolist()
        ops = self._remove_last(tenant, list(compress(keys, is_last.tolist())), rows[is_last])
        return ops + [op for number in left for op in self.remove_holder(node_id, tenant, keys[number], generations[number])]

    def _remove_last(self, tenant: Tenant, keys: Sequence[bytes], rows: Found) -> list[Change]:
        """Remove blocks without holders and without pending commits."""
        ops = self._record_policy.removed(tenant, keys, rows)
        self._rows.remove_all(tenant, rows.astype(np.uint32))
        for key in keys if tenant.pins or tenant.targets else ():
            ops += self._delete_pin_and_target(tenant, key)
        return ops

    def _delete_pin_and_target(self, tenant: Tenant, key: bytes) -> list[Change]:
        """Delete pin and target of a removed block: a later block with this key is another one."""
        ops: list[Change] = []
        if tenant.pins.pop(key, None) is not None:
            ops.append(records.unpin(tenant.prefix, key))
        if tenant.targets.pop(key, None) is not None:
            ops.append(records.delete_target(tenant.prefix, key))
        return ops

    def strip_holders(self, tenant: Tenant, key: bytes, node_ids: Iterable[int]) -> list[Change]:
        """Remove unreachable nodes from the block's holders; return operations. A node that returns has its
        inventory compared."""
        stripped = [self._drop_holder(tenant, key, node_id) for node_id in node_ids]
        return self._record_policy.ops(tenant, key) if any(stripped) else []

    def check_integrity(self) -> None:
        """Assert that each node has at most one pending version a key, and no entry is empty. For tests."""
        for tenant in self._tenants:
            for key, waiting in tenant.pending.items():
                assert waiting, key
                assert len({(one.node_id, one.ticket) for one in waiting}) == len(waiting), key
                assert len({one.node_id for one in waiting}) == len({(one.node_id, one.version[:3]) for one in waiting}), key

    def _take_in(self, plan: PublishPlan, node: NodeMember, message: Publish, tenants: list[Tenant]) -> None:
        columns = zip(
            message.kinds,
            message.keys,
            map(tenants.__getitem__, message.tenant_indexes),
            map(message.namespaces.__getitem__, message.namespace_indexes),
            message.sizes,
            message.checksums,
            message.generations,
            message.tiers,
            message.parents,
            strict=True,
        )
        self._reservations.saw(max(message.generations, default=0))
        removal_horizon = node.removal_horizon
        if self._plan_new(plan, node, message, tenants):
            return
        if len(tenants) == 1 and message.kinds.count(EVENT_REMOVED) == len(message.keys):
            plan.ops += self.remove_holder_all(plan.node_id, tenants[0], message.keys, message.generations)
            return
        left = self._plan_held(node, message, tenants)
        for kind, key, tenant, namespace, size, checksum, generation, tiers, parent in columns if left is None else compress(columns, left):
            if kind == EVENT_COMMIT:
                version = Version(size, checksum, generation, namespace, parent)
                if (generation <= removal_horizon or tenant.removed) and self._is_removed(tenant, key, node, version):
                    plan.owed += 1
                    node.dropped += 1
                    plan.commands.drop(plan.node_id, tenant, key, generation, force=True)
                else:
                    self._commit(plan, tenant, key, version, tiers & TIERS)
            elif kind == EVENT_REMOVED:
                plan.ops += self.remove_holder(plan.node_id, tenant, key, generation)
            else:
                self._moved(plan.node_id, tenant, key, generation, tiers & TIERS)
                plan.ops += self._record_policy.settle(tenant, key)

    def _commit(self, plan: PublishPlan, tenant: Tenant, key: bytes, version: Version, tiers: int) -> None:
        node_id = plan.node_id
        self._reservations.end(tenant, key, version.generation)
        if key not in tenant.rows and key not in tenant.pending:
            tenant.pending[key] = (Pending(plan.ticket, node_id, version, tiers),)
            if self._record_policy.is_all:
                plan.ops.append(records.put_block(tenant.name, key, version, (node_id,)))
            plan.commits.append((tenant, key))
        elif self._is_held(tenant, key, node_id, version, tiers):
            plan.ops += self._record_policy.settle(tenant, key)
        else:
            self._commit_known(plan, tenant, key, Pending(plan.ticket, node_id, version, tiers))

    def _plan_new(self, plan: PublishPlan, node: NodeMember, message: Publish, tenants: list[Tenant]) -> bool:
        """Plan a message of only commits of unknown keys as a batch, with the effects of `_commit` for each. Return
        False, with nothing changed, for other messages."""
        keys, generations = message.keys, message.generations
        is_plain = len(keys) >= MIN_NEW and message.kinds.count(EVENT_COMMIT) == len(keys) and len(tenants) == len(message.namespaces) == 1
        if not is_plain or min(generations) <= node.removal_horizon:
            return False
        tenant = tenants[0]
        if tenant.removed or tenant.pending.has_any(keys) or not _are_new(tenant, keys):
            return False
        if not tenant.reserved.keys().isdisjoint(keys):
            for key, generation in zip(keys, generations, strict=True):
                self._reservations.end(tenant, key, generation)
        namespaces, holders = (message.namespaces[0],) * len(keys), ((plan.node_id,),) * len(keys)
        puts = BlockPuts(tenant.name, keys, message.sizes, message.checksums, generations, namespaces, message.parents, holders)
        plan.batch = PendingBatch(plan.ticket, plan.node_id, puts, message.tiers.translate(_MASKS))
        tenant.pending.add_all(plan.batch)
        if self._record_policy.is_all:
            plan.ops.append(puts)
        plan.commits += zip(repeat(tenant), keys)  # noqa: B905  (repeat)
        return True

    def _plan_held(self, node: NodeMember, message: Publish, tenants: list[Tenant]) -> list[bool] | None:
        """Apply the commits of an inventory message whose versions the node is known to hold, with the effects of
        `_commit`: nearly all, after a brief disconnection. Return which events are left; None for all."""
        keys = message.keys
        is_plain = len(tenants) == 1 and len(keys) >= MIN_NEW and message.kinds.count(EVENT_COMMIT) == len(keys)
        if node.state != SYNCING or not self._record_policy.is_all or not is_plain or min(message.generations) <= node.removal_horizon:
            return None
        tenant = tenants[0]
        if tenant.removed or tenant.pending.has_any(keys) or not tenant.reserved.keys().isdisjoint(keys) or len(set(keys)) < len(keys):
            return None
        columns = message.sizes, message.checksums, message.generations
        is_held = self._rows.confirm_held(tenant.rows.find(keys), columns, node.node_id, message.tiers.translate(_MASKS))
        left: list[bool] = (~is_held).tolist()
        return left

    def _enter_new(self, effects: PublishEffects, plan: PublishPlan) -> bool:
        """`_enter` for a plan's batch, if every key is still unknown otherwise, and all are in the same tiers. Else
        return False, with nothing changed."""
        batch = plan.batch
        if batch is None:
            return False
        tenant, puts, mask = plan.commits[0][0], batch.puts, batch.tiers[0]
        is_alike = batch.tiers.count(mask) == len(batch.tiers) and tenant.pins.keys().isdisjoint(puts.keys)
        if not is_alike or tenant.rows.has_any(puts.keys) or not tenant.pending.take_all(batch):
            return False
        self._rows.insert_new(tenant, puts, ((plan.node_id, mask),))
        effects.ops += self._record_policy.entered(tenant, puts, mask)
        return True

    def _is_removed(self, tenant: Tenant, key: bytes, node: NodeMember, version: Version) -> bool:
        """True if the block was removed while the node was unreachable, or may have been and the directory does not
        list the node. A granted put that arrives late was met by no removal, however high its node's horizon."""
        if version.generation <= tenant.removed.get(key, 0):
            return True
        granted = tenant.reserved.get(key)
        is_granted = granted is not None and (granted.generation, granted.node_id) == (version.generation, node.node_id)
        if is_granted or version.generation > node.removal_horizon:
            return False
        row = tenant.rows.get(key, NO_ROW)
        # A removal strips unreachable nodes from the row at once, and sends drops to the others.
        is_listed = any(node_id == node.node_id for node_id, _state in self._rows.pairs(row))
        return not (is_listed and self._rows.is_version(row, version))

    def _commit_known(self, plan: PublishPlan, tenant: Tenant, key: bytes, new: Pending) -> None:
        """Plan a commit of a key with a row or a pending version, at this node or another."""
        # The same version in an earlier plan stays: that plan's response promises that it is visible.
        _unqueue(tenant, key, lambda one: one.node_id == new.node_id and (one.version[:3] != new.version[:3] or one.ticket == new.ticket))
        if self._is_beaten(tenant, key, new.version):
            plan.commands.drop(new.node_id, tenant, key, new.version.generation, force=True)
        else:
            tenant.pending[key] = (*tenant.pending[key], new)
            plan.commits.append((tenant, key))
        plan.ops += self._record_policy.ops(tenant, key)

    def _is_held(self, tenant: Tenant, key: bytes, node_id: int, version: Version, tiers: int) -> bool:
        """Return True if the node is known to hold this version, and update its tiers. Remove it as the holder of
        another version."""
        row = tenant.rows.get(key, NO_ROW)
        pairs = self._rows.pairs(row)
        if not self._rows.is_version(row, version):
            self._drop_holder(tenant, key, node_id)
            return False
        held = with_holder(pairs, node_id, tiers)
        if len(held) > len(pairs):
            return False
        self._rows.set_holders(row, held)
        return True

    def _is_beaten(self, tenant: Tenant, key: bytes, version: Version) -> bool:
        """True if another version of the key, held or pending at another node, is newer, or equally new and earlier."""
        row = tenant.rows.get(key, NO_ROW)
        rivals = [one.version for one in tenant.pending[key]]
        if self._rows.pairs(row):
            rivals.append(self._rows.version(row))
        return any(rival.generation >= version.generation and rival[:3] != version[:3] for rival in rivals)

    def _enter(self, effects: PublishEffects, tenant: Tenant, key: bytes, waiting: Pending) -> None:
        """Make a durable commit visible, unless a later version became visible meanwhile."""
        node_id, version = waiting.node_id, waiting.version
        row = tenant.rows.get(key, NO_ROW)
        pairs = self._rows.pairs(row)
        if pairs and self._rows.is_version(row, version):
            self._rows.set_holders(row, with_holder(pairs, node_id, waiting.tiers))
        elif pairs and self._rows.generations[row] >= version.generation:
            effects.commands.drop(node_id, tenant, key, version.generation, force=True)
            effects.ops += self._record_policy.ops(tenant, key)
            return
        else:
            for other, _state in pairs:
                effects.commands.drop(other, tenant, key, self._rows.generations[row], force=True)
            self._rows.insert(tenant, key, version, ((node_id, waiting.tiers),))
        if not self._record_policy.is_all:  # else its record is durable already
            effects.ops += self._record_policy.ops(tenant, key)
        if key in tenant.pins:
            effects.commands.set_pinned(node_id, tenant, key, pinned=True)

    def _drop_holder(self, tenant: Tenant, key: bytes, node_id: int) -> bool:
        """Remove the node from the row's holders, and the row with its last one. Return True if it was a holder."""
        row = tenant.rows.get(key, NO_ROW)
        pairs = self._rows.pairs(row)
        rest = without_holder(pairs, node_id)
        if rest == pairs:
            return False
        if rest:
            self._rows.set_holders(row, rest)
        else:
            self._record_policy.before_removal(tenant, key)
            self._rows.remove(row)
        return True

    def _moved(self, node_id: int, tenant: Tenant, key: bytes, generation: int, tiers: int) -> None:
        row = tenant.rows.get(key, NO_ROW)
        pairs = self._rows.pairs(row)
        if self._rows.generations[row] == generation and any(pair[0] == node_id for pair in pairs):
            self._rows.set_holders(row, with_holder(pairs, node_id, tiers))
        if key in tenant.pending:
            tenant.pending[key] = tuple(
                one._replace(tiers=tiers) if (one.node_id, one.version.generation) == (node_id, generation) else one
                for one in tenant.pending[key]
            )

    def _resend_pins(self, plan: PublishPlan) -> None:
        held = np.array(list(self._rows.sets.sets_of(plan.node_id)), np.uint32)
        for tenant in self._tenants:
            pinned = list(tenant.pins)
            for begin in range(0, len(pinned), MAX_BATCH):
                keys = pinned[begin : begin + MAX_BATCH]
                is_here = np.isin(np.frombuffer(self._rows.holders, np.uint32)[tenant.rows.find(keys)], held)
                if is_here.any():
                    plan.commands.set_pinned_all(plan.node_id, tenant, compress(keys, is_here.tolist()), pinned=True)


def _are_new(tenant: Tenant, keys: Sequence[bytes]) -> bool:
    """True if the keys are distinct and have no rows."""
    return len(set(keys)) == len(keys) and not tenant.rows.has_any(keys)


def _unqueue(tenant: Tenant, key: bytes, is_over: Callable[[Pending], bool]) -> bool:
    """Remove pending commits for which `is_over` is true. Return True if there were any."""
    waiting = tenant.pending[key]
    rest = tuple(one for one in waiting if not is_over(one))
    if len(rest) < len(waiting):
        tenant.pending[key] = rest
    return len(rest) < len(waiting)


def _check_columns(message: Publish, last_generation: int) -> None:
    """Raise InvalidArgument before any change: a message is applied completely or not at all."""
    if message.keys and max(message.generations) > last_generation:
        raise InvalidArgument(f"a block has generation {max(message.generations)}, which no master can have granted")
    if message.keys and max(message.tenant_indexes) >= len(message.tenants):
        raise InvalidArgument(f"a tenant index of {max(message.tenant_indexes)} for {len(message.tenants)} tenants")
    if message.keys and max(message.namespace_indexes) >= len(message.namespaces):
        raise InvalidArgument(f"a namespace index of {max(message.namespace_indexes)} for {len(message.namespaces)} namespaces")
    unknown = set(message.kinds) - {EVENT_COMMIT, EVENT_REMOVED, EVENT_MOVED}
    if unknown:
        raise InvalidArgument(f"events of unknown kind {min(unknown)}")
    for tenant in message.tenants:
        records.check_tenant(tenant)
