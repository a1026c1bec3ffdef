"""Permission to put a key: reservations, and commit requests for blocks that their node holds. Sans-I/O; `now_ns` is
passed in.

A reservation only avoids duplicate work. It is no lock: a put that is late or without a reservation is published all
the same, and generations decide between two puts of a key. A granted commit request is published in the same time slice
(block_events.py), and so needs no reservation."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.holders import ABSENT, CONFIRMED, HINTED
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.index.tenants import Reservation, Tenant
from kvstore.master.directory.limits.quotas import TenantShare
from kvstore.protocol.catalog_messages import CommitBlocks
from kvstore.protocol.errors import Full
from kvstore.protocol.master_messages import ReserveReply
from kvstore.protocol.message import BUSY, GRANTED, PRESENT
from kvstore.security.quotas.quota import RESERVATIONS


class DirectoryReservations:
    """Reservations of all tenants. Not thread-safe."""

    def __init__(self, *, ttl_ns: int, last_generation: int, limit: int) -> None:
        """Generations follow `last_generation`, which must be above all granted ones (a wall clock in ns is).
        `limit` bounds open reservations: otherwise clients that never put could fill the master's memory until they
        expire."""
        self._ttl_ns = ttl_ns
        self._limit = limit
        self._count = 0
        self._last_generation = last_generation

    @property
    def last_generation(self) -> int:
        """Upper bound of all granted and seen generations."""
        return self._last_generation

    def saw(self, generation: int) -> None:
        """A block of this generation exists: later grants are above it."""
        self._last_generation = max(self._last_generation, generation)

    def held(self, tenant: Tenant, key: bytes, live: frozenset[int], now_ns: int) -> bool:
        """True if the key has an unexpired reservation at a live node."""
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
        share: TenantShare | None = None,
    ) -> range:
        """Reserve `keys`, with a node each; return their generations. Replaces earlier reservations. `share` is the
        tenant's.

        Raises Full beyond the limit, QuotaExceeded beyond the share; nothing was reserved then."""
        if share is not None:
            more = sum(key not in tenant.reserved for key in keys)
            if len(tenant.reserved) + more > share.now:
                raise share.exceeded(tenant.name, RESERVATIONS, used=len(tenant.reserved), more=more)
        generations = self._take(len(keys))
        expires_ns = now_ns + self._ttl_ns
        for key, size, node_id, generation in zip(keys, sizes, nodes, generations, strict=True):
            self._count += key not in tenant.reserved
            tenant.reserved.pop(key, None)  # to the end of the dictionary, which is in order of expiry
            tenant.reserved[key] = Reservation(generation, node_id, size, expires_ns)
        return generations

    def pass_over(self, tenant: Tenant, keys: Sequence[bytes]) -> range:
        """Return generations for `keys` of one node that are published in this time slice, without reservations. Ends
        earlier ones.

        Raises Full beyond the limit, as `grant`."""
        generations = self._take(len(keys))
        for key in tenant.reserved.keys() & set(keys) if tenant.reserved else ():
            self.end(tenant, key, tenant.reserved[key].generation)
        return generations

    def _take(self, count: int) -> range:
        """Return the next generations. Raises Full."""
        if self._count + count > self._limit:
            raise Full(f"{self._count} puts are granted and not published, and {count} more exceed max_reservations ({self._limit})")
        first = self._last_generation + 1
        self._last_generation += count
        return range(first, first + count)

    def end(self, tenant: Tenant, key: bytes, generation: int) -> None:
        """End the key's reservation, if it has this generation."""
        found = tenant.reserved.get(key)
        if found is not None and found.generation == generation:
            del tenant.reserved[key]
            self._count -= 1

    def expire(self, tenants: Iterable[Tenant], now_ns: int) -> None:
        """End expired reservations."""
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
        """Assert that reservations are in order of expiry, are counted, and have granted generations. For tests."""
        tenants = list(tenants)
        assert self._count == sum(len(tenant.reserved) for tenant in tenants) <= self._limit
        for tenant in tenants:
            expiries = [reservation.expires_ns for reservation in tenant.reserved.values()]
            assert expiries == sorted(expiries), tenant.name
            assert all(reservation.generation <= self._last_generation for reservation in tenant.reserved.values()), tenant.name


