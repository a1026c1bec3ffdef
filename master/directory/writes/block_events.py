"""What the nodes say of their blocks, turned into rows, catalog operations and commands to nodes. Sans-I/O.

A commit is seen by no one until the catalog has it: `plan` puts it beside the table (Tenant.pending) and gives the operations,
`apply`, once they are durable, enters it. What is gone is gone at once, its deletion follows behind. Whatever is in flight, the
last operation given for a key describes all that is known of it then, so the catalog ends right in any order of events.

Of two versions of one key the higher generation wins, and the loser's node is told to drop its own, read and pinned or not: whoever
reads goes on, and one that stayed would be shown on its host, and known to nobody, until the next inventory. A version that can be read
is replaced only when its successor is durable.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from typing import Final

import numpy as np

from kvstore.master.catalogs.interface import BlockPuts, Change
from kvstore.master.directory import records
from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.holders import HINT, TIERS, has_holder, with_holder, without_holder
from kvstore.master.directory.index.key_index import FEW, Found
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
"""Commits that are taken in together where they can be: one takes half as long by itself."""
MAX_GENERATION: Final = 1 << 62
"""No owner grants a newer one, unless its clock is beyond the year 2116: they begin at the wall clock in ns. One that a node makes up is
followed by all that are granted later, and would leave none to grant."""
_MASKS: Final = bytes(tiers & TIERS for tiers in range(256))


@dataclass(slots=True)
class PublishPlan:
    """What one Publish asks for. `commands` may go out at once; hand it to `apply` when `ops` are durable."""

    ticket: int
    node_id: int
    epoch: int
    commands: NodeCommands
    ops: list[Change] = field(default_factory=list)
    commits: list[tuple[Tenant, bytes]] = field(default_factory=list)
    batch: PendingBatch | None = None
    """Of all commits, where they were taken in together."""
    owed: int = 0
    """Removed blocks that the node named: once it has answered their Drops, `paid` is to be called."""


@dataclass(slots=True)
class PublishEffects:
    """What an `apply` leaves to do: operations that nobody waits for, and commands to nodes."""

    commands: NodeCommands
    ops: list[Change] = field(default_factory=list)


class BlockEventWriter:
    """The writing side of the directory. Not thread-safe."""

    def __init__(self, parts: DirectoryParts, reservations: DirectoryReservations) -> None:
        self._rows, self._tenants, self._members, self._reservations = parts.rows, parts.tenants, parts.members, reservations
        self._recording = parts.recording
        self._master_epoch = parts.master_epoch
        self._next_ticket = 1

    def registered(self, node: NodeMember, *, same_process: bool) -> None:
        """What the node had is a hint until its inventory names it; a new process has lost all that was not on NVMe."""

        def known(state: int) -> int | None:
            tiers = state & TIERS
            kept = tiers if same_process else tiers & DURABLE_TIERS
            return None if tiers and not kept else kept | HINT

        self._rows.sets.rewrite(node.node_id, known)

    def write_off(self, node_id: int) -> None:
        """The node holds nothing any more. Its rows wait for the sweep."""
        self._rows.sets.rewrite(node_id, lambda _state: None)

    def plan(self, node_id: int, message: Publish) -> PublishPlan:
        """Take in a node's events, in order.

        Raises StaleEpoch (the registration is over) or InvalidArgument (an index, kind or tenant is wrong); nothing was taken in.
        """
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
            self._hold_pinned(plan)
        return plan

    def paid(self, plan: PublishPlan) -> None:
        """The node has answered every Drop of removed blocks that the plan has commands for: they are not there any more."""
        node = self._members.get(plan.node_id)
        if node is not None and node.epoch == plan.epoch:
            node.owed -= plan.owed

    def apply(self, plan: PublishPlan) -> PublishEffects:
        """The plan's operations are durable: its commits become visible, unless the node has registered again since."""
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
                effects.ops += self._recording.ops(tenant, key)
        return effects

    def gone(self, node_id: int, tenant: Tenant, key: bytes, generation: int) -> list[Change]:
        """`node_id` no longer has `key` in this generation or an older one: at once, also what was not visible yet."""
        queued = _unqueue(tenant, key, lambda one: one.node_id == node_id and one.version.generation <= generation)
        row = tenant.rows.get(key, NO_ROW)
        held = self._rows.generations[row] <= generation and self._let_go(tenant, key, node_id)
        if not queued and not held:
            return []
        ops = self._recording.ops(tenant, key)
        if key not in tenant.pending and not self._rows.pairs(tenant.rows.get(key, NO_ROW)):
            ops += self._forget_marks(tenant, key)
        return ops

    def gone_all(self, node_id: int, tenant: Tenant, keys: Sequence[bytes], generations: Sequence[int]) -> list[Change]:
        """As `gone`, one after the other. Blocks that are nowhere else go together."""
        if len(keys) <= FEW or tenant.pending.has_any(keys) or len(set(keys)) < len(keys):
            return [op for key, generation in zip(keys, generations, strict=True) for op in self.gone(node_id, tenant, key, generation)]
        rows = tenant.rows.find(keys)
        is_held = np.frombuffer(self._rows.generations, np.uint64)[rows] <= np.array(generations, np.uint64)
        held = np.frombuffer(self._rows.holders, np.uint32)[rows]
        theirs = [index for index in np.unique(held).tolist() if has_holder(self._rows.sets[index], node_id)]
        is_held &= np.isin(held, theirs)
        is_last = is_held & np.isin(held, [index for index in theirs if len(self._rows.sets[index]) == 1])
        left = np.flatnonzero(is_held & ~is_last).tolist()
        ops = self._last_gone(tenant, list(compress(keys, is_last.tolist())), rows[is_last])
        return ops + [op for number in left for op in self.gone(node_id, tenant, keys[number], generations[number])]

    def _last_gone(self, tenant: Tenant, keys: Sequence[bytes], rows: Found) -> list[Change]:
        """These blocks, of which nothing is pending, are nowhere any more."""
        ops = self._recording.gone(tenant, keys, rows)
        self._rows.remove_all(tenant, rows.astype(np.uint32))
        for key in keys if tenant.pins or tenant.targets else ():
            ops += self._forget_marks(tenant, key)
        return ops

    def _forget_marks(self, tenant: Tenant, key: bytes) -> list[Change]:
        """The block itself is gone, not only out of reach: a later block of this key is another one."""
        ops: list[Change] = []
        if tenant.pins.pop(key, None) is not None:
            ops.append(records.unpin(tenant.prefix, key))
        if tenant.targets.pop(key, None) is not None:
            ops.append(records.delete_target(tenant.prefix, key))
        return ops

    def strip(self, tenant: Tenant, key: bytes, node_ids: Iterable[int]) -> list[Change]:
        """Take nodes that cannot be asked off the row's holders; the operations. Should one come back, its inventory decides."""
        stripped = [self._let_go(tenant, key, node_id) for node_id in node_ids]
        return self._recording.ops(tenant, key) if any(stripped) else []

    def check_integrity(self) -> None:
        """Assert that at most one version a node waits for the catalog, and nothing empty is kept. For tests."""
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
        floor = node.floor
        if self._plan_new(plan, node, message, tenants):
            return
        if len(tenants) == 1 and message.kinds.count(EVENT_REMOVED) == len(message.keys):
            plan.ops += self.gone_all(plan.node_id, tenants[0], message.keys, message.generations)
            return
        left = self._plan_held(node, message, tenants)
        for kind, key, tenant, namespace, size, checksum, generation, tiers, parent in columns if left is None else compress(columns, left):
            if kind == EVENT_COMMIT:
                version = Version(size, checksum, generation, namespace, parent)
                if (generation <= floor or tenant.removed) and self._is_removed(tenant, key, node, version):
                    plan.owed += 1
                    node.dropped += 1
                    plan.commands.drop(plan.node_id, tenant, key, generation, force=True)
                else:
                    self._commit(plan, tenant, key, version, tiers & TIERS)
            elif kind == EVENT_REMOVED:
                plan.ops += self.gone(plan.node_id, tenant, key, generation)
            else:
                self._moved(plan.node_id, tenant, key, generation, tiers & TIERS)
                plan.ops += self._recording.settle(tenant, key)

    def _commit(self, plan: PublishPlan, tenant: Tenant, key: bytes, version: Version, tiers: int) -> None:
        node_id = plan.node_id
        self._reservations.end(tenant, key, version.generation)
        if key not in tenant.rows and key not in tenant.pending:
            tenant.pending[key] = (Pending(plan.ticket, node_id, version, tiers),)
            if self._recording.is_all:
                plan.ops.append(records.put_block(tenant.name, key, version, (node_id,)))
            plan.commits.append((tenant, key))
        elif self._is_held(tenant, key, node_id, version, tiers):
            plan.ops += self._recording.settle(tenant, key)
        else:
            self._commit_known(plan, tenant, key, Pending(plan.ticket, node_id, version, tiers))

    def _plan_new(self, plan: PublishPlan, node: NodeMember, message: Publish, tenants: list[Tenant]) -> bool:
        """The commits of a message of nothing else, all of keys of which nothing is known, as `_commit` takes them one by one. False, with
        nothing done, for any other message."""
        keys, generations = message.keys, message.generations
        is_plain = len(keys) >= MIN_NEW and message.kinds.count(EVENT_COMMIT) == len(keys) and len(tenants) == len(message.namespaces) == 1
        if not is_plain or min(generations) <= node.floor:
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
        if self._recording.is_all:
            plan.ops.append(puts)
        plan.commits += zip(repeat(tenant), keys)  # noqa: B905  (repeat)
        return True

    def _plan_held(self, node: NodeMember, message: Publish, tenants: list[Tenant]) -> list[bool] | None:
        """Those commits of an inventory's message that are of versions which the node is known to hold, as `_commit` takes them one by one:
        nearly all that a node names whose link was broken for a moment. Which events are left; None: all."""
        keys = message.keys
        is_plain = len(tenants) == 1 and len(keys) >= MIN_NEW and message.kinds.count(EVENT_COMMIT) == len(keys)
        if node.state != SYNCING or not self._recording.is_all or not is_plain or min(message.generations) <= node.floor:
            return None
        tenant = tenants[0]
        if tenant.removed or tenant.pending.has_any(keys) or not tenant.reserved.keys().isdisjoint(keys) or len(set(keys)) < len(keys):
            return None
        columns = message.sizes, message.checksums, message.generations
        is_held = self._rows.hold_known(tenant.rows.find(keys), columns, node.node_id, message.tiers.translate(_MASKS))
        left: list[bool] = (~is_held).tolist()
        return left

    def _enter_new(self, effects: PublishEffects, plan: PublishPlan) -> bool:
        """`_enter` for a plan's batch, if each is still the only one of its key, nothing else is known of that, and all are in the same
        tiers. Else False, with nothing done."""
        batch = plan.batch
        if batch is None:
            return False
        tenant, puts, mask = plan.commits[0][0], batch.puts, batch.tiers[0]
        is_alike = batch.tiers.count(mask) == len(batch.tiers) and tenant.pins.keys().isdisjoint(puts.keys)
        if not is_alike or tenant.rows.has_any(puts.keys) or not tenant.pending.take_all(batch):
            return False
        self._rows.insert_new(tenant, puts, ((plan.node_id, mask),))
        effects.ops += self._recording.entered(tenant, puts, mask)
        return True

    def _is_removed(self, tenant: Tenant, key: bytes, node: NodeMember, version: Version) -> bool:
        """The block was removed while the node was away; or may have been, and the directory does not list it there. A put that was granted
        and comes only now has been met by no removal, however far floors have risen since."""
        if version.generation <= tenant.removed.get(key, 0):
            return True
        granted = tenant.reserved.get(key)
        is_granted = granted is not None and (granted.generation, granted.node_id) == (version.generation, node.node_id)
        if is_granted or version.generation > node.floor:
            return False
        row = tenant.rows.get(key, NO_ROW)
        # A removal takes every node that is away off the row at once, and tells those that are there.
        is_listed = any(node_id == node.node_id for node_id, _state in self._rows.pairs(row))
        return not (is_listed and self._rows.is_version(row, version))

    def _commit_known(self, plan: PublishPlan, tenant: Tenant, key: bytes, new: Pending) -> None:
        """A commit of a key that is in the table or in flight, at this node or another."""
        # The same version in an earlier plan stays there: that plan's answer promises that it is visible.
        _unqueue(tenant, key, lambda one: one.node_id == new.node_id and (one.version[:3] != new.version[:3] or one.ticket == new.ticket))
        if self._is_beaten(tenant, key, new.version):
            plan.commands.drop(new.node_id, tenant, key, new.version.generation, force=True)
        else:
            tenant.pending[key] = (*tenant.pending[key], new)
            plan.commits.append((tenant, key))
        plan.ops += self._recording.ops(tenant, key)

    def _is_held(self, tenant: Tenant, key: bytes, node_id: int, version: Version, tiers: int) -> bool:
        """The node is known to hold this version: its tiers are updated. It no longer holds another one that was known."""
        row = tenant.rows.get(key, NO_ROW)
        pairs = self._rows.pairs(row)
        if not self._rows.is_version(row, version):
            self._let_go(tenant, key, node_id)
            return False
        held = with_holder(pairs, node_id, tiers)
        if len(held) > len(pairs):
            return False
        self._rows.hold(row, held)
        return True

    def _is_beaten(self, tenant: Tenant, key: bytes, version: Version) -> bool:
        """Another version of the key, held or in flight at another node, is newer, or as new and there first."""
        row = tenant.rows.get(key, NO_ROW)
        rivals = [one.version for one in tenant.pending[key]]
        if self._rows.pairs(row):
            rivals.append(self._rows.version(row))
        return any(rival.generation >= version.generation and rival[:3] != version[:3] for rival in rivals)

    def _enter(self, effects: PublishEffects, tenant: Tenant, key: bytes, waiting: Pending) -> None:
        """A durable commit becomes visible, or loses to a version that became visible while it waited."""
        node_id, version = waiting.node_id, waiting.version
        row = tenant.rows.get(key, NO_ROW)
        pairs = self._rows.pairs(row)
        if pairs and self._rows.is_version(row, version):
            self._rows.hold(row, with_holder(pairs, node_id, waiting.tiers))
        elif pairs and self._rows.generations[row] >= version.generation:
            effects.commands.drop(node_id, tenant, key, version.generation, force=True)
            effects.ops += self._recording.ops(tenant, key)
            return
        else:
            for other, _state in pairs:
                effects.commands.drop(other, tenant, key, self._rows.generations[row], force=True)
            self._rows.insert(tenant, key, version, ((node_id, waiting.tiers),))
        if not self._recording.is_all:  # else its record is durable by now
            effects.ops += self._recording.ops(tenant, key)
        if key in tenant.pins:
            effects.commands.hold(node_id, tenant, key, pinned=True)

    def _let_go(self, tenant: Tenant, key: bytes, node_id: int) -> bool:
        """Take the node off the row's holders, and the row away with its last; whether it was one."""
        row = tenant.rows.get(key, NO_ROW)
        pairs = self._rows.pairs(row)
        rest = without_holder(pairs, node_id)
        if rest == pairs:
            return False
        if rest:
            self._rows.hold(row, rest)
        else:
            self._recording.leaves(tenant, key)
            self._rows.remove(row)
        return True

    def _moved(self, node_id: int, tenant: Tenant, key: bytes, generation: int, tiers: int) -> None:
        row = tenant.rows.get(key, NO_ROW)
        pairs = self._rows.pairs(row)
        if self._rows.generations[row] == generation and any(pair[0] == node_id for pair in pairs):
            self._rows.hold(row, with_holder(pairs, node_id, tiers))
        if key in tenant.pending:
            tenant.pending[key] = tuple(
                one._replace(tiers=tiers) if (one.node_id, one.version.generation) == (node_id, generation) else one
                for one in tenant.pending[key]
            )

    def _hold_pinned(self, plan: PublishPlan) -> None:
        held = np.array(list(self._rows.sets.sets_of(plan.node_id)), np.uint32)
        for tenant in self._tenants:
            pinned = list(tenant.pins)
            for begin in range(0, len(pinned), MAX_BATCH):
                keys = pinned[begin : begin + MAX_BATCH]
                is_here = np.isin(np.frombuffer(self._rows.holders, np.uint32)[tenant.rows.find(keys)], held)
                if is_here.any():
                    plan.commands.hold_all(plan.node_id, tenant, compress(keys, is_here.tolist()), pinned=True)


