"""Eviction order of one tier: a policy per slot group, and the rebalancing of slabs between groups.

A group is a tenant and a size class. Other groups can use a freed slot only once its whole slab is free, so a victim is
usually of the new block's own group. If the coldest block of all is in another group, its slab is taken
- at once if all of it is colder than the victim;
- else when the group has collected rebalance credit for a whole slab, by its own evictions.

So memory follows the load, and at most one slab with warm blocks is flushed per slab's worth of evictions.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

from kvstore.protocol.retention import DEFAULT_PRIORITY
from kvstore.store.block_table.block import DRAM, Block
from kvstore.store.block_table.policy_families import PolicyFamilies
from kvstore.store.block_table.retention import priority_of
from kvstore.store.block_table.rows import keys_of
from kvstore.tiers.policies.block_values import BlockValues, block_of_value, is_of_values
from kvstore.tiers.policies.interface import EvictionPolicy

MAX_GROUPS_SEARCHED: Final = 256
"""Groups searched per eviction, round robin, a few us each. Thousands of small tenants would stop the loop."""


MIN_CANDIDATES: Final = 2048
"""Blocks that `next_coldest` may find over all groups, about a millisecond, however few it returns. With a smaller share
the coldest group ends the result after a few blocks, and each search skips all of its blocks that are in use."""

MAX_EARLY_EXAMINED: Final = 256
"""Retired and secondary blocks of a group examined per victim. Those in use are examined last the next time."""

MAX_GROUPS_SHOWN: Final = 64
"""Groups searched for `next_victim`, once a heartbeat."""
MAX_PASSED: Final = 16
"""Blocks in use that `next_victim` passes over, in each of a group's lists."""

RETIRED: Final = "retired"
SECONDARY: Final = "secondary"


class NextVictim(NamedTuple):
    """Block that a tier would evict next. `reason` is RETIRED, SECONDARY, or "" if its policy chooses it; `worth` is
    the policy's, in hits per second of its slot, None if the policy knows none."""

    block: Block
    reason: str
    worth: float | None


@dataclass(slots=True, eq=False)
class _OrderGroup:
    """Order of a group's keys. The policy knows keys, not blocks: a block stored again is a new Block under the same
    key. The tenant's visible blocks map keys to blocks.

    `retired` are the keys of retired namespaces (retired_blocks.py), in the order of their puts. The last is evicted
    first, so that the beginning of a prompt stays longest.

    `secondary` are the keys of secondary copies: the block's home is another node (master/directory/placement/
    home_copies.py), or it was promoted and has a copy in a faster tier. The one read longest ago is first. They are
    evicted after the retired ones.
    """

    policy: EvictionPolicy[bytes]
    tenant: str
    retired: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    secondary: OrderedDict[bytes, None] = field(default_factory=OrderedDict)


