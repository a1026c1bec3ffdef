"""A master: catalogs, roles, frames server and control plane on one reactor.

It owns all parts, and the order in which they start and stop. Several masters may share a catalog: each partition is
owned by one of them and followed by the others, which take over. Periodic work is in periodic_tasks.py, status in
status.py. daemon.py reads settings files and prints."""

import functools
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.console.config import ConsoleSettings
from kvstore.console.watch import ClusterWatcher
from kvstore.master.audit_trail import LOGIN, REQUEST, AuditTrail, Change, ForwardedEntries, Forwarder
from kvstore.master.callers import Callers
from kvstore.master.catalogs.factory import make_catalog
from kvstore.master.catalogs.interface import Candidate, Catalog, MasterContact
from kvstore.master.config import MasterSettings
from kvstore.master.console_source import MasterConsoleSource
from kvstore.master.control_service import ControlServer, ControlService
from kvstore.master.directory.followed_records import FollowedRecords
from kvstore.master.directory.index.queries import PrefixMatches, prefixes
from kvstore.master.directory.writes.record_policy import ALL
from kvstore.master.leadership.leader import LeaderRole
from kvstore.master.leadership.partition import Partition
from kvstore.master.leadership.partition_assigner import PartitionAssigner, RebalanceTiming
from kvstore.master.leadership.role_manager import MasterRole
from kvstore.master.metrics import MasterMetrics
from kvstore.master.peer_masters import PeerMasters
from kvstore.master.periodic_tasks import PERIOD_S, MasterPeriodicTasks
from kvstore.master.scheduling.scheduler import make_estimators
from kvstore.master.scheduling.service import SchedulerService
from kvstore.master.server.frames_service import MasterContactInfo
from kvstore.master.server.owner_parts import MasterParts
from kvstore.master.server.partition_router import PartitionRouter
from kvstore.master.sessions import PeerSessions, PermissionFiles
from kvstore.master.status import MasterStatus, PartitionRole, add_segments, role_in
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Closed, ConfigError, Denied, KVStoreError
from kvstore.protocol.partitions import split
from kvstore.rpc.address import Address, parse_address, socket_id
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.server import NullHandler, Server, default_run_dir
from kvstore.rpc.server.session import Session
from kvstore.rpc.server.tenant_loads import TenantLoads
from kvstore.rpc.unix_socket import SocketAccess
from kvstore.security.actor import CLIENT, Actor, host_of
from kvstore.security.authenticator import Authenticator
from kvstore.security.identity import UNAUTHENTICATED
from kvstore.security.listen_address import check_listen_address
from kvstore.security.quotas.limits import QuotasInForce
from kvstore.security.tls import subjects
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.https import HttpsCertificate
from kvstore.security.tls.own_certificate import OwnRole
from kvstore.security.tls.subjects import CertificateSubject
from kvstore.telemetry.http.access import OperatorAccess
from kvstore.telemetry.http.listener import url_of
from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.metrics.metric import MASTER
from kvstore.telemetry.metrics.requests import ROTATE_S
from kvstore.telemetry.signals import ALIVE_S, add_signals
from kvstore.telemetry.tracing.config import TracingSettings, open_tracing

if TYPE_CHECKING:
    from kvstore.telemetry.routes import LevelChange

CAMPAIGN_STEP_S: Final = 0.2
"""With several partitions: a partition without an owner is taken at once by its assigned master, by the next one in
its order after this long, and so on."""

STOP_GRACE_S: Final = 0.5
WILDCARDS: Final = ("0.0.0.0", "::", "")
log = logging.getLogger("kvstore.master")


@dataclass(frozen=True, slots=True)
class MasterAddresses:
    """Addresses of a started master."""

    listen: str
    unix: str
    control: str
    http: str = ""
    """Of health, metrics and diagnostics; "" for none."""
    console: str = ""
    """URL of the console; "" for none."""


@dataclass(frozen=True, slots=True)
class _MasterPosition:
    """Implements ClusterPosition."""

    partition: int
    partitions: Sequence[Partition]

    def prefixes(self, tenant: str, keys: Sequence[bytes]) -> PrefixMatches:
        """Over all partitions; those that others own from their records."""
        live = [node.node_id for node in self.partitions[0].role_manager.readable_leader().directory.members.live()]
        return prefixes(
            [
                self.partitions[index].role_manager.queries(live).part(tenant, [keys[at] for at in places], places)
                for index, places in split(keys, len(self.partitions)).items()
            ]
        )

    def blocks_elsewhere(self, node_id: int) -> int:
        """From the records of the other partitions."""
        others = () if self.partition else self.partitions[1:]
        return sum(other.role_manager.columns(())[0].sets.blocks_at(node_id) for other in others)


