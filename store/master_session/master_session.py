"""Sessions of a node with its masters, one per partition, from registration to the loss of the connection.

Partition 0's is first: its master reports the number of partitions and assigns the node's id, which the node sends to
the others.
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
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.config import NodeSettings
from kvstore.store.master_requests import request_master
from kvstore.store.master_session.master_link import MasterLink
from kvstore.store.node_service import NodeService
from kvstore.store.session_authenticator import SessionAuthenticator
from kvstore.store.storage import Storage

log = logging.getLogger("kvstore.store")


class SessionOwner(Protocol):
    """The node, as sessions report to it."""

    @property
    def reactor(self) -> Reactor: ...

    def synced(self) -> None:
        """A partition's master has the whole inventory."""

    def lost(self, partition: int, registration_epoch: int) -> None:
        """The connection of that registration is lost."""


class MasterSession:
    """Session of the newest registration with one partition's master. Not thread-safe: called from the node's loop."""

    def __init__(
        self,
        node: SessionOwner,
        storage: Storage,
        service: NodeService,
        authenticator: SessionAuthenticator,
        settings: NodeSettings,
        partition: int = 0,
        *,
        tracer: Tracer | None = None,
    ) -> None:
        """`service` executes the master's commands; `tracer` records spans of traced ones."""
        self._node = node
        self._reactor = node.reactor
        self._service = service
        self._replicator = storage.replicators[partition]
        self._commit_requests = storage.commit_requests
        self._commit_batcher = storage.commit_batcher
        self._replica_queue = storage.replica_queue
        self._victim_queries = storage.victim_queries
        self._authenticator = authenticator
        self._partition = partition
        self._peer_timeout_s = settings.peer_timeout_s
        self._tracer = tracer
        self._session: Session | None = None
        self._registration_epoch = self._node_id = 0
        self._replicator.on_refused = self._refused

    def begin(self, sock: socket.socket, registration: pb.RegisterReply, accepts_traces: bool) -> None:
        """Start the session over a registered connection and send the inventory. `accepts_traces`: the master accepts
        Trace messages."""
        partition, old = self._partition, self._session
        self._session = None
        if old is not None:
            old.close("a newer registration")
        enable_keepalive(sock, self._peer_timeout_s, limit_unacknowledged=True)
        session = Session(self._reactor, sock, _Commands(self._service, self._lost), tracer=self._tracer)
        session.mark_authenticated(accepts_traces=accepts_traces and self._tracer is not None)
        self._session = session
        self._registration_epoch, self._node_id = registration.registration_epoch, registration.node_id
        self._authenticator.registered(
            node_id=registration.node_id,
            master_epoch=registration.master_epoch,
            issuer=f"{registration.catalog}/{registration.master_epoch}",
            needs_tickets=registration.HasField("ticket_key"),
            partition=self._partition,
        )
        if registration.HasField("ticket_key"):
            key = registration.ticket_key
            self._authenticator.add_key(key.key_id, key.secret, age_ms=key.age_ms, partition=self._partition)
        self._service.link_up(session, registration.registration_epoch, partition)
        link = _PartitionConnection(session)
        self._replica_queue.link_up(link.report, registration.registration_epoch, partition)
        self._victim_queries.link_down(partition)
        self._victim_queries.link_up(link.query_victims, registration.registration_epoch, partition)
        self._commit_requests.link_up(link.commit, registration.registration_epoch, partition)
        self._replicator.link_up(
            link.publish,
            registration.registration_epoch,
            on_synced=self._synced,
            compare=link.compare,
            known_blocks=registration.known_blocks,
        )
        self._commit_batcher.link_up(link.commit, registration.registration_epoch, partition)

    def send_heartbeat(self, request: bytes, answered: Callable[[HeartbeatResponse | KVStoreError], None], deadline_s: float) -> None:
        """Send a heartbeat; `answered` is called once."""
        if self._session is None:
            answered(Unavailable("no link to the master"))
        else:
            request_master(self._session, Heartbeat(request), HeartbeatResponse, answered, deadline_s=deadline_s)

    def announce_stop(self, answered: Callable[[], None], deadline_s: float) -> None:
        """Announce the end of this process; `answered` is called once, even if the master is unreachable."""
        request = pb.HeartbeatRequest(node_id=self._node_id, registration_epoch=self._registration_epoch, stopped=True)
        self.send_heartbeat(request.SerializeToString(), lambda _answer: answered(), deadline_s)

    def _synced(self) -> None:
        self._service.synced(self._partition)
        self._node.synced()

    def _lost(self, session: Session) -> None:
        if session is self._session:
            self._session = None
            partition = self._partition
            self._service.link_down(partition)
            self._replicator.link_down()
            self._commit_requests.link_down(partition)
            self._commit_batcher.link_down(partition)
            self._replica_queue.link_down(partition)
            self._victim_queries.link_down(partition)
            self._node.lost(partition, self._registration_epoch)

    def _refused(self, error: KVStoreError) -> None:
        log.warning("the master refused events; reconnecting: %s", error)
        if self._session is not None:
            self._session.close(str(error))

    def close(self) -> None:
        if self._session is not None:
            self._session.close("the node stops")