class EvictionOrder:
    """Readable blocks of one tier in eviction order. Not thread-safe: called from the node's loop.

    A group's policy exists while the group has blocks, so that former tenants and sizes cost searches nothing.
    """

    def __init__(self, families: PolicyFamilies, tier: int = DRAM) -> None:
        self._families = families
        self._tier = tier
        self._blocks_of = families.blocks_of
        self._groups: OrderedDict[int, _OrderGroup] = OrderedDict()
        self._groups_of: dict[str, OrderedDict[int, None]] = {}
        """Groups by tenant. No empty dicts."""
        self._rebalance_credits: dict[int, tuple[int, int]] = {}
        """By group: bytes of credit, bytes at which a slab is taken."""
        self.is_retired: Callable[[Block], bool] | None = None
        """Returns True for a block of a retired namespace, which is evicted before others of its group. None: no
        namespace is retired."""
        self.released = 0
        """Secondary copies that were removed."""

    def insert(self, block: Block, group: int) -> None:
        """Add a block whose key is not in the group."""
        self._families.flush_touches()
        members = self._group_for(block, group)
        policy = members.policy
        self._families.suspend(policy)
        self._insert(members, block)
        self._families.resume(policy)
        if block.columns.retention and (priority := priority_of(block.columns.retention[block])) != DEFAULT_PRIORITY:
            members.policy.set_priority(block.key, priority)
        if self.is_retired is not None and self.is_retired(block):
            members.retired[block.key] = None

    def insert_all(self, blocks: Sequence[Block], group: int) -> None:
        """Add blocks in this order."""
        self._families.flush_touches()
        parents = list(map(blocks[0].columns.parents.__getitem__, blocks))
        members = self._group_for(blocks[0], group)
        policy = members.policy
        self._families.suspend(policy)
        if any(map(is_of_values, {block.namespace for block in blocks})):
            for block in blocks:
                self._insert(members, block)
        else:
            policy.insert_all(keys_of(blocks), [parent or None for parent in parents] if any(parents) else None)
        self._families.resume(policy)
        if self.is_retired is not None:
            members.retired.update(dict.fromkeys(block.key for block in blocks if self.is_retired(block)))

    def retire(self, block: Block, group: int) -> None:
        """Mark a block of a retired namespace."""
        members = self._groups.get(group)
        if members is not None and block.key in members.policy:
            members.retired[block.key] = None

    def mark_secondary(self, block: Block, group: int) -> None:
        """Mark a block whose copy here is secondary."""
        self._families.flush_touches()
        members = self._groups.get(group)
        if members is not None and block.key in members.policy:
            members.secondary[block.key] = None

    def secondary_copies(self) -> list[tuple[str, list[bytes]]]:
        """Return the keys of secondary copies of each group, in any order, with its tenant."""
        # A million take 10 ms as those of a dict; an OrderedDict's own iterator follows a list of nodes in 240 ms.
        return [(members.tenant, list(dict.__iter__(members.secondary))) for members in self._groups.values() if members.secondary]

    def set_priority(self, block: Block, group: int, priority: int) -> None:
        """Pass the priority of a block of the group to its policy."""
        self._families.flush_touches()
        if (members := self._groups.get(group)) is not None:
            members.policy.set_priority(block.key, priority)

    def expect_reuse(self, block: Block, group: int, after_s: float) -> None:
        """Pass the time until the next expected read of a block of the group to its policy."""
        self._families.flush_touches()
        if (members := self._groups.get(group)) is not None:
            members.policy.expect_reuse(block.key, after_s)

    def unmark_secondary(self, block: Block, group: int) -> None:
        """The copy here is the last one of its node, or the only one of the block's home and this node."""
        if (members := self._groups.get(group)) is not None:
            members.secondary.pop(block.key, None)

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
            policy = self._families.open(block.tenant, self._tier, block.columns)
            members = self._groups[group] = _OrderGroup(policy, block.tenant)
            self._families.hold(members)
            self._groups_of.setdefault(block.tenant, OrderedDict())[group] = None
        return members

    def touch(self, block: Block, group: int) -> None:
        """Record a read of a block of the group."""
        self._families.touch(self, group, block.key)

    def pass_touch(self, group: int, key: bytes) -> None:
        """Pass a read to the group's policy."""
        members = self._groups[group]
        members.policy.touch(key)
        if key in members.secondary:
            members.secondary.move_to_end(key)

    def remove(self, block: Block, group: int) -> None:
        self._families.flush_touches()
        members = self._groups[group]
        policy = members.policy
        self._families.suspend(policy)
        self._remove(members, block)
        self._have_left(group, 1)

    def _remove(self, members: _OrderGroup, block: Block) -> None:
        key = block.key
        if members.retired:
            members.retired.pop(key, None)
        if members.secondary:
            members.secondary.pop(key, None)
        if block.is_secondary:  # its home keeps it
            self.released += 1
            members.policy.release(key)
        else:
            members.policy.remove(key)

    def take_victims(self, group: int, count: int, evictable: Callable[[Block], bool], may_evict: Callable[[Block], bool]) -> list[Block]:
        """As `victim` and `remove` in turn, up to `count` blocks. Stops at the first that `may_evict` refuses."""
        self._families.flush_touches()
        members = self._groups.get(group)
        if members is None:
            return []
        blocks, policy = self._blocks_of(members.tenant), members.policy
        self._families.suspend(policy)
        found: list[bytes] = []
        is_over = False
        while len(found) < count and not is_over and (block := self._early_in(members, evictable)) is not None:
            is_over = not may_evict(block)
            if not is_over:
                self._remove(members, block)
                found.append(block.key)
        if len(found) < count and not is_over:
            more = policy.take_victims(count - len(found), lambda key: evictable(blocks[key]), lambda key: may_evict(blocks[key]))
            for key in more if members.retired or members.secondary else ():
                members.retired.pop(key, None)
                members.secondary.pop(key, None)
                self.released += blocks[key].is_secondary
            found += more
        self._have_left(group, len(found))
        return [blocks[key] for key in found]

    def _have_left(self, group: int, count: int) -> None:
        """Account for removed blocks of the group. Its remembered blocks are not counted at this point."""
        members = self._groups[group]
        policy, tenant = members.policy, members.tenant
        if not len(policy):
            del self._groups[group], self._groups_of[tenant][group]
            if not self._groups_of[tenant]:
                del self._groups_of[tenant]
            self._rebalance_credits.pop(group, None)
            self._families.close(tenant, members)
            return
        self._families.resume(policy)
        self._families.trim(policy, count)

    def holds(self, block: Block, group: int) -> bool:
        members = self._groups.get(group)
        return members is not None and block.key in members.policy and self._blocks_of(members.tenant).get(block.key) is block

    def next_after(self, block: Block, group: int) -> Block | None:
        """Return the block that would be the group's next victim once this one has left; None if it is unknown."""
        members = self._groups.get(group)
        key = members.policy.next_after(block.key) if members is not None else None
        return self._blocks_of(members.tenant).get(key) if members is not None and key is not None else None

    def worth(self, block: Block, group: int) -> float | None:
        """Return the worth of a block that may be evicted next, comparable between the tiers of a tenant; None if it is
        unknown."""
        members = self._groups.get(group)
        return members.policy.worth(block.key) if members is not None else None

    def victim(self, group: int, evictable: Callable[[Block], bool]) -> Block | None:
        """Return the group's next victim; None if no block is evictable."""
        self._families.flush_touches()
        members = self._groups.get(group)
        return self._victim(members, evictable) if members is not None else None

    def early_victim(self, group: int, evictable: Callable[[Block], bool]) -> Block | None:
        """Return the group's next victim that is of a retired namespace, or secondary; else None."""
        members = self._groups.get(group)
        return self._early_in(members, evictable) if members is not None else None

    def next_victim(self, evictable: Callable[[Block], bool]) -> NextVictim | None:
        """Return the next victim for display: of the groups' next victims the one read longest ago. Changes no order.

        Searches MAX_GROUPS_SHOWN groups. None if the tier is empty.
        """
        self._families.flush_touches()
        groups = islice(self._groups.values(), MAX_GROUPS_SHOWN)
        found = (one for members in groups if (one := self._next_in(members, evictable)) is not None)
        return min(found, key=lambda one: one.block.last_access, default=None)

    def _next_in(self, members: _OrderGroup, evictable: Callable[[Block], bool]) -> NextVictim | None:
        blocks, policy = self._blocks_of(members.tenant), members.policy
        retired = filter(self._is_still_retired, (blocks[key] for key in reversed(members.retired)))
        secondary = (blocks[key] for key in members.secondary)
        for reason, early in ((RETIRED, retired), (SECONDARY, secondary)):
            if (block := next(filter(evictable, islice(early, MAX_PASSED)), None)) is not None:
                return NextVictim(block, reason, None)
        passed = 0

        def may_be_shown(key: bytes) -> bool:
            nonlocal passed
            passed += 1
            return passed > MAX_PASSED or evictable(blocks[key])

        key = next(iter(policy.next_victims(1, may_be_shown)), None)
        return NextVictim(blocks[key], "", policy.worth(key)) if key is not None else None

    def _is_still_retired(self, block: Block) -> bool:
        return self.is_retired is not None and self.is_retired(block)

    def _victim(self, members: _OrderGroup, evictable: Callable[[Block], bool], *, may_stay: bool = False) -> Block | None:
        if (early := self._early_in(members, evictable)) is not None:
            return early
        blocks, policy = self._blocks_of(members.tenant), members.policy
        if may_stay and not policy.has_pure_victim:
            found = policy.next_victims(1, lambda key: evictable(blocks[key]))
            return blocks[found[0]] if found else None
        key = policy.victim(lambda key: evictable(blocks[key]))
        return blocks[key] if key is not None else None

    def _early_in(self, members: _OrderGroup, evictable: Callable[[Block], bool]) -> Block | None:
        """Return an evictable retired block of the group, else a secondary one, or None."""
        if not members.retired and not members.secondary:  # usual
            return None
        if (retired := self._retired_in(members, evictable)) is not None:
            return retired
        secondary, blocks = members.secondary, self._blocks_of(members.tenant)
        for _ in range(min(len(secondary), MAX_EARLY_EXAMINED)):
            key = next(iter(secondary))
            if evictable(blocks[key]):
                return blocks[key]
            secondary.move_to_end(key)
        return None

    def _retired_in(self, members: _OrderGroup, evictable: Callable[[Block], bool]) -> Block | None:
        """Return an evictable retired block of the group. Blocks whose namespace is used again are unmarked; blocks in
        use are examined last the next time."""
        retired, is_retired = members.retired, self.is_retired
        for _ in range(min(len(retired), MAX_EARLY_EXAMINED)):
            key = next(reversed(retired))
            block = self._blocks_of(members.tenant)[key]
            if is_retired is not None and is_retired(block):
                if evictable(block):
                    return block
                retired.move_to_end(key, last=False)
            else:
                del retired[key]
        return None

    def next_victims(
        self, group: int, evictable: Callable[[Block], bool], count: int, *, has_early: bool = True, may_stay: bool = False
    ) -> list[Block]:
        """Return up to `count` different blocks of the group, in approximate eviction order. Without `has_early` the
        retired and secondary ones are left out, as far as the policy offers others.

        With `may_stay` the order does not change. Without, the caller evicts the first: the policy may move to it.
        """
        self._families.flush_touches()
        found: dict[Block, None] = {}
        members = self._groups.get(group)

        def look(block: Block) -> bool:
            if evictable(block):
                found[block] = None
            return len(found) == count

        if members is not None and (not has_early or self._early_in(members, look) is None):
            blocks, policy = self._blocks_of(members.tenant), members.policy
            if policy.has_pure_victim:
                policy.victim(lambda key: look(blocks[key]))
                return list(found)
            if not may_stay:
                policy.victim(lambda key: evictable(blocks[key]))
            more = policy.next_victims(count - len(found), lambda key: blocks[key] not in found and evictable(blocks[key]))
            found.update(dict.fromkeys(map(blocks.__getitem__, more)))
        return list(found)

    def coldest_elsewhere(self, group: int, evictable: Callable[[Block], bool], *, may_stay: bool = False) -> Block | None:
        """Return the next victim of the other groups that was read longest ago, among at most MAX_GROUPS_SEARCHED groups.
        With `may_stay` no order changes."""
        return self._coldest(self._groups, evictable, _last_access, besides=group, may_stay=may_stay)

    def coldest_of(self, tenant: str, evictable: Callable[[Block], bool]) -> Block | None:
        """Return a retired next victim of the tenant's groups, else the one read longest ago, among at most
        MAX_GROUPS_SEARCHED groups."""
        return self._coldest(self._groups_of.get(tenant, OrderedDict()), evictable, self._coldness)

    def coldest(self, evictable: Callable[[Block], bool]) -> Block | None:
        """Return the next victim of all groups that was read longest ago."""
        return self.coldest_elsewhere(-1, evictable)

    def _coldest(
        self,
        groups: OrderedDict[int, Any],
        evictable: Callable[[Block], bool],
        rank: Callable[[Block], Any],
        *,
        besides: int = -1,
        may_stay: bool = False,
    ) -> Block | None:
        self._families.flush_touches()
        found: list[Block] = []
        for group in _round_robin(groups, found):
            if group != besides and (block := self._victim(self._groups[group], evictable, may_stay=may_stay)) is not None:
                found.append(block)  # noqa: PERF401 - `found` ends the iteration
        return min(found, key=rank, default=None)

    def _coldness(self, block: Block) -> tuple[bool, int]:
        """Sort key within a tenant: the least is evicted first."""
        return self.is_retired is None or not self.is_retired(block), block.last_access

    def next_coldest(self, evictable: Callable[[Block], bool], count: int, tenant: str | None = None) -> list[Block]:
        """Return up to `count` blocks, of `tenant` or of all, in the order of repeated `coldest_of` or `coldest`.

        At least one if any is evictable. Each group is searched for its share only; the first group whose share is used
        up ends the result, because its next block may be colder than those of others.
        """
        self._families.flush_touches()
        groups: OrderedDict[int, Any] = self._groups if tenant is None else self._groups_of.get(tenant, OrderedDict())
        searched = max(1, min(len(groups), MAX_GROUPS_SEARCHED))
        share = min(count, max(1, count // searched, MIN_CANDIDATES // searched))
        found: list[list[Block]] = []
        for group in _round_robin(groups, found):
            if blocks := self.next_victims(group, evictable, share):
                found.append(blocks)  # noqa: PERF401 - `found` ends the iteration
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
    def searches_all(self) -> bool:
        """True if `coldest_elsewhere` searches all groups, so that its result stays valid until another group changes."""
        return len(self._groups) <= MAX_GROUPS_SEARCHED

    def add_rebalance_credit(self, group: int, size_bytes: int, slab_bytes: Callable[[], int]) -> bool:
        """Credit the group for evicting a block of `size_bytes` although another group has a colder one. Return True if
        the credit pays for a slab now.

        `slab_bytes` returns the price of the slab, 0 if it is free. It walks the slab, and is called once per credit.
        """
        owed_bytes, due_bytes = self._rebalance_credits[group] if group in self._rebalance_credits else (0, slab_bytes())
        owed_bytes += size_bytes
        if owed_bytes >= due_bytes:
            self._rebalance_credits.pop(group, None)
            return True
        self._rebalance_credits[group] = (owed_bytes, due_bytes)
        return False

    def __len__(self) -> int:
        return sum(len(members.policy) for members in self._groups.values())


def _last_access(block: Block) -> int:
    return block.last_access


def _round_robin(groups: OrderedDict[int, Any], found: Sized) -> Iterator[int]:
    """Iterate over groups round robin: MAX_GROUPS_SEARCHED, and more until `found` is not empty."""
    for asked in range(len(groups)):
        if asked >= MAX_GROUPS_SEARCHED and len(found):
            return
        group = next(iter(groups))
        groups.move_to_end(group)
        yield group
