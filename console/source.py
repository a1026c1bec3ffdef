"""Interface of the console's data source: a master's own event loop, or the control plane from outside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvstore.protocol import control_pb2 as pb
from kvstore.security.actor import Actor


@dataclass(frozen=True, slots=True)
class MasterView:
    """State of one master. `behind`: records that it lacks compared with the owner. `error`: why it did not respond; `role` is then ""."""

    address: str
    name: str = ""
    role: str = ""
    behind: int = 0
    error: str = ""


class ClusterSnapshot(NamedTuple):
    """Status of the cluster. `missing` has a line per master that did not respond, whose part of the status is old or absent."""

    status: pb.StatusReply
    missing: tuple[str, ...] = ()
    age_s: float = 0.0
    """Age of the oldest part of the status, long for a master that does not respond. The nodes' `heartbeat_age_s` include it."""


class ConsoleSource(Protocol):
    """Data and actions of a cluster. Calls come from the console's threads, block up to a deadline, and raise errors of protocol/errors.py.

    `by` is the operator, for the audit trail; a source with a credential of its own is recorded under that.
    """

    def snapshot(self) -> ClusterSnapshot:
        """Return the status of the whole cluster."""

    def masters(self) -> Sequence[MasterView]:
        """Return the known masters."""

    def topologies(self) -> Sequence[pb.NodeTopology]:
        """Return the topologies that the nodes last reported."""

    def contents(self, request: pb.ContentsRequest) -> pb.ContentsReply:
        """Return the directory's contents by tenant and namespace, and the largest or hottest prefixes of one namespace."""

    def audit(self, after: int) -> Sequence[pb.AuditEntry]:
        """Return the entries of the audit trail with a higher number, oldest first."""

    def slow_requests(self) -> Sequence[pb.SlowRequest]:
        """Return the slowest requests of the last minutes at masters and nodes, slowest first."""

    def drain(self, node: str, by: Actor, *, to: str, cancel: bool) -> None:
        """As `kvstore drain`."""

    def forget(self, node: str, by: Actor) -> None:
        """As `kvstore forget`."""

    def pin(self, tenant: str, namespace: str, by: Actor, *, pinned: bool) -> int:
        """Pin or unpin all blocks of a namespace; return their number."""

    def remove(self, tenant: str, namespace: str, by: Actor) -> int:
        """Remove all blocks of a namespace that are not pinned; return their number."""

    def set_quota(self, tenant: str, limits: Mapping[str, int | None], by: Actor) -> None:
        """As `kvstore quota set`; None: no limit."""

    def clear_quota(self, tenant: str, names: Sequence[str], by: Actor) -> None:
        """As `kvstore quota clear`."""
