"""The master's control plane: registration, heartbeats, status and key listing by gRPC (kvstore.v1), with health and reflection.

gRPC's threads hold no state: each call is carried into the loop's thread and its result or typed error back.
"""

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.master.directory.directory import Directory
from kvstore.master.directory.draining import Progress
from kvstore.master.directory.membership import Member, NodeInfo
from kvstore.master.directory.records import TO_PEERS, Description
from kvstore.master.grpc_calls import abort, in_loop
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.control_pb2_grpc import (
    ControlServicer,
    SchedulerServicer,
    add_ControlServicer_to_server,
    add_SchedulerServicer_to_server,
)
from kvstore.protocol.errors import CatalogUnavailable, ConfigError, InvalidArgument, ProtocolError
from kvstore.rpc.reactor import Reactor
from kvstore.transfer.description import unpack_engine

T = TypeVar("T")

LIST_ROWS: Final = 4096
"""Rows of the directory looked at for one message of a listing: it fits gRPC's 4 MiB whatever the keys, and takes a millisecond."""


class MasterSeen(NamedTuple):
    """The master that a node was registered with last: its catalog's identity ("": none yet) and its epoch."""

    catalog: str
    epoch: int


class ControlService(ControlServicer):
    """Implements kvstore.v1.Control. `register`, `describe`, `forget`, `drain`, `status`: the master's, called in the loop's thread."""

    def __init__(
        self,
        reactor: Reactor,
        directory: Directory,
        *,
        register: Callable[[NodeInfo, list[pb.TierStatus], MasterSeen, Description], pb.RegisterReply],
        describe: Callable[[int, int, bytes | None, bytes | None], None],
        forget: Callable[[str, Callable[[], None]], None],
        drain: Callable[[str, str, Callable[[], None]], None],
        status: Callable[[], pb.StatusReply],
        check_token: Callable[[str, str], None],
        master_epoch: int,
        timeout_s: float,
    ) -> None:
        self._reactor = reactor
        self._directory = directory
        self._register = register
        self._describe = describe
        self._forget = forget
        self._drain = drain
        self._status = status
        self._check_token = check_token
        self._master_epoch = master_epoch
        self._timeout_s = timeout_s

    def Register(self, request: pb.RegisterRequest, context: grpc.ServicerContext) -> pb.RegisterReply:  # noqa: N802
        info = NodeInfo(request.name, request.instance, request.version, request.host_id, request.unix, request.tcp)
        description = Description(request.topology, request.transfer)
        seen = MasterSeen(request.seen_catalog, request.seen_master_epoch)
        return self._in_loop(context, lambda: self._register(info, list(request.tiers), seen, description))

    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatReply:  # noqa: N802
        def beat() -> pb.HeartbeatReply:
            self._directory.heartbeat(
                request.node_id, request.registration_epoch, list(request.tiers), dict(request.counters), self._reactor.now_ns()
            )
            topology = request.topology if request.HasField("topology") else None
            transfer = request.transfer if request.HasField("transfer") else None
            if topology is not None or transfer is not None:
                self._describe(request.node_id, request.registration_epoch, topology, transfer)
            self._directory.measured(request.node_id, request.registration_epoch, request.rates, self._reactor.now_ns())
            return pb.HeartbeatReply(master_epoch=self._master_epoch)

        return self._in_loop(context, beat)

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:  # noqa: N802
        return self._in_loop(context, self._status)

    def Topologies(self, request: pb.TopologiesRequest, context: grpc.ServicerContext) -> Iterator[pb.NodeTopology]:  # noqa: N802
        def found() -> list[pb.NodeTopology]:
            members = self._directory.members
            nodes = [node for node in members if request.node in ("", node.info.name)]
            if request.node and not nodes:
                known = ", ".join(sorted(node.info.name for node in members)) or "none"
                raise InvalidArgument(f"there is no node {request.node!r}; there are: {known}")
            return [pb.NodeTopology(name=node.info.name, state=node.state, topology=node.description.topology) for node in nodes]

        yield from self._in_loop(context, found)

    def Forget(self, request: pb.ForgetRequest, context: grpc.ServicerContext) -> pb.ForgetReply:  # noqa: N802
        """Answered when it is durable: a master that restarts has forgotten the node too."""
        done = threading.Event()
        self._in_loop(context, lambda: self._forget(request.node, done.set))
        if not done.wait(self._timeout_s):
            abort(context, CatalogUnavailable(f"node {request.node!r} is forgotten for good once the catalog takes writes again"))
        return pb.ForgetReply()

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainReply:  # noqa: N802
        """Answered when it is durable; how far it is shows in the node's status."""
        done = threading.Event()
        to = "" if request.cancel else request.to or TO_PEERS
        self._in_loop(context, lambda: self._drain(request.node, to, done.set))
        if not done.wait(self._timeout_s):
            abort(context, CatalogUnavailable("it is so, and outlives the master once the catalog takes writes again"))
        return pb.DrainReply()

    def ListKeys(self, request: pb.ListKeysRequest, context: grpc.ServicerContext) -> Iterator[pb.ListKeysReply]:  # noqa: N802
        """A slice of the directory at a time: the loop serves others in between."""

        def begin() -> Iterator[list[tuple[bytes, int, str]]]:
            self._check_token(request.tenant, request.token)
            return self._directory.queries.list_keys(
                request.tenant, None if request.any_namespace else request.namespace, slice_rows=LIST_ROWS
            )

        slices = self._in_loop(context, begin)
        left = request.limit or None
        while context.is_active() and (found := self._in_loop(context, lambda: next(slices, None))) is not None:
            found = found[:left]
            if found:
                yield pb.ListKeysReply(
                    keys=[key for key, _, _ in found], sizes=[size for _, size, _ in found], namespaces=[name for _, _, name in found]
                )
            if left is not None:
                left -= len(found)
                if not left:
                    return

    def _in_loop(self, context: grpc.ServicerContext, function: Callable[[], T]) -> T:
        return in_loop(self._reactor, context, function, timeout_s=self._timeout_s)


