"""The directory: which nodes hold which block, reservations and membership. The master without its sockets and its
catalog.

Sans-I/O and one thread: `now_ns` (monotonic) is passed in; catalog operations and commands to nodes are returned.
This class owns the parts, and handles registration and reservations. Lookups go to `queries`, removals and pins to
`removing` and `pins`, copies to `replication`; node reports go through block_events.py. Reads are fenced at the
node: a stale holder costs a miss and never returns wrong bytes."""

import random
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.master.catalogs.interface import Change, Op
from kvstore.master.directory import records
from kvstore.master.directory.bounds import DirectoryLimits
from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.followed_records import FollowedRecords
from kvstore.master.directory.index.inventory_comparison import DigestComparison
from kvstore.master.directory.index.queries import DirectoryQueries
from kvstore.master.directory.index.rows import Rows
from kvstore.master.directory.index.tenants import Tenants
from kvstore.master.directory.limits.pins import Pins
from kvstore.master.directory.limits.quotas import OperatorQuotas, TenantShare, unshared
from kvstore.master.directory.membership.cluster_reuse import ClusterReuse
from kvstore.master.directory.membership.members import Membership, NodeInfo, NodeMember
from kvstore.master.directory.membership.node_load import NodeRates
from kvstore.master.directory.membership.reads import BlockHeat, LastReads
from kvstore.master.directory.placement.drains import NodeDrains
from kvstore.master.directory.placement.home_copies import HomeCopies, HomeCopy
from kvstore.master.directory.placement.hot_copies import HotBlock, HotCopies
from kvstore.master.directory.placement.last_replica import LastReplicas
from kvstore.master.directory.placement.placement import place
from kvstore.master.directory.placement.replica_targets import ReplicaTargets
from kvstore.master.directory.placement.replication import ReplicaPlanner
from kvstore.master.directory.records import NO_DESCRIPTION, Description, DrainRecord, NodeRecord, PinRecord, StoppedRecord
from kvstore.master.directory.weights import WeightsTable
from kvstore.master.directory.weights_records import NamespaceRecord, WeightsRecord
from kvstore.master.directory.writes.block_events import BlockEventWriter, PublishEffects, PublishPlan
from kvstore.master.directory.writes.record_policy import RecordPolicy
from kvstore.master.directory.writes.removals import BlockRemover, RemovedKeys
from kvstore.master.directory.writes.reservations import DirectoryReservations, PutClaims
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import Publish
from kvstore.protocol.errors import InvalidArgument, Unavailable
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.master_messages import ReserveReply
from kvstore.protocol.message import BUSY, GRANTED, MAX_LINKS, MAX_SLOW, PRESENT
from kvstore.protocol.node_states import SYNCING
from kvstore.security.quotas.quota import RESERVATIONS

NS_PER_S: Final = 1_000_000_000
_MAY_PUT: Final = bytes((GRANTED, BUSY, PRESENT)).ljust(256, b"\0")
"""By a block's presence (ABSENT, HINTED, CONFIRMED): the status of a reservation."""
GENERATIONS_AHEAD: Final = 1 << 40
"""Generations allowed by one record: months of puts, so that an owner writes it once or twice. As wall clock they
are 18 minutes."""


@dataclass(frozen=True, slots=True)
class DirectoryCounts:
    """Readable blocks, open reservations, pinned keys."""

    blocks: int
    reserved: int
    pinned: int


