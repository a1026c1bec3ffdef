"""What each tenant keeps a daemon busy with: its connections, and its requests that have no answer yet, against what its quota allows.

The daemon says whose a connection is once that is known. A message that gets no answer is no request. What waits for its answer holds its
message: of one connection there is a limit, quota or none.
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
"""Of one connection, requests and the bytes of their messages; it is not read beyond. A client asks one thing at a time. Who asks on and on
what a catalog that does not answer holds up (a removal of 65,536 keys, again and again) would else take a master's memory."""


class TenantLoad:
    """Of one tenant. Sessions count their requests here."""

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
    """Requests of one connection that have no answer yet, once it is a tenant's. Nobody's, and other daemons', are not counted."""

    def __init__(self) -> None:
        self._load: TenantLoad | None = None
        self._bytes: dict[int, int] = {}
        """By request, of its message."""
        self._held_bytes = 0

    @property
    def is_full(self) -> bool:
        """As much waits for its answer as one connection may have wait."""
        return self._held_bytes > MAX_HELD_BYTES or len(self._bytes) >= MAX_UNANSWERED

    @property
    def is_uncounted(self) -> bool:
        """Nothing waits for its answer, and no quota says how much of the tenant's may: what is answered at once need not be counted."""
        return not self._bytes and self._load is not None and self._load.limit is None

    def belong_to(self, load: TenantLoad | None) -> None:
        """Requests are counted there from now on; those counted elsewhere before count nowhere. None: nobody's."""
        if load is self._load:
            return  # who says Hello again has as much waiting as before
        if self._load is not None:
            self._load.requests -= len(self._bytes)
            self._bytes.clear()
            self._held_bytes = 0
        self._load = load

    def check(self, header: FrameHeader) -> None:
        """Raises ProtocolError for a request whose end nobody could be told, so that it would count nowhere: it has no number though it
        wants an answer, or that of another one that waits."""
        number = header.request_id
        if self._load is not None and (number in self._bytes or not (number or header.type in NOTICES)):
            raise ProtocolError(f"a request has a number of its own, from 1 on, until it is answered: {number} is none")

    def begin(self, header: FrameHeader) -> None:
        """One that was checked. Raises QuotaExceeded; then it is not counted."""
        load = self._load
        if load is not None and header.type not in NOTICES:
            load.begin()
            self._bytes[header.request_id] = header.body_bytes
            self._held_bytes += header.body_bytes

    def end(self, request_id: int) -> bool:
        """It has its answer. Whether there is room for others again, where there was none."""
        size_bytes = self._bytes.get(request_id)
        if size_bytes is None or self._load is None:
            return False
        was_full = self.is_full
        del self._bytes[request_id]
        self._held_bytes -= size_bytes
        self._load.requests -= 1
        return was_full and not self.is_full
