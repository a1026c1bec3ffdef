"""The master's control plane: registration, status and key listing by gRPC (kvstore.v1), with health and reflection.

gRPC's threads hold no state: each call is carried into the loop's thread and its result or typed error back.
"""

import functools
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvstore.master.callers import Callers
from kvstore.master.config import MasterSettings
from kvstore.master.control_limits import UnauthenticatedConnections
from kvstore.master.directory.membership.members import NodeInfo
from kvstore.master.directory.records import TO_PEERS, Description
from kvstore.master.directory.weights import REPORT_S
from kvstore.master.grpc_calls import abort, in_loop
from kvstore.master.health import MasterHealth
from kvstore.master.leadership.contents_messages import contents
from kvstore.master.leadership.leader import LastMaster, LeaderRole
from kvstore.master.leadership.role_manager import RoleManager
from kvstore.master.leadership.status_messages import as_seen_by, node_topology, table_messages
from kvstore.master.server.owner_parts import MasterParts
from kvstore.master.sessions import PeerSessions, token_tables
from kvstore.master.status import MasterStatus
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import (
    ControlServicer,
    SchedulerServicer,
    add_ControlServicer_to_server,
    add_SchedulerServicer_to_server,
)
from kvstore.protocol.errors import CatalogUnavailable, ConfigError, Denied, InvalidArgument, KVStoreError, Unavailable
from kvstore.protocol.partitions import from_metadata
from kvstore.rpc.address import Address
from kvstore.security.identity import Identity, IdentityKind
from kvstore.security.permissions import RPCS, check_complete
from kvstore.security.tls.grpc_credentials import add_port

T = TypeVar("T")
log = logging.getLogger("kvstore.master")

