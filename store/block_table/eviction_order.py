"""Which block leaves a tier: one eviction policy a slot group, and the rule by which a group gets another group's memory.

A slot freed in one group (tenant and size class) is of no use to another until its whole slab is free. So the victim is normally of
the newcomer's own group. But when the coldest block of all is in another group, its slab is taken if the whole of it is colder than
the victim; else that group owes us, and its slab is taken once it owes a whole one. Memory so follows the load: what is cold goes
first, and at most one slab with warm blocks in it is flushed for one slab's worth of evictions.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Final

from kvstore.store.block_table.block import Block
from kvstore.store.block_table.policy_states import BlockStates
from kvstore.store.block_table.rows import keys_of
from kvstore.tiers.policies.block_values import BlockValues, block_of_value, is_of_values
from kvstore.tiers.policies.interface import EvictionPolicy

MAX_UNTOLD: Final = 64
"""Reads that the policies have not been told of: one at a time takes three times as long as many at once, and a reader waits."""
MAX_FORGOTTEN: Final = 64
"""Blocks that left and are forgotten at once: whose turn it is to forget is not asked at each eviction, and none takes long."""
MAX_GROUPS_ASKED: Final = 256
"""Groups asked for their coldest block at one eviction, in turn: a few us each. Thousands of small tenants would stop the loop."""


MAX_RETIRED_ASKED: Final = 256
"""Retired blocks of a group that are looked at for one victim; those that may not leave are looked at again last."""


@dataclass(slots=True, eq=False)
class _OrderGroup:
    """The order of a group's keys. The policy knows keys and no blocks: a block that comes back is a new Block and the same key. Whose they
    are says the tenant's table of visible blocks. `retired` are those of the policy's keys whose namespaces were retired
    (retired_blocks.py), in the order in which they were put: the last leaves first, so that the beginning of a prompt stays longest."""

    policy: EvictionPolicy[bytes]
    tenant: str
    retired: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


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
        is_of_dram: bool = False,
    ) -> None:
        """`blocks_of` gives a tenant's visible blocks by key: a second table of them would cost 100 bytes a block and tier. All policies
        together remember no more than `max_remembered` blocks that left; None: as many as they like. `is_of_dram`: what they know of
        a block is in its columns."""
        self._make_policy = make_policy
        self._blocks_of = blocks_of
        self._max_remembered = max_remembered
        self._is_of_dram = is_of_dram
        self.remembered = 0
        """Blocks that left and that the policies of groups that are there remember."""
        self._groups: OrderedDict[int, _OrderGroup] = OrderedDict()
        self._groups_of: dict[str, OrderedDict[int, None]] = {}
        """By tenant, its groups. None of them empty."""
        self._debts: dict[int, tuple[int, int]] = {}
        """Group to (bytes it is owed, bytes at which they are paid)."""
        self.is_retired: Callable[[Block], bool] | None = None
        """Whether a block's namespace is retired: it leaves before others of its group. None: none is."""
        self._untold: list[tuple[int, bytes]] = []
        """Groups and keys that were read: the policies hear of them before anything else is told or asked."""

    def insert(self, block: Block, group: int) -> None:
        """A block whose key is not in the group."""
        self.tell()
        members = self._group_for(block, group)
        policy = members.policy
        self.remembered -= policy.remembered
        self._insert(members, block)
        self.remembered += policy.remembered
        if self.is_retired is not None and self.is_retired(block):
            members.retired[block.key] = None

    def insert_all(self, blocks: Sequence[Block], group: int) -> None:
        """As `insert`, one after the other."""
        self.tell()
        parents = list(map(blocks[0].columns.parents.__getitem__, blocks))
        members = self._group_for(blocks[0], group)
        policy = members.policy
        self.remembered -= policy.remembered
        if any(map(is_of_values, {block.namespace for block in blocks})):
            for block in blocks:
                self._insert(members, block)
        else:
            policy.insert_all(keys_of(blocks), [parent or None for parent in parents] if any(parents) else None)
        self.remembered += policy.remembered
        if self.is_retired is not None:
            members.retired.update(dict.fromkeys(block.key for block in blocks if self.is_retired(block)))

    def retire(self, block: Block, group: int) -> None:
        """The block's namespace was retired: it leaves before others of its group."""
        members = self._groups.get(group)
        if members is not None and block.key in members.policy:
            members.retired[block.key] = None

    @staticmethod
    def _insert(members: _OrderGroup, block: Block) -> None:
        key, label = block.key, block.namespace
        whole = block_of_value(label, key) if is_of_values(label) else None
        if whole is None:
            members.policy.insert(key, block.parent or None)
            return
        if not isinstance(members.policy, BlockValues):
            members.policy = BlockValues(members.policy)
        above = block_of_value(label, block.parent) if block.parent else None
        members.policy.insert_value(key, whole, above)

    def _group_for(self, block: Block, group: int) -> _OrderGroup:
        members = self._groups.get(group)
        if members is None:
            policy = self._make_policy()
            if self._is_of_dram:
                policy.use_states(BlockStates(group, self._blocks_of(block.tenant), block.columns))
            members = self._groups[group] = _OrderGroup(policy, block.tenant)
            self._groups_of.setdefault(block.tenant, OrderedDict())[group] = None
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
        members = self._groups[group]
        policy = members.policy
        self.remembered -= policy.remembered
        policy.remove(block.key)
        if members.retired:
            members.retired.pop(block.key, None)
        self._have_left(group, 1)

    def take_victims(self, group: int, count: int, evictable: Callable[[Block], bool], may_evict: Callable[[Block], bool]) -> list[Block]:
        """As `victim` and `remove` one after the other, up to `count` blocks, which are the order's no more; none from the first on that
        may not go."""
        self.tell()
        members = self._groups.get(group)
        if members is None:
            return []
        blocks, policy = self._blocks_of(members.tenant), members.policy
        self.remembered -= policy.remembered
        found: list[bytes] = []
        is_over = False
        while len(found) < count and not is_over and (block := self._retired_in(members, evictable)) is not None:
            is_over = not may_evict(block)
            if not is_over:
                policy.remove(block.key)
                del members.retired[block.key]
                found.append(block.key)
        if len(found) < count and not is_over:
            more = policy.take_victims(count - len(found), lambda key: evictable(blocks[key]), lambda key: may_evict(blocks[key]))
            for key in more if members.retired else ():
                members.retired.pop(key, None)
            found += more
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
        return self._victim(members, evictable) if members is not None else None

    def retired_victim(self, group: int, evictable: Callable[[Block], bool]) -> Block | None:
        """The next block of the group to leave whose namespace is retired; None when it has none that may."""
        members = self._groups.get(group)
        return self._retired_in(members, evictable) if members is not None else None

    def _victim(self, members: _OrderGroup, evictable: Callable[[Block], bool]) -> Block | None:
        if (retired := self._retired_in(members, evictable)) is not None:
            return retired
        blocks = self._blocks_of(members.tenant)
        key = members.policy.victim(lambda key: evictable(blocks[key]))
        return blocks[key] if key is not None else None

    def _retired_in(self, members: _OrderGroup, evictable: Callable[[Block], bool]) -> Block | None:
        """A retired block of the group that may leave. Those whose namespace is used again are retired no more; those that may not leave
        are looked at again last."""
        retired, is_retired = members.retired, self.is_retired
        for _ in range(min(len(retired), MAX_RETIRED_ASKED)):
            key = next(reversed(retired))
            block = self._blocks_of(members.tenant)[key]
            if is_retired is not None and is_retired(block):
                if evictable(block):
                    return block
                retired.move_to_end(key, last=False)
            else:
                del retired[key]
        return None

    def next_victims(self, group: int, evictable: Callable[[Block], bool], count: int) -> list[Block]:
        """Return up to `count` different blocks of the group, in about the order in which they would leave.

        A policy may ask about a block that was refused once more, as SIEVE does in its second round."""
        self.tell()
        found: dict[Block, None] = {}
        members = self._groups.get(group)

        def look(block: Block) -> bool:
            if evictable(block):
                found[block] = None
            return len(found) == count

        if members is not None and self._retired_in(members, look) is None:
            blocks = self._blocks_of(members.tenant)
            members.policy.victim(lambda key: look(blocks[key]))
        return list(found)

    def coldest_elsewhere(self, group: int, evictable: Callable[[Block], bool]) -> Block | None:
        """Of the other groups' next victims the one read longest ago; where there are more than MAX_GROUPS_ASKED groups, of those asked."""
        return self._coldest(self._groups, evictable, _last_access, besides=group)

    def coldest_of(self, tenant: str, evictable: Callable[[Block], bool]) -> Block | None:
        """Of the next victims of a tenant's groups a retired one, else the one read longest ago; where it has more than MAX_GROUPS_ASKED,
        of those asked."""
        return self._coldest(self._groups_of.get(tenant, OrderedDict()), evictable, self._coldness)

    def coldest(self, evictable: Callable[[Block], bool]) -> Block | None:
        """Of all groups' next victims the one read longest ago."""
        return self.coldest_elsewhere(-1, evictable)

    def _coldest(
        self,
        groups: OrderedDict[int, Any],
        evictable: Callable[[Block], bool],
        rank: Callable[[Block], Any],
        *,
        besides: int = -1,
    ) -> Block | None:
        self.tell()
        found: list[Block] = []
        for group in _in_turn(groups, found):
            if group != besides and (block := self._victim(self._groups[group], evictable)) is not None:
                found.append(block)  # noqa: PERF401 - what is found ends the turns
        return min(found, key=rank, default=None)

    def _coldness(self, block: Block) -> tuple[bool, int]:
        """Of a tenant's blocks the least leaves first."""
        return self.is_retired is None or not self.is_retired(block), block.last_access

    def next_coldest(self, evictable: Callable[[Block], bool], count: int, tenant: str | None = None) -> list[Block]:
        """Up to `count` blocks, of that tenant or of all, as `coldest_of` or `coldest` would give them one after the other if each that was
        given were refused next. At least one where any may leave: of each group asked only its share of so many is looked at, and the first
        whose share is used up ends it, for its next block may be colder than those of the others."""
        self.tell()
        groups: OrderedDict[int, Any] = self._groups if tenant is None else self._groups_of.get(tenant, OrderedDict())
        share = max(1, count // max(1, min(len(groups), MAX_GROUPS_ASKED)))
        found: list[list[Block]] = []
        for group in _in_turn(groups, found):
            if blocks := self.next_victims(group, evictable, share):
                found.append(blocks)  # noqa: PERF401 - what is found ends the turns
        rank: Callable[[Block], Any] = _last_access if tenant is None else self._coldness
        heads = [(rank(blocks[0]), number, 0) for number, blocks in enumerate(found)]
        heapq.heapify(heads)
        coldest: list[Block] = []
        while heads and len(coldest) < count:
            _, number, at = heads[0]
            blocks = found[number]
            coldest.append(blocks[at])
            if at + 1 < len(blocks):
                heapq.heapreplace(heads, (rank(blocks[at + 1]), number, at + 1))
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


def _last_access(block: Block) -> int:
    return block.last_access


def _in_turn(groups: OrderedDict[int, Any], found: Sized) -> Iterator[int]:
    """The groups to ask: MAX_GROUPS_ASKED, and more until something is in `found`. Those that are asked come last the next time."""
    for asked in range(len(groups)):
        if asked >= MAX_GROUPS_ASKED and len(found):
            return
        group = next(iter(groups))
        groups.move_to_end(group)
        yield group
