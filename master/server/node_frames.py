"""Handlers of nodes' messages: published blocks, commit requests and copies. The hot path of puts.

They call the directory, and pass its operations to the committer. The loop is the only caller."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.master.audit_trail import Change
from kvstore.master.directory.membership.members import NodeMember
from kvstore.master.server.heartbeats import Heartbeats, parse
from kvstore.master.server.inventory_comparisons import InventoryComparisons
from kvstore.master.server.node_connections import Answers
from kvstore.master.server.owner_parts import OwnerParts
from kvstore.protocol.catalog_messages import (
    COPY_HOME,
    COPY_PREFETCH,
    COPY_REPLICA,
    EVENT_COMMIT,
    PHASE_STREAM,
    PHASE_SYNC_BEGIN,
    PHASE_SYNC_END,
    CommitBlocks,
    CopyBlocks,
    CopyResult,
    Digests,
    Heartbeat,
    HeartbeatResponse,
    MarkSecondary,
    Publish,
    QueryVictims,
    RequestCopy,
)
from kvstore.protocol.errors import InvalidArgument, KVStoreError, StaleEpoch, Unauthorized, Unavailable
from kvstore.protocol.frames import MAX_BATCH, MAX_VALUE_BYTES, FrameHeader
from kvstore.protocol.master_messages import ReserveReply
from kvstore.protocol.message import BUSY, GRANTED, TIER_BITS, Ints
from kvstore.protocol.partitions import PROMPT_BYTES
from kvstore.protocol.session_messages import Flags, Hello, Ok
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.session import Session
from kvstore.security.actor import CLIENT, Actor, host_of
from kvstore.security.identity import Identity
from kvstore.security.permissions import MASTER_FRAMES, allowed_frames
from kvstore.telemetry.logs import named

HOME_COPY_S: Final = 0.02
"""Delay of copies to home nodes, which forms batches. Meanwhile a full node evicts other blocks for its puts."""

log = logging.getLogger("kvstore.master")


@dataclass(frozen=True, slots=True)
class NodePeer:
    """Context of a node's session, under one registration."""

    name: str
    node_id: int
    epoch: int
    identity: Identity
    allowed: frozenset[int]
    """Frame types that it may send."""


