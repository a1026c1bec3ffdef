"""Where a console has its figures from, and who does as an operator asks: a master's own loop, or its control plane from outside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstore.protocol import control_pb2 as pb
from kvstore.security.actor import Actor


@dataclass(frozen=True, slots=True)
class MasterView:
    """One master. `behind` is how many blocks fewer than the owner it knows of; with `trouble` it does not answer, and `role` is empty."""

    address: str
    name: str = ""
    role: str = ""
    behind: int = 0
    trouble: str = ""


class ClusterSnapshot(NamedTuple):
    """The cluster as it is now, but for what is `missing`, a line each: what those who know it did not tell."""

    status: pb.StatusReply
    missing: tuple[str, ...] = ()
    age_s: float = 0.0
    """Since the oldest part of the status was told: long, where who knows it does not answer. The nodes' `heartbeat_age_s` include it."""


class ConsoleSource(Protocol):
    """Every call may block until a deadline of its own, comes from a thread of the console, and raises errors of protocol/errors.py."""

    def look(self) -> ClusterSnapshot:
        """At the whole cluster."""

    def masters(self) -> Sequence[MasterView]:
        """Those that are known of here."""

    def topologies(self) -> Sequence[pb.NodeTopology]:
        """What the nodes last said of their hosts."""

    def contents(self, request: pb.ContentsRequest) -> pb.ContentsReply:
        """What the directory holds, by tenant and namespace, and the largest prefixes of one namespace."""

    def audit(self, after: int) -> Sequence[pb.AuditEntry]:
        """Entries of the audit trail with a higher number, oldest first."""

    def slow_requests(self) -> Sequence[pb.SlowRequest]:
        """The slowest requests of the last minutes at masters and nodes, slowest first."""

    # `by` is the operator, for the audit trail; a source that logs in itself is known by its own credential instead.

    def drain(self, node: str, by: Actor, *, to: str, cancel: bool) -> None:
        """As `kvstore drain`."""

    def forget(self, node: str, by: Actor) -> None:
        """As `kvstore forget`."""

    def pin(self, tenant: str, namespace: str, by: Actor, *, pinned: bool) -> int:
        """Keep all blocks of a namespace from eviction and removal, or let them go; how many there were."""

    def remove(self, tenant: str, namespace: str, by: Actor) -> int:
        """Remove all blocks of a namespace that are not pinned; how many are gone."""

    def set_quota(self, tenant: str, limits: Mapping[str, int | None], by: Actor) -> None:
        """As `kvstore quota set`; None: no limit."""

    def clear_quota(self, tenant: str, names: Sequence[str], by: Actor) -> None:
        """As `kvstore quota clear`."""
