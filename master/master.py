"""A master put together: catalog, role, frames and control plane, on one reactor.

It owns all of them and the order in which they start and stop. Any number of masters may stand on one catalog: each partition of the key
space is owned by one of them, and the others follow it, and take over. What it does again and again is in periodic_tasks.py, what it
tells of itself in status.py. It does not read settings files or print: daemon.py does.
"""

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
from kvstore.master.measures import MasterMetrics
from kvstore.master.peer_masters import PeerMasters
from kvstore.master.periodic_tasks import TICK_S, MasterPeriodicTasks
from kvstore.master.scheduling.scheduler import make_estimators
from kvstore.master.scheduling.service import SchedulerService
from kvstore.master.server.frames_service import MasterContactInfo
from kvstore.master.server.owner_parts import MasterParts
from kvstore.master.server.partition_router import PartitionRouter
from kvstore.master.sessions import PeerSessions, PermissionFiles
from kvstore.master.status import MasterStatus, PartitionRole, add_segments, told_of
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
from kvstore.security.binding import check_binding
from kvstore.security.identity import STRANGER
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

SHARE_TURN_S: Final = 0.2
"""With several partitions: one that nobody owns is taken by the master whose share it is at once, by the next one in its order
after so long, and so on."""

STOP_GRACE_S: Final = 0.5
WILDCARDS: Final = ("0.0.0.0", "::", "")
log = logging.getLogger("kvstore.master")


@dataclass(frozen=True, slots=True)
class MasterAddresses:
    """Where a started master can be reached."""

    listen: str
    unix: str
    control: str
    http: str = ""
    """Of health, metrics and diagnostics; "" for none."""
    console: str = ""
    """Its address for a browser; "" for none."""


@dataclass(frozen=True, slots=True)
class _MasterPosition:
    """A PlaceInCluster."""

    partition: int
    partitions: Sequence[Partition]

    def prefixes(self, tenant: str, keys: Sequence[bytes]) -> PrefixMatches:
        """Of all partitions: those that others own as their records are."""
        live = [node.node_id for node in self.partitions[0].standing.answering().directory.members.live()]
        return prefixes(
            [
                self.partitions[index].standing.queries(live).part(tenant, [keys[at] for at in places], places)
                for index, places in split(keys, len(self.partitions)).items()
            ]
        )

    def blocks_elsewhere(self, node_id: int) -> int:
        """As the records of the other partitions are."""
        others = () if self.partition else self.partitions[1:]
        return sum(other.standing.columns(())[0].sets.blocks_at(node_id) for other in others)


