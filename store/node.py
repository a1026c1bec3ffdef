"""Storage node: storage, service, server and master connections on one reactor, and the order of start and stop.

storage.py makes the parts, periodic_tasks.py runs them, daemon.py reads settings and prints.
"""

import functools
import logging
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.version import VERSION
from kvstore.rpc.address import parse_address, socket_id
from kvstore.rpc.busy_poll import BusyPoll
from kvstore.rpc.frame_writer import SendLimits
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.server import ConnectionLimits, NullHandler, Server, default_run_dir
from kvstore.rpc.unix_socket import SocketAccess
from kvstore.security.listen_address import check_listen_address, is_loopback
from kvstore.security.quotas.limits import from_message
from kvstore.security.tls import subjects
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.own_certificate import OwnRole
from kvstore.security.tls.pem_files import CertificateEnds
from kvstore.security.tls.subjects import CertificateSubject
from kvstore.store.config import NodeSettings, join_token
from kvstore.store.identity import NodeIdentity, NodeName, new_instance, watch_topology
from kvstore.store.master_session.master_link import HeartbeatReport, MasterLink
from kvstore.store.master_session.master_session import MasterConnections, MasterSession
from kvstore.store.metrics import NodeMetrics
from kvstore.store.node_service import NodeService
from kvstore.store.periodic_tasks import NodePeriodicTasks
from kvstore.store.session_authenticator import SessionAuthenticator
from kvstore.store.status import NodeStatus, link_flows
from kvstore.store.storage import Storage, check
from kvstore.telemetry.http.server import open_http
from kvstore.telemetry.metrics.metric import NODE, Readings
from kvstore.telemetry.signals import ALIVE_S, add_signals
from kvstore.telemetry.tracing.config import TracingSettings, open_tracing, span_counts
from kvstore.transfer.config import TransferSettings

SEND_TIMEOUT_S: Final = 30.0
"""Time that a connection has to receive an answer. Then it is closed, and the answer's blocks are released."""

log = logging.getLogger("kvstore.store")


@dataclass(frozen=True, slots=True)
class NodeAddresses:
    """Addresses of a started node."""

    name: str
    tcp: str
    unix: str
    http: str
    """Of health, metrics and diagnostics; "" for none."""


STOPPING_S: Final = 0.5
"""Time for masters to acknowledge that this node stops."""


