"""Registration and heartbeats of a node with the master of one partition, in a thread of its own.

The thread finds the owner, registers by gRPC, hands the connected socket to the node's loop, and sends heartbeats over
it. When the link is lost or another master owns the partition, it starts over. A new link replaces the former one.

The thread shares no state with the loop: all calls go through `reactor.call`.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple, Protocol

import grpc

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.catalog_messages import HeartbeatResponse
from kvstore.protocol.control_pb2_grpc import ControlStub
from kvstore.protocol.errors import ConfigError, Fenced, KVStoreError, StaleEpoch
from kvstore.protocol.partitions import as_metadata as of_partition
from kvstore.protocol.session_messages import ROLE_NODE, Hello, Welcome
from kvstore.rpc.address import Address
from kvstore.rpc.client.channel import Channel
from kvstore.rpc.client.owners import probe_delays
from kvstore.rpc.deadline import OVERDUE_S, Deadline
from kvstore.rpc.keepalive import grpc_options
from kvstore.rpc.reactor import Reactor
from kvstore.security.grpc_metadata import as_metadata
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.grpc_credentials import open_channel
from kvstore.store.config import NodeSettings
from kvstore.store.identity import NodeIdentity
from kvstore.store.master_session.owner_search import OwnerSearch
from kvstore.telemetry.logs import named

STOP_POLL_S = 0.01
"""Interval at which the stopping loop checks if the thread has ended."""
REUSE_INTERVAL_NS = 10_000_000_000
"""Interval of reports of what eviction policies have learned. In a simulation 2 s and 60 s give no more hits."""
PAUSE_SHARE = 10
"""The pause between searches is 1/10 of the time without a link: a new owner is found soon, and unreachable masters are
not flooded."""

log = logging.getLogger("kvstore.store")


class HeartbeatReport(NamedTuple):
    """Content of a heartbeat, besides what the link adds. `slow` is None if the master has `slow_version`."""

    tiers: Sequence[pb.TierStatus]
    counters: Mapping[str, int]
    rates: Sequence[pb.PeerRate] = ()
    hot: Sequence[pb.HotBlocks] = ()
    tenants: Sequence[pb.TenantUse] = ()
    reads: Sequence[pb.NamespaceReads] = ()
    slow: pb.SlowTable | None = None
    slow_version: int = 0


class LinkedNode(Protocol):
    """The node, as its master links use it. Called in the node's loop unless stated otherwise."""

    @property
    def reactor(self) -> Reactor: ...

    @property
    def identity(self) -> NodeIdentity: ...

    def join_token(self) -> str:
        """Return the current token. Thread-safe. Raises ConfigError."""

    def link_flows(self) -> list[pb.LinkFlow]:
        """Return the traffic of the host's NICs. Thread-safe."""

    def node_id(self, partition: int) -> int:
        """Return the id under which to register with the partition's master; 0: the master assigns one. Thread-safe."""

    def report(self, hot_blocks: int, slow_version: int) -> HeartbeatReport:
        """Return the heartbeat report, with the `hot_blocks` most read blocks, and slow requests if they are newer than
        `slow_version`."""

    def registered(self, partition: int, partitions: int, node_id: int) -> None:
        """Record a registration. Raises ConfigError: the cluster has another number of partitions."""

    def reuse(self, *, is_first: bool) -> pb.ReuseReport | None:
        """Return what eviction policies have learned, None if there is nothing new. `is_first`: the master knows
        nothing yet."""

    def apply_reuse(self, answer: pb.ReuseReport) -> None:
        """Use what the policies of other nodes have learned."""

    def apply_reply(self, told: pb.RegisterReply | pb.HeartbeatReply) -> None:
        """Apply quotas and retired namespaces of a reply, if any."""

    def refused(self, why: str) -> None:
        """Handle a first registration that masters have refused for `refused_s`."""


class MasterConnection(Protocol):
    """The node's end of the frame connection. Called in the node's loop."""

    def begin(self, sock: socket.socket, registration: pb.RegisterReply, accepts_traces: bool) -> None:
        """Take over a registered connection's socket. `accepts_traces`: the master accepts Trace messages."""

    def send_heartbeat(self, request: bytes, answered: Callable[[HeartbeatResponse | KVStoreError], None], deadline_s: float) -> None:
        """Send a heartbeat; `answered` is called once."""


