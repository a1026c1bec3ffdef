"""A master put together: catalog, role, frames and control plane, on one reactor.

It owns all of them and the order in which they start and stop. Any number of masters may stand on one catalog: one owns it, the others
follow, and take over. It does not read settings files or print: daemon.py does.
"""

import functools
import logging
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.console.config import ConsoleSettings
from kvstore.console.watch import Watch
from kvstore.master.callers import Callers
from kvstore.master.catalogs.by_address import make_catalog
from kvstore.master.catalogs.interface import Candidate, Owner
from kvstore.master.config import MasterSettings
from kvstore.master.control_service import ControlServer, ControlService
from kvstore.master.directory.following import Followed
from kvstore.master.frames.clients import ClientPeer
from kvstore.master.frames.nodes import NodePeer
from kvstore.master.frames.service import Reachable
from kvstore.master.frames.standby import StandbyFrames
from kvstore.master.measures import MasterMeasures, of_owner
from kvstore.master.roles.leading import Leading
from kvstore.master.roles.relay import Relay
from kvstore.master.roles.standing import Role, Standing
from kvstore.master.scheduling.by_settings import make_estimators
from kvstore.master.scheduling.service import SchedulerService
from kvstore.master.watched import Watched
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import Closed, ConfigError, KVStoreError
from kvstore.protocol.version import VERSION
from kvstore.rpc.access import SocketAccess
from kvstore.rpc.address import parse_address, socket_id
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server import Nobody, Server, default_run_dir
from kvstore.security.binding import check_binding
from kvstore.security.guard import Guard
from kvstore.security.quotas.in_force import QuotasInForce
from kvstore.security.tls.certificates import Certificates
from kvstore.security.tls.https import HttpsCertificate
from kvstore.telemetry.http.by_token import by_token
from kvstore.telemetry.http.listening import url_of
from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.metrics.catalog import MASTER
from kvstore.telemetry.metrics.metric import Readings
from kvstore.telemetry.metrics.requests import TURN_S
from kvstore.telemetry.signals import ALIVE_S, add_signals
from kvstore.telemetry.tracing.config import TracingSettings
from kvstore.telemetry.tracing.opening import open_tracing, spans_told

TICK_S: Final = 0.1
STOP_GRACE_S: Final = 0.5
WILDCARDS: Final = ("0.0.0.0", "::", "")
log = logging.getLogger("kvstore.master")


@dataclass(frozen=True, slots=True)
class Places:
    """Where a started master can be reached."""

    listen: str
    unix: str
    control: str
    http: str = ""
    """Of health, metrics and diagnostics; "" for none."""
    console: str = ""
    """Its address for a browser; "" for none."""


@dataclass(frozen=True, slots=True)
class Told:
    """This master's role, and the owner's address ("" for nobody) and epoch (0)."""

    role: Role
    owner: str
    epoch: int