class NodeFrames:
    """Handlers of nodes' messages. Counts `published`, `copies_ordered`, `copies_entered` and `compared` in
    `counters`."""

    def __init__(self, owner: OwnerParts, heartbeats: Heartbeats) -> None:
        """The audit trail gets the blocks that returning nodes had to drop."""
        self._directory, self._committer, self._connections, self._tickets = (
            owner.directory,
            owner.committer,
            owner.connections,
            owner.tickets,
        )
        self._counters, self._recovery_barrier, self._trail = owner.counters, owner.recovery_barrier, owner.trail
        self._heartbeats = heartbeats
        self._master_epoch = owner.master_epoch
        self._is_home_due = False
        self._comparisons = InventoryComparisons(owner.directory, owner.committer, owner.counters)

    def enter_session(self, session: Session, message: Hello, identity: Identity) -> int:
        """Enter an authenticated node's session under registration `epoch`; with epoch 0 the node only requests the
        control plane's address."""
        if not message.epoch:
            return 0
        node = self._directory.members.named(message.name)
        if node is None or node.epoch != message.epoch or not node.is_live:
            raise StaleEpoch(f"node {message.name!r} sent a Hello of registration {message.epoch}, which is over: it must register again")
        session.context = NodePeer(node.info.name, node.node_id, node.epoch, identity, allowed_frames(MASTER_FRAMES, identity))
        session.mark_authenticated(accepts_traces=node.info.accepts_traces)
        self._connections.enter(node.node_id, session)
        return node.node_id

    def publish(self, session: Session, header: FrameHeader, message: Publish) -> None:
        """Responds when durable. Publishes without operations are queued too: a response means that all before it is
        durable."""
        peer = _node(session, "publish")
        _check_prompts(message)
        if message.phase in (PHASE_SYNC_BEGIN, PHASE_SYNC_END):
            self._comparisons.end(peer.node_id)
        if message.phase == PHASE_SYNC_BEGIN and self._tickets is not None:
            self._tickets.on_inventory_begin(peer.node_id)
        self._counters["published"] += len(message.keys)
        _trace_blocks(session, header, message)
        self._directory.home_copies.published(peer.node_id, message)
        self._copy_home_soon(session.reactor)
        self._take_in(peer.node_id, message, lambda: session.reply(header.request_id, Ok()))
        if message.phase == PHASE_SYNC_BEGIN:
            self._recovery_barrier.node_connected(peer.node_id)
        elif message.phase == PHASE_SYNC_END:
            self._audit_dropped(session, peer.node_id)

    def _audit_dropped(self, session: Session, node_id: int) -> None:
        """Record in the audit trail which blocks a returning node had to drop."""
        node = self._directory.members.get(node_id)
        if node is None or not node.dropped:
            return
        why = "the node had been forgotten" if node.is_new else "they were removed while the node was unreachable"
        actor = Actor("node", node.info.name, peer=host_of(session.peer()), via=CLIENT)
        detail = f"{node.dropped:,} blocks that it held are dropped: {why}"
        self._trail.done(Change(actor, "return", f"node {node.info.name}", detail=detail))
        node.dropped = 0

    def digests(self, session: Session, header: FrameHeader, message: Digests) -> None:
        """Responds once the inventory is compared."""
        self._comparisons.take(session, header, _node(session, "compare inventories").node_id, message)

    def claim(self, session: Session, header: FrameHeader, message: CommitBlocks) -> None:
        """Reserve and publish in one. Responds when the granted blocks are durable and visible."""
        peer = _node(session, "commit blocks")
        node = self._directory.members.check(peer.node_id, message.epoch)
        _check_prompts(message)
        _trace_blocks(session, header, message)
        if not message.acknowledged:
            _check_sizes(message.sizes)
            if max(message.sizes, default=0) > node.dram_bytes:  # the node cannot hold such a block
                session.reply(header.request_id, _all_busy(len(message.keys)))
                return
        grants = self._directory.claims.claim(message, node_id=peer.node_id, now_ns=session.reactor.now_ns())
        publish = _as_publish(message, grants)
        if not message.acknowledged:
            node.reserved_bytes += sum(publish.sizes)  # until its next heartbeat counts them
        self._counters["published"] += len(publish.keys)
        self._directory.home_copies.committed(peer.node_id, message.tenant, publish.keys, sum(publish.sizes), publish.prompts)
        self._copy_home_soon(session.reactor)

        def answer() -> None:
            try:
                session.reply(header.request_id, grants)
            except Exception:  # durable commits are entered all the same; after a reconnection the inventory corrects them
                log.exception("a claim could not be answered")
                session.close("an internal error")

        # The response precedes the entry: no request is served in between, and the node continues meanwhile.
        self._take_in(peer.node_id, publish, answer, is_answered_first=True)

    def replicate(self, tenant: str, keys: Sequence[bytes], *, node_id: int, source_node_id: int, reason: int = COPY_REPLICA) -> int:
        """Have node `node_id` fetch those of the blocks that it lacks and the source holds, in the order of `keys`.
        `reason` is one of COPY_.... Return the number of newly ordered blocks. Fire and forget: results go to the
        directory, failures to the log, once a call. For the loop's thread."""
        if not keys:
            return 0
        session = self._connections.get(node_id)
        try:
            if session is None:
                raise Unavailable(f"node {node_id} has no connection to this master")
            orders = self._directory.replication.plan(
                tenant, keys, node_id=node_id, source_node_id=source_node_id, now_ns=session.reactor.now_ns(), reason=reason
            )
        except KVStoreError as error:
            log.warning("nothing is copied from node %d to node %d: %s", source_node_id, node_id, error)
            return 0
        if self._tickets is not None:
            self._tickets.stamp(orders, session.reactor.now_ns())
        ordered = sum(len(order.keys) for order in orders)
        self._counters["copies_ordered"] += ordered

        def on_answers(answers: Answers) -> None:
            for _node_id, order, flags in answers:
                assert isinstance(order, CopyBlocks)
                self._directory.replication.answered(node_id, order, flags)

        self._connections.order([(node_id, order) for order in orders], on_answers)
        return ordered

    def copied(self, session: Session, header: FrameHeader, message: CopyResult) -> None:
        """Responds at once: the catalog has these blocks already; the new holder is committed later."""
        peer = _node(session, "report copies")
        _trace_blocks(session, header, message)
        entered = self._directory.replication.enter(peer.node_id, message)
        self._counters["copies_entered"] += sum(entered.flags)
        session.reply(header.request_id, Flags(bytes(entered.flags)))
        self._committer.commit(entered.ops)
        self._connections.send(entered.commands)  # after the flags: the node enters the blocks only then
        self._copy_home_soon(session.reactor)

    def copy_home(self, now_ns: int) -> None:
        """Order copies of blocks that nearly full nodes have committed, and name the secondary copies to their nodes, and
        those that are primary again."""
        home_copies = self._directory.home_copies
        for tenant, keys, node_id, source_node_id in home_copies.step(now_ns):
            self.replicate(tenant, keys, node_id=node_id, source_node_id=source_node_id, reason=COPY_HOME)
        for is_over, marks in enumerate((home_copies.take_secondary(), home_copies.take_primary())):
            for node_id, tenant, keys in marks:
                for begin in range(0, len(keys), MAX_BATCH):
                    message = MarkSecondary(self._master_epoch, tenant, keys[begin : begin + MAX_BATCH], is_over)
                    self._connections.notify(node_id, message, Ok, lambda _is_done: None)
        self._counters["home_copies"], self._counters["home_copied_bytes"] = home_copies.copied_blocks, home_copies.copied_bytes
        for reason, blocks in home_copies.skipped_blocks.items():
            self._counters[f"home_copies_skipped_{reason}"] = blocks

    def _copy_home_soon(self, reactor: Reactor) -> None:
        """Call `copy_home` within HOME_COPY_S if it has something to do; else it is called ten times a second."""
        if self._is_home_due or not self._directory.home_copies.is_pending:
            return
        self._is_home_due = True

        def run() -> None:
            self._is_home_due = False
            self.copy_home(reactor.now_ns())

        reactor.call_later(HOME_COPY_S, run)

    def query_victims(self, session: Session, header: FrameHeader, message: QueryVictims) -> None:
        """Responds at once, from the current state."""
        peer = _node(session, "query victims")
        flags = self._directory.last_replicas.may_evict(peer.node_id, message.epoch, message.tenant, message.keys)
        session.reply(header.request_id, Flags(flags))

    def heartbeat(self, session: Session, header: FrameHeader, message: Heartbeat) -> None:
        """Responds at once."""
        peer, report = _node(session, "send heartbeats"), parse(message.request)
        if (report.node_id, report.registration_epoch) != (peer.node_id, peer.epoch):
            what = f"node {report.node_id} under registration {report.registration_epoch}"
            raise StaleEpoch(f"a heartbeat of {what} was sent over the connection of node {peer.node_id} under registration {peer.epoch}")
        reply = self._heartbeats.take(report, session.reactor.now_ns())
        session.reply(header.request_id, HeartbeatResponse(reply.SerializeToString()))

    def request_copy(self, session: Session, header: FrameHeader, message: RequestCopy) -> None:
        """Responds at once; see `replicate`."""
        peer, tenant = _node(session, "request copies"), message.tenant
        self._directory.members.check(peer.node_id, message.epoch)
        by_source = {message.source: message.keys} if message.source else self._sources_of(tenant, message.keys, peer.node_id)
        for source, keys in by_source.items():
            self.replicate(tenant, keys, node_id=peer.node_id, source_node_id=source, reason=COPY_PREFETCH)
        is_under_way = self._directory.replication.is_under_way
        session.reply(header.request_id, Flags(bytes(is_under_way(tenant, key, peer.node_id) for key in message.keys)))

    def _sources_of(self, tenant: str, keys: Sequence[bytes], node_id: int) -> dict[int, list[bytes]]:
        """Return the keys by a readable node that holds the block, in DRAM if one does; not `node_id`."""
        found: dict[int, list[bytes]] = {}
        locations, end = self._directory.queries.lookup(tenant, keys, avoid=node_id), 0
        for key, count in zip(keys, locations.replicas, strict=True):
            at, end = end, end + count
            replicas = list(zip(locations.nodes[at:end], locations.tiers[at:end], strict=True))
            if replicas:
                in_dram = [node for node, tiers in replicas if tiers & TIER_BITS["dram"]]
                found.setdefault(in_dram[0] if in_dram else replicas[0][0], []).append(key)
        return found

    def closed(self, session: Session, peer: NodePeer) -> None:
        """A node whose connection breaks is dead until it registers again, as it does after a break."""
        now_ns = session.reactor.now_ns()
        if self._connections.leave(peer.node_id, session) and self._directory.disconnected(peer.node_id, peer.epoch, now_ns):
            node = self._directory.members.get(peer.node_id)
            if node is not None:
                log_end(node, "its connection broke")

    def _take_in(self, node_id: int, message: Publish, then: Callable[[], None], *, is_answered_first: bool = False) -> None:
        """Apply a node's events. Call `then` when they are durable and visible, or with `is_answered_first` just
        before."""
        plan = self._directory.plan_publish(node_id, message)

        def on_answers(answers: Answers) -> None:
            if all(flags is not None for _node_id, _command, flags in answers):  # else they stay owed until it registers again
                self._directory.drops_acknowledged(plan)

        self._connections.command(plan.commands, on_answers)

        def durable() -> None:
            if is_answered_first:
                then()
            effects = self._directory.apply(plan)
            if effects.ops:
                self._committer.commit(effects.ops)
            self._connections.send(effects.commands)
            if not is_answered_first:
                then()

        self._committer.commit(plan.ops, durable)


