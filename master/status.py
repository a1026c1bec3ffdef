"""What a master tells of itself: its role and owner in each partition, why it is not fit to serve, its metrics, its status for who asks.

It changes nothing and asks nobody: all of it is read from the parts as they are now.
"""

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
from kvstore.master.measures import MasterMetrics
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
"""Slow requests told at once."""


@dataclass(frozen=True, slots=True)
class PartitionRole:
    """This master's role in a partition, and the owner's address ("" for nobody) and epoch (0)."""

    role: MasterRole
    owner: str
    epoch: int
    partition: int = 0


def told_of(partition: Partition) -> PartitionRole:
    """The role that this master has there now."""
    owner = partition.owner()
    return PartitionRole(partition.standing.role, *((owner.address, owner.epoch) if owner is not None else ("", 0)), partition.index)


class MasterStatus:
    """See the module. The master's loop is the only caller."""

    def __init__(
        self,
        master: MasterParts,
        partitions: Sequence[Partition],
        server: Server,
        measures: MasterMetrics,
        tracing: "Tracing | None",
        *,
        name: str,
        http: HttpServer | None,
    ) -> None:
        """`name` is the master's; `http` serves its health and metrics."""
        settings = self._settings = master.settings
        self._guard, self._trail, self._wall_s = master.guard, master.trail, master.wall_s
        self.partitions = partitions
        self._server = server
        self._measures = measures
        self._tracing = tracing
        self.name = name
        self._http = http
        self._ends = CertificateEnds({name: getattr(settings, name) for name in ("tls_ca", "tls_cert", "http_tls_cert")})
        self._started_ns = time.monotonic_ns()

    def unready(self) -> list[str]:
        """Why it neither owns the catalog nor is fit to take it over, a line a reason."""
        return list(dict.fromkeys(reason for partition in self.partitions for reason in self._unready(partition)))

    def _unready(self, partition: Partition) -> list[str]:
        told, health = told_of(partition), self._health(partition)
        which = f"partition {partition.index} of " if len(self.partitions) > 1 else ""
        reasons = [f"this master is cut off from {which}its catalog, which another one may own"] if told.role is MasterRole.CUT_OFF else []
        reasons += [] if told.owner else [f"nobody owns {which}the catalog, as far as this master knows"]
        return reasons + ([f"catalog: {health}"] if health != "ok" else [])

    def _health(self, partition: Partition) -> str:
        """Of its catalog. The first partition's looks after the place of all."""
        return self.partitions[0].catalog.outage or partition.catalog.health

    def readings(self) -> Readings:
        """What its metrics tell now."""
        told = self._measures.read(
            self.name,
            [partition.catalog.written for partition in self.partitions],
            epoch=max(told_of(partition).epoch for partition in self.partitions),
            is_ready=not self.unready(),
            is_healthy=all(self._health(partition) == "ok" for partition in self.partitions),
            connections=len(self._server.sessions),
            records=sum(partition.standing.records() for partition in self.partitions),
            trace_spans=span_counts(self._tracing),
        )
        told["kvstore_master_audit_entries"] = self._trail.counts()
        told["kvstore_master_certificate_valid_seconds"] = self._ends.left_s(self._wall_s())
        told["kvstore_master_token_valid_seconds"] = self._tokens_left_s(self._wall_s())
        owned = [partition.standing.leading() for partition in self.partitions if partition.standing.role is MasterRole.OWNER]
        return {**told, **self._measures.of_owner(owned)} if owned else told

    def _tokens_left_s(self, now_s: float) -> dict[tuple[str, ...], float]:
        """Seconds until tokens end, by kind and name; of several of a name until the first one does."""
        return {(kind_of(one), one.name): one.expires_s - now_s for one in reversed(self._guard.first_to_end())}

    def _endings(self, now_s: float) -> Iterator[pb.Ending]:
        """Certificates and tokens that end within ENDS_SOON_S."""
        certificates = {f"certificate {setting}": left_s for (setting,), left_s in self._ends.left_s(now_s).items()}
        tokens = {f"token of {kind} {name}".rstrip(): left_s for (kind, name), left_s in self._tokens_left_s(now_s).items()}
        return (pb.Ending(what=what, left_s=left_s) for what, left_s in (certificates | tokens).items() if left_s < ENDS_SOON_S)

    def nodes(self) -> list[str]:
        """Names of the nodes that are alive, where this master owns the catalog."""
        replies = [self.of(partition) for partition in self.partitions]
        return sorted({node.name for reply in replies for node in reply.nodes if node.state == "alive"})

    def slow_requests(self) -> list[pb.SlowRequest]:
        """At this master, and at the nodes where it owns partition 0; the slowest first."""
        standing = self.partitions[0].standing
        found = slow_messages(self._measures.requests.slowest, self.name)
        if standing.role is MasterRole.OWNER:
            found += standing.leading().slow_requests()
        return sorted(found, key=lambda one: -one.duration_us)[:MAX_SLOW]

    def of(self, partition: Partition) -> pb.StatusReply:
        """What the control plane answers of a partition; of its nodes and blocks too where this master knows them."""
        owner, role = partition.owner(), partition.standing.role
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
            records=partition.standing.records(),
            http=self._http.advertised(self._settings.advertise or socket.gethostname()) if self._http is not None else "",
            counters=self._measures.requests.counters(),
        )
        reply.counters["credentials_refused"] = self._guard.refused
        reply.endings.extend(self._endings(self._wall_s()))
        if role is not MasterRole.FOLLOWING:
            partition.standing.answering().show(reply)
        return reply


def _as_message(owner: CatalogOwner | None) -> pb.CatalogOwner:
    """Without a name where nobody owns it."""
    return pb.CatalogOwner(name=owner.name, address=owner.address, epoch=owner.epoch) if owner is not None else pb.CatalogOwner()


def _rss_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def add_segments(server: HttpServer, nodes: Callable[[], Sequence[str]]) -> None:
    """`nodes` returns the names; it is called in a thread, and may be a call of the master's loop."""

    def add(server: HttpServer) -> None:
        from aiohttp import web

        async def handler(_request: web.Request) -> web.Response:
            return web.Response(text="".join(f"{name}\n" for name in await run_in_thread(nodes)))

        server.add("GET", "/get_all_segments", handler, needs=AccessLevel.READ)

    server.later(add)
