"""Frames handler of a partition's owner: authenticates sessions and dispatches messages to client_frames.py and
node_frames.py. The loop is the only caller."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from kvstore.master.catalogs.group_commit import Committer
from kvstore.master.directory.directory import Directory
from kvstore.master.directory.placement.home_copies import SKIPPED
from kvstore.master.server.client_frames import ClientFrames, ClientPeer
from kvstore.master.server.copy_causes import CopyReasons
from kvstore.master.server.drain_commands import DrainCommands
from kvstore.master.server.heartbeats import Heartbeats, Newer
from kvstore.master.server.node_connections import NodeConnections
from kvstore.master.server.node_frames import NodeFrames, NodePeer
from kvstore.master.server.owner_parts import MasterParts, OwnerParts
from kvstore.master.server.recovery_barrier import RecoveryBarrier
from kvstore.master.server.tickets import TicketService
from kvstore.protocol.catalog_messages import (
    COPY_HOT,
    CommitBlocks,
    CopyResult,
    Digests,
    Heartbeat,
    PrefetchBlocks,
    Publish,
    QueryVictims,
    RequestCopy,
)
from kvstore.protocol.errors import Denied, InvalidArgument, KVStoreError, ProtocolError, Unauthorized
from kvstore.protocol.frames import MAX_BATCH, FrameHeader
from kvstore.protocol.master_messages import (
    CancelReservations,
    Exists,
    Lookup,
    MatchPrefix,
    Nodes,
    Pin,
    PinFor,
    Remove,
    RemoveMatching,
    Replicate,
    Reserve,
)
from kvstore.protocol.messages import MESSAGES
from kvstore.protocol.session_messages import ROLE_CLIENT, ROLE_NODE, SERVER_MASTER, Hello, Ok, Welcome
from kvstore.rpc.address import Address
from kvstore.rpc.server.session import Session
from kvstore.rpc.tracing import call_within_spans
from kvstore.security.identity import UNAUTHENTICATED
from kvstore.security.permissions import MASTER_FRAMES, allowed_frames, check_complete, denial, requirement
from kvstore.security.tls.subjects import client_identity, node_identity

NO_CREDENTIAL: Final = (
    "no token was sent, and a Unix socket has no certificate: use the master's HOST:PORT with a certificate, or set a token"
)
UNAUTHENTICATED_FRAMES: Final = allowed_frames(MASTER_FRAMES, UNAUTHENTICATED)


@dataclass(frozen=True, slots=True)
class MasterContactInfo:
    """Addresses of this master for its Welcome: name, Unix socket with its `rpc.address.socket_id`, and the control
    plane's host ("": the one that the peer connected to) and port."""

    name: str
    host_id: str
    unix: str
    control_host: str
    control_port: int
    partitions: int = 1
    """Of the cluster's key space."""

    def control(self, session: Session) -> str:
        """Return the control plane's address for this peer."""
        return str(Address(self.control_host or session.local_host(), self.control_port))


