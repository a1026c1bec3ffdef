"""Which block leaves a tier: one eviction policy a slot group, and the rule by which a group gets another group's memory.

A slot freed in one group (tenant and size class) is of no use to another until its whole slab is free. So the victim is normally of
the newcomer's own group. But when the coldest block of all is in another group, its slab is taken if the whole of it is colder than
the victim; else that group owes us, and its slab is taken once it owes a whole one. Memory so follows the load: what is cold goes
first, and at most one slab with warm blocks in it is flushed for one slab's worth of evictions.
"""

from collections.abc import Callable

from kvstore.store.block import Block
from kvstore.tiers.policy import EvictionPolicy


class EvictionOrder:
    """The readable blocks of one tier in the order they would leave. Not thread-safe: the node's loop is the only caller.

    A group's policy is there while the group has blocks: tenants and sizes of the past cost a search for the coldest nothing.
    """

    def __init__(self, make_policy: Callable[[], EvictionPolicy[Block]]) -> None:
        self._make_policy = make_policy
        self._policies: dict[int, EvictionPolicy[Block]] = {}
        self._debts: dict[int, tuple[int, int]] = {}
        """Group to (bytes it is owed, bytes at which they are paid)."""

    def insert(self, block: Block, group: int) -> None:
        policy = self._policies.get(group)
        if policy is None:
            policy = self._policies[group] = self._make_policy()
        policy.insert(block)

    def touch(self, block: Block, group: int) -> None:
        self._policies[group].touch(block)

    def remove(self, block: Block, group: int) -> None:
        policy = self._policies[group]
        policy.remove(block)
        if not len(policy):
            del self._policies[group]
            self._debts.pop(group, None)

    def holds(self, block: Block, group: int) -> bool:
        return group in self._policies and block in self._policies[group]

    def victim(self, group: int, evictable: Callable[[Block], bool]) -> Block | None:
        """The group's next block to leave; None when it has none that may."""
        policy = self._policies.get(group)
        return policy.victim(evictable) if policy is not None else None

    def coldest_elsewhere(self, group: int, evictable: Callable[[Block], bool]) -> Block | None:
        """Of the other groups' next victims the one read longest ago."""
        victims = [policy.victim(evictable) for other, policy in self._policies.items() if other != group]
        return min((block for block in victims if block is not None), key=lambda block: block.last_access, default=None)

    def coldest(self, evictable: Callable[[Block], bool]) -> Block | None:
        """Of all groups' next victims the one read longest ago."""
        return self.coldest_elsewhere(-1, evictable)

    def owe(self, group: int, size_bytes: int, slab_bytes: Callable[[], int]) -> bool:
        """`group` gives up a block of `size_bytes` though a colder one is elsewhere; True when it is now owed a whole slab.

        `slab_bytes` says what the colder one's slab costs, 0 for nothing. It is asked once a debt: it walks the slab.
        """
        owed_bytes, due_bytes = self._debts[group] if group in self._debts else (0, slab_bytes())
        owed_bytes += size_bytes
        if owed_bytes >= due_bytes:
            self._debts.pop(group, None)
            return True
        self._debts[group] = (owed_bytes, due_bytes)
        return False

    def __len__(self) -> int:
        return sum(map(len, self._policies.values()))

    def check_integrity(self) -> None:
        """Assert the policies' invariants, and that none is empty. For tests; O(blocks)."""
        for policy in self._policies.values():
            policy.check_integrity()
            assert len(policy)
        assert self._debts.keys() <= self._policies.keys()
