"""A master put together: catalog, directory, frames and control plane, on one reactor.

It owns all of them and the order in which they start and stop. It does not read settings files or print: daemon.py does.
"""

import logging
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.master.catalogs.by_address import make_catalog
from kvstore.master.catalogs.committing import Committer
from kvstore.master.catalogs.interface import Candidate, Catalog, Change, Owner
from kvstore.master.config import MasterSettings, read_tokens
from kvstore.master.control_service import ControlServer, ControlService, MasterSeen, node_status
from kvstore.master.directory.directory import Directory, Limits, Timing
from kvstore.master.directory.draining import Pace
from kvstore.master.directory.membership import NodeInfo
from kvstore.master.directory.records import Description
from kvstore.master.frames.service import FramesService, Reachable
from kvstore.master.scheduling.by_settings import make_estimators, make_scheduling
from kvstore.master.scheduling.service import SchedulerService
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import ConfigError, KVStoreError, StaleEpoch
from kvstore.protocol.version import VERSION
from kvstore.rpc.access import SocketAccess
from kvstore.rpc.address import parse_address, socket_id
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server import Nobody, Server, default_run_dir

TICK_S = 0.1
STOP_GRACE_S = 0.5

log = logging.getLogger("kvstore.master")


@dataclass(frozen=True, slots=True)
class Places:
    """Where a started master can be reached."""

    listen: str
    unix: str
    control: str


