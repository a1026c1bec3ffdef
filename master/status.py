"""State of a master for display: roles, readiness, metrics and status.

Read-only, and without calls to other processes."""

import resource
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore.master.catalogs.interface import CatalogOwner
from kvstore.master.leadership.partition import Partition
from kvstore.master.leadership.role_manager import MasterRole
from kvstore.master.metrics import MasterMetrics
from kvstore.master.server.owner_parts import MasterParts
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.version import VERSION
from kvstore.rpc.server.server import Server
from kvstore.security.actor import kind_of
from kvstore.security.tls.pem_files import CertificateEnds
from kvstore.telemetry.http.access import AccessLevel
from kvstore.telemetry.http.server import HttpServer, run_in_thread
from kvstore.telemetry.metrics.alerts import ENDS_SOON_S
from kvstore.telemetry.metrics.metric import Readings
from kvstore.telemetry.metrics.requests import slow_messages
from kvstore.telemetry.tracing.config import span_counts

if TYPE_CHECKING:
    from kvstore.telemetry.tracing.spans import Tracing


MAX_SLOW: Final = 256
"""Slow requests in one response."""


@dataclass(frozen=True, slots=True)
class PartitionRole:
    """This master's role in a partition, and the owner's address ("" for none) and epoch (0)."""

    role: MasterRole
    owner: str
    epoch: int
    partition: int = 0


def role_in(partition: Partition) -> PartitionRole:
    """Return this master's current role in a partition."""
    owner = partition.owner()
    return PartitionRole(partition.role_manager.role, *((owner.address, owner.epoch) if owner is not None else ("", 0)), partition.index)