class _PartitionConnection:
    """Typed requests over one connection."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def publish(self, message: Publish, answered: Callable[[KVStoreError | None], None]) -> None:
        def on_reply(reply: Ok | KVStoreError) -> None:
            if self._session.is_open:  # otherwise the link was lost, not the message refused
                answered(reply if isinstance(reply, KVStoreError) else None)

        request_master(self._session, message, Ok, on_reply)

    def compare(self, message: Digests, answered: Callable[[Flags | KVStoreError], None]) -> None:
        def on_reply(reply: Flags | KVStoreError) -> None:
            if self._session.is_open:
                answered(reply)

        request_master(self._session, message, Flags, on_reply)

    def commit(self, message: CommitBlocks, decided: Callable[[ReserveReply | KVStoreError], None]) -> None:
        request_master(self._session, message, ReserveReply, decided)

    def query_victims(self, message: QueryVictims, answered: Callable[[Flags | KVStoreError], None]) -> None:
        request_master(self._session, message, Flags, answered)

    def report(self, message: CopyResult, decided: Callable[[Flags | KVStoreError], None]) -> None:
        request_master(self._session, message, Flags, decided)


class _Commands:
    """Session handler: frames go to the service, the end of the connection to the session."""

    def __init__(self, service: NodeService, on_lost: Callable[[Session], None]) -> None:
        self.frame = service.frame
        self.payload = service.payload
        self.closed = on_lost


class MasterConnections:
    """Links and sessions of all partitions. `describe` is thread-safe; the rest is called from the node's loop."""

    def __init__(
        self,
        partition_map: PartitionMap,
        *,
        make_session: Callable[[int], MasterSession],
        make_link: Callable[[int, MasterSession], MasterLink],
        on_partitioned: Callable[[], None],
    ) -> None:
        """`on_partitioned` is called once when several partitions are known, before links to the others are made."""
        self._partition_map = partition_map
        self._make_session = make_session
        self._make_link = make_link
        self._on_partitioned = on_partitioned
        self._is_partitioned = False
        self.node_id = 0
        """Id assigned by partition 0's master; 0: none yet."""
        self._describing = threading.Lock()
        self._described: dict[str, bytes] = {}
        """Last topology and transfer description, for new links. Protected by the lock, as is `_links`."""
        self._sessions = [make_session(0)]
        self._links = [make_link(0, self._sessions[0])]

    def start(self) -> None:
        for link in self._links:
            link.start()

    def describe(self, *, topology: bytes, transfer: bytes) -> None:
        """Send a description to every master."""
        with self._describing:
            self._described = {"topology": topology, "transfer": transfer}
            for link in self._links:
                link.describe(topology=topology, transfer=transfer)

    def send_heartbeats(self) -> None:
        """Send a heartbeat to every master at once."""
        for link in self._links:
            link.describe()

    def registered(self, count: int, node_id: int) -> None:
        """Record the node id and the number of partitions; start a link for each. Raises ConfigError: the number has
        changed; RuntimeError: no thread is available. The next registration starts what is missing."""
        self._partition_map.set_count(count)
        is_other, self.node_id = node_id != self.node_id, node_id
        if count > 1 and not self._is_partitioned:
            self._on_partitioned()
            self._is_partitioned = True
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
        """Reconnect after the loss of a partition's session."""
        self._links[partition].lost(registration_epoch)

    def announce_stop(self, then: Callable[[], None], deadline_s: float) -> None:
        """Announce the end of this process to every master; call `then` once all have answered, at most after
        `deadline_s`."""
        waiting = len(self._sessions)

        def answered() -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                then()

        for session in list(self._sessions):
            session.announce_stop(answered, deadline_s)

    def stop(self) -> None:
        """Stop all links."""
        for link in self._links:
            link.stop()

    def close(self) -> None:
        for session in self._sessions:
            session.close()