class FramesService:
    """Frames handler of an owner, in one epoch."""

    def __init__(
        self,
        master: MasterParts,
        reachable: MasterContactInfo,
        directory: Directory,
        committer: Committer,
        recovery_barrier: RecoveryBarrier,
        *,
        master_epoch: int,
        newer: Newer,
    ) -> None:
        """`newer`: see heartbeats.Newer."""
        self.reachable = reachable
        self._directory = directory
        self._master_epoch = master_epoch
        self._authenticator = authenticator = master.authenticator
        settings = master.settings
        self.counters = dict.fromkeys(
            ("requests", "keys", "lookup_misses", "published", "compared", "commands_failed", "copies_ordered", "copies_entered")
            + ("home_copies", "home_copied_bytes", *(f"home_copies_skipped_{reason}" for reason in SKIPPED))
            + ("hot_blocks", "hot_copies", "hot_copied_bytes")
            + ("reuse_reports", "reuse_refused"),
            0,
        )
        self.loads = master.loads
        self.connections = NodeConnections(self.counters, command_timeout_s=settings.command_timeout_s)
        self.tickets: TicketService | None = None
        """None while authentication is off."""
        if not authenticator.allows_anonymous:
            self.tickets = TicketService(
                self.connections,
                master_epoch=master_epoch,
                holds=authenticator.holds,
                ticket_ttl_s=settings.ticket_ttl_s,
                key_ttl_s=settings.ticket_key_ttl_s,
            )
        owner = OwnerParts(
            directory, committer, self.connections, self.tickets, self.counters, recovery_barrier, master.trail, master_epoch
        )
        self.heartbeats = Heartbeats(owner, newer)
        self.nodes = NodeFrames(owner, self.heartbeats)
        self._causes = CopyReasons()
        self.drains = DrainCommands(owner, self.nodes)
        self._recovery_barrier = recovery_barrier
        self.clients = clients = ClientFrames(owner, self._causes, partial(self.make_replicas, is_periodic=False))
        self._handlers: dict[int, Callable[[Session, FrameHeader, Any], None]] = {
            Hello.TYPE: self._hello,
            Lookup.TYPE: clients.lookup,
            Exists.TYPE: clients.exists,
            MatchPrefix.TYPE: clients.match_prefix,
            Reserve.TYPE: clients.reserve,
            CancelReservations.TYPE: clients.cancel,
            Remove.TYPE: clients.remove,
            RemoveMatching.TYPE: clients.remove_matching,
            Pin.TYPE: clients.pin,
            PinFor.TYPE: clients.pin_for,
            Replicate.TYPE: clients.replicate,
            Nodes.TYPE: clients.nodes,
            Publish.TYPE: self.nodes.publish,
            Digests.TYPE: self.nodes.digests,
            CommitBlocks.TYPE: self.nodes.claim,
            CopyResult.TYPE: self.nodes.copied,
            QueryVictims.TYPE: self.nodes.query_victims,
            RequestCopy.TYPE: self.nodes.request_copy,
            Heartbeat.TYPE: self.nodes.heartbeat,
        }
        check_complete(MASTER_FRAMES, self._handlers)

    def frame(self, session: Session, header: FrameHeader, body: memoryview) -> None:
        handler = self._handlers.get(header.type)
        if handler is None:
            raise ProtocolError(f"a master takes no message of type {header.type}")
        self.counters["requests"] += 1
        session.requests += 1
        peer = session.context
        if header.type not in (UNAUTHENTICATED_FRAMES if peer is None else peer.allowed):
            raise _refused(header.type, peer)
        handler(session, header, MESSAGES[header.type].unpack(body))

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> list[memoryview] | None:
        raise ProtocolError("values go to nodes, not to the master")

    def closed(self, session: Session) -> None:
        peer = session.context
        self.loads.leave(session)
        if isinstance(peer, ClientPeer):
            self.clients.closed(peer)
        elif isinstance(peer, NodePeer):
            self.nodes.closed(session, peer)

    def run_due(self, now_ns: int) -> None:
        """Periodic work, ten times a second."""
        self._recovery_barrier.run_due(now_ns)
        self.drains.run_due(now_ns)
        self.make_replicas(now_ns)
        self.nodes.copy_home(now_ns)
        self._spread_reads(now_ns)
        if self.tickets is not None:
            self.tickets.run_due(now_ns)

    def make_replicas(self, now_ns: int, *, is_periodic: bool = True) -> None:
        """Order missing replicas; see ReplicaTargets.step."""
        for tenant, keys, node_id, source_node_id in self._directory.targets.step(now_ns, is_periodic=is_periodic):
            order = partial(self.nodes.replicate, tenant, keys, node_id=node_id, source_node_id=source_node_id)
            call_within_spans(self._causes.of(tenant, keys, now_ns) if self._causes else (), order)

    def prefetch(self, tenant: str, keys: Sequence[bytes], *, node_id: int, source_node_id: int) -> int:
        """Have node `node_id` request copies of these blocks from the owners of their partitions; with a source of 0 see
        `promote`. Fire and forget, as `replicate`, but returns the number of all keys: only those masters know which are
        under way already."""
        for begin in range(0, len(keys), MAX_BATCH):
            part = list(keys[begin : begin + MAX_BATCH])
            self.connections.notify(node_id, PrefetchBlocks(self._master_epoch, tenant, source_node_id, part), Ok, lambda _is_done: None)
        return len(keys)

    def promote(self, tenant: str, keys: Sequence[bytes], *, node_id: int) -> int:
        """Have node `node_id` copy into DRAM those of its blocks that are below it, as far as the directory knows. Return
        the number of keys sent. Fire and forget."""
        cold = self._directory.queries.outside_dram(tenant, keys, node_id)
        return self.prefetch(tenant, cold, node_id=node_id, source_node_id=0)

    def _spread_reads(self, now_ns: int) -> None:
        """Order copies of hot blocks."""
        hot_copies = self._directory.hot_copies
        for tenant, keys, node_id, source_node_id in hot_copies.step(now_ns):
            self.nodes.replicate(tenant, keys, node_id=node_id, source_node_id=source_node_id, reason=COPY_HOT)
        self.counters["hot_blocks"] = hot_copies.hot_blocks
        self.counters["hot_copies"], self.counters["hot_copied_bytes"] = hot_copies.copied_blocks, hot_copies.copied_bytes

    def _hello(self, session: Session, header: FrameHeader, message: Hello) -> None:
        _check_same(session.context, message)
        if message.role == ROLE_NODE:
            identity = self._authenticator.identify_node(message.name, message.token, node_identity(session.certified, message.name))
            node_id = self.nodes.enter_session(session, message, identity)
        elif message.role == ROLE_CLIENT:
            node_id = 0
            if session.is_local and not (message.token or self._authenticator.allows_anonymous):
                raise Unauthorized(NO_CREDENTIAL)
            identity = self._authenticator.identify(
                message.tenant, message.token, client_identity(session.certified, message.tenant, message.token)
            )
            session.set_tenant_load(self.loads.enter(session, message.tenant))
            known, peer = session.context, ClientPeer(message.tenant, identity, allowed_frames(MASTER_FRAMES, identity))
            if isinstance(known, ClientPeer):
                peer.reserved = known.reserved
            session.context = peer
        else:
            raise InvalidArgument(f"unknown role {message.role} in Hello")
        at = self.reachable
        session.welcome(
            header.request_id,
            Welcome(
                SERVER_MASTER, at.name, node_id, self._master_epoch, at.host_id, at.unix, at.control(session), partitions=at.partitions
            ),
            makes_hot_copies=self._directory.hot_copies.is_on,
        )


def _check_same(known: ClientPeer | NodePeer | None, message: Hello) -> None:
    """Raise Denied if the connection belongs to another identity: its state, and its end, would be of two."""
    if isinstance(known, ClientPeer):
        is_other = message.role == ROLE_NODE or known.tenant != message.tenant
    else:
        is_other = known is not None and message.role == ROLE_CLIENT
    if known is not None and is_other:
        raise Denied(f"this connection belongs to {known.identity}: open another one for another identity")


def _refused(kind: int, peer: ClientPeer | NodePeer | None) -> KVStoreError:
    rule, name = MASTER_FRAMES[kind], MESSAGES[kind].__name__
    return denial(rule, peer.identity, name) if peer is not None else Unauthorized(f"no Hello was sent: {requirement(rule, name)}")