class Directory:
    """State of one partition at its owner. Not thread-safe: the master's loop is the only caller."""

    def __init__(
        self,
        master_epoch: int,
        followed: FollowedRecords,
        limits: DirectoryLimits,
        *,
        wall_ns: int,
        now_ns: int,
        rng: random.Random,
        share_of: Callable[[str, int], TenantShare | None] = unshared,
    ) -> None:
        """Take over `followed`, which must not be used afterwards. No node is live until it registers.

        `wall_ns` is the wall clock. Generations and registrations start above it and above all that former owners
        granted, whose clocks may have been ahead: none is repeated. Takes constant time in the number of blocks.
        Raises Corrupt."""
        self._timing = limits.timing
        self._rng = rng
        self._share_of = share_of
        self._tenants, self._rows = followed.tenants, followed.rows
        granted = max(wall_ns, followed.granted_generation)
        self._reservations = DirectoryReservations(
            ttl_ns=_ns(self._timing.reserve_ttl_s),
            last_generation=max(granted, followed.last_generation),
            limit=limits.reservations,
        )
        self._granted_generation = 0
        self.members = Membership(
            wall_ns=granted, node_ttl_ns=_ns(self._timing.node_ttl_s), max_live=limits.nodes, max_absent=limits.absent_nodes
        )
        self.record_policy = RecordPolicy(self._rows, limits.recorded)
        parts = self._parts = DirectoryParts(self._rows, self._tenants, self.members, self.record_policy, master_epoch)
        self._events = BlockEventWriter(parts, self._reservations)
        self.replication = ReplicaPlanner(parts)
        self.drains = NodeDrains(parts, self.replication, limits.pace)
        self.targets = ReplicaTargets(parts, self.replication, limits.pace, patience_ns=_ns(self._timing.repair_after_s))
        secondary: OrderedDict[tuple[str, bytes], HomeCopy] = OrderedDict()
        hot: dict[tuple[str, bytes], HotBlock] = {}
        self.last_replicas = LastReplicas(parts, secondary, hot)
        self.home_copies = HomeCopies(
            parts,
            self.replication,
            secondary,
            limits.pace,
            bytes_per_s=limits.home_copy_bytes_per_s,
            slow_start_ns=_ns(self._timing.slow_start_s),
        )
        self.block_heat = BlockHeat()
        self.cluster_reuse = ClusterReuse()
        """Of all partitions, at the owner of the first."""
        self.hot_copies = HotCopies(parts, self.replication, self.block_heat, hot, limits.pace, spread=limits.spread, rng=rng)
        self._removals = RemovedKeys(self._tenants, self.members, limit=limits.kept_removals)
        self.operator_quotas = OperatorQuotas(followed.operator_quotas())
        self.audit = followed.audit
        """Of all partitions, at the owner of the first."""
        self.weights = WeightsTable(followed.each(WeightsRecord), followed.each(NamespaceRecord), now_ns=now_ns, wall_ns=wall_ns)
        """Of all partitions, at the owner of the first."""
        self.last_reads = LastReads()
        self.queries = DirectoryQueries(self._rows, self._tenants)
        self.claims = PutClaims(parts, self._reservations)
        self.pins = Pins(parts, self.queries, share_of=share_of, wall_ns=wall_ns, now_ns=now_ns)
        self.removing = BlockRemover(parts, self.queries, self._reservations, self._events, self.replication, self.targets, self._removals)
        self._scan_row = 0
        self._remember(followed, now_ns)

    def _remember(self, followed: FollowedRecords, now_ns: int) -> None:
        if followed.unknown_nodes is not None:
            self.members.load_unknown_nodes(followed.unknown_nodes)
        for record in followed.each(NodeRecord):
            self.members.remember(record, now_ns)
        for node in self.members:
            node.description = followed.description(node.info.name)
        for pin in followed.each(PinRecord):
            self.pins.load(self._tenants.of(pin.tenant), pin)
        for drain in followed.each(DrainRecord):
            self.members.set_drain(drain.name, drain.to)
        for stopped in followed.each(StoppedRecord):
            self.members.set_stopped(stopped.name)
        for node_id in self._rows.sets.node_ids():
            if self.members.get(node_id) is None:
                self._events.write_off(node_id)  # a forgotten node that blocks' records still name
        self._set_live()  # a follower takes the owner's nodes as live, for queries

    def columns(self) -> tuple[Rows, Tenants]:
        """Return the tables that contents.py copies."""
        return self._rows, self._tenants

    def grants_ahead(self) -> list[Op]:
        """Return operations that allow further generations, if needed. The first must be durable before a grant;
        later ones need no wait."""
        last = self._reservations.last_generation
        if last + GENERATIONS_AHEAD // 2 < self._granted_generation:
            return []
        self._granted_generation = last + GENERATIONS_AHEAD
        return [records.put_granted(self._granted_generation)]

    def register(
        self, info: NodeInfo, tiers: Sequence[pb.TierStatus], now_ns: int, description: Description = NO_DESCRIPTION, *, node_id: int = 0
    ) -> tuple[NodeMember, list[Op]]:
        """Register a node; return it, and operations that need no wait. See Membership.register."""
        known = self.members.named(info.name)
        was_stopping = known is not None and known.is_stopping
        same_process = known is not None and known.info.instance == info.instance
        former = known.description if known else NO_DESCRIPTION
        node, is_new = self.members.register(info, tiers, now_ns, description, node_id=node_id)
        self._events.registered(node, same_process=same_process)
        self.replication.end_orders_of_node(node.node_id)
        node.known_blocks = self._rows.sets.blocks_at(node.node_id)
        self.home_copies.heartbeat(node)
        self._set_live()
        ops = [records.put_node(info.name, node.node_id, node.removal_horizon)] if is_new else []
        if was_stopping:
            ops.append(records.delete_stopped(info.name))
        return node, ops + records.put_description(info.name, description, former)

    def forget(self, name: str) -> tuple[NodeMember, list[Op]]:
        """Forget the dead node `name`; return it, and operations. Call `horizons_written` once they are durable.

        If it returns it is a new node, and must drop its blocks. Raises InvalidArgument: no such node, or it is
        alive."""
        node, ops = self._removals.forget(name, self._reservations.last_generation)
        self._events.write_off(node.node_id)
        if node.drain:
            ops.append(records.delete_drain(name))
        if node.is_stopping:
            ops.append(records.delete_stopped(name))
        return node, ops + records.put_description(name, NO_DESCRIPTION, node.description)

    def horizons_written(self) -> list[Op]:
        """A `forget`, or a removal that `raises_horizons`, is durable; return operations that need no wait."""
        return self._removals.horizons_written()

    def describe(self, node_id: int, epoch: int, *, topology: bytes | None, transfer: bytes | None) -> list[Op]:
        """See Membership.describe; return catalog operations that need no wait."""
        node, former = self.members.describe(node_id, epoch, topology=topology, transfer=transfer)
        return records.put_description(node.info.name, node.description, former)

    def set_slow_requests(self, node_id: int, epoch: int, slow: Sequence[pb.SlowRequest]) -> None:
        """Replace the node's slowest requests. Raises StaleEpoch, InvalidArgument."""
        node = self.members.check(node_id, epoch)
        if len(slow) > MAX_SLOW:
            raise InvalidArgument(f"a node reported {len(slow)} slow requests: at most {MAX_SLOW} are allowed")
        node.slow = slow

    def stopping(self, node_id: int, epoch: int) -> list[Op]:
        """See Membership.stopping; return catalog operations that need no wait."""
        return [records.put_stopped(self.members.stopping(node_id, epoch).info.name)]

    def heartbeat(
        self,
        node_id: int,
        epoch: int,
        tiers: Sequence[pb.TierStatus],
        counters: Mapping[str, int],
        now_ns: int,
        *,
        tenants: Sequence[pb.TenantUse] = (),
    ) -> None:
        """Raises StaleEpoch: the node must register again."""
        self.members.heartbeat(node_id, epoch, tiers, counters, now_ns, tenants=tenants)
        self.home_copies.heartbeat(self.members.check(node_id, epoch))

    def set_rates(self, node_id: int, epoch: int, rates: Sequence[pb.PeerRate], now_ns: int) -> None:
        """Replace the rates at which the node received from others. Raises StaleEpoch, InvalidArgument; nothing has
        changed then."""
        node = self.members.check(node_id, epoch)
        node.rates = NodeRates(rates, ttl_ns=int(self._timing.measured_rate_ttl_s * NS_PER_S), now_ns=now_ns)

    def set_links(self, node_id: int, epoch: int, links: Sequence[pb.LinkFlow]) -> None:
        """Replace the counters of the NICs of the node's host. Raises StaleEpoch, InvalidArgument."""
        node = self.members.check(node_id, epoch)
        if len(links) > MAX_LINKS:
            raise InvalidArgument(f"a node reported {len(links)} NICs: at most {MAX_LINKS} are allowed")
        node.links = links

    def disconnected(self, node_id: int, epoch: int, now_ns: int) -> bool:
        """The node's connection broke: its blocks are unreadable until it registers again. Return True if it counts
        as dead now."""
        has_died = self.members.disconnected(node_id, epoch, now_ns)
        if has_died:
            self.replication.end_orders_of_node(node_id)
            self._set_live()
        return has_died

    def run_due(self, now_ns: int) -> list[NodeMember]:
        """Expire reservations, silent nodes, long-dead nodes and empty tenants. Return the nodes that died of
        silence."""
        self._reservations.expire(self._tenants, now_ns)
        self.replication.expire(now_ns)
        silent = self.members.expire(now_ns)
        for node in silent:
            self.replication.end_orders_of_node(node.node_id)
        if silent:
            self._set_live()
        for node in self.members.write_off(now_ns, _ns(self._timing.forget_node_s)):
            self._events.write_off(node.node_id)
        self._tenants.forget_empty()
        return silent

    def delete_unheld(self, max_rows: int) -> list[Change]:
        """Check the next `max_rows` rows and delete blocks whose holders are all forgotten; return operations that need
        no wait.

        Also drops tombstones once every known node has sent its inventory."""
        ops: list[Change] = [*self._removals.settle()]
        empty = self._rows.sets.empty
        if not empty:
            return ops
        begin = self._scan_row if self._scan_row < len(self._rows) else 0
        self._scan_row = begin + max_rows
        if empty.isdisjoint(self._rows.holders[begin : self._scan_row]):
            return ops
        end = min(self._scan_row, len(self._rows))
        for row in range(begin, end):
            if self._rows.holders[row] in empty:
                ops += self._delete_row(row)
        return ops

    def reserve(
        self,
        tenant: str,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        *,
        local_node: int = 0,
        avoid: int = 0,
        now_ns: int,
    ) -> ReserveReply:
        """Reserve keys for a put, and choose their nodes. A repeated key is BUSY, as is a block that no inventory has
        confirmed: PRESENT is a promise, and a node may have lost the block while it was disconnected.

        Raises InvalidArgument (size out of range, or too large for every node), Unavailable (no node), Full (too
        many reservations) or QuotaExceeded (too many of the tenant); nothing was reserved then."""
        if keys and not 1 <= min(sizes) <= max(sizes) <= MAX_VALUE_BYTES:
            raise InvalidArgument(f"a value is 1 to {MAX_VALUE_BYTES} bytes long")
        owner = self._tenants.lookup(tenant)
        statuses = bytearray(self.queries.presence(tenant, keys).translate(_MAY_PUT))
        wanted: dict[bytes, int] = {}
        live = self._rows.sets.live_nodes
        for index, key in enumerate(keys):
            if statuses[index] != GRANTED:
                continue
            if key in wanted or key in owner.pending or self._reservations.held(owner, key, live, now_ns):
                statuses[index] = BUSY
            else:
                wanted[key] = index
        nodes, generations = array("I", bytes(4 * len(keys))), array("Q", bytes(8 * len(keys)))
        if wanted:
            members = self.members.live()
            candidates = [node for node in members if node.node_id != avoid and node.takes_blocks]
            if not candidates and (drained := sum(bool(node.drain) for node in members)):
                raise Unavailable(f"no node is registered that could take the blocks: {drained} of {len(members)} drained")
            share = self._share_of(tenant, RESERVATIONS)
            self._grant(tenant, wanted, sizes, nodes, generations, local_node, candidates, now_ns, share)
        return ReserveReply(bytes(statuses), nodes, generations)

    def cancel(self, tenant: str, keys: Sequence[bytes], generations: Sequence[int]) -> None:
        """End these reservations; those of other generations stay."""
        for key, generation in zip(keys, generations, strict=True):
            self._reservations.end(self._tenants.lookup(tenant), key, generation)

    def plan_publish(self, node_id: int, message: Publish) -> PublishPlan:
        """See BlockEventWriter.plan. Commit the plan's operations to the catalog, then call `apply` with the plan."""
        return self._events.plan(node_id, message)

    def compare(self, node_id: int, epoch: int) -> DigestComparison:
        """Begin the comparison of the node's inventory under this registration. Raises StaleEpoch, InvalidArgument."""
        node = self.members.check(node_id, epoch)
        if node.state != SYNCING:
            raise InvalidArgument(f"node {node_id} compares an inventory that it has not begun, or has completed")
        return DigestComparison(self._parts, node)

    def drops_acknowledged(self, plan: PublishPlan) -> None:
        """See BlockEventWriter.drops_acknowledged."""
        self._events.drops_acknowledged(plan)

    def apply(self, plan: PublishPlan) -> PublishEffects:
        """See BlockEventWriter.apply."""
        return self._events.apply(plan)

    def blocks_at(self, node_id: int) -> int:
        """Return the number of blocks that list the node as a holder."""
        return self._rows.sets.blocks_at(node_id)

    def counts(self) -> DirectoryCounts:
        reserved, pinned = sum(len(tenant.reserved) for tenant in self._tenants), sum(len(tenant.pins) for tenant in self._tenants)
        return DirectoryCounts(self._rows.sets.live_blocks(), reserved, pinned)

    def grants_by_tenant(self) -> dict[str, tuple[int, int]]:
        """Return the pins and reservations of each tenant that has any."""
        return {tenant.name: (len(tenant.pins), len(tenant.reserved)) for tenant in self._tenants if tenant.pins or tenant.reserved}

    def check_integrity(self) -> None:
        """Assert that all parts agree. For tests; O(rows)."""
        self._rows.check_integrity()
        self._events.check_integrity()
        self._reservations.check_integrity(self._tenants)
        assert self._rows.sets.live_nodes == {node.node_id for node in self.members.live()}
        self._removals.check_integrity()
        self.pins.check_integrity()
        self.replication.check_integrity()
        self.hot_copies.check_integrity()
        self.record_policy.check_integrity()

    def _set_live(self) -> None:
        live = [node.node_id for node in self.members.live()]
        self._rows.sets.set_live(live)
        self.cluster_reuse.keep(live)

    def _delete_row(self, row: int) -> list[Change]:
        key = self._rows.keys[row]
        tenant = self._tenants.at(self._rows.tenant_indexes[row])
        self.record_policy.before_removal(tenant, key)
        self._rows.remove(row)
        ops = self.record_policy.ops(tenant, key)
        return ops if tenant.targets.pop(key, None) is None else [*ops, records.delete_target(tenant.prefix, key)]

    def _grant(
        self,
        tenant: str,
        wanted: dict[bytes, int],
        sizes: Sequence[int],
        nodes: "array[int]",
        generations: "array[int]",
        local_node: int,
        candidates: Sequence[NodeMember],
        now_ns: int,
        share: TenantShare | None,
    ) -> None:
        """Place and reserve the `wanted` keys (key to index), and fill their columns."""
        wanted_sizes = [sizes[index] for index in wanted.values()]
        slow_start_ns = _ns(self._timing.slow_start_s)
        placed = place(wanted_sizes, candidates, local_node=local_node, slow_start_ns=slow_start_ns, rng=self._rng, now_ns=now_ns)
        granted = self._reservations.grant(self._tenants.of(tenant), list(wanted), wanted_sizes, placed, now_ns, share=share)
        for index, node_id, generation in zip(wanted.values(), placed, granted, strict=True):
            nodes[index], generations[index] = node_id, generation
        taken: dict[int, int] = {}
        for size, node_id in zip(wanted_sizes, placed, strict=True):
            taken[node_id] = taken.get(node_id, 0) + size
        for node in candidates:
            node.reserved_bytes += taken.get(node.node_id, 0)


def _ns(seconds: float) -> int:
    return int(seconds * NS_PER_S)
