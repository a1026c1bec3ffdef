"""What each tenant keeps a daemon busy with: its connections, and its requests that have no answer yet, against what its quota allows.

The daemon says whose a connection is once that is known; requests without an id, which get no answer, are not counted.
"""

from collections.abc import Hashable
from typing import Final

from kvstore.protocol.errors import QuotaExceeded
from kvstore.security.quotas.quota import UNLIMITED, Quotas

REASONS: Final = ("connections", "requests_in_flight")


class TenantLoad:
    """Of one tenant. Sessions count their requests here (`begin`, `end`) while there is a limit."""

    __slots__ = ("connections", "limit", "refused", "requests", "tenant")

    def __init__(self, tenant: str, limit: int | None) -> None:
        self.tenant = tenant
        self.limit = limit
        self.requests = 0
        self.connections = 0
        self.refused = 0
        """Requests."""

    def begin(self) -> None:
        """One more request. Raises QuotaExceeded: it is one too many, and not counted."""
        if self.limit is not None and self.requests >= self.limit:
            self.refused += 1
            raise QuotaExceeded(
                f"tenant {self.tenant!r} has {self.requests} requests in flight here, all that its quota gives it (requests_in_flight): "
                "wait for an answer"
            )
        self.requests += 1


class TenantLoads:
    """See the module. Not thread-safe: the daemon's loop is the only caller."""

    def __init__(self) -> None:
        self._quotas = UNLIMITED
        self._loads: dict[str, TenantLoad] = {}
        self._of: dict[Hashable, TenantLoad] = {}
        """By connection."""
        self._refused = dict.fromkeys(REASONS, 0)

    def hold_to(self, quotas: Quotas) -> None:
        """These are in force from now on. Connections that are open stay."""
        if quotas is not self._quotas:
            self._quotas = quotas
            for load in self._loads.values():
                load.limit = quotas.of(load.tenant).requests_in_flight

    def enter(self, connection: Hashable, tenant: str) -> TenantLoad:
        """The connection is the tenant's. Raises QuotaExceeded: it is one too many."""
        load = self._of.get(connection)
        if load is not None and load.tenant == tenant:
            return load
        quota, load = self._quotas.of(tenant), self._loads.get(tenant)
        count = load.connections if load is not None else 0
        if quota.connections is not None and count >= quota.connections:
            self._refused["connections"] += 1
            raise QuotaExceeded(
                f"tenant {tenant!r} has {count} connections here, all that its quota gives it (connections): close one, or have the "
                "operator raise it"
            )
        self.leave(connection)
        if load is None:
            load = self._loads[tenant] = TenantLoad(tenant, quota.requests_in_flight)
        load.connections += 1
        self._of[connection] = load
        return load

    def leave(self, connection: Hashable) -> None:
        """It is over, or another's."""
        load = self._of.pop(connection, None)
        if load is not None:
            load.connections -= 1
            if not load.connections:
                del self._loads[load.tenant]
                self._refused["requests_in_flight"] += load.refused

    def of(self, tenant: str) -> tuple[int, int]:
        """Its connections, and requests in flight."""
        load = self._loads.get(tenant)
        return (load.connections, load.requests) if load is not None else (0, 0)

    def tenants(self) -> set[str]:
        """Those that have connections."""
        return set(self._loads)

    def refused(self) -> dict[str, int]:
        """By reason, so far."""
        return self._refused | {
            "requests_in_flight": self._refused["requests_in_flight"] + sum(one.refused for one in self._loads.values())
        }

    def check_integrity(self) -> None:
        """Assert that connections are counted. For tests."""
        counted = [load.tenant for load in self._of.values()]
        assert {tenant: load.connections for tenant, load in self._loads.items()} == {one: counted.count(one) for one in counted}


class InFlight:
    """Requests of one connection that have no answer yet, as far as they are counted at its tenant."""

    def __init__(self) -> None:
        self._load: TenantLoad | None = None
        self._ids: set[int] = set()

    def belong_to(self, load: TenantLoad | None) -> None:
        """Requests are counted there from now on, while they have a limit; those counted before count nowhere. None: nobody's."""
        if self._load is not None:
            self._load.requests -= len(self._ids)
            self._ids.clear()
        self._load = load

    def begin(self, request_id: int) -> None:
        """Raises QuotaExceeded."""
        load = self._load
        if load is not None and load.limit is not None and request_id and request_id not in self._ids:
            load.begin()
            self._ids.add(request_id)

    def end(self, request_id: int) -> None:
        """It has its answer."""
        if request_id in self._ids and self._load is not None:
            self._ids.discard(request_id)
            self._load.requests -= 1
