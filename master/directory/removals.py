"""Removals that a node has not heard of: what it still has of those blocks must not come back with it. Sans-I/O.

While every node is settled (it has told its inventory, and dropped what was removed) nothing is kept: a removal is final once the
holders have dropped the block. While one is away it may hold what is removed, even if the directory has forgotten that it does. So
the removal is kept, in the catalog too, until every node that is known is settled.

As many as `limit` are kept. When there are more, the floors of the nodes that are away rise (membership.py): such a node must drop
all that it has up to there when it returns, and single removals need not be remembered for it. Nor need they for a node that is
forgotten, since strangers have a floor too. What floors stand in for is deleted from the catalog only once they are in it.
"""

import math

from kvstore.master.catalogs.interface import Op
from kvstore.master.directory import records
from kvstore.master.directory.membership import Member, Membership
from kvstore.master.directory.tenants import Tenant, Tenants


class Removals:
    """Keys are in Tenant.removed, up to which generation; those that are there already count. Not thread-safe."""

    def __init__(self, tenants: Tenants, members: Membership, *, limit: int) -> None:
        self._tenants = tenants
        self._members = members
        self._limit = limit
        self._count = sum(len(tenant.removed) for tenant in tenants)
        self._unwritten = 0

    @property
    def unwritten(self) -> int:
        """How often floors have risen without being durable yet: `floors_written` is to be called as often."""
        return self._unwritten

    def are_kept(self, generation: int) -> bool:
        """Whether `remember` has anything to do for removals up to `generation`: a node is not settled."""
        return any(node.floor < generation and not node.is_settled for node in self._members)

    def remember(self, tenant: Tenant, key: bytes, generation: int) -> list[Op]:
        """A block is being removed, with all its versions up to `generation`; operations that must be durable before that is said.

        If floors rise for it, so does `unwritten`. Until they are written more than `limit` may be kept: those of the calls under way.
        """
        if not self.are_kept(generation):
            return []
        if key not in tenant.removed:
            if self._count >= self._limit and not self._unwritten:
                self._unwritten += 1
                return self._members.raise_floors(generation)
            self._count += 1
        tenant.removed[key] = generation
        return [records.removed(tenant.prefix, key, generation)]

    def forget(self, name: str, generation: int) -> tuple[Member, list[Op]]:
        """The dead node `name` is known no more; what it has up to `generation` must go if it ever returns. It, and operations that
        must be durable before that is said; `unwritten` has risen. Raises InvalidArgument: no node has the name, or it is alive.
        """
        node = self._members.forget(name)
        self._unwritten += 1
        return node, [self._members.raise_strangers_floor(generation), records.delete_node(name)]

    def floors_written(self) -> list[Op]:
        """Floors that have risen are durable: the removals that they stand in for are kept no more. Operations nobody waits for."""
        self._unwritten -= 1
        if self._unwritten:
            return []
        return self._let_go(min((node.floor for node in self._members if not node.is_settled), default=math.inf))

    def refused(self, tenant: Tenant, key: bytes, generation: int) -> list[Op]:
        """A holder keeps the block of `generation` (it is in use): it is not removed after all, only what was there before it."""
        if tenant.removed.get(key, 0) < generation:
            return []
        tenant.removed[key] = generation - 1
        return [records.removed(tenant.prefix, key, generation - 1)]

    def settle(self) -> list[Op]:
        """Forget all of them, if every node is settled by now, and the floors of those that are; operations nobody waits for."""
        ops = self._members.clear_floors()
        if self._count and not self._unwritten and all(node.is_settled for node in self._members):
            ops += self._let_go(math.inf)
        return ops

    def check_integrity(self) -> None:
        """Assert that the count is right. For tests; O(tenants)."""
        assert self._count == sum(len(tenant.removed) for tenant in self._tenants)
        assert self._unwritten >= 0

    def _let_go(self, up_to: float) -> list[Op]:
        ops = []
        for tenant in self._tenants:
            covered = [key for key, generation in tenant.removed.items() if generation <= up_to]
            for key in covered:
                del tenant.removed[key]
            ops += [records.removed(tenant.prefix, key, None) for key in covered]
        self._count -= len(ops)
        return ops
