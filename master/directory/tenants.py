"""The tenants: for each its blocks, reservations, commits in flight and pins, in dictionaries of its own, so that none can see another's.

A tenant exists from its first block, reservation or pin until the last of them is gone: inventing names grows nothing for long.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvstore.master.directory.key_index import KeyIndex
from kvstore.master.directory.keys import Keys
from kvstore.master.directory.pending import PendingCommits
from kvstore.master.directory.records import check_tenant, tenant_prefix

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


_NOBODY: Final = Tenant("", -1, b"", KeyIndex(Keys()))


class Tenants:
    """By name, and by the index that a row keeps."""

    def __init__(self) -> None:
        self.keys = Keys()
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