class Master:
    """See the module. All methods belong to the thread that calls `reactor.run`."""

    def __init__(
        self, settings: MasterSettings, tracing: TracingSettings | None = None, *, wall_s: Callable[[], float] = time.time
    ) -> None:
        """Listen, and reach the catalog. Raises ConfigError, CatalogUnavailable; nothing stays open then."""
        self._settings = settings
        self.on_role: Callable[[Told], None] = lambda _told: None
        """Called at each change of the role, or of the owner that is followed."""
        self._tls = Certificates.of(settings)
        self._guard = Guard(settings.tokens, nodes_have_certificates=self._asks_for_certificates(), wall_s=wall_s)
        self._quotas = QuotasInForce(settings.quotas)
        make_estimators(settings)  # refused now if not when this master is elected
        self.reactor = Reactor()
        self.failure: KVStoreError | None = None
        """Set when the catalog cannot be followed: this master has stopped."""
        self._started_ns = time.monotonic_ns()
        self._control: ControlServer | None = None
        self._is_ready = self._was_owner = False
        self._measures = MasterMeasures()
        self._server = Server(
            self.reactor,
            Nobody(),
            max_connections=settings.max_connections,
            hello_timeout_s=settings.hello_timeout_s,
            max_strangers=settings.max_strangers,
            peer_timeout_s=settings.peer_timeout_s,
            tls=self._tls,
            observer=self._measures.requests if settings.http else None,  # else nobody can read it
        )
        self.http: HttpServer | None = None
        self._watch: Watch | None = None
        self._catalog = make_catalog(
            settings.catalog,
            lease_ttl_s=settings.lease_ttl_s,
            compact_interval_s=settings.compact_interval_s,
            quota_bytes=settings.etcd_quota_bytes,
            quota_warning_share=settings.etcd_quota_warning_share,
            tls=settings,
        )
        try:
            self._tcp, self._unix = self._listen()
            self.http = self._http_server() if settings.http else None
            """Health and what is added before `start`; None where the settings want none."""
            self._me = self._candidate()
            self._tracing = self._server.tracer = open_tracing(tracing, role="master", instance=self._me.name)
            self.standing = Standing(self._me.address, self._lead, on_change=self._changed)
            self._relay = Relay(self.reactor, self.standing, on_failure=self._fail)
            self._catalog.open(deadline_s=settings.catalog_timeout_s)
        except BaseException:
            if self.http is not None:
                self.http.close()
            self._server.close()
            self._catalog.close()
            self.reactor.close()
            raise

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

    def _candidate(self) -> Candidate:
        """This master as others are told of it: by its host's name and port, and where clients and nodes reach it."""
        listen, port = parse_address(self._settings.listen), self._tcp.rpartition(":")[2]
        host = self._settings.advertise or listen.host
        if host in WILDCARDS and self._catalog.scheme == "etcd":
            raise ConfigError(
                f"listen is {self._settings.listen}, by which no other host reaches this master: say in advertise by which name or address "
                "clients and nodes do, for other masters of the catalog send them there"
            )
        return Candidate(f"{socket.gethostname()}:{port}", f"[{host}]:{port}" if ":" in host else f"{host}:{port}")

    def start(self) -> Places:
        """Serve, and follow the catalog; returns once it is known who owns it. Raises ConfigError (the control plane's address cannot be
        had), Corrupt."""
        settings, listen = self._settings, parse_address(self._settings.listen)
        callers = Callers(self._guard, threads=settings.control_threads, message_timeout_s=settings.hello_timeout_s)
        service = ControlService(
            self.reactor,
            self.standing,
            status=self._status,
            callers=callers,
            timeout_s=settings.control_timeout_s,
        )
        control = parse_address(settings.control) if settings.control else None
        control_host = control.host if control else listen.host
        control_port = control.port if control else (listen.port + 1 if listen.port else 0)
        scheduler = SchedulerService(
            self.reactor,
            lambda: self.standing.answering().scheduling,
            callers=callers,
            report_interval_s=settings.report_interval_s,
            timeout_s=settings.control_timeout_s,
        )
        self._control = ControlServer(
            service,
            scheduler,
            callers,
            control_host,
            control_port,
            max_connections=settings.max_connections,
            durations=self._measures.control,
            tls=self._tls,
            begin_span=self._tracing.begin_named if self._tracing is not None else None,
        )
        told_host = settings.advertise or ("" if control_host in WILDCARDS else control_host)
        self._reachable = Reachable(socket.gethostname(), socket_id(self._unix), self._unix, told_host, self._control.port)
        self._standby = StandbyFrames(lambda: self.standing.owner, self._reachable, self._guard)
        self._server.handler = self._standby
        self._control.start()
        if self.http is not None:
            ask = functools.partial(self.reactor.call, deadline_s=ALIVE_S)
            add_signals(self.http, MASTER, lambda: ask(self.readings), alive=lambda: ask(lambda: None), unready=lambda: ask(self.unready))
            if settings.console_interval_s:
                self._watch = Watch(self._watched(), ConsoleSettings(interval_s=settings.console_interval_s))
                self.http.later(self._add_console)
            self.http.start()
        self.reactor.every(TICK_S, self._tick)
        self.reactor.every(TURN_S, self._measures.requests.turn)
        self.reactor.every(settings.tokens_check_interval_s, self._look_at_credentials)
        self.reactor.every(settings.tokens_check_interval_s, self._look_at_quotas)
        self._catalog.follow(self._me, self._relay)
        while self.failure is None and not self.told().owner:
            self.reactor.run_once(TICK_S)
        if self.failure is not None:
            raise self.failure
        self._tell_ready()
        if self._watch is not None:
            self._watch.start()
        http = self.http.told() if self.http is not None else ""
        console = f"{url_of(http)}/" if self._watch is not None else ""
        return Places(self._tcp, self._unix, f"{control_host}:{self._control.port}", http, console)

    def _http_server(self) -> HttpServer:
        https = HttpsCertificate.of(self._settings.http_tls_cert, self._settings.http_tls_key)
        return HttpServer(self._settings.http, authorize=by_token(self._guard), https=https)

    def _add_console(self, http: HttpServer) -> None:
        from kvstore.console.web import add_console  # with what serves it, once somebody connects

        assert self._watch is not None
        add_console(http, self._watch)

    def close(self) -> None:
        """Hang up, give the catalog its last chance and its ownership up, let control calls end."""
        if self._watch is not None:
            self._watch.close(wait_s=0)  # it may be waiting for this very thread
        if self.http is not None:
            self.http.close()
        self._relay.close()
        self.standing.close(Closed("it stops"))
        self._server.close()
        self._catalog.close()
        if self._control is not None:
            self._control.stop(STOP_GRACE_S)
        if self._tracing is not None:
            self._tracing.close()
        self.reactor.close()

    def told(self) -> Told:
        """The role that this master has now."""
        owner = self._owner()
        return Told(self.standing.role, owner.address, owner.epoch) if owner is not None else Told(self.standing.role, "", 0)

    def _owner(self) -> Owner | None:
        """Who owns the catalog, as far as this master knows."""
        if self.standing.role is Role.OWNER:
            return Owner(*self._me, self.standing.leading().epoch)
        return self.standing.owner

    def _lead(self, epoch: int, followed: Followed) -> Leading:
        return Leading(
            self.reactor,
            self._catalog,
            self._settings,
            epoch=epoch,
            followed=followed,
            wall_ns=time.time_ns(),
            reachable=self._reachable,
            guard=self._guard,
            quotas=self._quotas,
        )

    def _changed(self) -> None:
        role = self.standing.role
        self._measures.takeovers += role is Role.OWNER and not self._was_owner
        self._was_owner = role is Role.OWNER
        handler = self._standby if role is Role.FOLLOWING else self.standing.answering().frames
        if handler is not self._server.handler:
            if self._server.handler is not self._standby:  # who asked there was told of the owner, and no more
                self._server.hang_up("this master owns the catalog no longer")
            self._server.handler = handler
        assert self._control is not None
        self._control.serving(is_owner=role is Role.OWNER)
        self.on_role(self.told())

    def _fail(self, error: KVStoreError) -> None:
        self.failure = error
        self.reactor.stop()

    def _tick(self) -> None:
        self.standing.tick()
        self._tell_ready()
        assert self._control is not None
        self._control.expire()

    def _tell_ready(self) -> None:
        """Health by gRPC says whether it is."""
        is_ready = not self.unready()
        if is_ready is not self._is_ready:
            self._is_ready = is_ready
            assert self._control is not None
            self._control.ready(is_ready=is_ready)

    def unready(self) -> list[str]:
        """Why it neither owns the catalog nor is fit to take it over, a line a reason."""
        told, health = self.told(), self._catalog.health
        reasons = ["this master is cut off from its catalog, which another one may own"] if told.role is Role.CUT_OFF else []
        reasons += [] if told.owner else ["nobody owns the catalog, as far as this master knows"]
        return reasons + ([f"catalog: {health}"] if health != "ok" else [])

    def readings(self) -> Readings:
        """What its metrics tell now."""
        role = self.standing.role
        told = self._measures.read(
            self._me.name,
            self._catalog.written,
            epoch=self.told().epoch,
            is_ready=not self.unready(),
            is_healthy=self._catalog.health == "ok",
            connections=len(self._server.sessions),
            records=self.standing.records(),
            trace_spans=spans_told(self._tracing),
        )
        return {**told, **of_owner(self.standing.leading())} if role is Role.OWNER else told

    def _watched(self) -> Watched:
        settings = self._settings
        return Watched(
            self.reactor,
            self.standing,
            self._status,
            timeout_s=settings.control_timeout_s,
            action_timeout_s=settings.console_action_timeout_s,
        )

    def _told_http(self) -> str:
        return self.http.told(self._settings.advertise or socket.gethostname()) if self.http is not None else ""

    def reread_credentials(self) -> None:
        """Of the tokens file, whatever became of it: sessions of who is known no more end. A bad file changes nothing, but for the log.
        Certificates are looked at with the next connection."""
        if self._tls is not None:
            self._tls.reload()
        self._guard.reread_loudly()
        self._look_at_sessions()

    def reread_files(self) -> None:
        """Of all files that say who may do what, and how much: at SIGHUP."""
        self.reread_credentials()
        self._quotas.reread()

    def _look_at_quotas(self) -> None:
        if self._quotas.has_changed():
            self._quotas.reread()

    def _look_at_credentials(self) -> None:
        if self._guard.has_changed():
            self.reread_credentials()
        else:
            self._look_at_sessions()

    def _look_at_sessions(self) -> None:
        """End those whose token is gone, or has come to its end."""
        if self._guard.lets_everybody_in:
            return
        for session in list(self._server.sessions):
            peer = session.context
            if isinstance(peer, ClientPeer | NodePeer) and not self._guard.holds(peer.identity):
                log.info("%s is hung up on: its token is valid no more", peer.identity)
                session.close("its token is valid no more")

    def _status(self) -> pb.StatusReply:
        owner, role = self._owner(), self.standing.role
        reply = pb.StatusReply(
            version=VERSION,
            uptime_s=(time.monotonic_ns() - self._started_ns) / 1e9,
            catalog=self._settings.catalog.partition("?")[0],
            catalog_health=self._catalog.health,
            shards=self._catalog.shards,
            rss_bytes=_rss_bytes(),
            name=self._me.name,
            role=role,
            owner=pb.CatalogOwner(name=owner.name, address=owner.address, epoch=owner.epoch) if owner is not None else None,
            records=self.standing.records(),
            http=self._told_http(),
            counters=self._measures.requests.told(),
        )
        reply.counters["credentials_refused"] = self._guard.refused
        if role is not Role.FOLLOWING:
            self.standing.answering().show(reply)
        return reply


def _rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