class ControlServer:
    """The gRPC server around it and around the scheduler. Owns its threads and its port."""

    def __init__(self, service: ControlService, scheduler: SchedulerServicer, host: str, port: int, *, threads: int) -> None:
        """Raises ConfigError when the port cannot be had."""
        # Two masters of one port would each get half of the calls: a port in use is an error.
        self._server = grpc.server(ThreadPoolExecutor(threads, thread_name_prefix="control"), options=[("grpc.so_reuseport", 0)])
        add_ControlServicer_to_server(service, self._server)  # type: ignore[no-untyped-call]
        add_SchedulerServicer_to_server(scheduler, self._server)  # type: ignore[no-untyped-call]
        servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        ours = [pb.DESCRIPTOR.services_by_name[name].full_name for name in ("Control", "Scheduler")]
        for name in ours:
            servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        names = (*ours, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            # gRPC's core prints a line of its own before it says no.
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
            self.port = self._server.add_insecure_port(place)
        except (OSError, RuntimeError):
            raise ConfigError(f"cannot listen on {place} for the control plane: the port is in use or not this machine's") from None

    def start(self) -> None:
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Let calls under way end within `grace_s`."""
        self._server.stop(grace_s).wait(grace_s + 1)


def node_status(node: Member, blocks: int, drain: Progress | None, now_ns: int) -> pb.NodeStatus:
    """What `kvstore status` shows of a node."""
    tiers: list[Any] = list(node.tiers)
    return pb.NodeStatus(
        node_id=node.node_id,
        name=node.info.name,
        host_id=node.info.host_id,
        unix=node.info.unix,
        tcp=node.info.tcp,
        version=node.info.version,
        state=node.state,
        registration_epoch=node.epoch,
        heartbeat_age_s=(now_ns - node.heartbeat_ns) / 1e9 if node.heartbeat_ns else 0.0,
        blocks=blocks,
        tiers=tiers,
        counters=dict(node.counters),
        transports=transports(node.description.transfer),
        rates=[
            pb.PeerRate(
                node_id=node_id,
                bytes_per_s=rate.bytes_per_s,
                basis_bytes=rate.basis_bytes,
                age_s=(now_ns - rate.measured_ns) / 1e9,
            )
            for node_id, rate in node.rates.fresh(now_ns).items()
        ],
        drain=pb.DrainStatus(**dataclasses.asdict(drain)) if drain is not None else None,
    )


@lru_cache(maxsize=1024)
def transports(transfer: bytes) -> tuple[str, ...]:
    """The transports and rails of a node's engine, from its own description; nothing for one that has none, or one we cannot read."""
    try:
        agents = unpack_engine(transfer).agents if transfer else ()
    except ProtocolError:
        return ()
    return tuple(f"{agent.transport} {agent.rail.device}".rstrip() for agent in agents)