class Master:
    """One master process. All methods belong to the thread that calls `reactor.run`."""

    def __init__(
        self, settings: MasterSettings, tracing: TracingSettings | None = None, *, wall_s: Callable[[], float] = time.time
    ) -> None:
        """Listen, and open the catalogs. Raises ConfigError, CatalogUnavailable; nothing stays open then."""
        self._settings = settings
        self.on_role: Callable[[PartitionRole], None] = lambda _told: None
        """Called at each change of a partition's role or owner."""
        self._tls = Certificates.of(settings)
        self._authenticator = Authenticator(settings.tokens, nodes_have_certificates=self._asks_for_certificates(), wall_s=wall_s)
        self._quotas = QuotasInForce(settings.quotas)
        if settings.partitions > 1 and settings.records != ALL:
            raise ConfigError("with several partitions the scheduler finds blocks of others by their records: records must be all")
        if settings.instance_ttl_s < 2 * settings.report_interval_s:
            raise ConfigError(
                f"instance_ttl_s is {settings.instance_ttl_s:g} and report_interval_s {settings.report_interval_s:g}: live "
                "instances would expire between two reports; make instance_ttl_s at least twice report_interval_s"
            )
        make_estimators(settings)  # an error shows now, rather than at the election
        self.reactor = Reactor()
        self.failure: KVStoreError | None = None
        """Set when the catalog cannot be followed: this master has stopped."""
        self._control: ControlServer | None = None
        self._metrics = MasterMetrics()
        self._server = Server(
            self.reactor,
            NullHandler(),
            settings,
            tls=self._tls,
            observer=self._metrics.requests if settings.http else None,  # else unreadable
        )
        self.http: HttpServer | None = None
        self._watch: ClusterWatcher | None = None
        self._trail = AuditTrail(self.reactor, wall_s=wall_s)
        self._parts = MasterParts(self.reactor, settings, self._authenticator, self._quotas, TenantLoads(), self._trail, wall_s)
        self._trail.deliver = self._deliver_audit
        self._server.on_denied = self._denied
        self._files = PermissionFiles(self._authenticator, self._quotas, self._tls, self._server, self._trail, self.reactor)
        self._catalogs = [self._make_catalog(index) for index in range(settings.partitions)]
        self._peer_masters = PeerMasters(lambda: self._catalogs[0].peer_masters, tls=self._tls, peer_timeout_s=settings.peer_timeout_s)
        self._forwarder = Forwarder(self._peer_masters, self._take_audit_entries, self._put_back_audit)
        try:
            self._tcp, self._unix = self._listen()
            self.http = self._http_server() if settings.http else None
            """Health and metrics server; None if it is not configured."""
            self._me = self._candidate()
            self._check_certificate()
            self._trail.master = self._me.name
            self._tracing = self._server.tracer = open_tracing(tracing, role="master", instance=self._me.name)
            self.partitions = tuple(Partition(index, catalog, self._me, self._parts, self) for index, catalog in enumerate(self._catalogs))
            self._status = MasterStatus(
                self._parts, self.partitions, self._server, self._metrics, self._tracing, name=self._me.name, http=self.http
            )
            patience = RebalanceTiming(settings.share_settle_s, settings.share_pause_s, CAMPAIGN_STEP_S)
            self._assigner = PartitionAssigner(self._me.address, settings.partitions, patience)
            for index, catalog in enumerate(self._catalogs):
                catalog.wait_s = functools.partial(self._wait_s, index)
                catalog.open(deadline_s=settings.catalog_timeout_s)
        except BaseException:
            if self.http is not None:
                self.http.close()
            self._server.close()
            for catalog in self._catalogs:
                catalog.close()
            self.reactor.close()
            raise

    def _wait_s(self, partition: int) -> float:
        """Called in a catalog's thread."""
        return self._assigner.wait_s(self._catalogs[0].live_masters, partition)

    def _make_catalog(self, partition: int) -> Catalog:
        settings = self._settings
        return make_catalog(
            settings.catalog,
            partition=partition,
            partitions=settings.partitions,
            lease_ttl_s=settings.lease_ttl_s,
            compact_interval_s=settings.compact_interval_s,
            quota_bytes=settings.etcd_quota_bytes,
            tls=settings,
        )

    def _asks_for_certificates(self) -> bool:
        return self._tls is not None and self._tls.serves and self._tls.requires_client_cert

    def _listen(self) -> tuple[str, str]:
        """Listen before the catalogs are opened: a master whose port is in use must not campaign."""
        listen = parse_address(self._settings.listen)
        if listen.unix:
            raise ConfigError("listen is HOST:PORT; the Unix socket is made in run_dir")
        for name, place in (("listen", self._settings.listen), ("control", self._settings.control)):
            if place:
                check_listen_address(
                    name,
                    parse_address(place).host,
                    is_authenticated=self._asks_for_certificates() or not self._authenticator.allows_anonymous,
                    allow_unauthenticated=self._settings.allow_unauthenticated,
                    mend="name a tokens file, or ask for certificates (tls_require_client_cert)",
                )
        tcp = self._server.listen_tcp(listen.host, listen.port)
        run_dir = Path(self._settings.run_dir) if self._settings.run_dir else default_run_dir()
        access = SocketAccess.chosen(self._settings.socket_group, self._settings.socket_mode)
        return tcp, self._server.listen_unix(run_dir / f"master-{tcp.rpartition(':')[2]}.sock", access)

    def _check_certificate(self) -> None:
        """Raise ConfigError if clients and nodes would refuse the certificate."""
        if self._tls is None:
            return
        settings = self._settings
        listened = (parse_address(place).host for place in (settings.listen, settings.control) if place)
        hosts = (settings.advertise,) if settings.advertise else dict.fromkeys(host for host in listened if host not in WILDCARDS)
        self._tls.require_role(OwnRole(CertificateSubject(subjects.MASTER), tuple(hosts)))

    def _candidate(self) -> Candidate:
        """Return this master's name (`advertise` or its host's name, with its port) and its address for clients and
        nodes."""
        listen, port = parse_address(self._settings.listen), self._tcp.rpartition(":")[2]
        host = self._settings.advertise or listen.host
        if host in WILDCARDS and self._catalogs[0].scheme == "etcd":
            raise ConfigError(
                f"listen is {self._settings.listen}, which is no address for other hosts: set advertise to the host name or address "
                "of this master, to which other masters redirect clients and nodes"
            )
        try:
            if ":" in host:
                ip_address(host)
        except ValueError:
            raise ConfigError(f"advertise {host!r} is neither a host without a port (listen's is used) nor an IPv6 address") from None
        return Candidate(str(Address(self._settings.advertise or socket.gethostname(), int(port))), str(Address(host, int(port))))

    def start(self) -> MasterAddresses:
        """Serve and follow the catalogs; return once each partition's owner is known. Raises ConfigError (cannot
        listen for the control plane), Corrupt."""
        settings, listen = self._settings, parse_address(self._settings.listen)
        begin_span = self._tracing.begin_named if self._tracing is not None else None
        callers = Callers(self._authenticator, self._trail, settings, durations=self._metrics.control, tls=self._tls, begin_span=begin_span)
        service = ControlService(self._parts, self._status, callers, PeerSessions(self._server, self.reactor, self._trail))
        scheduler = SchedulerService(self.reactor, settings, lambda: self.partitions[0].role_manager.readable_leader().scheduling, callers)
        default = Address(listen.host, listen.port + 1 if listen.port else 0)
        control = parse_address(settings.control) if settings.control else default
        self._control = ControlServer(service, scheduler, callers, control, settings)
        advertised_host = settings.advertise or ("" if control.host in WILDCARDS else control.host)
        self._reachable = MasterContactInfo(
            socket.gethostname(), socket_id(self._unix), self._unix, advertised_host, self._control.port, settings.partitions
        )
        peer_host = advertised_host or parse_address(self._me.address).host
        self._catalogs[0].contact = MasterContact(
            str(Address(peer_host, self._control.port)),
            self._authenticator.master_key,
        )
        self._router = PartitionRouter(self._server, lambda index: self.partitions[index].handler, settings.partitions)
        self._control.start()
        if self.http is not None:
            ask, status = functools.partial(self.reactor.call, deadline_s=ALIVE_S), self._status
            add_signals(
                self.http,
                MASTER,
                lambda: ask(status.readings),
                alive=lambda: ask(lambda: None),
                unready=lambda: ask(status.unready),
                level_changed=self._level_changed,
            )
            add_segments(self.http, lambda: ask(status.nodes))
            watched = MasterConsoleSource(self._parts, self._status, self._peer_masters, address=self._me.address)
            self._watch = ClusterWatcher(watched, ConsoleSettings(), rest_s=watched.rest_s)
            self.http.later(self._add_console)
            self.http.start()
        self._periodic_tasks = MasterPeriodicTasks(self._parts, self._status, self._assigner, self._files, self._control)
        self._periodic_tasks.start(check_interval_s=settings.tokens_check_interval_s)
        self.reactor.every(ROTATE_S, self._metrics.requests.rotate)
        for partition in self.partitions:
            partition.follow(self._reachable, self._authenticator)
        while self.failure is None and not all(role_in(partition).owner for partition in self.partitions):
            self.reactor.run_once(PERIOD_S)
        if self.failure is not None:
            raise self.failure
        self._periodic_tasks.update_readiness()
        if self._watch is not None:
            self._watch.start()
        if self._catalogs[0].scheme == "etcd":  # other catalogs have one master
            self._forwarder.start()
        http = self.http.advertised() if self.http is not None else ""
        console = f"{url_of(http)}/" if self._watch is not None else ""
        return MasterAddresses(self._tcp, self._unix, str(Address(control.host, self._control.port)), http, console)

    def _http_server(self) -> HttpServer:
        https = HttpsCertificate.of(self._settings.http_tls_cert, self._settings.http_tls_key)
        return HttpServer(self._settings.http, access_control=OperatorAccess(self._authenticator, self._trail.denied), https=https)

    def _add_console(self, http: HttpServer) -> None:
        from kvstore.console.web import add_console  # imported with its server, at the first connection

        assert self._watch is not None
        add_console(http, self._watch)

    def close(self) -> None:
        """Close connections, write queued commits once more, give up ownerships, and let control calls end."""
        if self._watch is not None:
            self._watch.close(wait_s=0)  # it may be waiting for this thread
        self._forwarder.close()
        self._peer_masters.close()
        if self.http is not None:
            self.http.close()
        for partition in self.partitions:
            partition.stop(Closed("it stops"))
        self._server.close()
        for catalog in self._catalogs:
            catalog.close()
        if self._control is not None:
            self._control.stop(STOP_GRACE_S)
        if self._tracing is not None:
            self._tracing.close()
        self.reactor.close()

    def lead(self, partition: Partition, epoch: int, followed: FollowedRecords) -> LeaderRole:
        """See PartitionHost, also for the next two."""
        place = _MasterPosition(partition.index, self.partitions)
        return LeaderRole(self._parts, partition.catalog, place, self._reachable, epoch=epoch, followed=followed, wall_ns=time.time_ns())

    def changed(self, partition: Partition) -> None:
        role = partition.role_manager.role
        self._metrics.takeovers += role is MasterRole.OWNER and not partition.was_owner
        partition.was_owner = role is MasterRole.OWNER
        if role is MasterRole.FOLLOWING:
            self._router.deposed(partition.index)
        assert self._control is not None
        self._control.serving(is_owner=any(one.role_manager.role is MasterRole.OWNER for one in self.partitions))
        self.on_role(role_in(partition))

    def failed(self, error: KVStoreError) -> None:
        self.failure = error
        self.reactor.stop()

    def _deliver_audit(self, entries: Sequence[pb.AuditEntry]) -> bool:
        """Return False if this master does not own partition 0, whose catalog has the audit trail."""
        role_manager = self.partitions[0].role_manager
        return role_manager.role is MasterRole.OWNER and role_manager.leader().record_audit(entries)

    def _take_audit_entries(self) -> ForwardedEntries | None:
        """Take the entries for another master. Called in the forwarder's thread."""

        def take() -> ForwardedEntries | None:
            owner = self.partitions[0].role_manager.owner
            entries = self._trail.take_waiting() if owner is not None else []
            return ForwardedEntries(owner.address, entries) if owner is not None and entries else None

        return self.reactor.call(take, deadline_s=self._settings.control_timeout_s)

    def _put_back_audit(self, entries: Sequence[pb.AuditEntry]) -> None:
        self.reactor.call_soon(lambda: self._trail.put_back(entries))

    def _denied(self, session: Session, error: Denied) -> None:
        """A session's credential was refused, or does not allow a request."""
        identity = session.context.identity if session.context is not None else None
        actor = Actor.of(identity or UNAUTHENTICATED, peer=host_of(session.peer()), via=CLIENT)
        self._trail.denied(actor, error, action=LOGIN if identity is None else REQUEST)

    def _level_changed(self, level: "LevelChange") -> None:
        """Called in the HTTP server's thread."""
        change = Change(level.by, "log_level", f"logger {level.of}", level.old, level.new)
        self.reactor.call_soon(lambda: self._trail.done(change))

    def reread_files(self) -> None:
        """Read the files of tokens, certificates and quotas again, at SIGHUP."""
        self._files.reread()
