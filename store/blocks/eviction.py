"""Which block leaves a tier: one eviction policy a slot group, and the rule by which a group gets another group's memory.

A slot freed in one group (tenant and size class) is of no use to another until its whole slab is free. So the victim is normally of
the newcomer's own group. But when the coldest block of all is in another group, its slab is taken if the whole of it is colder than
the victim; else that group owes us, and its slab is taken once it owes a whole one. Memory so follows the load: what is cold goes
first, and at most one slab with warm blocks in it is flushed for one slab's worth of evictions.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvstore.store.blocks.block import Block
from kvstore.store.blocks.rows import keys_of
from kvstore.tiers.policies.interface import EvictionPolicy

MAX_UNTOLD: Final = 64
"""Reads that the policies have not been told of: one at a time takes three times as long as many at once, and a reader waits."""
MAX_FORGOTTEN: Final = 64
"""Blocks that left and are forgotten at once: whose turn it is to forget is not asked at each eviction, and none takes long."""
MAX_GROUPS_ASKED: Final = 256
"""Groups asked for their coldest block at one eviction, in turn: a few us each. Thousands of small tenants would stop the loop."""


@dataclass(slots=True, eq=False)
class _Group:
    """The order of a group's keys. The policy knows keys and no blocks: a block that comes back is a new Block and the same key. Whose they
    are says the tenant's table of visible blocks."""

    policy: EvictionPolicy[bytes]
    tenant: str

    def victim(self, blocks: Mapping[bytes, Block], evictable: Callable[[Block], bool]) -> Block | None:
        key = self.policy.victim(lambda key: evictable(blocks[key]))
        return blocks[key] if key is not None else None


