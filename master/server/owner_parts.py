"""Shared parts of an owner: those of the master for all partitions, and those of one partition for one epoch.
Values."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.master.audit_trail import AuditTrail
from kvstore.master.catalogs.group_commit import Committer
from kvstore.master.config import MasterSettings
from kvstore.master.directory.directory import Directory
from kvstore.master.server.node_connections import NodeConnections
from kvstore.master.server.recovery_barrier import RecoveryBarrier
from kvstore.master.server.tickets import TicketService
from kvstore.rpc.reactor import Reactor
from kvstore.rpc.server.tenant_loads import TenantLoads
from kvstore.security.authenticator import Authenticator
from kvstore.security.quotas.limits import QuotasInForce


@dataclass(frozen=True, slots=True)
class MasterParts:
    """Parts of one master, shared by all its partitions."""

    reactor: Reactor
    settings: MasterSettings
    authenticator: Authenticator
    quotas: QuotasInForce
    loads: TenantLoads
    """Connections and requests of clients."""
    trail: AuditTrail
    wall_s: Callable[[], float] = time.time
    """Clock by which tokens and certificates expire."""


@dataclass(frozen=True, slots=True)
class OwnerParts:
    """Parts of one partition while this master owns it, in the epoch `master_epoch`."""

    directory: Directory
    committer: Committer
    connections: NodeConnections
    tickets: TicketService | None
    """None while authentication is off."""
    counters: dict[str, int]
    recovery_barrier: RecoveryBarrier
    """Parks requests for blocks of nodes that have yet to register."""
    trail: AuditTrail
    master_epoch: int
