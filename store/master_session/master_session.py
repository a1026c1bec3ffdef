"""Sessions of a node with its masters, one for each partition of the key space: from registration to the loss of the connection.

Partition 0's comes first. Its master reports how many partitions there are and gives the node its id, which the node sends to the others.
"""

import logging
import socket
import threading
from collections.abc import Callable
from typing import Protocol

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import CommitBlocks, CopyResult, Digests, Heartbeat, HeartbeatResponse, Publish, QueryVictims
from kvstore.protocol.errors import KVStoreError, Unavailable
from kvstore.protocol.master_messages import ReserveReply
from kvstore.protocol.session_messages import Flags, Ok
from kvstore.rpc.keepalive import enable_keepalive
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.session import Session
from kvstore.rpc.tracing import Tracer
from kvstore.store.block_table.partitioning import Partitioning
from kvstore.store.config import NodeSettings
from kvstore.store.master_requests import ask
from kvstore.store.master_session.master_link import MasterLink
from kvstore.store.node_service import NodeService
from kvstore.store.session_authenticator import SessionAuthenticator
from kvstore.store.storage import Storage

log = logging.getLogger("kvstore.store")


class SessionOwner(Protocol):
    """The node, as the session reports to it."""

    @property
    def reactor(self) -> Reactor: ...

    def synced(self) -> None:
        """A partition's master knows the whole inventory."""

    def lost(self, partition: int, registration_epoch: int) -> None:
        """The connection of that registration is gone."""


class MasterSession:
    """One at a time; the newest registration's. Not thread-safe: the node's loop is the only caller."""

    def __init__(
        self,
        node: SessionOwner,
        storage: Storage,
        service: NodeService,
        admission: SessionAuthenticator,
        settings: NodeSettings,
        partition: int = 0,
        *,
        tracer: Tracer | None = None,
    ) -> None:
        """`service` carries out the master's commands; those that belong to a trace have spans of `tracer`."""
        self._node = node
        self._reactor = node.reactor
        self._service = service
        self._publisher = storage.publishers[partition]
        self._claims = storage.claims
        self._deciding = storage.deciding
        self._copies = storage.copies
        self._last_copies = storage.last_copies
        self._admission = admission
        self._partition = partition
        self._peer_timeout_s = settings.peer_timeout_s
        self._tracer = tracer
        self._session: Session | None = None
        self._registration_epoch = self._node_id = 0
        self._publisher.on_refused = self._refused

    def begin(self, sock: socket.socket, registration: pb.RegisterReply, accepts_traces: bool) -> None:
        """A registered connection to the master, which takes Trace messages or does not: introduce the inventory over it."""
        partition, old = self._partition, self._session
        self._session = None
        if old is not None:
            old.close("a newer registration")
        enable_keepalive(sock, self._peer_timeout_s, limit_unacknowledged=True)
        session = Session(self._reactor, sock, _Commands(self._service, self._lost), tracer=self._tracer)
        session.mark_authenticated(accepts_traces=accepts_traces and self._tracer is not None)
        self._session = session
        self._registration_epoch, self._node_id = registration.registration_epoch, registration.node_id
        self._admission.registered(
            node_id=registration.node_id,
            master_epoch=registration.master_epoch,
            issuer=f"{registration.catalog}/{registration.master_epoch}",
            needs_tickets=registration.HasField("ticket_key"),
            partition=self._partition,
        )
        if registration.HasField("ticket_key"):
            key = registration.ticket_key
            self._admission.add_key(key.key_id, key.secret, age_ms=key.age_ms, partition=self._partition)
        self._service.link_up(session, registration.registration_epoch, partition)
        link = _PartitionConnection(session)
        self._copies.link_up(link.report, registration.registration_epoch, partition)
        self._last_copies.link_down(partition)
        share = registration.spill_at_share
        self._last_copies.link_up(link.coldest, registration.registration_epoch, partition, spill_at_share=share)
        self._claims.link_up(link.claim, registration.registration_epoch, partition)
        self._publisher.link_up(
            link.publish,
            registration.registration_epoch,
            on_synced=self._synced,
            compare=link.compare,
            known_blocks=registration.known_blocks,
        )
        self._deciding.link_up(link.claim, registration.registration_epoch, partition)

    def beat(self, request: bytes, answered: Callable[[HeartbeatResponse | KVStoreError], None], deadline_s: float) -> None:
        """Send a heartbeat over the connection; `answered` is called once."""
        if self._session is None:
            answered(Unavailable("there is no link to the master"))
        else:
            ask(self._session, Heartbeat(request), HeartbeatResponse, answered, deadline_s=deadline_s)

    def stopping(self, answered: Callable[[], None], deadline_s: float) -> None:
        """Announce to the master that this process ends; `answered` is called once, also where it is not reached."""
        request = pb.HeartbeatRequest(node_id=self._node_id, registration_epoch=self._registration_epoch, stopped=True)
        self.beat(request.SerializeToString(), lambda _answer: answered(), deadline_s)

    def _synced(self) -> None:
        self._service.synced(self._partition)
        self._node.synced()

    def _lost(self, session: Session) -> None:
        if session is self._session:
            self._session = None
            partition = self._partition
            self._service.link_down(partition)
            self._publisher.link_down()
            self._claims.link_down(partition)
            self._deciding.link_down(partition)
            self._copies.link_down(partition)
            self._last_copies.link_down(partition)
            self._node.lost(partition, self._registration_epoch)

    def _refused(self, error: KVStoreError) -> None:
        log.warning("the master refused an event: %s", error)
        if self._session is not None:
            self._session.close(str(error))

    def close(self) -> None:
        if self._session is not None:
            self._session.close("the node stops")