class Node:
    """Storage node. All methods are for the thread that calls `reactor.run`, unless stated otherwise."""

    def __init__(
        self,
        settings: NodeSettings,
        transfer: TransferSettings | None = None,
        tracing: TracingSettings | None = None,
        *,
        on_synced: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the tiers, recover NVMe, and listen. Connections are served from `start` on.

        `on_synced` is called in the loop each time the master has the whole inventory. Raises ConfigError: invalid
        settings or addresses; nothing is left open.
        """
        check(settings)
        self._settings = settings
        self._metrics = NodeMetrics()
        self._ends = CertificateEnds({name: getattr(settings, name) for name in ("tls_ca", "tls_cert", "http_tls_cert")})
        self._transfer = transfer or TransferSettings()
        self._trace_settings = tracing
        join_token(settings)  # raises ConfigError early
        self._tls = Certificates.of_peer(settings, "a node")
        self._addresses = [parse_address(text.strip()) for text in settings.master.split(",")]
        self._on_synced = on_synced
        self.refusal = ""
        """Reason why masters refused the node, which has stopped for it."""
        self._instance = new_instance()
        with ExitStack() as opened:
            self.reactor = Reactor(busy_poll=BusyPoll(settings.busy_poll_us))
            opened.callback(self.reactor.close)
            self._storage = Storage(
                settings,
                self.reactor,
                opened,
                transfer=self._transfer,
                instance=self._instance,
                tls=self._tls,
            )
            self._listen(opened)
            self._serve()
            self._find_masters()
            opened.pop_all()

    def _asks_for_certificates(self) -> bool:
        return self._tls is not None and self._tls.requires_client_cert

    def _listen(self, opened: ExitStack) -> None:
        """Bind the addresses, and choose the name."""
        settings, listen = self._settings, parse_address(self._settings.listen)
        check_listen_address(
            "listen",
            listen.host,
            is_authenticated=bool(join_token(settings)) or self._asks_for_certificates(),
            allow_unauthenticated=settings.allow_unauthenticated,
            mend="give tokens to the masters, and this node a join_token",
        )
        self._server = Server(
            self.reactor,
            NullHandler(),
            ConnectionLimits(
                max_connections=settings.max_connections,
                hello_timeout_s=settings.hello_timeout_s,
                max_unauthenticated=settings.max_unauthenticated,
                peer_timeout_s=settings.peer_timeout_s,
            ),
            send_limits=SendLimits(settings.peer_bytes, SEND_TIMEOUT_S),
            tls=self._tls,
            observer=self._metrics.requests if settings.http else None,  # unused without HTTP
        )
        opened.callback(self._server.close)
        tcp = self._server.listen_tcp(listen.host, listen.port)
        run_dir = Path(settings.run_dir) if settings.run_dir else default_run_dir()
        access = SocketAccess.chosen(settings.socket_group, settings.socket_mode)
        unix = self._server.listen_unix(run_dir / f"node-{tcp.rpartition(':')[2]}.sock", access)
        self._name = NodeName(settings, socket.gethostname(), tcp, run_dir)
        opened.callback(self._name.close)
        self._tracing = self._server.tracer = open_tracing(self._trace_settings, role="node", instance=self._name.text)
        if self._tracing is not None:
            opened.callback(self._tracing.close)
        self.http = open_http(settings)
        """HTTP server for health and metrics; None if not configured."""
        if self.http is not None:
            opened.callback(self.http.close)
        told = settings.advertise or tcp
        http = self.http.advertised(parse_address(told).host) if self.http is not None else ""
        self._check_certificate(parse_address(told).host)
        traces = self._tracing is not None
        self.identity = NodeIdentity(self._name.text, VERSION, socket_id(unix), unix, told, self._instance, http, traces)

    def _check_certificate(self, host: str) -> None:
        """Raises ConfigError if masters, clients and other nodes would refuse the certificate."""
        if self._tls is not None:
            is_wildcard = host in ("0.0.0.0", "::", "")
            self._tls.require_role(OwnRole(CertificateSubject(subjects.NODE, self._name.text), () if is_wildcard else (host,)))

    def _serve(self) -> None:
        """Install the service as the server's handler."""
        storage = self._storage
        self._authenticator = self._make_authenticator()
        self._periodic_tasks = NodePeriodicTasks(self.reactor, storage, self._metrics, self._authenticator)
        self._service = NodeService(storage, self._authenticator, self.identity)
        self._server.handler = self._service
        self._status = NodeStatus(storage, self._service.loads, self._server.counts, self._metrics)

    def _make_authenticator(self) -> SessionAuthenticator:
        tls, regions = self._tls, self._storage.regions
        return SessionAuthenticator(
            clock_ns=self.reactor.now_ns,
            grace_s=self._settings.ticket_grace_s,
            is_revoked=tls.names_revoked if tls is not None else lambda _fingerprint: False,
            on_revoked=regions.close_exports if regions is not None else lambda _tenant: None,
        )

    def _find_masters(self) -> None:
        """Make the master connections. Last, because nothing here is closed if a later step fails."""
        storage = self._storage
        self._links = MasterConnections(
            storage.partition_map, make_session=self._session, make_link=self._link, on_partitioned=storage.add_partitions
        )
        self._watch = watch_topology(self._transfer, storage.engine, self._links.describe)

    def _session(self, partition: int) -> MasterSession:
        return MasterSession(self, self._storage, self._service, self._authenticator, self._settings, partition, tracer=self._tracing)

    def _link(self, partition: int, session: MasterSession) -> MasterLink:
        settings = self._settings
        is_private = is_loopback(parse_address(settings.listen).host)
        needs_tickets = not (settings.allow_unauthenticated or self._asks_for_certificates() or is_private)
        return MasterLink(self, self._addresses, session, self._settings, needs_tickets=needs_tickets, tls=self._tls, partition=partition)

    # --- LinkedNode and SessionOwner ---

    def join_token(self) -> str:
        return join_token(self._settings)

    def link_flows(self) -> list[pb.LinkFlow]:
        return link_flows(self._watch.topology.nics if self._watch is not None else (), self._storage.engine)

    def node_id(self, partition: int) -> int:
        return self._links.node_id if partition else 0

    def report(self, hot_blocks: int, slow_version: int) -> HeartbeatReport:
        report = self._status.report(self._metrics.requests.slowest, slow_version, hot_blocks, self.reactor.now_ns())
        return report._replace(counters={**report.counters, **self._metrics.requests.counters()})

    def registered(self, partition: int, partitions: int, node_id: int) -> None:
        if not partition:
            self._links.registered(partitions, node_id)

    def refused(self, why: str) -> None:
        """Stop the node: masters refuse it permanently."""
        self.refusal = why
        self.reactor.stop()

    def synced(self) -> None:
        if self._storage.replicators.is_synced:
            self._on_synced()

    def lost(self, partition: int, registration_epoch: int) -> None:
        self._links.lost(partition, registration_epoch)

    def apply_reply(self, told: pb.RegisterReply | pb.HeartbeatReply) -> None:
        """Apply quotas and retired namespaces, and retry queued requests."""
        if told.HasField("quotas"):
            quotas = from_message(told.quotas)
            self._storage.table.quotas.set(quotas)
            self._service.loads.set_quotas(quotas)
        if told.HasField("retired"):
            self._storage.table.retired.set({one.tenant: frozenset(one.namespaces) for one in told.retired.tenants})
        self._storage.waiting.retry()

    def reuse(self, *, is_first: bool) -> pb.ReuseReport | None:
        return self._status.reuse(is_first=is_first)

    def apply_reuse(self, answer: pb.ReuseReport) -> None:
        self._storage.table.shared_reuse.apply((one.tenant, one.statistics) for one in answer.tenants)

    # --- start and stop ---

    def start(self) -> NodeAddresses:
        """Start the periodic tasks, the master links and the HTTP server."""
        log.info("memory of this node: at most %s", self._storage.memory)
        self._periodic_tasks.start()
        if self._watch is not None:
            self._watch.start()
        self._links.start()
        if self.http is not None:
            ask = functools.partial(self.reactor.call, deadline_s=ALIVE_S)
            add_signals(self.http, NODE, lambda: ask(self.readings), alive=lambda: ask(lambda: None), unready=lambda: ask(self.unready))
            self.http.start()
        identity = self.identity
        return NodeAddresses(identity.name, identity.tcp, identity.unix, self.http.advertised() if self.http is not None else "")

    def prefault(self, on_done: Callable[[], None] = lambda: None) -> None:
        """Touch all DRAM once, in a thread: see Prefaulter. `on_done` is called in the loop."""
        self._storage.prefaulter.start(on_done)

    def end(self) -> None:
        """Stop the reactor once memory is drained to NVMe, at most after `drain_s`."""
        self._storage.drainer.end(self._settings.drain_s, lambda: self._links.announce_stop(self.reactor.stop, STOPPING_S))
        self._links.send_heartbeats()  # masters send new blocks elsewhere

    def reread_certificates(self) -> None:
        """Reload the TLS files with the next connection. Thread-safe and signal-safe."""
        if self._tls is not None:
            self._tls.reload()

    def close(self) -> None:
        """Close connections, wait for moves in progress, close the tiers."""
        storage = self._storage
        if self.http is not None:
            self.http.close()
        storage.prefaulter.stop()
        if self._watch is not None:
            self._watch.close()
        self._links.stop()
        storage.replicators.close()
        if storage.engine is not None:
            storage.engine.close()
        self._server.close()
        self._service.close()
        storage.shared_index.close()
        self._links.close()
        storage.close()
        self._name.close()
        if self._tracing is not None:
            self._tracing.close()
        self.reactor.close()

    def unready(self) -> list[str]:
        """Reasons why it does not serve, one line each; empty if ready."""
        is_synced, is_closed = self._storage.replicators.is_synced, self._storage.drainer.is_closed
        reasons = [] if is_synced else ["not registered with a master, or its inventory is not complete there"]
        return reasons + (["draining: the node takes no new blocks"] if is_closed else [])

    def readings(self) -> Readings:
        """Return the readings of all metrics."""
        storage = self._storage
        self._metrics.sample(storage.table, self.reactor.now_ns())
        return self._metrics.read(
            storage.table,
            *self.status(),
            storage.engine,
            {
                "kvstore_node_info": {(self._name.text, VERSION): 1},
                "kvstore_node_ready": int(not self.unready()),
                "kvstore_node_certificate_valid_seconds": self._ends.left_s(time.time()),
                "kvstore_node_trace_spans": span_counts(self._tracing),
                "kvstore_node_quota_refused": {(reason,): count for reason, count in self._service.loads.refused().items()},
            },
        )

    def status(self) -> tuple[list[pb.TierStatus], dict[str, int]]:
        tiers, counters = self._status.now(self.reactor.now_ns())
        return tiers, counters | self._metrics.requests.counters()
