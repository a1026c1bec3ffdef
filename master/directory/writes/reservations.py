"""Permission to write a key: reservations of puts, and claims of blocks that are at their node already. Sans-I/O; `now_ns` is passed in.

A reservation only keeps two writers from doing the same work. It protects nothing: a put that comes late or was never reserved
is published all the same, and generations decide between two of one key. What a claim is granted is published in the same turn of the loop
(block_events.py), and so is not reserved."""

from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.master.directory.directory_parts import DirectoryParts
from kvstore.master.directory.index.holders import HINTED, NAMED, NOBODY
from kvstore.master.directory.index.keys import NO_ROW
from kvstore.master.directory.index.tenants import Reservation, Tenant
from kvstore.master.directory.limits.quotas import TenantShare
from kvstore.protocol.catalog_messages import CommitBlocks
from kvstore.protocol.errors import Full
from kvstore.protocol.master_messages import ReserveReply
from kvstore.protocol.message import BUSY, GRANTED, PRESENT
from kvstore.security.quotas.quota import RESERVATIONS


class DirectoryReservations:
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
        share: TenantShare | None = None,
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


MIN_NEW: Final = 4
"""Keys that are looked at together first: one takes half as long by itself."""


class PutClaims:
    """Not thread-safe."""

    def __init__(self, parts: DirectoryParts, reservations: DirectoryReservations) -> None:
        self._rows, self._tenants, self._reservations = parts.rows, parts.tenants, reservations

    def claim(self, message: CommitBlocks, *, node_id: int, now_ns: int) -> ReserveReply:
        """What becomes of the blocks that the node has. GRANTED: it is the node's to publish, under that generation. PRESENT with a
        generation, of blocks that can be read at the node (`held`): the cluster has these bytes as that version, and the node may be
        entered as a holder; without: it has other bytes, or the node gives up its own. BUSY: another writer is at the key, or what the
        node holds is being removed; or the cluster's block would be told as PRESENT without a generation, and no inventory has named it
        yet, so that it may be lost. It is lost where only this node was thought to have it, which would not claim the key then: that is
        GRANTED. The second of a repeated key is BUSY, too.

        Raises Full (too many stand reserved already), InvalidArgument (a tenant's name); nothing has changed.
        """
        owner = self._tenants.asked(message.tenant)
        if len(message.keys) >= MIN_NEW and self._are_new(owner, message.keys):
            granted = self._reservations.pass_over(self._tenants.of(message.tenant), message.keys)
            count = len(message.keys)
            return ReserveReply(bytes((GRANTED,)) * count, array("I", (node_id,)) * count, array("Q", granted))
        statuses = bytearray(len(message.keys))
        generations = array("Q", bytes(8 * len(message.keys)))
        wanted: dict[bytes, int] = {}
        for at, (key, size, checksum) in enumerate(zip(message.keys, message.sizes, message.checksums, strict=True)):
            row = owner.rows.get(key, NO_ROW)
            standing = self._rows.sets.standing[self._rows.holders[row]]
            is_same = message.acknowledged and (size, checksum) == (self._rows.sizes[row], self._rows.checksums[row])
            if standing == HINTED and not is_same and self._has_lost(owner, key, row, node_id):
                standing = NOBODY
            if standing:
                statuses[at] = PRESENT if standing == NAMED else BUSY
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
        """Each is named once, and nothing is known of it."""
        is_unknown = not owner.pending.has_any(keys) and owner.reserved.keys().isdisjoint(keys)
        return is_unknown and len(set(keys)) == len(keys) and not owner.rows.has_any(keys)

    def _has_lost(self, owner: Tenant, key: bytes, row: int, node_id: int) -> bool:
        """Whether nobody has a block that is only hinted at, as one of the key's is claimed by the node: one that was granted to it just
        before its link broke, so that it never heard of that."""
        return key not in owner.removing and all(holder == node_id for holder, _state in self._rows.pairs(row))

    def _is_busy(self, owner: Tenant, key: bytes, now_ns: int) -> bool:
        return key in owner.pending or self._reservations.held(owner, key, self._rows.sets.live_nodes, now_ns)