OURS: Final = tuple(service.full_name for service in pb.DESCRIPTOR.services_by_name.values())
METHODS: Final = tuple(
    f"/{service.full_name}/{method.name}"
    for file in (pb.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
)
"""All that is served, by gRPC's names."""
LIST_ROWS: Final = 4096
"""Rows of the directory looked at for one message of a listing: it fits gRPC's 4 MiB whatever the keys, and takes a millisecond."""

AUDIT_ENTRIES: Final = 256
"""Of one message; with texts of 512 bytes it fits gRPC's 4 MiB."""
DOOR_THREADS: Final = 2
"""They look who calls, and never wait."""
MAX_STREAMS: Final = 128
"""Calls of one connection at once; further ones wait at their caller."""
IDLE_MS: Final = 300_000
"""A connection without a call for so long is closed; whoever wants to call again makes another one by himself."""

STRANGERS_INTERVAL_S: Final = 1.0
"""How often connections are looked at where there are many."""
CONSOLE_ACTION_TIMEOUT_S: Final = 30.0
"""An action of the console is answered after this, done or not; it continues."""
IT_GOES_ON: Final = "it has begun and takes long, or the catalog takes no writes now; it goes on"
OUTLIVES_LATER: Final = "it is so, and outlives the master once the catalog takes writes again"


class ControlService(ControlServicer):
    """Implements kvstore.v1.Control. A call's metadata says which partition it is about (protocol/partitions.py)."""

    def __init__(self, master: MasterParts, status: MasterStatus, callers: Callers, sessions: PeerSessions) -> None:
        self._reactor = master.reactor
        self._standings = [partition.standing for partition in status.partitions]
        self._status = status
        self._callers = callers
        self._sessions = sessions
        self._timeout_s = master.settings.control_timeout_s
        self._action_timeout_s = CONSOLE_ACTION_TIMEOUT_S
        """For what is done with all blocks of a namespace."""

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterReply:  # noqa: N802
        said = request
        info = NodeInfo(said.name, said.instance, said.version, said.host_id, said.unix, said.tcp, said.http, said.takes_traces)
        description = Description(request.topology, request.transfer)
        seen = LastMaster(request.seen_catalog, request.seen_master_epoch)

        def register() -> pb.RegisterReply:
            _check_name(self._callers.identify(context), request.name)
            leading = self._standing(context).leading()
            return leading.register(
                info, request.tiers, seen, description, request.quotas_version, request.retired_version, node_id=request.node_id
            )

        return self._in_loop(context, register)

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:  # noqa: N802
        def status() -> pb.StatusReply:
            partition = from_metadata(context.invocation_metadata(), len(self._standings))
            return as_seen_by(self._callers.identify(context), self._status.of(self._status.partitions[partition]))

        return self._in_loop(context, status)

    def Topologies(self, request: pb.TopologiesRequest, context: grpc.ServicerContext) -> Iterator[pb.NodeTopology]:  # noqa: N802
        def found() -> list[pb.NodeTopology]:
            members = self._standing(context).answering().directory.members
            nodes = [node for node in members if request.node in ("", node.info.name)]
            if request.node and not nodes:
                known = ", ".join(sorted(node.info.name for node in members)) or "none"
                raise InvalidArgument(f"there is no node {request.node!r}; there are: {known}")
            now_ns = self._reactor.now_ns()
            return [node_topology(node, now_ns) for node in nodes]

        yield from self._in_loop(context, found)

    def Forget(self, request: pb.ForgetRequest, context: grpc.ServicerContext) -> pb.ForgetReply:  # noqa: N802
        """Answered when it is durable: a master that restarts has forgotten the node too."""
        by = self._callers.actor(context)
        durable = self._in_loop(context, lambda: self._standing(context).leading().forget(request.node, by))
        self._wait(context, durable, f"node {request.node!r} is forgotten for good once the catalog takes writes again")
        return pb.ForgetReply()

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainReply:  # noqa: N802
        """Answered when it is durable; how far it is shows in the node's status."""
        to, by = "" if request.cancel else request.to or TO_PEERS, self._callers.actor(context)
        durable = self._in_loop(context, lambda: self._standing(context).leading().drain(request.node, to, by))
        self._wait(context, durable, OUTLIVES_LATER)
        return pb.DrainReply()

    def SetQuota(self, request: pb.SetQuotaRequest, context: grpc.ServicerContext) -> pb.SetQuotaReply:  # noqa: N802
        """Answered when it is durable."""
        by = self._callers.actor(context)

        def begin() -> "Future[None]":
            if twice := sorted(set(request.limits) & set(request.unlimited)):
                raise InvalidArgument(f"{', '.join(twice)}: either a limit or none")
            return self._standing(context).leading().set_quota(request.tenant, {**request.limits, **dict.fromkeys(request.unlimited)}, by)

        self._wait(context, self._in_loop(context, begin), OUTLIVES_LATER)
        return pb.SetQuotaReply()

    def ClearQuota(self, request: pb.ClearQuotaRequest, context: grpc.ServicerContext) -> pb.ClearQuotaReply:  # noqa: N802
        """Answered when it is durable."""
        by = self._callers.actor(context)
        durable = self._in_loop(context, lambda: self._standing(context).leading().clear_quota(request.tenant, request.names, by))
        self._wait(context, durable, OUTLIVES_LATER)
        return pb.ClearQuotaReply()

    def ListKeys(self, request: pb.ListKeysRequest, context: grpc.ServicerContext) -> Iterator[pb.ListKeysReply]:  # noqa: N802
        """A slice of the directory at a time: the loop serves others in between."""

        def begin() -> tuple[LeaderRole, Iterator[list[tuple[bytes, int, str]]]]:
            if self._check_tenant(context, request).kind is IdentityKind.OPERATOR and not request.tenant:
                raise InvalidArgument("an operator has no keys: name the tenant whose keys to list (--tenant NAME)")
            leading = self._standing(context).answering()
            return leading, leading.directory.queries.list_keys(
                request.tenant, None if request.any_namespace else request.namespace, slice_rows=LIST_ROWS
            )

        leading, slices = self._in_loop(context, begin)

        def proceed() -> list[tuple[bytes, int, str]] | None:
            if self._standing(context).answering() is not leading:
                raise Unavailable("this master has lost the catalog and won it again meanwhile: list once more")
            return next(slices, None)

        left = request.limit or None
        while context.is_active() and (found := self._in_loop(context, proceed)) is not None:
            found = found[:left]
            if found:
                yield pb.ListKeysReply(
                    keys=[key for key, _, _ in found], sizes=[size for _, size, _ in found], namespaces=[name for _, _, name in found]
                )
            if left is not None:
                left -= len(found)
                if not left:
                    return

    def Contents(self, request: pb.ContentsRequest, context: grpc.ServicerContext) -> pb.ContentsReply:  # noqa: N802
        """A slice of the directory at a time, too; an operator is told of all tenants."""
        identity = self._in_loop(context, lambda: self._check_tenant(context, request))
        tenant = None if identity.operates else request.tenant
        ask = functools.partial(self._in_loop, context)
        return contents(ask, self._standings, tenant, request, now_ns=self._reactor.now_ns)

    def ReportWeights(self, request: pb.WeightsReport, context: grpc.ServicerContext) -> pb.WeightsReply:  # noqa: N802
        """Answered at once: what it changes is durable soon."""

        def report() -> None:
            identity = self._callers.identify(context)
            if not identity.is_tenant(request.tenant):
                raise Denied(f"{identity} may not report weights of tenant {request.tenant!r}: it needs a token of that tenant")
            self._standing(context).leading().report_weights(request)

        self._in_loop(context, report)
        return pb.WeightsReply(report_interval_s=REPORT_S)

    def Weights(self, request: pb.WeightsRequest, context: grpc.ServicerContext) -> Iterator[pb.WeightsTable]:  # noqa: N802
        """An operator is told of all tenants."""

        def table() -> list[pb.WeightsTable]:
            tenant = None if self._check_tenant(context, request).operates else request.tenant
            return table_messages(self._standing(context).answering().directory.weights, tenant, self._reactor.now_ns())

        yield from self._in_loop(context, table)

    def RetireWeights(self, request: pb.RetireWeightsRequest, context: grpc.ServicerContext) -> pb.RetireWeightsReply:  # noqa: N802
        """Answered when it is durable."""
        by = self._callers.actor(context)
        begin = self._in_loop(
            context, lambda: self._standing(context).leading().retire_weights(request.tenant, request.base, request.version, by)
        )
        return pb.RetireWeightsReply(versions=self._wait(context, begin, OUTLIVES_LATER))

    def PinNamespace(self, request: pb.PinNamespaceRequest, context: grpc.ServicerContext) -> pb.PinNamespaceReply:  # noqa: N802
        """Answered when it is durable."""
        tenant, namespace, pinned, by = request.tenant, request.namespace, request.pinned, self._callers.actor(context)
        durable = self._in_loop(context, lambda: self._standing(context).leading().pin_all(tenant, namespace, by, pinned=pinned))
        return pb.PinNamespaceReply(blocks=self._wait(context, durable, IT_GOES_ON, self._action_timeout_s))

    def RemoveNamespace(self, request: pb.RemoveNamespaceRequest, context: grpc.ServicerContext) -> pb.RemoveNamespaceReply:  # noqa: N802
        """Answered when it is durable."""
        by = self._callers.actor(context)
        durable = self._in_loop(context, lambda: self._standing(context).leading().remove_all(request.tenant, request.namespace, by))
        return pb.RemoveNamespaceReply(blocks=self._wait(context, durable, IT_GOES_ON, self._action_timeout_s))

    def Audit(self, request: pb.AuditRequest, context: grpc.ServicerContext) -> Iterator[pb.AuditEntries]:  # noqa: N802
        """Of the whole cluster, as the catalog of partition 0 has it."""
        entries = self._in_loop(context, lambda: self._standings[0].audit().after(request.after))
        for begin in range(0, len(entries), AUDIT_ENTRIES):
            yield pb.AuditEntries(entries=entries[begin : begin + AUDIT_ENTRIES])

    def RecordAudit(self, request: pb.AuditEntries, context: grpc.ServicerContext) -> pb.RecordAuditReply:  # noqa: N802
        """Answered at once; durable soon."""
        if not self._in_loop(context, lambda: self._standings[0].leading().record_audit(request.entries)):
            abort(context, Unavailable("this master owns the catalog no longer"))
        return pb.RecordAuditReply()

    def Sessions(self, request: pb.SessionsRequest, context: grpc.ServicerContext) -> Iterator[pb.SessionTable]:  # noqa: N802
        yield from self._in_loop(context, lambda: self._sessions.tables(self._status.name))

    def EndSession(self, request: pb.EndSessionRequest, context: grpc.ServicerContext) -> pb.EndSessionReply:  # noqa: N802
        by = self._callers.actor(context)
        self._in_loop(context, lambda: self._sessions.end(request.id, by))
        return pb.EndSessionReply()

    def Tokens(self, request: pb.TokensRequest, context: grpc.ServicerContext) -> Iterator[pb.TokenTable]:  # noqa: N802
        yield from token_tables(list(self._callers.tokens()))

    def SlowRequests(self, request: pb.SlowRequestsRequest, context: grpc.ServicerContext) -> pb.SlowRequestsReply:  # noqa: N802
        """Of this master, and, at the owner of partition 0, of the nodes."""
        return pb.SlowRequestsReply(requests=self._in_loop(context, self._status.slow_requests))

    def _standing(self, context: grpc.ServicerContext) -> RoleManager:
        """Of the partition that a call is about. Raises InvalidArgument."""
        return self._standings[from_metadata(context.invocation_metadata(), len(self._standings))]

    def _check_tenant(
        self, context: grpc.ServicerContext, request: "pb.ListKeysRequest | pb.ContentsRequest | pb.WeightsRequest"
    ) -> Identity:
        """Who asks. Raises Denied for whoever is neither this tenant nor an operator."""
        identity = self._callers.identify(context)
        if not (identity.operates or identity.is_tenant(request.tenant)):
            raise Denied(f"{identity} may not list what tenant {request.tenant!r} has: it needs a token of that tenant or of [admins]")
        return identity

    def _wait(self, context: grpc.ServicerContext, durable: "Future[T]", otherwise: str, timeout_s: float | None = None) -> T:
        """What comes of it, once that is durable. Ends the call with its error, or with `otherwise` when that takes too long."""
        try:
            return durable.result(timeout_s or self._timeout_s)
        except TimeoutError:
            abort(context, CatalogUnavailable(otherwise))
        except KVStoreError as error:
            abort(context, error)

    def _in_loop(self, context: grpc.ServicerContext, function: Callable[[], T]) -> T:
        return in_loop(self._reactor, context, function, timeout_s=self._timeout_s)


def _check_name(identity: Identity, name: str) -> None:
    """Raises Denied unless this node may speak as the one of this name."""
    if not identity.goes_by(name):
        raise Denied(f"{identity} may not speak as node {name!r}: its token is of that name only")


class ControlServer:
    """The gRPC server around it and around the scheduler. Owns its threads and its port."""

    def __init__(
        self, service: ControlService, scheduler: SchedulerServicer, callers: Callers, address: Address, settings: MasterSettings
    ) -> None:
        """Of `max_connections`, `max_strangers` and half of them at most may be of those who have not shown who they are. Raises
        ConfigError when the address cannot be had, InvalidArgument for a method without a rule."""
        check_complete(RPCS, METHODS)
        self._server = grpc.server(
            ThreadPoolExecutor(DOOR_THREADS, thread_name_prefix="control-door"),
            interceptors=[callers],
            options=[
                ("grpc.so_reuseport", 0),  # two masters of one port would each get half of the calls: a port in use is an error
                ("grpc.max_allowed_incoming_connections", settings.max_connections),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
                ("grpc.server_handshake_timeout_ms", int(settings.hello_timeout_s * 1000)),
                ("grpc.max_connection_idle_ms", IDLE_MS),
            ],
        )
        self._executor = callers.executor
        add_ControlServicer_to_server(service, self._server)  # type: ignore[no-untyped-call]
        add_SchedulerServicer_to_server(scheduler, self._server)  # type: ignore[no-untyped-call]
        self._health = MasterHealth()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.ready(is_ready=False)
        self.serving(is_owner=False)
        names = (*OURS, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        try:
            # gRPC's core prints a line of its own before it says no.
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            socket.create_server((address.host, address.port), family=family).close()
            self.port = add_port(self._server, str(address), callers.tls)
        except (OSError, RuntimeError):
            raise ConfigError(f"cannot listen on {address} for the control plane: the port is in use or not this machine's") from None
        most = min(settings.max_strangers, max(1, settings.max_connections // 2))
        self._unauthenticated = UnauthenticatedConnections(self.port, most=most, max_connections=settings.max_connections)
        callers.on_known = self._unauthenticated.authenticated
        self._is_over = threading.Event()
        self._looking = threading.Thread(target=self._look, name="control-connections", daemon=True)

    def start(self) -> None:
        self._server.start()
        self._looking.start()

    def _look(self) -> None:
        """For those who hold connections and do not say who they are; in a thread of its own, for where there are many it takes a while."""
        while not self._is_over.wait(STRANGERS_INTERVAL_S):
            try:
                self._unauthenticated.enforce()
            except OSError as error:  # out of descriptors, say
                log.warning("cannot look who is connected to the control plane: %s", error)

    def ready(self, *, is_ready: bool) -> None:
        """The master as a whole owns its catalog, or is fit to take it over. May be called from any thread."""
        self._health.set("", is_serving=is_ready)

    def serving(self, *, is_owner: bool) -> None:
        """Only the catalog's owner serves what is asked of a cluster. May be called from any thread."""
        for name in OURS:
            self._health.set(name, is_serving=is_owner)

    def expire(self) -> None:
        """Now and then: end the calls whose peers say or take nothing. May be called from any thread."""
        self._executor.expire()

    def stop(self, grace_s: float) -> None:
        """Let calls under way end within `grace_s`."""
        self._is_over.set()
        self._server.stop(grace_s).wait(grace_s + 1)
        self._executor.close()