def log_end(node: NodeMember, why: str) -> None:
    """Log that a node stopped, or that it counts as dead and why."""
    about: dict[str, Any] = {"node": node.info.name, "node_id": node.node_id}
    if node.is_stopping:
        log.info("node %s (%d) has stopped", node.info.name, node.node_id, extra=named("node_stopped", **about))
    else:
        log.warning("node %s (%d) counts as dead: %s", node.info.name, node.node_id, why, extra=named("node_died", **about))


def _node(session: Session, purpose: str) -> NodePeer:
    peer = session.context
    if not isinstance(peer, NodePeer):
        raise Unauthorized(f"only a registered node may {purpose}")
    return peer


def _trace_blocks(session: Session, header: FrameHeader, message: Publish | CommitBlocks | CopyResult) -> None:
    """Add the number of blocks to the request's span, if it is traced."""
    span = session.span(header.request_id)
    if span is not None:
        span.set("kvstore.blocks", len(message.keys))


def _check_sizes(sizes: Ints) -> None:
    """Raises InvalidArgument."""
    if sizes and not 1 <= min(sizes) <= max(sizes) <= MAX_VALUE_BYTES:
        raise InvalidArgument(f"a value is 1 to {MAX_VALUE_BYTES} bytes long")


def _all_busy(count: int) -> ReserveReply:
    return ReserveReply(bytes((BUSY,)) * count, [0] * count, [0] * count)