class Master:
    """See the module. All methods belong to the thread that calls `reactor.run`."""

    def __init__(
        self, settings: MasterSettings, tracing: TracingSettings | None = None, *, wall_s: Callable[[], float] = time.time
    ) -> None:
        """Listen, and reach the catalog. Raises ConfigError, CatalogUnavailable; nothing stays open then."""
        self._settings = settings
        self.on_role: Callable[[PartitionRole], None] = lambda _told: None
        """Called at each change of the role in a partition, or of the owner that is followed there."""
        self._tls = Certificates.of(settings)
        self._guard = Authenticator(settings.tokens, nodes_have_certificates=self._asks_for_certificates(), wall_s=wall_s)
        self._quotas = QuotasInForce(settings.quotas)
        if settings.partitions > 1 and settings.records != ALL:
            raise ConfigError("with several partitions the scheduler finds blocks of others by their records: records must be all")
        if settings.instance_ttl_s < 2 * settings.report_interval_s:
            raise ConfigError(
                f"instance_ttl_s is {settings.instance_ttl_s:g} and report_interval_s {settings.report_interval_s:g}: instances that live "
                "would leave between two reports; make instance_ttl_s at least twice report_interval_s"
            )
        make_estimators(settings)  # refused now if not when this master is elected
        self.reactor = Reactor()
        self.failure: KVStoreError | None = None
        """Set when the catalog cannot be followed: this master has stopped."""
        self._control: ControlServer | None = None
        self._measures = MasterMetrics()
        self._server = Server(
            self.reactor,
            NullHandler(),
            settings,
            tls=self._tls,
            observer=self._measures.requests if settings.http else None,  # else nobody can read it
        )
        self.http: HttpServer | None = None
        self._watch: ClusterWatcher | None = None
        self._trail = AuditTrail(self.reactor, wall_s=wall_s)
        self._parts = MasterParts(self.reactor, settings, self._guard, self._quotas, TenantLoads(), self._trail, wall_s)
        self._trail.deliver = self._deliver_audit
        self._server.on_denied = self._denied
        self._files = PermissionFiles(self._guard, self._quotas, self._tls, self._server, self._trail, self.reactor)
        self._catalogs = [self._make_catalog(index) for index in range(settings.partitions)]
        self._fellows = PeerMasters(lambda: self._catalogs[0].fellows, tls=self._tls, peer_timeout_s=settings.peer_timeout_s)
        self._forwarder = Forwarder(self._fellows, self._audit_parcel, self._put_audit_back)
        try:
            self._tcp, self._unix = self._listen()
            self.http = self._http_server() if settings.http else None
            """Health and what is added before `start`; None where the settings want none."""
            self._me = self._candidate()
            self._check_certificate()
            self._trail.master = self._me.name
            self._tracing = self._server.tracer = open_tracing(tracing, role="master", instance=self._me.name)
            self.partitions = tuple(Partition(index, catalog, self._me, self._parts, self) for index, catalog in enumerate(self._catalogs))
            self._status = MasterStatus(
                self._parts, self.partitions, self._server, self._measures, self._tracing, name=self._me.name, http=self.http
            )
            patience = RebalanceTiming(settings.share_settle_s, settings.share_pause_s, SHARE_TURN_S)
            self._sharing = PartitionAssigner(self._me.address, settings.partitions, patience)
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
        """In a catalog's thread."""
        return self._sharing.wait_s(self._catalogs[0].living, partition)

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
        """Take the addresses before the catalog: a master with a port in use has no business to stand for election."""
        listen = parse_address(self._settings.listen)
        if listen.unix:
            raise ConfigError("listen is HOST:PORT; the Unix socket is made in run_dir")
        for name, place in (("listen", self._settings.listen), ("control", self._settings.control)):
            if place:
                check_binding(
                    name,
                    parse_address(place).host,
                    is_authenticated=self._asks_for_certificates() or not self._guard.lets_everybody_in,
                    allow_unauthenticated=self._settings.allow_unauthenticated,
                    mend="name a tokens file, or ask for certificates (tls_require_client_cert)",
                )
        tcp = self._server.listen_tcp(listen.host, listen.port)
        run_dir = Path(self._settings.run_dir) if self._settings.run_dir else default_run_dir()
        access = SocketAccess.chosen(self._settings.socket_group, self._settings.socket_mode)
        return tcp, self._server.listen_unix(run_dir / f"master-{tcp.rpartition(':')[2]}.sock", access)

    def _check_certificate(self) -> None:
        """Raises ConfigError: clients and nodes would refuse it."""
        if self._tls is None:
            return
        settings = self._settings
        listened = (parse_address(place).host for place in (settings.listen, settings.control) if place)
        hosts = (settings.advertise,) if settings.advertise else dict.fromkeys(host for host in listened if host not in WILDCARDS)
        self._tls.require_role(OwnRole(CertificateSubject(subjects.MASTER), tuple(hosts)))

    def _candidate(self) -> Candidate:
        """This master as others are told of it: by `advertise` or its host's name, with its port, and where clients and nodes reach it."""
        listen, port = parse_address(self._settings.listen), self._tcp.rpartition(":")[2]
        host = self._settings.advertise or listen.host
        if host in WILDCARDS and self._catalogs[0].scheme == "etcd":
            raise ConfigError(
                f"listen is {self._settings.listen}, by which no other host reaches this master: say in advertise by which name or address "
                "clients and nodes do, for other masters of the catalog send them there"
            )
        try:
            if ":" in host:
                ip_address(host)
        except ValueError:
            raise ConfigError(
                f"advertise is a host without a port (that of listen is told), or an IPv6 address: {host!r} is neither"
            ) from None
        return Candidate(str(Address(self._settings.advertise or socket.gethostname(), int(port))), str(Address(host, int(port))))

    def start(self) -> MasterAddresses:
        """Serve, and follow the catalog; returns once it is known who owns it, each partition of it. Raises ConfigError (the control
        plane's address cannot be had), Corrupt."""
        settings, listen = self._settings, parse_address(self._settings.listen)
        begin_span = self._tracing.begin_named if self._tracing is not None else None
        callers = Callers(self._guard, self._trail, settings, durations=self._measures.control, tls=self._tls, begin_span=begin_span)
        service = ControlService(self._parts, self._status, callers, PeerSessions(self._server, self.reactor, self._trail))
        scheduler = SchedulerService(self.reactor, settings, lambda: self.partitions[0].standing.answering().scheduling, callers)
        default = Address(listen.host, listen.port + 1 if listen.port else 0)
        control = parse_address(settings.control) if settings.control else default
        self._control = ControlServer(service, scheduler, callers, control, settings)
        told_host = settings.advertise or ("" if control.host in WILDCARDS else control.host)
        self._reachable = MasterContactInfo(
            socket.gethostname(), socket_id(self._unix), self._unix, told_host, self._control.port, settings.partitions
        )
        fellows_host = told_host or parse_address(self._me.address).host
        self._catalogs[0].contact = MasterContact(
            str(Address(fellows_host, self._control.port)),
            self._guard.master_key,
        )
        self._reception = PartitionRouter(self._server, lambda index: self.partitions[index].handler, settings.partitions)
        self._control.start()
        if self.http is not None:
            ask, told = functools.partial(self.reactor.call, deadline_s=ALIVE_S), self._status
            add_signals(
                self.http,
                MASTER,
                lambda: ask(told.readings),
                alive=lambda: ask(lambda: None),
                unready=lambda: ask(told.unready),
                level_changed=self._level_changed,
            )
            add_segments(self.http, lambda: ask(told.nodes))
            watched = MasterConsoleSource(self._parts, self._status, self._fellows, address=self._me.address)
            self._watch = ClusterWatcher(watched, ConsoleSettings(), rest_s=watched.rest_s)
            self.http.later(self._add_console)
            self.http.start()
        self._clockwork = MasterPeriodicTasks(self._parts, self._status, self._sharing, self._files, self._control)
        self._clockwork.start(check_interval_s=settings.tokens_check_interval_s)
        self.reactor.every(ROTATE_S, self._measures.requests.rotate)
        for partition in self.partitions:
            partition.follow(self._reachable, self._guard)
        while self.failure is None and not all(told_of(partition).owner for partition in self.partitions):
            self.reactor.run_once(TICK_S)
        if self.failure is not None:
            raise self.failure
        self._clockwork.tell_ready()
        if self._watch is not None:
            self._watch.start()
        if self._catalogs[0].scheme == "etcd":  # others have one master
            self._forwarder.start()
        http = self.http.advertised() if self.http is not None else ""
        console = f"{url_of(http)}/" if self._watch is not None else ""
        return MasterAddresses(self._tcp, self._unix, str(Address(control.host, self._control.port)), http, console)

    def _http_server(self) -> HttpServer:
        https = HttpsCertificate.of(self._settings.http_tls_cert, self._settings.http_tls_key)
        return HttpServer(self._settings.http, access_control=OperatorAccess(self._guard, self._trail.denied), https=https)

    def _add_console(self, http: HttpServer) -> None:
        from kvstore.console.web import add_console  # with what serves it, once somebody connects

        assert self._watch is not None
        add_console(http, self._watch)

    def close(self) -> None:
        """Hang up, give the catalog its last chance and its ownership up, let control calls end."""
        if self._watch is not None:
            self._watch.close(wait_s=0)  # it may be waiting for this very thread
        self._forwarder.close()
        self._fellows.close()
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
        """See PartitionHost, as the next two."""
        place = _MasterPosition(partition.index, self.partitions)
        return LeaderRole(self._parts, partition.catalog, place, self._reachable, epoch=epoch, followed=followed, wall_ns=time.time_ns())

    def changed(self, partition: Partition) -> None:
        role = partition.standing.role
        self._measures.takeovers += role is MasterRole.OWNER and not partition.was_owner
        partition.was_owner = role is MasterRole.OWNER
        if role is MasterRole.FOLLOWING:
            self._reception.deposed(partition.index)
        assert self._control is not None
        self._control.serving(is_owner=any(one.standing.role is MasterRole.OWNER for one in self.partitions))
        self.on_role(told_of(partition))

    def failed(self, error: KVStoreError) -> None:
        self.failure = error
        self.reactor.stop()

    def _deliver_audit(self, entries: Sequence[pb.AuditEntry]) -> bool:
        """Whether this master owns partition 0, whose catalog keeps them."""
        standing = self.partitions[0].standing
        return standing.role is MasterRole.OWNER and standing.leading().record_audit(entries)

    def _audit_parcel(self) -> ForwardedEntries | None:
        """What waits for another master, for the forwarder's thread."""

        def take() -> ForwardedEntries | None:
            owner = self.partitions[0].standing.owner
            entries = self._trail.take_waiting() if owner is not None else []
            return ForwardedEntries(owner.address, entries) if owner is not None and entries else None

        return self.reactor.call(take, deadline_s=self._settings.control_timeout_s)

    def _put_audit_back(self, entries: Sequence[pb.AuditEntry]) -> None:
        self.reactor.call_soon(lambda: self._trail.put_back(entries))

    def _denied(self, session: Session, error: Denied) -> None:
        """A peer showed a credential that is refused, or asked for what its own does not allow."""
        identity = session.context.identity if session.context is not None else None
        actor = Actor.of(identity or STRANGER, peer=host_of(session.peer()), via=CLIENT)
        self._trail.denied(actor, error, action=LOGIN if identity is None else REQUEST)

    def _level_changed(self, level: "LevelChange") -> None:
        """In the HTTP server's thread."""
        change = Change(level.by, "log_level", f"logger {level.of}", level.old, level.new)
        self.reactor.call_soon(lambda: self._trail.done(change))

    def reread_files(self) -> None:
        """Of all files that say who may do what, and how much: at SIGHUP."""
        self._files.reread()
