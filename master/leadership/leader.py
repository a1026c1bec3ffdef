"""The owner of a partition: its directory and all services on it, for one epoch.

Made when the master is elected and ended when it is deposed; not used after that. The loop is the only caller."""

import heapq
import logging
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from kvstore.master.audit_trail import Change
from kvstore.master.catalogs.group_commit import Committer
from kvstore.master.catalogs.interface import Catalog, Op
from kvstore.master.directory.bounds import DirectoryLimits, DirectoryTiming, HotCopyLimits
from kvstore.master.directory.directory import Directory
from kvstore.master.directory.followed_records import FollowedRecords
from kvstore.master.directory.index.queries import PrefixMatches
from kvstore.master.directory.limits.quotas import share_of
from kvstore.master.directory.membership.members import NodeInfo
from kvstore.master.directory.placement.copies import CopyLimits
from kvstore.master.directory.records import Description
from kvstore.master.directory.weights import ReportedNamespace
from kvstore.master.directory.weights import named as named_weights
from kvstore.master.leadership.status_messages import node_status, retired_message
from kvstore.master.scheduling.scheduler import ClusterScheduler
from kvstore.master.server.frames_service import FramesService, MasterContactInfo
from kvstore.master.server.node_frames import log_end
from kvstore.master.server.owner_parts import MasterParts
from kvstore.master.server.recovery_barrier import RecoveryBarrier
from kvstore.master.server.time_slices import TimeSlicer
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument, KVStoreError, StaleEpoch, Unavailable
from kvstore.protocol.node_states import DEAD, SYNCING
from kvstore.protocol.partitions import partition_of
from kvstore.security.actor import Actor
from kvstore.security.quotas.limits import NamedLimits, as_message
from kvstore.security.quotas.quota import format_limits
from kvstore.telemetry.logs import named

MAX_ABSENT_NODES: Final = 1024
"""Known dead nodes; beyond this the one dead longest is forgotten, as by `kvstore forget`. After a failover or
restart, a node that has not registered counts as dead after `forget_node_s`."""
COPY_BLOCKS: Final = 4096
"""Blocks of drained nodes under way at once; as many again for replicas, for home copies, and for hot blocks."""
COPY_BYTES: Final = 256 << 20
"""Bytes of these; a larger block is copied alone."""
SCAN_ROWS: Final = 20_000
"""Rows checked in one slice of a sweep, ten slices a second."""

T = TypeVar("T")
Then = Callable[[T | KVStoreError], None]
"""Completion callback: gets the result, or the error."""

MAX_TENANTS: Final = 1000
"""Tenants in a status: those with most pins and reservations."""

log = logging.getLogger("kvstore.master")


class LastMaster(NamedTuple):
    """Master of a node's last registration: its catalog's identity ("" for none) and its epoch."""

    catalog: str
    epoch: int


def _drain_shown(to: str) -> str:
    return f"drained to {to}" if to else "takes blocks"