class MasterStatus:
    """Status and metrics of one master. The master's loop is the only caller."""

    def __init__(
        self,
        master: MasterParts,
        partitions: Sequence[Partition],
        server: Server,
        metrics: MasterMetrics,
        tracing: "Tracing | None",
        *,
        name: str,
        http: HttpServer | None,
    ) -> None:
        """`name` is the master's; `http` serves its health and metrics."""
        settings = self._settings = master.settings
        self._authenticator, self._trail, self._wall_s = master.authenticator, master.trail, master.wall_s
        self.partitions = partitions
        self._server = server
        self._metrics = metrics
        self._tracing = tracing
        self.name = name
        self._http = http
        self._ends = CertificateEnds({name: getattr(settings, name) for name in ("tls_ca", "tls_cert", "http_tls_cert")})
        self._started_ns = time.monotonic_ns()

    def unready(self) -> list[str]:
        """Return the reasons that it neither owns the catalog nor could take it over."""
        return list(dict.fromkeys(reason for partition in self.partitions for reason in self._unready(partition)))

    def _unready(self, partition: Partition) -> list[str]:
        state, health = role_in(partition), self._health(partition)
        which = f"partition {partition.index} of " if len(self.partitions) > 1 else ""
        reasons = [f"this master is cut off from {which}its catalog, which another one may own"] if state.role is MasterRole.CUT_OFF else []
        reasons += [] if state.owner else [f"no master owns {which}the catalog, as far as this one knows"]
        return reasons + ([f"catalog: {health}"] if health != "ok" else [])

    def _health(self, partition: Partition) -> str:
        """Health of its catalog. The first partition's catalog checks the storage of all."""
        return self.partitions[0].catalog.outage or partition.catalog.health

    def readings(self) -> Readings:
        """Return its current metrics."""
        readings = self._metrics.read(
            self.name,
            [partition.catalog.written for partition in self.partitions],
            epoch=max(role_in(partition).epoch for partition in self.partitions),
            is_ready=not self.unready(),
            is_healthy=all(self._health(partition) == "ok" for partition in self.partitions),
            connections=len(self._server.sessions),
            records=sum(partition.role_manager.records() for partition in self.partitions),
            trace_spans=span_counts(self._tracing),
        )
        readings["kvstore_master_audit_entries"] = self._trail.counts()
        readings["kvstore_master_certificate_valid_seconds"] = self._ends.left_s(self._wall_s())
        readings["kvstore_master_token_valid_seconds"] = self._tokens_left_s(self._wall_s())
        owned = [partition.role_manager.leader() for partition in self.partitions if partition.role_manager.role is MasterRole.OWNER]
        return {**readings, **self._metrics.of_owner(owned)} if owned else readings

    def _tokens_left_s(self, now_s: float) -> dict[tuple[str, ...], float]:
        """Seconds until tokens expire, by kind and name; the first of several with one name."""
        return {(kind_of(one), one.name): one.expires_s - now_s for one in reversed(self._authenticator.next_to_expire())}

    def _expirations(self, now_s: float) -> Iterator[pb.Expiration]:
        """Certificates and tokens that expire within ENDS_SOON_S."""
        certificates = {f"certificate {setting}": left_s for (setting,), left_s in self._ends.left_s(now_s).items()}
        tokens = {f"token of {kind} {name}".rstrip(): left_s for (kind, name), left_s in self._tokens_left_s(now_s).items()}
        return (pb.Expiration(what=what, left_s=left_s) for what, left_s in (certificates | tokens).items() if left_s < ENDS_SOON_S)

    def nodes(self) -> list[str]:
        """Return the names of the live nodes, where this master owns a partition."""
        replies = [self.of(partition) for partition in self.partitions]
        return sorted({node.name for reply in replies for node in reply.nodes if node.state == "alive"})

    def slow_requests(self) -> list[pb.SlowRequest]:
        """Return the slowest requests of this master, and of the nodes if it owns partition 0; the slowest first."""
        role_manager = self.partitions[0].role_manager
        found = slow_messages(self._metrics.requests.slowest, self.name)
        if role_manager.role is MasterRole.OWNER:
            found += role_manager.leader().slow_requests()
        return sorted(found, key=lambda one: -one.duration_us)[:MAX_SLOW]

    def of(self, partition: Partition) -> pb.StatusReply:
        """Return the status of a partition, with nodes and blocks if this master has them."""
        owner, role = partition.owner(), partition.role_manager.role
        reply = pb.StatusReply(
            version=VERSION,
            uptime_s=(time.monotonic_ns() - self._started_ns) / 1e9,
            catalog=self._settings.catalog.partition("?")[0],
            catalog_health=self._health(partition),
            shards=partition.catalog.shards,
            partitions=len(self.partitions),
            rss_bytes=_rss_bytes(),
            name=self.name,
            role=role,
            owner=_as_message(owner) if owner is not None else None,
            owners=[_as_message(each.owner()) for each in self.partitions],
            records=partition.role_manager.records(),
            http=self._http.advertised(self._settings.advertise or socket.gethostname()) if self._http is not None else "",
            counters=self._metrics.requests.counters(),
        )
        reply.counters["credentials_refused"] = self._authenticator.refused
        reply.expirations.extend(self._expirations(self._wall_s()))
        if role is not MasterRole.FOLLOWING:
            partition.role_manager.readable_leader().show(reply)
        return reply


def _as_message(owner: CatalogOwner | None) -> pb.CatalogOwner:
    """Return an empty message if there is no owner."""
    return pb.CatalogOwner(name=owner.name, address=owner.address, epoch=owner.epoch) if owner is not None else pb.CatalogOwner()


def _rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def add_segments(server: HttpServer, nodes: Callable[[], Sequence[str]]) -> None:
    """Add the route of node names. `nodes` returns them; it is called in a thread and may block."""

    def add(server: HttpServer) -> None:
        from aiohttp import web

        async def handler(_request: web.Request) -> web.Response:
            return web.Response(text="".join(f"{name}\n" for name in await run_in_thread(nodes)))

        server.add("GET", "/get_all_segments", handler, needs=AccessLevel.READ)

    server.later(add)
