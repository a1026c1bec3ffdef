"""Removals that a node has not heard of: what it still has of those blocks must not come back with it. Sans-I/O.

While every node has told its inventory nothing is kept: a removal is final once the holders have dropped the block. While one is away,
or has not told all yet, it may hold what is removed, even if the directory has forgotten that it does. So the removal is kept,
in the catalog too, until every node that was ever seen has told what it holds.
"""

from typing import Final

from kvstore.master.catalogs.interface import Op
from kvstore.master.directory import records
from kvstore.master.directory.membership import ALIVE, Membership
from kvstore.master.directory.tenants import Tenant, Tenants

MAX_REMOVED: Final = 100_000
"""Removals kept for nodes that are away. One more cannot be promised, and is answered "not removed"."""


class Removals:
    """Keys are in Tenant.removed, up to which generation. Not thread-safe."""

    def __init__(self, tenants: Tenants, members: Membership, *, limit: int = MAX_REMOVED) -> None:
        self._tenants = tenants
        self._members = members
        self._limit = limit
        self._count = 0

    def load(self, tenant: Tenant, key: bytes, generation: int) -> None:
        """A removal from the catalog."""
        tenant.removed[key] = generation
        self._count += 1

    def remember(self, tenant: Tenant, key: bytes, generation: int) -> list[Op] | None:
        """A block is being removed, with all its versions up to `generation`. None when that cannot be promised; nothing changed."""
        if not self._is_one_away():
            return []
        if key not in tenant.removed:
            if self._count >= self._limit:
                return None
            self._count += 1
        tenant.removed[key] = generation
        return [records.removed(tenant.prefix, key, generation)]

    def refused(self, tenant: Tenant, key: bytes) -> list[Op]:
        """A holder keeps the block (it is in use): it is not removed after all."""
        if tenant.removed.pop(key, None) is None:
            return []
        self._count -= 1
        return [records.removed(tenant.prefix, key, None)]

    def settle(self) -> list[Op]:
        """Forget all of them, if every node has told its inventory by now."""
        if not self._count or self._is_one_away():
            return []
        ops = [records.removed(tenant.prefix, key, None) for tenant in self._tenants for key in tenant.removed]
        for tenant in self._tenants:
            tenant.removed.clear()
        self._count = 0
        return ops

    def check_integrity(self) -> None:
        """Assert that the count is right. For tests; O(tenants)."""
        assert self._count == sum(len(tenant.removed) for tenant in self._tenants) <= self._limit

    def _is_one_away(self) -> bool:
        return any(node.state != ALIVE for node in self._members)
