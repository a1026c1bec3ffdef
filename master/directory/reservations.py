"""Who may write which key: granted puts, their generations and their expiry. Sans-I/O; `now_ns` is passed in.

A reservation only keeps two writers from doing the same work. It protects nothing: a put that comes late or was never reserved
is published all the same, and generations decide between two of one key.
"""

from collections.abc import Iterable, Sequence

from kvstore.master.directory.quotas import Share
from kvstore.master.directory.tenants import Reservation, Tenant
from kvstore.protocol.errors import Full
from kvstore.security.quotas.quota import RESERVATIONS


class Reservations:
    """The reservations of all tenants. Not thread-safe."""

    def __init__(self, *, ttl_ns: int, last_generation: int, limit: int) -> None:
        """Generations follow `last_generation`, which must be above all that were ever granted (a wall clock in ns is). At most `limit`
        reservations stand at once: whoever asks and never puts would else fill the master's memory until they expire.
        """
        self._ttl_ns = ttl_ns
        self._limit = limit
        self._count = 0
        self._last_generation = last_generation

    @property
    def last_generation(self) -> int:
        """No version that was ever granted or seen is newer."""
        return self._last_generation

    def saw(self, generation: int) -> None:
        """A generation of a block met in the catalog or at a node: later grants are above it."""
        self._last_generation = max(self._last_generation, generation)

    def held(self, tenant: Tenant, key: bytes, live: frozenset[int], now_ns: int) -> bool:
        """Someone may be writing the key: reserved, not expired, at a live node."""
        found = tenant.reserved.get(key)
        return found is not None and found.expires_ns > now_ns and found.node_id in live

    def grant(
        self,
        tenant: Tenant,
        keys: Sequence[bytes],
        sizes: Sequence[int],
        nodes: Sequence[int],
        now_ns: int,
        *,
        share: Share | None = None,
    ) -> range:
        """Reserve `keys`, one node each; their generations. An earlier reservation of a key is void. `share`: of the tenant's limit.

        Raises Full, beyond the limit, QuotaExceeded, beyond the share; nothing was reserved.
        """
        if share is not None:
            more = sum(key not in tenant.reserved for key in keys)
            if len(tenant.reserved) + more > share.now:
                raise share.exceeded(tenant.name, RESERVATIONS, used=len(tenant.reserved), more=more)
        generations = self._take(len(keys))
        expires_ns = now_ns + self._ttl_ns
        for key, size, node_id, generation in zip(keys, sizes, nodes, generations, strict=True):
            self._count += key not in tenant.reserved
            tenant.reserved.pop(key, None)  # to the end of the dictionary: it is the order of expiry
            tenant.reserved[key] = Reservation(generation, node_id, size, expires_ns)
        return generations

    def pass_over(self, tenant: Tenant, keys: Sequence[bytes]) -> range:
        """Generations for `keys` of one node that are published in this turn of the loop: nothing is reserved, for nobody comes between. An
        earlier reservation of a key is void.

        Raises Full, beyond the limit, as for a grant.
        """
        generations = self._take(len(keys))
        for key in tenant.reserved.keys() & set(keys) if tenant.reserved else ():
            self.end(tenant, key, tenant.reserved[key].generation)
        return generations

    def _take(self, count: int) -> range:
        """The next generations. Raises Full."""
        if self._count + count > self._limit:
            raise Full(f"{self._count} puts are granted and not published, and {count} more exceed max_reservations ({self._limit})")
        first = self._last_generation + 1
        self._last_generation += count
        return range(first, first + count)

    def end(self, tenant: Tenant, key: bytes, generation: int) -> None:
        """The key's reservation is over, if it is the one of `generation`."""
        found = tenant.reserved.get(key)
        if found is not None and found.generation == generation:
            del tenant.reserved[key]
            self._count -= 1

    def expire(self, tenants: Iterable[Tenant], now_ns: int) -> None:
        """Forget what expired by now."""
        for tenant in tenants:
            over: list[bytes] = []
            for key, reservation in tenant.reserved.items():
                if reservation.expires_ns > now_ns:
                    break
                over.append(key)
            for key in over:
                del tenant.reserved[key]
            self._count -= len(over)

    def check_integrity(self, tenants: Iterable[Tenant]) -> None:
        """Assert that reservations lie in the order of their expiry, are counted, and none is of a generation to come. For tests."""
        tenants = list(tenants)
        assert self._count == sum(len(tenant.reserved) for tenant in tenants) <= self._limit
        for tenant in tenants:
            expiries = [reservation.expires_ns for reservation in tenant.reserved.values()]
            assert expiries == sorted(expiries), tenant.name
            assert all(reservation.generation <= self._last_generation for reservation in tenant.reserved.values()), tenant.name