class EvictionOrder:
    """The readable blocks of one tier in the order they would leave. Not thread-safe: the node's loop is the only caller.

    A group's policy is there while the group has blocks: tenants and sizes of the past cost a search for the coldest nothing.
    So what it remembers of blocks that left ends with the group's last block.
    """

    def __init__(
        self,
        make_policy: Callable[[], EvictionPolicy[bytes]],
        blocks_of: Callable[[str], Mapping[bytes, Block]],
        *,
        max_remembered: int | None = None,
    ) -> None:
        """`blocks_of` gives a tenant's visible blocks by key: a second table of them would cost 100 bytes a block and tier. All policies
        together remember no more than `max_remembered` blocks that left; None: as many as they like."""
        self._make_policy = make_policy
        self._blocks_of = blocks_of
        self._max_remembered = max_remembered
        self.remembered = 0
        """Blocks that left and that the policies of groups that are there remember."""
        self._groups: OrderedDict[int, _Group] = OrderedDict()
        self._groups_of: dict[str, dict[int, None]] = {}
        """By tenant, its groups. None of them empty."""
        self._debts: dict[int, tuple[int, int]] = {}
        """Group to (bytes it is owed, bytes at which they are paid)."""
        self._untold: list[tuple[int, bytes]] = []
        """Groups and keys that were read: the policies hear of them before anything else is told or asked."""

    def insert(self, block: Block, group: int) -> None:
        """A block whose key is not in the group."""
        self.tell()
        policy = self._group_for(block, group).policy
        self.remembered -= policy.remembered
        policy.insert(block.key, block.parent or None)
        self.remembered += policy.remembered

    def insert_all(self, blocks: Sequence[Block], group: int) -> None:
        """As `insert`, one after the other."""
        self.tell()
        parents = [block.parent for block in blocks]
        policy = self._group_for(blocks[0], group).policy
        self.remembered -= policy.remembered
        policy.insert_all(keys_of(blocks), [parent or None for parent in parents] if any(parents) else None)
        self.remembered += policy.remembered

    def _group_for(self, block: Block, group: int) -> _Group:
        members = self._groups.get(group)
        if members is None:
            members = self._groups[group] = _Group(self._make_policy(), block.tenant)
            self._groups_of.setdefault(block.tenant, {})[group] = None
        return members

    def touch(self, block: Block, group: int) -> None:
        """A block of the group was read; it is told soon."""
        self._untold.append((group, block.key))
        if len(self._untold) >= MAX_UNTOLD:
            self.tell()

    def tell(self) -> None:
        """Have the policies know of all reads so far. To be called now and then, for they have clocks."""
        if not self._untold:
            return
        untold, self._untold = self._untold, []
        for group, key in untold:
            self._groups[group].policy.touch(key)

    def remove(self, block: Block, group: int) -> None:
        self.tell()
        policy = self._groups[group].policy
        self.remembered -= policy.remembered
        policy.remove(block.key)
        self._have_left(group, 1)

    def take_victims(self, group: int, count: int, evictable: Callable[[Block], bool], may_go: Callable[[Block], bool]) -> list[Block]:
        """As `victim` and `remove` one after the other, up to `count` blocks, which are the order's no more; none from the first on that
        may not go."""
        self.tell()
        members = self._groups.get(group)
        if members is None:
            return []
        blocks, policy = self._blocks_of(members.tenant), members.policy
        self.remembered -= policy.remembered
        found = policy.take_victims(count, lambda key: evictable(blocks[key]), lambda key: may_go(blocks[key]))
        self._have_left(group, len(found))
        return [blocks[key] for key in found]

    def _have_left(self, group: int, count: int) -> None:
        """So many blocks of the group, whose policy does not count among what is remembered."""
        members = self._groups[group]
        policy, tenant = members.policy, members.tenant
        if not len(policy):
            del self._groups[group], self._groups_of[tenant][group]
            if not self._groups_of[tenant]:
                del self._groups_of[tenant]
            self._debts.pop(group, None)
            return
        self.remembered += policy.remembered
        for _ in range(count):
            if self._max_remembered is None or self.remembered <= self._max_remembered:
                break
            self._forget(policy, self._max_remembered // len(self._groups))

    def _forget(self, policy: EvictionPolicy[bytes], share: int) -> None:
        """Blocks of a group that remembers more than its `share`: of this one that has just lost a block, or of one that is looked for."""
        for _ in range(min(len(self._groups), MAX_GROUPS_ASKED)):
            if policy.remembered > share:
                break
            other, members = next(iter(self._groups.items()))
            self._groups.move_to_end(other)
            policy = members.policy
        self.remembered -= policy.remembered
        policy.forget(MAX_FORGOTTEN)
        self.remembered += policy.remembered

    def holds(self, block: Block, group: int) -> bool:
        members = self._groups.get(group)
        return members is not None and block.key in members.policy and self._blocks_of(members.tenant).get(block.key) is block

    def victim(self, group: int, evictable: Callable[[Block], bool]) -> Block | None:
        """The group's next block to leave; None when it has none that may."""
        self.tell()
        members = self._groups.get(group)
        return members.victim(self._blocks_of(members.tenant), evictable) if members is not None else None

    def next_victims(self, group: int, evictable: Callable[[Block], bool], count: int) -> list[Block]:
        """Up to `count` blocks of the group, in about the order in which they would leave."""
        self.tell()
        found: list[Block] = []
        members = self._groups.get(group)

        def look(block: Block) -> bool:
            if evictable(block):
                found.append(block)
            return len(found) == count

        if members is not None:
            members.victim(self._blocks_of(members.tenant), look)
        return found

    def coldest_elsewhere(self, group: int, evictable: Callable[[Block], bool]) -> Block | None:
        """Of the other groups' next victims the one read longest ago; where there are more than MAX_GROUPS_ASKED groups, of those asked."""
        self.tell()
        coldest: Block | None = None
        for asked in range(len(self._groups)):
            if coldest is not None and asked >= MAX_GROUPS_ASKED:
                break
            other, members = next(iter(self._groups.items()))
            self._groups.move_to_end(other)  # whoever was asked is asked again last
            block = members.victim(self._blocks_of(members.tenant), evictable) if other != group else None
            if block is not None and (coldest is None or block.last_access < coldest.last_access):
                coldest = block
        return coldest

    def coldest_of(self, tenant: str, evictable: Callable[[Block], bool]) -> Block | None:
        """Of the next victims of a tenant's groups the one read longest ago; where it has more than MAX_GROUPS_ASKED, of those asked."""
        self.tell()
        coldest: Block | None = None
        groups = self._groups_of.get(tenant, {})
        for asked, group in enumerate(list(groups)):
            if coldest is not None and asked >= MAX_GROUPS_ASKED:
                break
            if len(groups) > MAX_GROUPS_ASKED:
                groups[group] = groups.pop(group)  # whoever was asked is asked again last
            block = self._groups[group].victim(self._blocks_of(tenant), evictable)
            if block is not None and (coldest is None or block.last_access < coldest.last_access):
                coldest = block
        return coldest

    def coldest(self, evictable: Callable[[Block], bool]) -> Block | None:
        """Of all groups' next victims the one read longest ago."""
        return self.coldest_elsewhere(-1, evictable)

    def next_coldest(self, evictable: Callable[[Block], bool], count: int, tenant: str | None = None) -> list[Block]:
        """Up to `count` blocks, of that tenant or of all, as `coldest_of` or `coldest` would give them one after the other if each that was
        given were refused next. At least one where any may leave: of each group asked only its share of so many is looked at, and the first
        whose share is used up ends it, for its next block may be colder than those of the others."""
        self.tell()
        groups: dict[int, Any] = self._groups if tenant is None else self._groups_of.get(tenant, {})
        share = max(1, count // max(1, min(len(groups), MAX_GROUPS_ASKED)))
        found: list[list[Block]] = []
        for asked, group in enumerate(list(groups)):
            if found and asked >= MAX_GROUPS_ASKED:
                break
            if len(groups) > MAX_GROUPS_ASKED:
                groups[group] = groups.pop(group)  # whoever was asked is asked again last
            blocks = self.next_victims(group, evictable, share)
            if blocks:
                found.append(blocks)
        heads = [(blocks[0].last_access, number, 0) for number, blocks in enumerate(found)]
        heapq.heapify(heads)
        coldest: list[Block] = []
        while heads and len(coldest) < count:
            _, number, at = heads[0]
            blocks = found[number]
            coldest.append(blocks[at])
            if at + 1 < len(blocks):
                heapq.heapreplace(heads, (blocks[at + 1].last_access, number, at + 1))
            elif len(blocks) == share:
                break
            else:
                heapq.heappop(heads)
        return coldest

    @property
    def asks_all(self) -> bool:
        """Whether `coldest_elsewhere` asks all groups: what it gives is so until one of another group changes."""
        return len(self._groups) <= MAX_GROUPS_ASKED

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
        return sum(len(members.policy) for members in self._groups.values())

    def check_integrity(self) -> None:
        """Assert the policies' invariants, and that none is empty. For tests; O(blocks)."""
        self.tell()
        for members in self._groups.values():
            members.policy.check_integrity()
            assert len(members.policy)
        assert self._debts.keys() <= self._groups.keys()
        assert {group: members.tenant for group, members in self._groups.items()} == {
            group: tenant for tenant, groups in self._groups_of.items() for group in groups
        }
        assert all(self._groups_of.values())
        assert self.remembered == sum(members.policy.remembered for members in self._groups.values())
