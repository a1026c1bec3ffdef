"""The node's tie to the master of a partition of the key space: registration by gRPC and heartbeats, in a thread of its own, and the
connection for frames.

The thread finds the master that owns the catalog, registers, hands the connected socket to the node's loop, and beats until the link is
lost, or another master owns the catalog; then it begins anew. A link takes the place of the one before: there are never two. The thread
owns nothing that the loop uses: everything goes over by `reactor.call`. Heartbeats go over the connection for frames.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
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
"""How often the loop, which stops, looks whether the thread has ended."""
PAUSE_SHARE = 10
"""Masters are tried again after so great a part of the time that there has been no link: whoever is elected is found soon, and masters that
stay away for long are not asked all the time."""

log = logging.getLogger("kvstore.store")


class HeartbeatReport(NamedTuple):
    """What a heartbeat reports, besides what the link knows itself. `slow` is None where the master has `slow_version`."""

    tiers: Sequence[pb.TierStatus]
    counters: Mapping[str, int]
    rates: Sequence[pb.PeerRate] = ()
    hot: Sequence[pb.HotBlocks] = ()
    tenants: Sequence[pb.TenantUse] = ()
    reads: Sequence[pb.NamespaceReads] = ()
    slow: pb.SlowTable | None = None
    slow_version: int = 0


class LinkedNode(Protocol):
    """A node as its connections to masters see it. Its methods are called in the node's loop but where they say otherwise."""

    @property
    def reactor(self) -> Reactor: ...

    @property
    def identity(self) -> NodeIdentity: ...

    def join_token(self) -> str:
        """The token as it is now. For any thread. Raises ConfigError."""

    def link_flows(self) -> list[pb.LinkFlow]:
        """What the host's NICs have carried. For any thread."""

    def node_id(self, partition: int) -> int:
        """By which id the partition's master is to know the node; 0: it chooses one. For any thread."""

    def report(self, hot_blocks: int, slow_version: int) -> HeartbeatReport:
        """With the `hot_blocks` that are read most, and slow requests unless they are those of `slow_version`."""

    def registered(self, partition: int, partitions: int, node_id: int) -> None:
        """The partition's master knows the node by this id. Raises ConfigError: the cluster has another number of partitions."""

    def take_told(self, told: pb.RegisterReply | pb.HeartbeatReply) -> None:
        """Apply quotas and retired namespaces, where the reply has any."""

    def refused(self, why: str) -> None:
        """No master takes the node, which was never registered, and has been refused for `refused_s`."""


class MasterConnection(Protocol):
    """The node's end of the connection for frames. For the node's loop."""

    def begin(self, sock: socket.socket, registration: pb.RegisterReply, accepts_traces: bool) -> None:
        """A registered connection, whose socket is given away, to a master that takes Trace messages or does not."""

    def beat(self, request: bytes, answered: Callable[[HeartbeatResponse | KVStoreError], None], deadline_s: float) -> None:
        """Send a heartbeat; `answered` is called once."""