class MasterLink:
    """Link thread of one partition. `start`, `lost` and `stop` are called in the node's loop; `describe` is
    thread-safe."""

    def __init__(
        self,
        node: LinkedNode,
        masters: Sequence[Address],
        connection: MasterConnection,
        settings: NodeSettings,
        *,
        needs_tickets: bool,
        tls: Certificates | None = None,
        partition: int = 0,
    ) -> None:
        """With `needs_tickets` a master without authentication is refused."""
        self._node = node
        self._reactor = node.reactor
        self._connection = connection
        self._settings = settings
        self._timeout_s = settings.control_timeout_s
        self._search = OwnerSearch(
            masters, self._hello, timeout_s=self._timeout_s, patience_s=settings.owner_patience_s, tls=tls, clock_ns=self._reactor.now_ns
        )
        self._needs_tickets = needs_tickets
        self._tls = tls
        self._partition = partition
        self._metadata: tuple[tuple[str, str | bytes], ...] = ()
        """gRPC metadata of the present registration."""
        self._hot_requested = 0
        """Number of hot blocks that the last reply requested."""
        self._slow_version = 0
        """Version of the slow requests that the master has; 0: none."""
        self._quotas_version = self._retired_version = 0
        self._reuse_reported_ns = 0
        """Time of the last report of reuse to the present master; 0: none yet."""
        self._refused_since_ns = 0
        """0: the last answer was no refusal."""
        self._no_link_since_ns = 0
        self._seen_epoch = 0
        self._seen_catalog = ""
        self._stopping = threading.Event()
        self._lost = threading.Event()
        self._registration_epoch = 0
        self._registered_id = 0
        """Id of the last registration; 0: none."""
        self._describing = threading.Lock()
        self._description: dict[str, bytes] = {"topology": b"", "transfer": b""}
        self._sent_description: dict[str, bytes] = {}
        self._complaint = ""
        """Last heartbeat error, "" after a success: only changes are logged."""
        self._wake = threading.Event()
        name = f"master-link-{partition}" if partition else "master-link"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_started(self) -> bool:
        return self._thread.ident is not None

    def start(self) -> None:
        """Raises RuntimeError: no thread is available. May be retried."""
        self._thread.start()

    def lost(self, registration_epoch: int) -> None:
        """Reconnect, unless a newer registration exists."""
        if registration_epoch == self._registration_epoch:
            self._lost.set()
            self._wake.set()

    def renew(self) -> None:
        """Reconnect and register again."""
        self._lost.set()
        self._wake.set()

    def describe(self, *, topology: bytes | None = None, transfer: bytes | None = None) -> None:
        """Send a changed topology (JSON) or transfer description with a heartbeat at once; at most 256 KiB each. Before
        `start` they are part of the registration."""
        with self._describing:
            given = {"topology": topology, "transfer": transfer}
            self._description = self._description | {name: part for name, part in given.items() if part is not None}
        self._wake.set()

    def stop(self) -> None:
        """End the thread. Runs the loop until a call in progress is over, at most until its deadline, because the call
        may wait for the loop."""
        self._stopping.set()
        self._lost.set()
        self._wake.set()
        until_ns = self._reactor.now_ns() + int((self._timeout_s + 1) * 1e9)
        while self._thread.is_alive() and self._reactor.now_ns() < until_ns:
            self._reactor.run_once(STOP_POLL_S)

    def _run(self) -> None:
        complaint = ""
        self._no_link_since_ns = self._reactor.now_ns()
        owner: Channel | None = None
        while not self._stopping.is_set():
            found, owner = owner, None
            try:
                owner = self._run_session(found)
                complaint = ""
            except (KVStoreError, grpc.RpcError) as error:
                text = error.details() if isinstance(error, grpc.Call) else str(error)
                if text != complaint and not self._stopping.is_set():  # log changes only
                    log.warning("no master: %s", text, extra=named("master_lost", why=text))
                complaint = text or ""
                self._note_refusal(error, complaint)
            except Exception:
                log.exception("the link to the master failed")
            if owner is None:
                away_s = (self._reactor.now_ns() - self._no_link_since_ns) / 1e9
                self._stopping.wait(
                    max(self._settings.reconnect_interval_s, min(away_s / PAUSE_SHARE, self._settings.reconnect_max_interval_s))
                )
        if owner is not None:
            owner.close()

    def _note_refusal(self, error: KVStoreError | grpc.RpcError, text: str) -> None:
        """Stop a node that was never registered after `refused_s`. A registered one retries: clients may be reading
        from it."""
        is_refusal = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.INVALID_ARGUMENT and not self._registration_epoch
        now_ns = self._reactor.now_ns()
        if not is_refusal:
            self._refused_since_ns = 0
        elif not self._refused_since_ns:
            self._refused_since_ns = now_ns
        elif now_ns - self._refused_since_ns >= self._settings.refused_s * 1e9:
            self._reactor.call_soon(lambda: self._node.refused(text))

    def _run_session(self, owner: Channel | None) -> Channel | None:
        """Register and send heartbeats until the link is lost. `owner` is a connection to the owner, if known. Return
        that of the next owner, if known."""
        channel, control_address = self._search.prefer_unix(owner or self._search.find())
        try:
            with contextlib.ExitStack() as calls:
                stub = ControlStub(
                    calls.enter_context(open_channel(control_address, self._tls, grpc_options(self._settings.peer_timeout_s)))
                )  # type: ignore[no-untyped-call]
                reply = self._register(stub)
                self._lost.clear()
                if self._node.node_id(self._partition) != self._registered_id:
                    self.renew()  # a renew meanwhile was cleared with `_lost`
                self._registration_epoch = reply.registration_epoch
                self._apply(reply)
                partitions = channel.welcome.partitions
                self._reactor.call(lambda: self._node.registered(self._partition, partitions, reply.node_id), deadline_s=self._timeout_s)
                channel.call(self._hello(reply.registration_epoch), Welcome, Deadline(self._timeout_s))
                begin = self._connection.begin
                self._reactor.call(lambda: begin(channel.detach(), reply, channel.accepts_traces), deadline_s=self._timeout_s)
                self._search.confirm_owner()
                log.info(
                    "registered with the master of epoch %d%s as node %d",
                    reply.master_epoch,
                    f", which owns partition {self._partition} of {partitions}," if partitions > 1 else "",
                    reply.node_id,
                    extra=named("registered", epoch=reply.master_epoch, node_id=reply.node_id),
                )
                calls.close()
                try:
                    return self._send_heartbeats(reply)
                finally:
                    self._no_link_since_ns = self._reactor.now_ns()
        finally:
            if channel.is_open:
                channel.close()

    def _hello(self, epoch: int = 0) -> Hello:
        """Hello of this node under registration `epoch`; 0: not registered."""
        return Hello(ROLE_NODE, token=self._node.join_token(), name=self._node.identity.name, epoch=epoch, partition=self._partition)

    def _register(self, stub: ControlStub) -> pb.RegisterReply:
        tiers = self._reactor.call(lambda: self._node.report(0, self._slow_version), deadline_s=self._timeout_s).tiers
        identity, described, self._registered_id = self._node.identity, self._description, self._node.node_id(self._partition)
        self._metadata = *as_metadata("", self._node.join_token()), *of_partition(self._partition)
        reply: pb.RegisterReply = stub.Register(
            pb.RegisterRequest(
                name=identity.name,
                instance=identity.instance,
                version=identity.version,
                host_id=identity.host_id,
                unix=identity.unix,
                tcp=identity.tcp,
                http=identity.http,
                seen_master_epoch=self._seen_epoch,
                seen_catalog=self._seen_catalog,
                tiers=tiers,
                topology=described["topology"],
                transfer=described["transfer"],
                accepts_traces=identity.accepts_traces,
                quotas_version=self._quotas_version,
                retired_version=self._retired_version,
                node_id=self._registered_id,
            ),
            timeout=self._timeout_s,
            metadata=self._metadata,
        )
        if self._needs_tickets and not reply.HasField("ticket_key"):
            raise ConfigError(
                "the master has no tokens file, so this node would accept unauthenticated clients: give the master a tokens "
                "file, or set allow_unauthenticated on the node"
            )
        self._sent_description, self._slow_version = described, 0
        self._follow(reply.catalog, reply.master_epoch)
        blocks = max((tier.blocks for tier in tiers), default=0)
        if reply.is_new and reply.removal_horizon and blocks:
            log.warning(
                "the cluster has removed this node (kvstore forget): dropping its %d blocks",
                blocks,
                extra=named("forgotten", blocks=blocks),
            )
        return reply

    def _follow(self, catalog: str, epoch: int) -> None:
        """Record the master's epoch and catalog. Raises StaleEpoch for a former owner of the same catalog."""
        if catalog == self._seen_catalog and epoch < self._seen_epoch:
            raise StaleEpoch(f"master of epoch {epoch} refused: epoch {self._seen_epoch} was seen")
        if self._seen_catalog and catalog != self._seen_catalog:
            log.warning(
                "the master of epoch %d has another catalog (%s) than that of epoch %d (%s): pins and removals in the former are lost",
                *(epoch, catalog, self._seen_epoch, self._seen_catalog),
            )
        self._seen_catalog, self._seen_epoch = catalog, epoch

    def _heartbeat(self, request: pb.HeartbeatRequest) -> "Future[pb.HeartbeatReply]":
        future: Future[pb.HeartbeatReply] = Future()

        def answered(reply: HeartbeatResponse | KVStoreError) -> None:
            if isinstance(reply, KVStoreError):
                future.set_exception(reply)
            else:
                future.set_result(pb.HeartbeatReply.FromString(reply.reply))

        request_bytes = request.SerializeToString()
        self._reactor.call(lambda: self._connection.send_heartbeat(request_bytes, answered, self._timeout_s), deadline_s=self._timeout_s)
        return future

    def _send_heartbeats(self, registration: pb.RegisterReply) -> Channel | None:
        """Send heartbeats until the link is lost or superseded. Return a connection to another owner, if there is one.

        Changes of the description cause a heartbeat and are repeated until one is answered.
        """
        self._reuse_reported_ns = 0
        while True:
            self._wake.wait(registration.heartbeat_interval_s)
            self._wake.clear()
            if self._is_over():
                return None
            report = self._reactor.call(lambda: self._node.report(self._hot_requested, self._slow_version), deadline_s=self._timeout_s)
            self._hot_requested = 0
            reuse = self._reuse_report()
            described = self._description
            request = pb.HeartbeatRequest(
                node_id=registration.node_id,
                registration_epoch=registration.registration_epoch,
                tiers=report.tiers,
                counters=report.counters,
                rates=report.rates,
                hot=report.hot,
                links=self._node.link_flows(),
                tenants=report.tenants,
                reads=report.reads,
                slow=report.slow if not self._partition else None,
                reuse=reuse,
                quotas_version=self._quotas_version,
                retired_version=self._retired_version,
                topology=self._changed_part(described, "topology"),
                transfer=self._changed_part(described, "transfer"),
            )
            calls = [self._heartbeat(request)]
            try:
                answer = self._wait_for_reply(calls[0])
            except KVStoreError as error:
                # Taken out: a call refers to its error, whose traceback refers to this frame.
                if not calls.pop().done() or isinstance(error, Fenced):  # Fenced: the registration is over
                    raise
                if not self._is_over() and str(error) != self._complaint:
                    self._complaint = str(error)
                    log.warning("a heartbeat failed: %s", error)
                answer = self._other_owner()
            else:
                self._sent_description, self._slow_version, self._complaint = described, report.slow_version, ""
            if isinstance(answer, pb.HeartbeatReply):
                self._hot_requested = answer.hot_blocks
                self._apply(answer)
                if reuse is not None:
                    self._reactor.call(partial(self._node.apply_reuse, answer.reuse), deadline_s=self._timeout_s)
            elif answer is not None:
                log.warning("the catalog has another owner: %s", answer.address)
                return answer

    def _reuse_report(self) -> pb.ReuseReport | None:
        """Return what eviction policies have learned, if it is time for a report. Partition 0's master collects them."""
        now_ns = self._reactor.now_ns()
        if self._partition or (self._reuse_reported_ns and now_ns - self._reuse_reported_ns < REUSE_INTERVAL_NS):
            return None
        ask = partial(self._node.reuse, is_first=not self._reuse_reported_ns)
        report = self._reactor.call(ask, deadline_s=self._timeout_s)
        if report is not None:
            self._reuse_reported_ns = now_ns
        return report

    def _changed_part(self, described: Mapping[str, bytes], part: str) -> bytes | None:
        """Return a part of the description that the master does not have, else None."""
        return described[part] if described[part] != self._sent_description[part] else None

    def _apply(self, reply: pb.RegisterReply | pb.HeartbeatReply) -> None:
        """Pass newer quotas and retired namespaces to the node. They stay in force until a master has others."""
        if reply.HasField("quotas") or reply.HasField("retired"):
            self._reactor.call(lambda: self._node.apply_reply(reply), deadline_s=self._timeout_s)
        if reply.HasField("quotas"):
            self._quotas_version = reply.quotas.version
        if reply.HasField("retired"):
            self._retired_version = reply.retired.version

    def _wait_for_reply(self, call: Future[pb.HeartbeatReply]) -> pb.HeartbeatReply | Channel | None:
        """Wait for the reply. Return a connection to another owner instead if one is found first, or None if the link
        is over. Raises the call's error, and DeadlineExceeded if it does not even end at its deadline."""
        owner = None
        overdue = Deadline(self._timeout_s + OVERDUE_S)
        try:
            for wait_s in probe_delays(self._settings.owner_patience_s):
                left_s = overdue.left_s()
                try:
                    return call.result(timeout=min(wait_s, left_s))
                except TimeoutError:
                    if call.done():
                        raise  # the call's own error
                owner = self._other_owner()
                if owner is not None or self._is_over():
                    break
            return owner
        finally:
            del call  # it refers to its error, whose traceback refers to this frame

    def _other_owner(self) -> Channel | None:
        """Return a connection to another master that owns the catalog, or None."""
        return None if self._is_over() else self._search.another()

    def _is_over(self) -> bool:
        return self._lost.is_set() or self._stopping.is_set()