def _as_publish(claim: CommitBlocks, grants: ReserveReply) -> Publish:
    """Return the commits of the granted blocks of a commit request."""
    if grants.statuses.count(GRANTED) == len(claim.keys):  # usual
        return _commits(claim, claim.keys, claim.sizes, claim.checksums, grants.generations, claim.parents, claim.prompts)
    granted = [at for at, generation in enumerate(grants.generations) if generation]
    return _commits(
        claim,
        [claim.keys[at] for at in granted],
        [claim.sizes[at] for at in granted],
        [claim.checksums[at] for at in granted],
        [grants.generations[at] for at in granted],
        [claim.parents[at] for at in granted],
        b"".join([claim.prompts[at * PROMPT_BYTES : (at + 1) * PROMPT_BYTES] for at in granted]),
    )


def _check_prompts(message: Publish | CommitBlocks) -> None:
    if len(message.prompts) not in (0, PROMPT_BYTES * len(message.keys)):
        raise InvalidArgument(
            f"{len(message.prompts)} bytes name the prompts of {len(message.keys)} blocks: {PROMPT_BYTES} for each, or none"
        )


def _commits(
    claim: CommitBlocks, keys: list[bytes], sizes: Ints, checksums: Ints, generations: Ints, parents: list[bytes], prompts: bytes
) -> Publish:
    """Return a Publish of blocks in the requesting node's DRAM."""
    count = len(keys)
    return Publish(
        epoch=claim.epoch,
        phase=PHASE_STREAM,
        tenants=[claim.tenant],
        namespaces=[claim.namespace],
        keys=keys,
        kinds=bytes((EVENT_COMMIT,)) * count,
        tenant_indexes=[0] * count,
        namespace_indexes=[0] * count,
        sizes=sizes,
        checksums=checksums,
        generations=generations,
        tiers=bytes((TIER_BITS["dram"],)) * count,
        parents=parents,
        prompts=prompts,
    )
