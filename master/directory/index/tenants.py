"""The tenants: for each its blocks, reservations, commits in flight and pins, in dictionaries of its own, so that none can see another's.

A tenant exists from its first block, reservation or pin until the last of them is gone: inventing names grows nothing for long.

Commits that came together, of keys of which nothing was known, are kept together: the columns of their message, no object a block. Such a
block gets one when something else happens to its key before the catalog has answered."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore.master.catalogs.interface import BlockPuts
from kvstore.master.directory.index.key_index import KeyIndex
from kvstore.master.directory.index.keys import RowKeys
from kvstore.master.directory.records import Version, check_tenant, tenant_prefix


class Pending(NamedTuple):
    """A version that a node has and the catalog does not yet: nobody sees it. `ticket` is the number of the plan it waits in."""

    ticket: int
    node_id: int
    version: Version
    tiers: int


@dataclass(slots=True, eq=False)
class PendingBatch:
    """Versions of one plan. `tiers`: a mask each, in the order of the columns."""

    ticket: int
    node_id: int
    puts: BlockPuts
    tiers: bytes
    _places: dict[bytes, int] = field(default_factory=dict)

    def of(self, key: bytes) -> Pending:
        """The one of a key that it has."""
        if not self._places:
            self._places.update(zip(self.puts.keys, range(len(self.puts.keys)), strict=True))
        at, puts = self._places[key], self.puts
        version = Version(puts.sizes[at], puts.checksums[at], puts.generations[at], puts.namespaces[at], puts.parents[at])
        return Pending(self.ticket, self.node_id, version, self.tiers[at])


class PendingCommits:
    """By key, in the order in which they came. Not thread-safe."""

    def __init__(self) -> None:
        self._of_key: dict[bytes, tuple[Pending, ...] | PendingBatch] = {}

    def __len__(self) -> int:
        """Keys that have any."""
        return len(self._of_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._of_key

    def __getitem__(self, key: bytes) -> tuple[Pending, ...]:
        """Those of a key; none: an empty tuple."""
        found = self._of_key.get(key, ())
        return (found.of(key),) if isinstance(found, PendingBatch) else found

    def __setitem__(self, key: bytes, waiting: tuple[Pending, ...]) -> None:
        """These are all of the key from now on."""
        if waiting:
            self._of_key[key] = waiting
        else:
            self._of_key.pop(key, None)

    def has_any(self, keys: Iterable[bytes]) -> bool:
        """Whether one of the keys has any."""
        return bool(self._of_key) and not self._of_key.keys().isdisjoint(keys)

    def add_all(self, batch: PendingBatch) -> None:
        """Of different keys that have none."""
        self._of_key.update(dict.fromkeys(batch.puts.keys, batch))

    def take_all(self, batch: PendingBatch) -> bool:
        """Take out all of a batch, if they are as they came; else False, with nothing done."""
        keys = batch.puts.keys
        if list(map(self._of_key.get, keys)).count(batch) < len(keys):
            return False
        for key in keys:
            del self._of_key[key]
        return True

    def items(self) -> Iterator[tuple[bytes, tuple[Pending, ...]]]:
        """Each key and what it has; nothing must change meanwhile."""
        for key in self._of_key:
            yield key, self[key]


FOR_GOOD: Final = 1 << 63


class Reservation(NamedTuple):
    """A granted put: nobody else gets its key before `expires_ns` while the node lives."""

    generation: int
    node_id: int
    size: int
    expires_ns: int


@dataclass(slots=True, eq=False)
class Tenant:
    """`rows` names the row of each key; `prefix` starts its catalog keys. Compared and hashed by identity."""

    name: str
    index: int
    prefix: bytes
    rows: KeyIndex
    reserved: dict[bytes, Reservation] = field(default_factory=dict)
    pending: PendingCommits = field(default_factory=PendingCommits)
    pins: dict[bytes, int] = field(default_factory=dict)
    """Until when each pinned key is, by the loop's clock in ns; FOR_GOOD: it has no end."""
    targets: dict[bytes, int] = field(default_factory=dict)
    """At how many nodes a block is to be, where that is more than one."""
    removed: dict[bytes, int] = field(default_factory=dict)
    """Keys removed while a node was away, up to which generation: that node may still have them."""
    removing: dict[bytes, int] = field(default_factory=dict)
    """Keys whose holders have been told to drop them and have not all answered: by how many removes. No other node becomes a holder."""


_NOBODY: Final = Tenant("", -1, b"", KeyIndex(RowKeys()))


class Tenants:
    """By name, and by the index that a row keeps."""

    def __init__(self) -> None:
        self.keys = RowKeys()
        """Of the rows of all tenants."""
        self._by_name: dict[str, Tenant] = {}
        self._by_index: list[Tenant | None] = []
        self._free: list[int] = []

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Tenant | None:
        """None for a tenant that has nothing."""
        return self._by_name.get(name)

    def asked(self, name: str) -> Tenant:
        """The tenant, or an empty one to be read only: a question makes none."""
        return self._by_name.get(name) or _NOBODY

    def at(self, index: int) -> Tenant:
        tenant = self._by_index[index]
        assert tenant is not None, index
        return tenant

    def of(self, name: str) -> Tenant:
        """The tenant, made if need be. Raises InvalidArgument for a name too long to be kept."""
        found = self._by_name.get(name)
        if found is not None:
            return found
        check_tenant(name)
        index = self._free.pop() if self._free else len(self._by_index)
        made = self._by_name[name] = Tenant(name, index, tenant_prefix(name), KeyIndex(self.keys))
        self._by_index[index : index + 1] = [made]
        return made

    def forget_empty(self) -> None:
        """Forget the tenants that have nothing. O(tenants)."""
        for tenant in list(self._by_name.values()):
            kept = tenant.reserved, tenant.pending, tenant.pins, tenant.targets, tenant.removed, tenant.removing
            if not (tenant.rows or any(kept)):
                del self._by_name[tenant.name]
                self._by_index[tenant.index] = None
                self._free.append(tenant.index)
