"""Who may write which key: granted puts, their generations and their expiry. Sans-I/O; `now_ns` is passed in.

A reservation only keeps two writers from doing the same work. It protects nothing: a put that comes late or was never reserved
is published all the same, and generations decide between two of one key.
"""

from collections import deque
from collections.abc import Sequence

from kvstore.master.tenants import Reservation, Tenant


class Reservations:
    """The reservations of all tenants. Not thread-safe."""

    def __init__(self, *, ttl_ns: int, last_generation: int) -> None:
        """Generations follow `last_generation`, which must be above all that were ever granted (a wall clock in ns is)."""
        self._ttl_ns = ttl_ns
        self._last_generation = last_generation
        self._expiries: deque[tuple[int, Tenant, list[bytes], int]] = deque()

    def saw(self, generation: int) -> None:
        """A generation of a block met in the catalog or at a node: later grants are above it."""
        self._last_generation = max(self._last_generation, generation)

    def held(self, tenant: Tenant, key: bytes, live: frozenset[int], now_ns: int) -> bool:
        """Someone may be writing the key: reserved, not expired, at a live node."""
        found = tenant.reserved.get(key)
        return found is not None and found.expires_ns > now_ns and found.node_id in live

    def grant(self, tenant: Tenant, keys: list[bytes], sizes: Sequence[int], nodes: Sequence[int], now_ns: int) -> range:
        """Reserve `keys`, one node each; their generations. An earlier reservation of a key is void."""
        first = self._last_generation + 1
        self._last_generation += len(keys)
        expires_ns = now_ns + self._ttl_ns
        generations = range(first, first + len(keys))
        for key, size, node_id, generation in zip(keys, sizes, nodes, generations, strict=True):
            tenant.reserved[key] = Reservation(generation, node_id, size, expires_ns)
        self._expiries.append((expires_ns, tenant, keys, first))
        return generations

    def end(self, tenant: Tenant, key: bytes, generation: int) -> None:
        """The key's reservation is over, if it is the one of `generation`."""
        found = tenant.reserved.get(key)
        if found is not None and found.generation == generation:
            del tenant.reserved[key]

    def expire(self, now_ns: int) -> None:
        """Forget what expired by now. O(forgotten)."""
        while self._expiries and self._expiries[0][0] <= now_ns:
            _expires_ns, tenant, keys, first = self._expiries.popleft()
            for generation, key in enumerate(keys, first):
                self.end(tenant, key, generation)

    def check_integrity(self, tenants: Sequence[Tenant]) -> None:
        """Assert that every reservation will expire and none is of a generation to come. For tests."""
        due = {(tenant, key, generation) for _ns, tenant, keys, first in self._expiries for generation, key in enumerate(keys, first)}
        for tenant in tenants:
            for key, reservation in tenant.reserved.items():
                assert (tenant, key, reservation.generation) in due
                assert reservation.generation <= self._last_generation
