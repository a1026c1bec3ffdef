"""Tenants: each has its own blocks, reservations, pending commits and pins, so that none sees another's.

A tenant exists from its first block, reservation or pin until the last is gone: invented names use no memory for long.

Pending commits of one message with unknown keys are stored as the message's columns, without an object per block. A
block gets its own object when another event of its key precedes the catalog's response."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore.master.catalogs.interface import BlockPuts
from kvstore.master.directory.index.key_index import KeyIndex
from kvstore.master.directory.index.keys import RowKeys
from kvstore.master.directory.records import Version, check_tenant, tenant_prefix


class Pending(NamedTuple):
    """A version that a node has and the catalog has not stored yet: it is not readable. `ticket` is the number of
    its plan."""

    ticket: int
    node_id: int
    version: Version
    tiers: int


@dataclass(slots=True, eq=False)
class PendingBatch:
    """Pending versions of one plan. `tiers` has a mask for each, in the order of the columns."""

    ticket: int
    node_id: int
    puts: BlockPuts
    tiers: bytes
    _places: dict[bytes, int] = field(default_factory=dict)

    def of(self, key: bytes) -> Pending:
        """Return the version of a key in this batch."""
        if not self._places:
            self._places.update(zip(self.puts.keys, range(len(self.puts.keys)), strict=True))
        at, puts = self._places[key], self.puts
        version = Version(puts.sizes[at], puts.checksums[at], puts.generations[at], puts.namespaces[at], puts.parents[at])
        return Pending(self.ticket, self.node_id, version, self.tiers[at])


class PendingCommits:
    """Pending versions by key, in order. Not thread-safe."""

    def __init__(self) -> None:
        self._of_key: dict[bytes, tuple[Pending, ...] | PendingBatch] = {}

    def __len__(self) -> int:
        """Number of keys with pending versions."""
        return len(self._of_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._of_key

    def __getitem__(self, key: bytes) -> tuple[Pending, ...]:
        """Return the pending versions of a key."""
        found = self._of_key.get(key, ())
        return (found.of(key),) if isinstance(found, PendingBatch) else found

    def __setitem__(self, key: bytes, waiting: tuple[Pending, ...]) -> None:
        """Replace the pending versions of a key."""
        if waiting:
            self._of_key[key] = waiting
        else:
            self._of_key.pop(key, None)

    def has_any(self, keys: Iterable[bytes]) -> bool:
        """Return True if any of the keys has pending versions."""
        return bool(self._of_key) and not self._of_key.keys().isdisjoint(keys)

    def add_all(self, batch: PendingBatch) -> None:
        """Add versions of different keys without pending ones."""
        self._of_key.update(dict.fromkeys(batch.puts.keys, batch))

    def take_all(self, batch: PendingBatch) -> bool:
        """Remove a batch if all of it is unchanged; else return False, with nothing changed."""
        keys = batch.puts.keys
        if list(map(self._of_key.get, keys)).count(batch) < len(keys):
            return False
        for key in keys:
            del self._of_key[key]
        return True

    def items(self) -> Iterator[tuple[bytes, tuple[Pending, ...]]]:
        """Iterate over keys and versions; they must not change meanwhile."""
        for key in self._of_key:
            yield key, self[key]


FOR_GOOD: Final = 1 << 63


class Reservation(NamedTuple):
    """A granted put: no other writer gets its key before `expires_ns` while the node lives."""

    generation: int
    node_id: int
    size: int
    expires_ns: int


@dataclass(slots=True, eq=False)
class Tenant:
    """State of a tenant. `rows` maps keys to rows; `prefix` starts its catalog keys. Compared and hashed by
    identity."""

    name: str
    index: int
    prefix: bytes
    rows: KeyIndex
    reserved: dict[bytes, Reservation] = field(default_factory=dict)
    pending: PendingCommits = field(default_factory=PendingCommits)
    pins: dict[bytes, int] = field(default_factory=dict)
    """End of each pin, by the loop's clock in ns; FOR_GOOD if it has none."""
    targets: dict[bytes, int] = field(default_factory=dict)
    """Replica targets above one."""
    removed: dict[bytes, int] = field(default_factory=dict)
    """Tombstones: removed keys and their generation, which an unreachable node may still hold."""
    removing: dict[bytes, int] = field(default_factory=dict)
    """Keys whose holders have not all acknowledged a drop, by number of removals. No node becomes a holder
    meanwhile."""


_NO_TENANT: Final = Tenant("", -1, b"", KeyIndex(RowKeys()))


class Tenants:
    """Tenants by name, and by the index that rows have."""

    def __init__(self) -> None:
        self.keys = RowKeys()
        """Keys of the rows of all tenants."""
        self._by_name: dict[str, Tenant] = {}
        self._by_index: list[Tenant | None] = []
        self._free: list[int] = []

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Tenant | None:
        """None for a tenant without state."""
        return self._by_name.get(name)

    def lookup(self, name: str) -> Tenant:
        """Return the tenant, or an empty one that must only be read: a lookup creates none."""
        return self._by_name.get(name) or _NO_TENANT

    def at(self, index: int) -> Tenant:
        tenant = self._by_index[index]
        assert tenant is not None, index
        return tenant

    def of(self, name: str) -> Tenant:
        """Return the tenant, created if needed. Raises InvalidArgument for a too long name."""
        found = self._by_name.get(name)
        if found is not None:
            return found
        check_tenant(name)
        index = self._free.pop() if self._free else len(self._by_index)
        made = self._by_name[name] = Tenant(name, index, tenant_prefix(name), KeyIndex(self.keys))
        self._by_index[index : index + 1] = [made]
        return made

    def forget_empty(self) -> None:
        """Drop tenants without state. O(tenants)."""
        for tenant in list(self._by_name.values()):
            kept = tenant.reserved, tenant.pending, tenant.pins, tenant.targets, tenant.removed, tenant.removing
            if not (tenant.rows or any(kept)):
                del self._by_name[tenant.name]
                self._by_index[tenant.index] = None
                self._free.append(tenant.index)