class MasterLink:
    """See the module. `start`, `lost` and `stop` are for the node's loop, `describe` for any thread."""

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
        """With `needs_tickets` a master that lets everybody in is none for this node."""
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
        """Of calls under the present registration."""
        self._hot_asked = 0
        """How many hot blocks the next heartbeat is to report, as the master asked with the last."""
        self._slow_version = 0
        """Of the slow requests that the master has; 0: none."""
        self._quotas_version = self._retired_version = 0
        self._refused_since_ns = 0
        """0: the last answer was no refusal."""
        self._no_link_since_ns = 0
        self._seen_epoch = 0
        self._seen_catalog = ""
        self._stopping = threading.Event()
        self._lost = threading.Event()
        self._registration_epoch = 0
        self._said_id = 0
        """By which the node has registered last; 0: by none."""
        self._describing = threading.Lock()
        self._description: dict[str, bytes] = {"topology": b"", "transfer": b""}
        self._told: dict[str, bytes] = {}
        self._complaint = ""
        """Why the last heartbeat failed, "" once one is answered: logs get the changes only."""
        self._wake = threading.Event()
        name = f"master-link-{partition}" if partition else "master-link"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_started(self) -> bool:
        return self._thread.ident is not None

    def start(self) -> None:
        """Raises RuntimeError: no thread is to be had. It may be tried again."""
        self._thread.start()

    def lost(self, registration_epoch: int) -> None:
        """The connection of that registration is gone: register again, unless that is being done already."""
        if registration_epoch == self._registration_epoch:
            self._lost.set()
            self._wake.set()

    def renew(self) -> None:
        """Register again."""
        self._lost.set()
        self._wake.set()

    def describe(self, *, topology: bytes | None = None, transfer: bytes | None = None) -> None:
        """Have the master told, at once, what is given: the topology as JSON, how the node's transfer engine is reached; at most 256 KiB
        each. Before `start` they go with the registration."""
        with self._describing:
            given = {"topology": topology, "transfer": transfer}
            self._description = self._description | {name: part for name, part in given.items() if part is not None}
        self._wake.set()

    def stop(self) -> None:
        """End the thread. Serves the loop until a call under way is over, no longer than its deadline: it may be waiting for the loop."""
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
                owner = self._live_once(found)
                complaint = ""
            except (KVStoreError, grpc.RpcError) as error:
                text = error.details() if isinstance(error, grpc.Call) else str(error)
                if text != complaint and not self._stopping.is_set():  # once is enough for a master that stays away
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
        """A node that was registered before goes on trying: clients may be reading from it."""
        is_refusal = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.INVALID_ARGUMENT and not self._registration_epoch
        now_ns = self._reactor.now_ns()
        if not is_refusal:
            self._refused_since_ns = 0
        elif not self._refused_since_ns:
            self._refused_since_ns = now_ns
        elif now_ns - self._refused_since_ns >= self._settings.refused_s * 1e9:
            self._reactor.call_soon(lambda: self._node.refused(text))

    def _live_once(self, owner: Channel | None) -> Channel | None:
        """From finding the master to the loss of the link. `owner`: it has been found already. Returns that of the next link, if it has."""
        channel, place = self._search.nearest(owner or self._search.find())
        try:
            with contextlib.ExitStack() as calls:
                stub = ControlStub(calls.enter_context(open_channel(place, self._tls, grpc_options(self._settings.peer_timeout_s))))  # type: ignore[no-untyped-call]
                reply = self._register(stub)
                self._lost.clear()
                if self._node.node_id(self._partition) != self._said_id:
                    self.renew()  # for one that was asked for meanwhile, and is cleared with the loss of the former session
                self._registration_epoch = reply.registration_epoch
                self._take(reply)
                partitions = channel.welcome.partitions
                self._reactor.call(lambda: self._node.registered(self._partition, partitions, reply.node_id), deadline_s=self._timeout_s)
                channel.call(self._hello(reply.registration_epoch), Welcome, Deadline(self._timeout_s))
                begin = self._connection.begin
                self._reactor.call(lambda: begin(channel.detach(), reply, channel.accepts_traces), deadline_s=self._timeout_s)
                self._search.has_taken_us()
                log.info(
                    "registered with the master of epoch %d%s as node %d",
                    reply.master_epoch,
                    f", which owns partition {self._partition} of {partitions}," if partitions > 1 else "",
                    reply.node_id,
                    extra=named("registered", epoch=reply.master_epoch, node_id=reply.node_id),
                )
                calls.close()
                try:
                    return self._live(reply)
                finally:
                    self._no_link_since_ns = self._reactor.now_ns()
        finally:
            if channel.is_open:
                channel.close()

    def _hello(self, epoch: int = 0) -> Hello:
        """Of this node, under registration `epoch`; 0: it has none yet."""
        return Hello(ROLE_NODE, token=self._node.join_token(), name=self._node.identity.name, epoch=epoch, partition=self._partition)

    def _register(self, stub: ControlStub) -> pb.RegisterReply:
        tiers = self._reactor.call(lambda: self._node.report(0, self._slow_version), deadline_s=self._timeout_s).tiers
        identity, described, self._said_id = self._node.identity, self._description, self._node.node_id(self._partition)
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
                node_id=self._said_id,
            ),
            timeout=self._timeout_s,
            metadata=self._metadata,
        )
        if self._needs_tickets and not reply.HasField("ticket_key"):
            raise ConfigError(
                "the master has no tokens, so that this node would let in whoever reaches where it listens: give the master a tokens "
                "file, or say allow_unauthenticated at the node, too"
            )
        self._told, self._slow_version = described, 0
        self._follow(reply.catalog, reply.master_epoch)
        blocks = max((tier.blocks for tier in tiers), default=0)
        if reply.is_new and reply.removal_horizon and blocks:
            log.warning(
                "the cluster had forgotten this node (kvstore forget): the %d blocks that it holds are dropped",
                blocks,
                extra=named("forgotten", blocks=blocks),
            )
        return reply

    def _follow(self, catalog: str, epoch: int) -> None:
        """This is the node's master from now on. Raises StaleEpoch for a former owner of the same catalog."""
        if catalog == self._seen_catalog and epoch < self._seen_epoch:
            raise StaleEpoch(f"a master of epoch {epoch} answered, but one of epoch {self._seen_epoch} has spoken")
        if self._seen_catalog and catalog != self._seen_catalog:
            log.warning(
                "the master of epoch %d has another catalog (%s) than that of epoch %d (%s) before: it knows none of its pins and removals",
                *(epoch, catalog, self._seen_epoch, self._seen_catalog),
            )
        self._seen_catalog, self._seen_epoch = catalog, epoch

    def _beat(self, request: pb.HeartbeatRequest) -> "Future[pb.HeartbeatReply]":
        future: Future[pb.HeartbeatReply] = Future()

        def answered(heard: HeartbeatResponse | KVStoreError) -> None:
            if isinstance(heard, KVStoreError):
                future.set_exception(heard)
            else:
                future.set_result(pb.HeartbeatReply.FromString(heard.reply))

        said = request.SerializeToString()
        self._reactor.call(lambda: self._connection.beat(said, answered, self._timeout_s), deadline_s=self._timeout_s)
        return future

    def _live(self, registration: pb.RegisterReply) -> Channel | None:
        """Send heartbeats until the link is lost, or the master says that this registration is not the newest, or another one owns the
        catalog: the connection to that one.

        What has changed of the description goes along, again and again until the master has taken it; a change causes a heartbeat.
        """
        while True:
            self._wake.wait(registration.heartbeat_interval_s)
            self._wake.clear()
            if self._is_over():
                return None
            report = self._reactor.call(lambda: self._node.report(self._hot_asked, self._slow_version), deadline_s=self._timeout_s)
            self._hot_asked = 0
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
                quotas_version=self._quotas_version,
                retired_version=self._retired_version,
                topology=self._news(described, "topology"),
                transfer=self._news(described, "transfer"),
            )
            call = self._beat(request)
            try:
                answer = self._unless_answered(call)
            except KVStoreError as error:
                if not call.done() or isinstance(error, Fenced):  # Fenced: the registration is over
                    raise
                if not self._is_over() and str(error) != self._complaint:
                    self._complaint = str(error)
                    log.warning("a heartbeat failed: %s", error)
                answer = self._other_owner()
            else:
                self._told, self._slow_version, self._complaint = described, report.slow_version, ""
            if isinstance(answer, pb.HeartbeatReply):
                self._hot_asked = answer.hot_blocks
                self._take(answer)
            elif answer is not None:
                log.warning("%s owns the catalog now", answer.address)
                return answer

    def _news(self, described: Mapping[str, bytes], part: str) -> bytes | None:
        """A part of the description, unless the master has it."""
        return described[part] if described[part] != self._told[part] else None

    def _take(self, reply: pb.RegisterReply | pb.HeartbeatReply) -> None:
        """Hand on the master's quotas and retired namespaces where the node has others. It keeps them until a master has others."""
        if reply.HasField("quotas") or reply.HasField("retired"):
            self._reactor.call(lambda: self._node.take_told(reply), deadline_s=self._timeout_s)
        if reply.HasField("quotas"):
            self._quotas_version = reply.quotas.version
        if reply.HasField("retired"):
            self._retired_version = reply.retired.version

    def _unless_answered(self, call: Future[pb.HeartbeatReply]) -> pb.HeartbeatReply | Channel | None:
        """Wait for the answer; or a connection to another master that owns the catalog, if that is so before it comes. None: the link is
        over. Raises what the call does, and DeadlineExceeded where it does not even end at its deadline: who would tell is dead."""
        owner = None
        overdue = Deadline(self._timeout_s + OVERDUE_S)
        for wait_s in probe_delays(self._settings.owner_patience_s):
            left_s = overdue.left_s()
            try:
                return call.result(timeout=min(wait_s, left_s))
            except TimeoutError:
                if call.done():
                    raise  # it is the answer
            owner = self._other_owner()
            if owner is not None or self._is_over():
                break
        return owner

    def _other_owner(self) -> Channel | None:
        """Ask the other masters whether another one owns the catalog than that of the link."""
        return None if self._is_over() else self._search.another()

    def _is_over(self) -> bool:
        return self._lost.is_set() or self._stopping.is_set()
