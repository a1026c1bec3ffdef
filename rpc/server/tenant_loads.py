"""Connections and requests in flight of each tenant at a daemon, checked against its quota.

The daemon assigns a connection to its tenant after authentication. One-way messages are not counted. Waiting requests
hold their messages in memory; so each connection has a limit even without a quota.
"""

from collections.abc import Hashable
from typing import Final

from kvstore.protocol.errors import ProtocolError, QuotaExceeded
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.messages import NOTICES
from kvstore.security.quotas.quota import UNLIMITED, Quotas

REASONS: Final = ("connections", "requests_in_flight")
MAX_UNANSWERED: Final = 4096
MAX_HELD_BYTES: Final = 64 << 20
"""Waiting requests of one connection, and bytes of their messages, beyond which it is not read. Clients send one at a
time; without a limit, a client could fill a master's memory while the catalog does not respond."""


class TenantLoad:
    """Connections and requests in flight of one tenant."""

    __slots__ = ("connections", "limit", "refused", "requests", "tenant")

    def __init__(self, tenant: str, limit: int | None) -> None:
        self.tenant = tenant
        self.limit = limit
        self.requests = 0
        self.connections = 0
        self.refused = 0
        """Refused requests."""

    def begin(self) -> None:
        """Count a request. Raises QuotaExceeded, and then does not count it."""
        if self.limit is not None and self.requests >= self.limit:
            self.refused += 1
            raise QuotaExceeded(
                f"tenant {self.tenant!r} has {self.requests} requests in flight here, its quota (requests_in_flight): wait for a response"
            )
        self.requests += 1


class TenantLoads:
    """Loads of all tenants of a daemon. Not thread-safe: only the daemon's loop calls it."""

    def __init__(self) -> None:
        self._quotas = UNLIMITED
        self._loads: dict[str, TenantLoad] = {}
        self._of: dict[Hashable, TenantLoad] = {}
        """Load by connection."""
        self._refused = dict.fromkeys(REASONS, 0)

    def set_quotas(self, quotas: Quotas) -> None:
        """Apply new quotas. Open connections stay."""
        if quotas is not self._quotas:
            self._quotas = quotas
            for load in self._loads.values():
                load.limit = quotas.of(load.tenant).requests_in_flight

    def enter(self, connection: Hashable, tenant: str) -> TenantLoad:
        """Assign the connection to the tenant. Raises QuotaExceeded: the tenant has all its connections."""
        load = self._of.get(connection)
        if load is not None and load.tenant == tenant:
            return load
        quota, load = self._quotas.of(tenant), self._loads.get(tenant)
        count = load.connections if load is not None else 0
        if quota.connections is not None and count >= quota.connections:
            self._refused["connections"] += 1
            raise QuotaExceeded(
                f"tenant {tenant!r} has {count} connections here, its quota (connections): close one, or have an operator raise it"
            )
        self.leave(connection)
        if load is None:
            load = self._loads[tenant] = TenantLoad(tenant, quota.requests_in_flight)
        load.connections += 1
        self._of[connection] = load
        return load

    def leave(self, connection: Hashable) -> None:
        """Remove a connection that ended or gets another tenant."""
        load = self._of.pop(connection, None)
        if load is not None:
            load.connections -= 1
            if not load.connections:
                del self._loads[load.tenant]
                self._refused["requests_in_flight"] += load.refused

    def of(self, tenant: str) -> tuple[int, int]:
        """Return the tenant's connections and requests in flight."""
        load = self._loads.get(tenant)
        return (load.connections, load.requests) if load is not None else (0, 0)

    def tenants(self) -> set[str]:
        """Return the tenants that have connections."""
        return set(self._loads)

    def refused(self) -> dict[str, int]:
        """Return counts of refusals by reason."""
        return self._refused | {
            "requests_in_flight": self._refused["requests_in_flight"] + sum(one.refused for one in self._loads.values())
        }

    def check_integrity(self) -> None:
        """Assert that the counts of connections match. For tests."""
        counted = [load.tenant for load in self._of.values()]
        assert {tenant: load.connections for tenant, load in self._loads.items()} == {one: counted.count(one) for one in counted}


class InFlight:
    """Requests in flight of one connection, counted while it is assigned to a tenant."""

    def __init__(self) -> None:
        self._load: TenantLoad | None = None
        self._bytes: dict[int, int] = {}
        """Message size by request id."""
        self._held_bytes = 0

    @property
    def is_full(self) -> bool:
        """True if the connection's limit of waiting requests is reached."""
        return self._held_bytes > MAX_HELD_BYTES or len(self._bytes) >= MAX_UNANSWERED

    @property
    def is_uncounted(self) -> bool:
        """True if no request waits and no quota limits them. Requests with an immediate response then need no count."""
        return not self._bytes and self._load is not None and self._load.limit is None

    def belong_to(self, load: TenantLoad | None) -> None:
        """Count further requests to `load`; the current ones are no longer counted. None: to none."""
        if load is self._load:
            return  # a repeated Hello keeps the waiting requests
        if self._load is not None:
            self._load.requests -= len(self._bytes)
            self._bytes.clear()
            self._held_bytes = 0
        self._load = load

    def check(self, header: FrameHeader) -> None:
        """Raises ProtocolError for a request id that is 0 or in use: its end could not be matched."""
        number = header.request_id
        if self._load is not None and (number in self._bytes or not (number or header.type in NOTICES)):
            raise ProtocolError(f"request id {number} is 0 or in use: until its response a request needs a unique id from 1 on")

    def begin(self, header: FrameHeader) -> None:
        """Count a checked request. Raises QuotaExceeded, and then does not count it."""
        load = self._load
        if load is not None and header.type not in NOTICES:
            load.begin()
            self._bytes[header.request_id] = header.body_bytes
            self._held_bytes += header.body_bytes

    def end(self, request_id: int) -> bool:
        """Remove a request after its response. Return whether the connection was at its limit and is not any more."""
        size_bytes = self._bytes.get(request_id)
        if size_bytes is None or self._load is None:
            return False
        was_full = self.is_full
        del self._bytes[request_id]
        self._held_bytes -= size_bytes
        self._load.requests -= 1
        return was_full and not self.is_full