class _PartitionConnection:
    """What is asked over one connection."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def publish(self, message: Publish, answered: Callable[[KVStoreError | None], None]) -> None:
        def on_reply(reply: Ok | KVStoreError) -> None:
            if self._session.is_open:  # else the link is lost, not the message refused
                answered(reply if isinstance(reply, KVStoreError) else None)

        ask(self._session, message, Ok, on_reply)

    def compare(self, message: Digests, answered: Callable[[Flags | KVStoreError], None]) -> None:
        def on_reply(reply: Flags | KVStoreError) -> None:
            if self._session.is_open:
                answered(reply)

        ask(self._session, message, Flags, on_reply)

    def claim(self, message: CommitBlocks, decided: Callable[[ReserveReply | KVStoreError], None]) -> None:
        ask(self._session, message, ReserveReply, decided)

    def coldest(self, message: QueryVictims, answered: Callable[[Flags | KVStoreError], None]) -> None:
        ask(self._session, message, Flags, answered)

    def report(self, message: CopyResult, decided: Callable[[Flags | KVStoreError], None]) -> None:
        ask(self._session, message, Flags, decided)


class _Commands:
    """The master's frames go to the service, the connection's end to its owner."""

    def __init__(self, service: NodeService, on_lost: Callable[[Session], None]) -> None:
        self.frame = service.frame
        self.payload = service.payload
        self.closed = on_lost


class MasterConnections:
    """`describe` may be called from any thread; the rest is for the node's loop."""

    def __init__(
        self,
        partitioning: Partitioning,
        *,
        make_session: Callable[[int], MasterSession],
        make_link: Callable[[int, MasterSession], MasterLink],
        on_cut: Callable[[], None],
    ) -> None:
        """`on_cut` is called once it is known that there are several partitions, before anything is made for the others."""
        self._partitioning = partitioning
        self._make_session = make_session
        self._make_link = make_link
        self._on_cut = on_cut
        self._is_cut = False
        self.node_id = 0
        """By which partition 0's master knows the node; 0: not yet."""
        self._describing = threading.Lock()
        self._described: dict[str, bytes] = {}
        """What masters were told last of the host's topology and of the way to the transfer engine. Under the lock, as is what links
        there are: those that come are told the newest."""
        self._sessions = [make_session(0)]
        self._links = [make_link(0, self._sessions[0])]

    def start(self) -> None:
        for link in self._links:
            link.start()

    def describe(self, *, topology: bytes, transfer: bytes) -> None:
        """Have every master told."""
        with self._describing:
            self._described = {"topology": topology, "transfer": transfer}
            for link in self._links:
                link.describe(topology=topology, transfer=transfer)

    def beat(self) -> None:
        """Have every master told at once what heartbeats tell."""
        for link in self._links:
            link.describe()

    def registered(self, count: int, node_id: int) -> None:
        """Partition 0's master knows the node by this id, and there are so many partitions: each has a link from now on. Raises
        ConfigError: there were others; RuntimeError where no thread is to be had. The next registration makes and starts what is
        missing then."""
        self._partitioning.tell(count)
        is_other, self.node_id = node_id != self.node_id, node_id
        if count > 1 and not self._is_cut:
            self._on_cut()
            self._is_cut = True
        for partition in range(len(self._links), count):
            session = self._make_session(partition)
            link = self._make_link(partition, session)
            with self._describing:
                link.describe(**self._described)
                self._links.append(link)
            self._sessions.append(session)
        for link in self._links[1:]:
            if not link.is_started:
                link.start()
            elif is_other:
                link.renew()

    def lost(self, partition: int, registration_epoch: int) -> None:
        """The session of the partition has ended."""
        self._links[partition].lost(registration_epoch)

    def stopping(self, then: Callable[[], None], deadline_s: float) -> None:
        """Announce to every master that this process ends, and call `then` once all have answered, after `deadline_s` at the latest."""
        waiting = len(self._sessions)

        def answered() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                then()

        for session in list(self._sessions):
            session.stopping(answered, deadline_s)

    def stop(self) -> None:
        """No master is looked for any more."""
        for link in self._links:
            link.stop()

    def close(self) -> None:
        for session in self._sessions:
            session.close()