class Master:
    """See the module. All methods belong to the thread that calls `reactor.run`."""

    def __init__(self, settings: MasterSettings) -> None:
        """Listen, open the catalog, wait to be elected its owner, however long another owns it, and load it.

        Raises ConfigError, CatalogUnavailable, Corrupt; nothing stays open then.
        """
        self._settings = settings
        self._token_digests = read_tokens(settings.tokens)
        estimators = make_estimators(settings)
        self.reactor = Reactor()
        self.fenced: KVStoreError | None = None
        """Set when another master has taken over: this one has stopped."""
        self._started_ns = time.monotonic_ns()
        self._control: ControlServer | None = None
        self._server = Server(
            self.reactor,
            Nobody(),
            max_connections=settings.max_connections,
            hello_timeout_s=settings.hello_timeout_s,
            max_strangers=settings.max_strangers,
            peer_timeout_s=settings.peer_timeout_s,
        )
        self._catalog = make_catalog(settings.catalog, lease_ttl_s=settings.lease_ttl_s)
        try:
            self._tcp, self._unix = self._listen()
            self._catalog.open(deadline_s=settings.catalog_timeout_s)
            self._election = _Election(self._catalog, Candidate(socket.gethostname(), self._tcp), on_deposed=self._on_deposed)
            self.epoch = self._election.wait()
            self._directory = self._load_directory()
        except BaseException:
            self._server.close()
            self._catalog.close()
            self.reactor.close()
            raise
        self._committer = Committer(self.reactor, self._catalog, on_fenced=self._on_fenced)
        self._frames = FramesService(
            self._directory,
            self._committer,
            master_epoch=self.epoch,
            token_digests=self._token_digests,
            command_timeout_s=settings.command_timeout_s,
        )
        self._server.handler = self._frames
        self._scheduling = make_scheduling(
            settings, self._directory, estimators, replicate=self._frames.nodes.replicate, wall_ns=time.time_ns()
        )

    def _listen(self) -> tuple[str, str]:
        """Take the addresses before the catalog: opening it fences its owner, which a master with a port in use has no business to do."""
        listen = parse_address(self._settings.listen)
        if listen.unix:
            raise ConfigError("listen is HOST:PORT; the Unix socket is made in run_dir")
        tcp = self._server.listen_tcp(listen.host, listen.port)
        run_dir = Path(self._settings.run_dir) if self._settings.run_dir else default_run_dir()
        access = SocketAccess.chosen(self._settings.socket_group, self._settings.socket_mode)
        return tcp, self._server.listen_unix(run_dir / f"master-{tcp.rpartition(':')[2]}.sock", access)

    def _load_directory(self) -> Directory:
        settings = self._settings
        timing = Timing(
            settings.reserve_ttl_s, settings.node_ttl_s, settings.slow_start_s, settings.forget_node_s, settings.measured_rate_ttl_s
        )
        limits = Limits(
            settings.max_nodes,
            settings.max_absent_nodes,
            settings.max_kept_removals,
            settings.max_reservations,
            Pace(settings.drain_blocks, settings.drain_bytes, settings.sweep_rows),
        )
        directory = Directory(self.epoch, wall_ns=time.time_ns(), rng=random.Random(), timing=timing, limits=limits)
        directory.load(self._election.records, self.reactor.now_ns())
        return directory

    def start(self) -> Places:
        """Serve the control plane too. Raises ConfigError when its address cannot be had."""
        settings, listen = self._settings, parse_address(self._settings.listen)
        service = ControlService(
            self.reactor,
            self._directory,
            register=self._register,
            describe=self._describe,
            forget=self._forget,
            drain=self._frames.drains.drain,
            status=self._status,
            check_token=self._frames.check_token,
            master_epoch=self.epoch,
            timeout_s=settings.control_timeout_s,
        )
        control = parse_address(settings.control) if settings.control else None
        control_host = control.host if control else listen.host
        control_port = control.port if control else (listen.port + 1 if listen.port else 0)
        scheduler = SchedulerService(
            self.reactor,
            self._scheduling,
            check_token=self._frames.check_token,
            report_interval_s=settings.report_interval_s,
            timeout_s=settings.control_timeout_s,
        )
        self._control = ControlServer(service, scheduler, control_host, control_port, threads=settings.control_threads)
        is_wildcard = control_host in ("0.0.0.0", "::")
        told_host = settings.advertise or ("" if is_wildcard else control_host)
        self._frames.reachable = Reachable(socket.gethostname(), socket_id(self._unix), self._unix, told_host, self._control.port)
        self._control.start()
        self.reactor.every(TICK_S, self._tick)
        return Places(self._tcp, self._unix, f"{control_host}:{self._control.port}")

    def close(self) -> None:
        """Hang up, let control calls end, give the catalog its last chance."""
        if self._control is not None:
            self._control.stop(STOP_GRACE_S)
        self._server.close()
        self._catalog.close()
        self.reactor.close()

    def _on_deposed(self, why: KVStoreError) -> None:
        """In the catalog's thread."""
        self.reactor.call_soon(lambda: self._on_fenced(why))

    def _on_fenced(self, error: KVStoreError) -> None:
        self.fenced = error
        self.reactor.stop()

    def _tick(self) -> None:
        for node in self._directory.tick(self.reactor.now_ns()):
            log.warning("node %s (%d) is silent for %g s and counts as dead", node.info.name, node.node_id, self._settings.node_ttl_s)
        for node in self._directory.members.surplus():
            log.warning("node %s is forgotten: more than %d nodes are away", node.info.name, self._settings.max_absent_nodes)
            self._forget(node.info.name, lambda: None)
        for name in self._scheduling.tick(self.reactor.now_ns()):
            log.warning("instance %s is silent for %g s and gets no more requests", name, self._settings.instance_ttl_s)
        self._frames.drains.tick(self.reactor.now_ns())
        self._frames.clients.expire_pins(self.reactor.now_ns())
        ops = self._directory.sweep(self._settings.sweep_rows)
        if ops:
            self._committer.commit(ops)

    def _register(self, info: NodeInfo, tiers: list[pb.TierStatus], seen: MasterSeen, description: Description) -> pb.RegisterReply:
        if seen.catalog == self._catalog.identity and seen.epoch > self.epoch:
            raise StaleEpoch(f"this master is of epoch {self.epoch}, but node {info.name!r} has heard one of epoch {seen.epoch}")
        node, ops = self._directory.register(info, tiers, self.reactor.now_ns(), description)
        self._committer.commit(ops)
        log.info("node %s is node %d, at %s", info.name, node.node_id, info.tcp)
        return pb.RegisterReply(
            node_id=node.node_id,
            registration_epoch=node.epoch,
            master_epoch=self.epoch,
            catalog=self._catalog.identity,
            heartbeat_interval_s=self._settings.heartbeat_interval_s,
            tenant_token_sha256=dict(self._token_digests),
        )

    def _describe(self, node_id: int, epoch: int, topology: bytes | None, transfer: bytes | None) -> None:
        self._committer.commit(self._directory.describe(node_id, epoch, topology=topology, transfer=transfer))

    def _forget(self, name: str, then: Callable[[], None]) -> None:
        """Forget a dead node; `then` when that is durable. Raises InvalidArgument."""
        node, ops = self._directory.forget(name)
        self._frames.links.hang_up(node.node_id)

        def durable() -> None:
            self._committer.commit(self._directory.floors_written())
            then()

        self._committer.commit(ops, durable)

    def _status(self) -> pb.StatusReply:
        counts, now_ns = self._directory.counts(), self.reactor.now_ns()
        return pb.StatusReply(
            version=VERSION,
            epoch=self.epoch,
            uptime_s=(time.monotonic_ns() - self._started_ns) / 1e9,
            catalog=self._settings.catalog.partition("?")[0],
            catalog_health=self._catalog.health,
            blocks=counts.blocks,
            reserved=counts.reserved,
            pinned=counts.pinned,
            rss_bytes=_rss_bytes(),
            nodes=[
                node_status(node, self._directory.blocks_at(node.node_id), self._directory.draining.progress(node), now_ns)
                for node in self._directory.members
            ],
            counters=self._frames.counters,
        )


class _Election:
    """Follows the catalog until this master is elected. `records` is what it was given."""

    def __init__(self, catalog: Catalog, me: Candidate, *, on_deposed: Callable[[KVStoreError], None]) -> None:
        self.records: list[Sequence[Change]] = []
        self._on_deposed = on_deposed
        self._epoch = 0
        self._failure: KVStoreError | None = None
        self._over = threading.Event()
        catalog.follow(me, self)

    def wait(self) -> int:
        """The epoch this master was elected with. Raises Corrupt: it cannot be."""
        self._over.wait()
        if self._failure is not None:
            raise self._failure
        return self._epoch

    def begin(self) -> None:
        if not self._over.is_set():
            self.records = []

    def take(self, changes: Sequence[Change]) -> None:
        if not self._over.is_set():
            self.records.append(changes)

    def owned_by(self, owner: Owner | None) -> None:
        if owner is not None and not self._over.is_set():
            log.info("the catalog is owned by %s: this master waits", owner.name)

    def elected(self, epoch: int) -> None:
        self._epoch = self._epoch or epoch
        self._over.set()

    def deposed(self, why: KVStoreError) -> None:
        if not self._over.is_set():
            self._failure = why
            self._over.set()
        self._on_deposed(why)


def _rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