def _are_new(tenant: Tenant, keys: Sequence[bytes]) -> bool:
    """Each is named once, and has no row."""
    return len(set(keys)) == len(keys) and not tenant.rows.has_any(keys)


def _unqueue(tenant: Tenant, key: bytes, is_over: Callable[[Pending], bool]) -> bool:
    """Take what `is_over` off the commits that wait for the catalog; whether there was any."""
    waiting = tenant.pending[key]
    rest = tuple(one for one in waiting if not is_over(one))
    if len(rest) < len(waiting):
        tenant.pending[key] = rest
    return len(rest) < len(waiting)


def _check_columns(message: Publish, last_generation: int) -> None:
    """Raises InvalidArgument before anything is taken in: a message is taken whole or not at all."""
    if message.keys and max(message.generations) > last_generation:
        raise InvalidArgument(f"a block of generation {max(message.generations)}, which nobody can have granted")
    if message.keys and max(message.tenant_indexes) >= len(message.tenants):
        raise InvalidArgument(f"a tenant index of {max(message.tenant_indexes)} for {len(message.tenants)} tenants")
    if message.keys and max(message.namespace_indexes) >= len(message.namespaces):
        raise InvalidArgument(f"a namespace index of {max(message.namespace_indexes)} for {len(message.namespaces)} namespaces")
    unknown = set(message.kinds) - {EVENT_COMMIT, EVENT_REMOVED, EVENT_MOVED}
    if unknown:
        raise InvalidArgument(f"events of unknown kind {min(unknown)}")
    for tenant in message.tenants:
        records.check_tenant(tenant)
