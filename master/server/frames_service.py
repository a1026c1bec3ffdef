"""The master's frames: who says them, and which part takes them (client_frames.py, nodes.py). The loop is the only caller."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from kvstore.master.catalogs.group_commit import Committer
from kvstore.master.directory.directory import Directory
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

NOTHING_SHOWN: Final = (
    "no token came, and over a Unix socket no certificate can: name the master as HOST:PORT to show the certificate, or set a token"
)
UNAUTHENTICATED_FRAMES: Final = allowed_frames(MASTER_FRAMES, UNAUTHENTICATED)


@dataclass(frozen=True, slots=True)
class MasterContactInfo:
    """Where this master can be reached, and what its Welcome says of the cluster: its name, Unix socket with its `rpc.address.socket_id`,
    and the control plane's host ("": as reached) and port."""

    name: str
    host_id: str
    unix: str
    control_host: str
    control_port: int
    partitions: int = 1
    """Of the cluster's key space."""

    def control(self, session: Session) -> str:
        """The control plane's address, for this peer."""
        return str(Address(self.control_host or session.local_host(), self.control_port))


class FramesService:
    """The transfer Handler of the master."""

    def __init__(
        self,
        master: MasterParts,
        reachable: MasterContactInfo,
        directory: Directory,
        committer: Committer,
        arrivals: RecoveryBarrier,
        *,
        master_epoch: int,
        newer: Newer,
    ) -> None:
        """`newer`: see Newer."""
        self.reachable = reachable
        self._directory = directory
        self._master_epoch = master_epoch
        self._guard = guard = master.guard
        settings = master.settings
        self.counters = dict.fromkeys(
            ("requests", "keys", "lookup_misses", "published", "compared", "commands_failed", "copies_ordered", "copies_entered")
            + ("spilled_blocks", "spilled_bytes", "hot_blocks", "hot_copies", "hot_copied_bytes"),
            0,
        )
        self.loads = master.loads
        self.links = NodeConnections(self.counters, command_timeout_s=settings.command_timeout_s)
        self.tickets: TicketService | None = None
        """None where everybody is let in."""
        if not guard.allows_anonymous:
            self.tickets = TicketService(
                self.links,
                master_epoch=master_epoch,
                holds=guard.holds,
                ticket_ttl_s=settings.ticket_ttl_s,
                key_ttl_s=settings.ticket_key_ttl_s,
            )
        owner = OwnerParts(directory, committer, self.links, self.tickets, self.counters, arrivals, master.trail, master_epoch)
        self.heartbeats = Heartbeats(owner, newer)
        self.nodes = NodeFrames(owner, self.heartbeats)
        self._causes = CopyReasons()
        self.drains = DrainCommands(owner, self.nodes)
        self._arrivals = arrivals
        self.clients = clients = ClientFrames(owner, self._causes, partial(self.make_replicas, is_tick=False))
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
            QueryVictims.TYPE: self.nodes.coldest,
            RequestCopy.TYPE: self.nodes.want,
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

    def tick(self, now_ns: int) -> None:
        """What is done without being asked, ten times a second."""
        self._arrivals.tick(now_ns)
        self.drains.tick(now_ns)
        self.make_replicas(now_ns)
        self._spill(now_ns)
        self._spread_reads(now_ns)
        if self.tickets is not None:
            self.tickets.tick(now_ns)

    def make_replicas(self, now_ns: int, *, is_tick: bool = True) -> None:
        """Order copies of what is at fewer nodes than it is to be; see Targets.step."""
        for tenant, keys, node_id, source_node_id in self._directory.targets.step(now_ns, is_tick=is_tick):
            order = partial(self.nodes.replicate, tenant, keys, node_id=node_id, source_node_id=source_node_id)
            call_within_spans(self._causes.of(tenant, keys, now_ns) if self._causes else (), order)

    def seek(self, tenant: str, keys: Sequence[bytes], *, node_id: int, source_node_id: int) -> int:
        """Have node `node_id` ask for copies of these blocks, each at the master of its partition. Fire and forget, as `replicate`, but all
        are counted: which are on their way already only those masters know."""
        for begin in range(0, len(keys), MAX_BATCH):
            part = list(keys[begin : begin + MAX_BATCH])
            self.links.say(node_id, PrefetchBlocks(self._master_epoch, tenant, source_node_id, part), Ok, lambda _is_done: None)
        return len(keys)

    def _spill(self, now_ns: int) -> None:
        """Order copies of what nodes without room would have leave next."""
        spilling = self._directory.spilling
        for tenant, keys, node_id, source_node_id in spilling.step(now_ns):
            self.nodes.replicate(tenant, keys, node_id=node_id, source_node_id=source_node_id, as_guests=True)
        self.counters["spilled_blocks"], self.counters["spilled_bytes"] = spilling.spilled_blocks, spilling.spilled_bytes

    def _spread_reads(self, now_ns: int) -> None:
        """Order copies of what is read much."""
        hot_copies = self._directory.hot_copies
        for tenant, keys, node_id, source_node_id in hot_copies.step(now_ns):
            self.nodes.replicate(tenant, keys, node_id=node_id, source_node_id=source_node_id)
        self.counters["hot_blocks"] = hot_copies.hot_blocks
        self.counters["hot_copies"], self.counters["hot_copied_bytes"] = hot_copies.copied_blocks, hot_copies.copied_bytes

    def _hello(self, session: Session, header: FrameHeader, message: Hello) -> None:
        _check_same(session.context, message)
        if message.role == ROLE_NODE:
            identity = self._guard.identify_node(message.name, message.token, node_identity(session.certified, message.name))
            node_id = self.nodes.meet(session, message, identity)
        elif message.role == ROLE_CLIENT:
            node_id = 0
            if session.is_local and not (message.token or self._guard.allows_anonymous):
                raise Unauthorized(NOTHING_SHOWN)
            identity = self._guard.identify(
                message.tenant, message.token, client_identity(session.certified, message.tenant, message.token)
            )
            session.set_tenant_load(self.loads.enter(session, message.tenant))
            known, peer = session.context, ClientPeer(message.tenant, identity, allowed_frames(MASTER_FRAMES, identity))
            if isinstance(known, ClientPeer):
                peer.reserved = known.reserved
            session.context = peer
        else:
            raise InvalidArgument(f"there is no role {message.role}")
        at = self.reachable
        session.welcome(
            header.request_id,
            Welcome(
                SERVER_MASTER, at.name, node_id, self._master_epoch, at.host_id, at.unix, at.control(session), partitions=at.partitions
            ),
            makes_hot_copies=self._directory.hot_copies.is_on,
        )


def _check_same(known: ClientPeer | NodePeer | None, message: Hello) -> None:
    """Raises Denied where the connection is another's already: what it holds, and what ends it, would be of two."""
    if isinstance(known, ClientPeer):
        is_other = message.role == ROLE_NODE or known.tenant != message.tenant
    else:
        is_other = known is not None and message.role == ROLE_CLIENT
    if known is not None and is_other:
        raise Denied(f"this connection is of {known.identity}: open another one to be somebody else")


def _refused(kind: int, peer: ClientPeer | NodePeer | None) -> KVStoreError:
    rule, name = MASTER_FRAMES[kind], MESSAGES[kind].__name__
    return denial(rule, peer.identity, name) if peer is not None else Unauthorized(f"say Hello first: {requirement(rule, name)}")