def _share(limit: int, count: int) -> int:
    """Return one partition's share of a cluster-wide limit, rounded up: keys are spread evenly."""
    return -(-limit // count)


class ClusterPosition(Protocol):
    """The owner's partition among all partitions, which this master owns or follows."""

    @property
    def partition(self) -> int: ...

    def prefixes(self, tenant: str, keys: Sequence[bytes]) -> PrefixMatches:
        """Return the prefixes of a prompt, over all partitions."""

    def blocks_elsewhere(self, node_id: int) -> int:
        """Return the node's blocks in other partitions; 0 unless this is partition 0, which keeps the node table."""


class LeaderRole:
    """Owner of one partition in one epoch. The loop is the only caller."""

    def __init__(
        self,
        master: MasterParts,
        catalog: Catalog,
        place: ClusterPosition,
        reachable: MasterContactInfo,
        *,
        epoch: int,
        followed: FollowedRecords,
        wall_ns: int,
    ) -> None:
        """Take over the records of `followed`. Raises Corrupt."""
        reactor, settings, quotas, trail = master.reactor, master.settings, master.quotas, master.trail
        partition = place.partition
        self.epoch = epoch
        self._partition = partition
        self._is_first = not partition
        self._trail = trail
        count = self._count = reachable.partitions
        self._reactor = reactor
        self._catalog = catalog
        self._settings = settings
        self._quotas = quotas
        self._is_ended = False
        self._durable: set[Future[Any]] = set()
        """Calls that wait for a commit."""
        limits = DirectoryLimits(
            timing=DirectoryTiming(
                settings.reserve_ttl_s,
                settings.node_ttl_s,
                settings.slow_start_s,
                settings.forget_node_s,
                settings.measured_rate_ttl_s,
                settings.repair_after_s,
            ),
            nodes=settings.max_nodes,
            absent_nodes=MAX_ABSENT_NODES,
            kept_removals=_share(settings.max_kept_removals, count),
            reservations=_share(settings.max_reservations, count),
            pace=CopyLimits(_share(COPY_BLOCKS, count), _share(COPY_BYTES, count), SCAN_ROWS),
            home_copy_bytes_per_s=settings.home_copy_rate,
            spread=HotCopyLimits(settings.hot_copies, settings.hot_reads_per_s),
            recorded=settings.records,
        )
        if count > 1:
            followed.rows.is_elsewhere = lambda key: partition_of(key, count) != partition
        self.directory = Directory(
            epoch,
            followed,
            limits,
            wall_ns=wall_ns,
            now_ns=reactor.now_ns(),
            rng=random.Random(),
            share_of=lambda tenant, limit: share_of(quotas.now.of(tenant), limit, count),
        )
        if self._is_first:
            quotas.overlay(self.directory.operator_quotas.tenants)
        self._committer = Committer(reactor, catalog)
        self._recovery_barrier = RecoveryBarrier(
            self.directory, reactor.now_ns() + int(settings.takeover_wait_s * 1e9), place.blocks_elsewhere
        )
        self.frames = FramesService(
            master, reachable, self.directory, self._committer, self._recovery_barrier, master_epoch=epoch, newer=self.newer
        )
        self.frames.loads.set_quotas(quotas.now)
        self.scheduling = ClusterScheduler(
            settings,
            self.directory,
            replicate=self.frames.nodes.replicate if count == 1 else self.frames.prefetch,
            promote=self.frames.promote,
            wall_ns=wall_ns,
            prefixes=place.prefixes if count > 1 else None,
        )

    def begin(self, then: Callable[[], None]) -> None:
        """Call `then` when the generations to be granted are durable: the owner may serve then."""
        self._committer.commit(self.directory.grants_ahead(), then)

    def end(self, why: KVStoreError) -> None:
        """Commit nothing more for this epoch, and fail waiting calls with Unavailable."""
        self._is_ended = True
        self._committer.end()
        self._recovery_barrier.end(str(why))
        self.frames.heartbeats.end(why)
        for waiting in self._durable:
            waiting.set_exception(Unavailable(f"this master owns the catalog no longer: {why}"))
        self._durable.clear()

    def connected_nodes(self) -> int:
        """Return the number of nodes with a connection to this master."""
        return len(self.frames.connections)

    def run_due(self) -> None:
        """Expire nodes, instances and pins, and sweep rows."""
        now_ns = self._reactor.now_ns()
        for node in self.directory.run_due(now_ns):
            log_end(node, f"it was silent for {self._settings.node_ttl_s:g} s")
        for node in self.directory.members.excess_dead():
            log.warning(
                "node %s is forgotten: more than %d nodes are away",
                node.info.name,
                MAX_ABSENT_NODES,
                extra=named("node_forgotten", node=node.info.name, why="too many are away"),
            )
            self._forget(node.info.name, lambda: None)
        for name in self.scheduling.run_due(now_ns):
            log.warning(
                "instance %s is silent for %g s and gets no more requests",
                name,
                self._settings.instance_ttl_s,
                extra=named("instance_died", instance=name),
            )
        self.frames.loads.set_quotas(self._quotas.now)
        self.frames.run_due(now_ns)
        self.frames.clients.expire_pins(now_ns)
        changes = [*self.directory.delete_unheld(SCAN_ROWS), *self.directory.grants_ahead()]
        if self._is_first:
            changes += self.directory.weights.expire(now_ns)
        if changes:
            self._committer.commit(changes)

    def register(
        self,
        info: NodeInfo,
        tiers: Sequence[pb.TierStatus],
        seen: LastMaster,
        description: Description,
        quotas_version: int = 0,
        retired_version: int = 0,
        *,
        node_id: int = 0,
    ) -> pb.RegisterReply:
        """Register a node. `node_id` was assigned by partition 0; it is 0 at partition 0 itself.

        Raises StaleEpoch (the node was registered with a later owner), InvalidArgument (`node_id` is missing,
        unexpected or another node's), and what Directory.register raises."""
        tickets, now_ns = self.frames.tickets, self._reactor.now_ns()
        if bool(node_id) is self._is_first:
            raise InvalidArgument("partition 0 assigns node ids: register there without one, and with it at other partitions")
        if seen.catalog == self._catalog.identity and seen.epoch > self.epoch:
            raise StaleEpoch(f"this master is of epoch {self.epoch}, but node {info.name!r} was registered at epoch {seen.epoch}")
        if node_id:
            self._forget_conflicting(info, node_id, now_ns)
        node, changes = self.directory.register(info, list(tiers), now_ns, description, node_id=node_id)
        self._committer.commit(changes)
        log.info(
            "node %s is node %d, at %s",
            info.name,
            node.node_id,
            info.tcp,
            extra=named("node_registered", node=info.name, node_id=node.node_id, at=info.tcp),
        )
        quotas, retired = self.newer(quotas_version, retired_version)
        return pb.RegisterReply(
            node_id=node.node_id,
            registration_epoch=node.epoch,
            master_epoch=self.epoch,
            catalog=self._catalog.identity,
            heartbeat_interval_s=self._settings.heartbeat_interval_s,
            ticket_key=tickets.key_for(node.node_id, now_ns) if tickets is not None else None,
            quotas=quotas,
            retired=retired,
            known_blocks=node.known_blocks,
            removal_horizon=node.removal_horizon,
            is_new=node.is_new,
        )

    def _forget_conflicting(self, info: NodeInfo, node_id: int, now_ns: int) -> None:
        """Forget another node with this id, and this node's former id, as partition 0 has done. Raises
        InvalidArgument if either is live in another process."""
        members = self.directory.members
        for known in (members.named(info.name), members.get(node_id)):
            if known is None or (known.info.name, known.node_id) == (info.name, node_id):
                continue
            if known.is_live and known.info.instance == info.instance:
                self.directory.disconnected(known.node_id, known.epoch, now_ns)
            self._forget(known.info.name, lambda: None)

    def newer(self, quotas_version: int, retired_version: int) -> tuple[pb.Quotas | None, pb.RetiredNamespaces | None]:
        """See heartbeats.Newer."""
        if not self._is_first:
            return None, None
        quotas, retired = self._quotas, self.directory.weights.retired
        return (
            None if quotas_version == quotas.version else as_message(quotas.now, quotas.version),
            None if retired_version == retired.version else retired_message(retired),
        )

    def show(self, reply: pb.StatusReply) -> None:
        """Fill in the cluster's state, which only an owner has."""
        directory, now_ns, counts = self.directory, self._reactor.now_ns(), self.directory.counts()
        reply.epoch = self.epoch
        reply.blocks, reply.reserved, reply.pinned = counts.blocks, counts.reserved, counts.pinned
        reply.nodes.extend(
            node_status(node, directory.blocks_at(node.node_id), directory.drains.progress(node), now_ns) for node in directory.members
        )
        expects_nodes = self._recovery_barrier.expects_nodes(now_ns)
        for node in reply.nodes:
            node.counters["home_copies_skipped"] = directory.home_copies.skipped_at[node.node_id]
            if expects_nodes and node.state == DEAD and not node.heartbeat_age_s:  # never heard by this owner: not yet dead
                node.state = SYNCING
        reply.counters.update(self.frames.counters)
        reply.quotas.CopyFrom(as_message(self._quotas.now, self._quotas.version))
        for tenant, origins in self._quotas.origins().items():
            reply.quota_origins[tenant].CopyFrom(pb.QuotaOrigins(operator=sorted(origins.operator), file=sorted(origins.file)))
        reply.grants.extend(self._grants())

    def _grants(self) -> Iterator[pb.TenantGrants]:
        """Yield each tenant's pins, reservations, requests and connections."""
        loads, grants_by_tenant = self.frames.loads, self.directory.grants_by_tenant()
        for tenant in heapq.nlargest(
            MAX_TENANTS, grants_by_tenant.keys() | loads.tenants(), key=lambda name: sum(grants_by_tenant.get(name, (0, 0)))
        ):
            (pins, reservations), (connections, requests) = grants_by_tenant.get(tenant, (0, 0)), loads.of(tenant)
            yield pb.TenantGrants(tenant=tenant, pins=pins, reservations=reservations, requests_in_flight=requests, connections=connections)

    def forget(self, name: str, by: Actor) -> "Future[None]":
        """Forget a dead node. The future is done when that is durable; Unavailable if the epoch ends. Raises
        InvalidArgument."""

        def begin(then: Then[None]) -> None:
            self._forget(name, lambda: then(None))

        return self._of_node(begin, Change(by, "forget", f"node {name}", self._known(name)))

    def drain(self, name: str, to: str, by: Actor) -> "Future[None]":
        """See DrainCommands.drain. The future is done when that is durable; Unavailable if the epoch ends. Raises
        InvalidArgument."""

        def begin(then: Then[None]) -> None:
            self.frames.drains.drain(name, to, lambda: then(None))

        node = self.directory.members.named(name)
        return self._of_node(begin, Change(by, "drain", f"node {name}", _drain_shown(node.drain if node else ""), _drain_shown(to)))

    def _of_node(self, begin: Callable[[Then[None]], None], change: Change) -> "Future[None]":
        """A change of a node. Operators' calls apply it to partition 0 last, which records it in the audit trail."""
        return self._audited(begin, change) if self._is_first else self._promise(begin)

    def _known(self, name: str) -> str:
        """Return state and number of blocks of a node, for the audit trail."""
        node = self.directory.members.named(name)
        return f"{node.state}, {self.directory.blocks_at(node.node_id):,} blocks" if node is not None else ""

    def set_quota(self, tenant: str, limits: NamedLimits, by: Actor) -> "Future[None]":
        """See OperatorQuotas.set. In force at once; the future is done when it is durable, Unavailable if the epoch
        ends. Raises InvalidArgument, Full."""
        return self._change_quota(tenant, limits, lambda: self.directory.operator_quotas.set(tenant, limits), Change(by, "quota_set"))

    def clear_quota(self, tenant: str, names: Collection[str], by: Actor) -> "Future[None]":
        """See OperatorQuotas.clear; as `set_quota`."""
        changed = names or self.directory.operator_quotas.tenants.get(tenant, {})
        return self._change_quota(tenant, changed, lambda: self.directory.operator_quotas.clear(tenant, names), Change(by, "quota_clear"))

    def _change_quota(self, tenant: str, names: Collection[str], write: Callable[[], Sequence[Op]], change: Change) -> "Future[None]":
        """`names` are the limits that change."""

        def begin(then: Then[None]) -> None:
            ops = write()
            self._quotas.overlay(self.directory.operator_quotas.tenants)
            self._committer.commit(ops, lambda: then(None))

        def shown() -> str:
            return format_limits(self._quotas.now.of(tenant), names)

        change = replace(change, target=f"tenant {tenant or '(none)'}", old=shown())
        return self._audited(begin, change, lambda _result: replace(change, new=shown()))

    def report_weights(self, request: pb.WeightsReport) -> None:
        """See WeightsTable.report and leave; durable soon. Raises InvalidArgument, Full."""
        table, now_ns = self.directory.weights, self._reactor.now_ns()
        if request.ends:
            changes = table.leave(request.tenant, request.engine)
        else:
            namespaces = [ReportedNamespace(one.id, one.form) for one in request.namespaces]
            changes = table.report(request.tenant, request.engine, request.base, request.version, namespaces, now_ns)
        if changes:
            self._committer.commit(changes)

    def retire_weights(self, tenant: str, base: str, version: str, by: Actor) -> "Future[int]":
        """See WeightsTable.retire. The future has the number of rows, once durable. Raises InvalidArgument."""

        def begin(then: Then[int]) -> None:
            count, changes = self.directory.weights.retire(tenant, base, version)
            self._committer.commit(changes, lambda: then(count))

        change = Change(by, "weights_retire", f"weights {named_weights(base, version)} of tenant {tenant or '(none)'}")
        return self._audited(begin, change, lambda count: replace(change, detail=f"{count:,} versions"))

    def pin_all(self, tenant: str, namespace: str, by: Actor, *, pinned: bool) -> "Future[int]":
        """Pin or unpin the blocks of a namespace, once the recovery barrier has passed. The future has their number
        once durable; Unavailable if the epoch ends, QuotaExceeded beyond the tenant's limit."""

        def begin(then: Then[int]) -> None:
            pin_all = self.frames.clients.pin_all
            self._recovery_barrier.run_when_recovered(lambda: pin_all(tenant, namespace, pinned=pinned, slicer=self._slicer(), then=then))

        return self._of_blocks(begin, Change(by, "pin" if pinned else "unpin", self._space(tenant, namespace)))

    def remove_all(self, tenant: str, namespace: str, by: Actor) -> "Future[int]":
        """Remove the unpinned blocks of a namespace. The future has the number of removed ones, as `pin_all`."""

        def begin(then: Then[int]) -> None:
            remove_all = self.frames.clients.remove_all
            self._recovery_barrier.run_when_recovered(
                lambda: remove_all(tenant, namespace, "*", is_forced=False, slicer=self._slicer(), then=then)
            )

        return self._of_blocks(begin, Change(by, "remove", self._space(tenant, namespace)))

    def _of_blocks(self, begin: Callable[[Then[int]], None], change: Change) -> "Future[int]":
        return self._audited(begin, change, lambda count: replace(change, detail=f"{count:,} blocks"))

    def _space(self, tenant: str, namespace: str) -> str:
        """Return a namespace's description for the audit trail. Each partition records its own part."""
        part = f", partition {self._partition}" if self._count > 1 else ""
        return f"namespace {namespace or '(none)'} of tenant {tenant or '(none)'}{part}"

    def slow_requests(self) -> Iterator[pb.SlowRequest]:
        """Slow requests at nodes, from their heartbeats; for partition 0."""
        for node in self.directory.members:
            for slow in node.slow:
                yield pb.SlowRequest(
                    tenant=slow.tenant,
                    operation=slow.operation,
                    duration_us=slow.duration_us,
                    time_s=slow.time_s,
                    at=node.info.name,
                    peer=slow.peer,
                )

    def record_audit(self, entries: Sequence[pb.AuditEntry]) -> bool:
        """Add entries to the audit trail of partition 0; durable soon. Return False if the epoch has ended."""
        if not self._is_ended:
            self._committer.commit([op for entry in entries for op in self.directory.audit.add(entry)])
        return not self._is_ended

    def _slicer(self) -> TimeSlicer:
        return TimeSlicer(self._reactor.call_soon, lambda: not self._is_ended)

    def _audited(self, begin: Callable[[Then[T]], None], change: Change, outcome: Callable[[T], Change] | None = None) -> "Future[T]":
        """As `_promise`; the audit trail gets the change with its result, which `outcome` adds to it."""

        def ended(done: "Future[T]") -> None:
            error = done.exception()
            if error is not None:
                self._trail.failed(change, error)
            else:
                self._trail.done(outcome(done.result()) if outcome is not None else change)

        try:
            promise = self._promise(begin)
        except KVStoreError as error:
            self._trail.failed(change, error)
            raise
        promise.add_done_callback(ended)
        return promise

    def _promise(self, begin: Callable[[Then[T]], None]) -> "Future[T]":
        """Return a future that the callback given to `begin` completes."""
        durable: Future[T] = Future()

        def then(result: T | KVStoreError) -> None:
            if durable not in self._durable:
                return
            self._durable.discard(durable)
            if isinstance(result, KVStoreError):
                durable.set_exception(result)
            else:
                durable.set_result(result)

        self._durable.add(durable)
        try:
            begin(then)
        except KVStoreError:
            self._durable.discard(durable)
            raise
        return durable

    def _forget(self, name: str, then: Callable[[], None]) -> None:
        node, changes = self.directory.forget(name)
        self.frames.connections.forget(node.node_id)
        if self.frames.tickets is not None:
            self.frames.tickets.forget(node.node_id)

        def durable() -> None:
            self._committer.commit(self.directory.horizons_written())
            then()

        self._committer.commit(changes, durable)