MIN_NEW: Final = 4
"""Keys checked as a batch; smaller batches take longer than one by one."""


class PutClaims:
    """Decides on commit requests for blocks that a node holds. Not thread-safe."""

    def __init__(self, parts: DirectoryParts, reservations: DirectoryReservations) -> None:
        self._rows, self._tenants, self._reservations = parts.rows, parts.tenants, reservations

    def claim(self, message: CommitBlocks, *, node_id: int, now_ns: int) -> ReserveReply:
        """Decide on blocks that the node has and wants to publish. Statuses:

        - GRANTED: the node may publish it, under the returned generation.
        - PRESENT with a generation, for readable blocks (`held`): the cluster has the same bytes as that version, and
          the node may become a holder.
        - PRESENT without one: the cluster has other bytes, or the node drops its own.
        - BUSY: another writer puts the key, the node's block is being removed, the key is repeated, or the cluster's
          block has only hints and may be lost. If only this node was listed for it, it is lost, and the claim is
          GRANTED.

        Raises Full (too many reservations), InvalidArgument (a tenant's name); nothing has changed then."""
        owner = self._tenants.lookup(message.tenant)
        if len(message.keys) >= MIN_NEW and self._are_new(owner, message.keys):
            granted = self._reservations.pass_over(self._tenants.of(message.tenant), message.keys)
            count = len(message.keys)
            return ReserveReply(bytes((GRANTED,)) * count, array("I", (node_id,)) * count, array("Q", granted))
        statuses = bytearray(len(message.keys))
        generations = array("Q", bytes(8 * len(message.keys)))
        wanted: dict[bytes, int] = {}
        for at, (key, size, checksum) in enumerate(zip(message.keys, message.sizes, message.checksums, strict=True)):
            row = owner.rows.get(key, NO_ROW)
            presence = self._rows.sets.presence[self._rows.holders[row]]
            is_same = message.acknowledged and (size, checksum) == (self._rows.sizes[row], self._rows.checksums[row])
            if presence == HINTED and not is_same and self._has_lost(owner, key, row, node_id):
                presence = ABSENT
            if presence:
                statuses[at] = PRESENT if presence == CONFIRMED else BUSY
                if not message.acknowledged:
                    continue
                if key in owner.removing or self._rows.generations[row] <= owner.removed.get(key, 0):
                    statuses[at] = BUSY
                elif is_same:
                    statuses[at], generations[at] = PRESENT, self._rows.generations[row]
            elif key in wanted or self._is_busy(owner, key, now_ns):
                statuses[at] = BUSY
            else:
                statuses[at] = GRANTED
                wanted[key] = at
        if wanted:
            granted = self._reservations.pass_over(self._tenants.of(message.tenant), list(wanted))
            for at, generation in zip(wanted.values(), granted, strict=True):
                generations[at] = generation
        nodes = array("I", [node_id if generation else 0 for generation in generations])
        return ReserveReply(bytes(statuses), nodes, generations)

    def _are_new(self, owner: Tenant, keys: Sequence[bytes]) -> bool:
        """True if the keys are distinct and unknown."""
        is_unknown = not owner.pending.has_any(keys) and owner.reserved.keys().isdisjoint(keys)
        return is_unknown and len(set(keys)) == len(keys) and not owner.rows.has_any(keys)

    def _has_lost(self, owner: Tenant, key: bytes, row: int, node_id: int) -> bool:
        """True if no other node can hold a block with hints only, since the node claims its key: it was granted just
        before the connection broke, and the node did not receive the grant."""
        return key not in owner.removing and all(holder == node_id for holder, _state in self._rows.pairs(row))

    def _is_busy(self, owner: Tenant, key: bytes, now_ns: int) -> bool:
        return key in owner.pending or self._reservations.held(owner, key, self._rows.sets.live_nodes, now_ns)
