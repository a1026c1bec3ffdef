"""The block table's view of one tier: blocks with a copy there, their eviction order, and demotions in progress."""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Final

from kvstore.protocol.node_states import SUSPENDED
from kvstore.store.block_table.access_counts import TierCounts
from kvstore.store.block_table.block import DRAM, HELD, IN_USE, SECONDARY, Block, BlockColumns, Loss
from kvstore.store.block_table.eviction_order import EvictionOrder, NextVictim
from kvstore.store.block_table.limits import SlabLimits, TierLimits
from kvstore.store.block_table.replicated_victims import LOOK_AHEAD, ReplicatedVictims
from kvstore.store.block_table.rows import Numbers, groups_in, read, slot_indexes_in
from kvstore.store.block_table.slab_index import SlabIndex
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.tiers.slabs import POSITION_BITS, SlabTier
from kvstore.tiers.tier import Slot, Tier

MAX_WALKED: Final = 1 << 13
"""Slots examined per search for a slab to empty, not counting the last slab: about 20 ms. Without it a tenant with a
pinned block at the end of each of 256 slabs stopped the node for 0.5 s, at each attempt of a waiting put."""

MAX_PART: Final = 1024
"""Blocks of a slab evicted at once: about 20 ms. A slab of small blocks has tens of thousands."""

IsEvictable = Callable[[Block], bool]


@dataclass(slots=True)
class _Emptying:
    """Slab that is emptied in parts. It takes no new values meanwhile."""

    slab: int
    left: deque[Block]
    is_wanted: bool = True
    """The next part was requested since the last `retry_failed_searches`."""


@dataclass(slots=True)
class EncodedTotals:
    """Totals of a tier's encoded copies: bytes of the values, bytes stored, payload bytes among these, elements."""

    value_bytes: int = 0
    stored_bytes: int = 0
    payload_bytes: int = 0
    elements: int = 0

    def count(self, block: Block, loss: Loss | None, times: int) -> None:
        """Add (1) or subtract (-1) a copy, if it is encoded."""
        if loss is None or loss.encoding is None:
            return
        self.value_bytes += times * block.size_bytes
        self.stored_bytes += times * loss.encoding.size_bytes
        self.payload_bytes += times * loss.encoding.payload_bytes
        self.elements += times * loss.encoding.elements


class TierView:
    """Blocks and victims of one tier. It frees and copies nothing. Called by the block table only."""

    def __init__(
        self,
        index: int,
        tier: Tier,
        order: EvictionOrder,
        *,
        watermarks: tuple[float, float],
        evictable_now: Callable[[], IsEvictable],
        evictable_of: Callable[[str], IsEvictable] | None = None,
        has_lower_tier: Callable[[], bool] | None = None,
    ) -> None:
        """`watermarks` are the high and the low one, as shares of the capacity. `evictable_now` returns a predicate for
        one search: True if a block's copy here is not in use. `evictable_of` does so for one tenant.
        `has_lower_tier` returns True if victims are demoted first; None: there is no lower tier."""
        self.index = index
        self.evictable_now = evictable_now
        self._evictable_of = evictable_of or (lambda tenant: evictable_now())
        self._has_lower_tier = has_lower_tier
        self.tier = tier
        self.high_bytes, self.low_bytes = (tier.capacity_bytes * share for share in watermarks)
        self.counts = TierCounts()
        self.order = order
        self.replicated_victims = ReplicatedVictims(index)
        """Used in the lowest tier only: evictions from others do not drop a block from the node."""
        self.demoting_bytes = 0
        """Bytes of blocks that are being demoted."""
        self.demoting_blocks = 0
        self.is_demoting = False
        """The high watermark was exceeded; blocks are demoted until the low one."""
        self.limits = TierLimits(tier)
        self.is_suspended = False
        self.refusal = ""
        """Error of the write for which it is suspended."""
        self.encoded = EncodedTotals()
        self._count = 0
        self._slabs = tier if isinstance(tier, SlabTier) else None
        self.slab_limits = SlabLimits(self._slabs)
        self._by_slot = SlabIndex()
        """Kept for slab tiers only."""
        self._emptying: dict[int | str, _Emptying] = {}
        """By slot group, or by tenant that is over quota."""

    @property
    def health(self) -> str:
        """The tier's health; of a suspended tier, whose device may have space again, the reason."""
        return f"{SUSPENDED}: {self.refusal}" if self.refusal and self.tier.health == "ok" else self.tier.health

    @property
    def takes_values(self) -> bool:
        return not self.is_suspended and self.tier.health == "ok"

    def add(self, block: Block) -> None:
        """Add a block whose slot here holds its value."""
        columns = block.columns  # inlined for DRAM: methods cost each put 1 us
        self.order.insert(block, columns.groups[block] if self.index == DRAM else block.group_in(self.index))
        self._count += 1
        if self._slabs is not None:
            self._by_slot.add(columns.slot_indexes[block] if self.index == DRAM else self._slot_index(block), block)
        if columns.others:
            self.encoded.count(block, block.loss_in(self.index), 1)

    def add_all(self, blocks: Sequence[Block], rows: Numbers) -> None:
        """Add DRAM blocks without lossy copies; `rows` are theirs."""
        groups: list[int] = groups_in(blocks[0].columns, rows).tolist()
        for group in dict.fromkeys(groups):
            is_all = groups.count(group) == len(groups)
            mine = blocks if is_all else [block for block, other in zip(blocks, groups, strict=True) if other == group]
            self.order.insert_all(mine, group)
        self._count += len(blocks)
        if self._slabs is not None:
            self._by_slot.add_all(slot_indexes_in(blocks[0].columns, rows), blocks)

    def remove(self, block: Block) -> None:
        """Remove a block before its slot here is freed and its `lossy` entry cleared."""
        if block.columns.others:
            self.encoded.count(block, block.loss_in(self.index), -1)
        columns = block.columns
        self.order.remove(block, columns.groups[block] if self.index == DRAM else block.group_in(self.index))
        self._count -= 1
        if self._slabs is not None:
            self._by_slot.remove(columns.slot_indexes[block] if self.index == DRAM else self._slot_index(block))

    def take_coldest(self, group: int, tenant: str, count: int) -> list[Block]:
        """Remove from the order and return up to `count` victims for new blocks of the tenant, as `victims` would
        return them in turn.

        Stops at the first that is not the coldest of its own group, or that has another copy. `remove_all` must follow.
        """
        if self.limits.over_quota or self.slab_limits.over_quota or self.replicated_victims.has_any(group) or not self.order.searches_all:
            return []
        colder = self.order.coldest_elsewhere(group, self.evictable_now(), may_stay=True)
        colder_access = colder.last_access if colder is not None else None
        elsewhere, is_retired = ~HELD[self.index], self.order.is_retired

        def may_evict(block: Block) -> bool:
            columns = block.columns
            is_coldest = (
                colder_access is None
                or colder_access >= columns.last_accesses[block]
                or columns.states[block] & SECONDARY
                or (is_retired is not None and is_retired(block))
            )
            return bool(is_coldest) and not columns.held[block] & elsewhere

        found = self.order.take_victims(group, count, self._evictable_of(tenant), may_evict)
        self.replicated_victims.count_evictions(group, len(found))
        return found

    def remove_all(self, blocks: Sequence[Block], rows: Numbers) -> None:
        """Remove DRAM blocks that `take_coldest` returned; `rows` are theirs."""
        for block in blocks if blocks[0].columns.others else ():
            self.encoded.count(block, block.loss_in(self.index), -1)
        self._count -= len(blocks)
        if self._slabs is not None:
            self._by_slot.remove_all(slot_indexes_in(blocks[0].columns, rows))

    def free_all(self, columns: BlockColumns, rows: Numbers) -> None:
        """Free the DRAM slots of unused blocks."""
        assert self._slabs is not None, "DRAM is made of slabs"
        self._slabs.free_indices(slot_indexes_in(columns, rows), read(columns.slot_generations, rows))

    def lacks_quota(self, size_bytes: int, tenant: str) -> bool:
        """Return True if one more value of this size exceeds the tenant's quota here. Raises InvalidArgument."""
        return self.lacks_bytes(size_bytes, tenant) or self.slab_limits.lacks(size_bytes, tenant)

    def lacks_bytes(self, size_bytes: int, tenant: str) -> bool:
        """Return True if one more value exceeds the tenant's byte quota."""
        if not self.limits.are_any:
            return False
        left_bytes = self.limits.left(tenant)
        return left_bytes is not None and self.tier.slot_bytes(size_bytes, tenant=tenant) > left_bytes

    def within_limit(self, tenant: str, size_bytes: int, count: int) -> int:
        """Return how many of `count` further values of that size the tenant's quota permits; its slabs may hold fewer.
        Raises InvalidArgument."""
        if self.slab_limits.lacks(size_bytes, tenant):
            return 0
        left_bytes = self.limits.left(tenant) if self.limits.are_any else None
        return count if left_bytes is None else min(count, left_bytes // self.tier.slot_bytes(size_bytes, tenant=tenant))

    def count_demotion(self, block: Block, times: int) -> None:
        """Count the start (1) or end (-1) of a block's demotion."""
        self.demoting_bytes += times * block.size_bytes
        self.demoting_blocks += times
        self.limits.count_demotion(block, times)

    def own_victims(self, size_bytes: int, tenant: str) -> list[Block]:
        """Victims for a new block of a tenant at its quota, out of its own blocks.

        Usually its coldest block. If the tenant lacks a slab and that block is of another size class: all blocks of its
        coldest slab that can be emptied, else the coldest of this size class.
        """
        may_leave = self._evictable_for_put()
        coldest = self.order.coldest_of(tenant, may_leave)
        if coldest is None:
            return []
        group = self.tier.group(size_bytes, tenant=tenant)
        if coldest.group_in(self.index) == group or not self.slab_limits.lacks(size_bytes, tenant):
            return [coldest]
        if slab := self.own_slab(tenant):
            return slab
        own = self.order.victim(group, may_leave)
        return [own] if own is not None else []

    def own_slab(self, tenant: str) -> list[Block]:
        """Victims for a tenant that is within its quota but has no free slot of this size class: the blocks of its
        coldest slab, at most MAX_PART at a time. Empty while earlier ones are being demoted."""
        if (part := self._next_part(tenant)) is not None:
            return part
        return self._coldest_whole_slab(tenant, functools.partial(self.order.coldest_of, tenant))

    def victims(self, group: int) -> list[Block]:
        """Victims for a new block of `group`. Empty while earlier ones are being demoted. In this order:

        - a slab of a tenant over its quota;
        - a block of the group whose namespace is retired, or whose copy here is secondary;
        - the group's coldest block;
        - a slab of another group with colder blocks, paid by rebalance credit.

        A slab's blocks are returned at most MAX_PART at a time.
        """
        if (part := self._next_part(group)) is not None:
            return part
        for limits in (self.limits, self.slab_limits):
            for tenant in limits.over_quota:
                if limits.is_above(tenant) and (found := self.own_slab(tenant)):
                    return found
        may_leave = self._evictable_for_put()
        if (early := self.order.early_victim(group, may_leave)) is not None:
            return [early]
        own = self.replicated_victims.next(group, may_leave) or self.order.victim(group, may_leave)
        if own is None and self._has_lower_tier is not None:
            own = self.order.victim(group, self.evictable_now())  # wait for it instead of taking another group's memory
        if own is not None:
            colder = self.order.coldest_elsewhere(group, may_leave, may_stay=True)
            if colder is None or colder.last_access >= own.last_access:
                return [own]
            if not self.order.add_rebalance_credit(group, own.size_bytes, lambda: self._rebalance_price(colder, own)):
                return [own]
        return self._coldest_whole_slab(group, functools.partial(self.order.coldest_elsewhere, group)) or ([own] if own is not None else [])

    def next_victim(self) -> NextVictim | None:
        """Return what the tier would evict next, for display; None if it is unknown."""
        return self.order.next_victim(evictable_in(self.index))

    def _evictable_for_put(self) -> IsEvictable:
        """As `evictable_now`, but exclude uncommitted blocks if this tier demotes: they cannot be demoted yet, and the
        put would wait although others could be."""
        may_leave = self.evictable_now()
        if self._has_lower_tier is None or not self._has_lower_tier():
            return may_leave
        return lambda block: block.generation != UNCOMMITTED and may_leave(block)

    def coldest(self, group: int) -> list[Block]:
        """Return the group's next committed victims that are neither retired nor secondary, at most LOOK_AHEAD."""
        found = self._next_committed(group, LOOK_AHEAD, has_early=False, may_stay=True)
        return [block for block in found if not block.is_secondary]

    def _next_committed(self, group: int, count: int, *, has_early: bool, may_stay: bool = False) -> list[Block]:
        may_leave = self.evictable_now()

        def is_committed(block: Block) -> bool:
            return block.generation != UNCOMMITTED and may_leave(block)

        return self.order.next_victims(group, is_committed, count, has_early=has_early, may_stay=may_stay)

    def coldest_of_all(self, group: int, count: int) -> list[Block]:
        """Return the group's next committed victims that no other group's block is colder than; none if a tenant is
        over quota. One search finds them all; a search for each would skip all that are being demoted."""
        if self.limits.over_quota or self.slab_limits.over_quota:
            return []
        colder = self.order.coldest_elsewhere(group, self.evictable_now(), may_stay=True)
        blocks = self._next_committed(group, count, has_early=True)
        return (
            blocks
            if colder is None
            else list(takewhile(lambda block: block.is_secondary or block.last_access <= colder.last_access, blocks))
        )

    def _rebalance_price(self, colder: Block, own: Block) -> int:
        """Bytes that `own`'s group evicts before it gets the slab of `colder`. 0 if everything in the slab is colder
        than `own`."""
        slot, access = self._slot(colder), own.last_access
        used, mates = (1, [colder]) if self._slabs is None else (self._slabs.slab_used(slot), self._mates(colder))
        is_colder = used == len(mates) and all(mate.last_access < access for mate in mates)
        return 0 if is_colder else slot.size_bytes if self._slabs is None else self._slabs.slab_value_bytes(slot)

    def _mates(self, block: Block) -> list[Block]:
        """Return the blocks in the block's slab, including itself."""
        if self._slabs is None:
            return [block]
        return [mate for mate in self._by_slot.mates(self._slot_index(block)) if mate is not None]

    def retry_failed_searches(self) -> None:
        """Reopen slabs whose emptying is no longer requested. Called periodically."""
        for key, emptying in list(self._emptying.items()):
            if not emptying.is_wanted:
                self._stop_emptying(key)
            emptying.is_wanted = False

    def _next_part(self, key: int | str) -> list[Block] | None:
        """Return the next blocks of the slab being emptied; empty while some are being demoted. None: no such slab, or
        it can no longer be emptied."""
        emptying = self._emptying.get(key)
        if emptying is None:
            return None
        emptying.is_wanted, left = True, emptying.left
        while left and not self._is_in_slab(left[0], emptying.slab):
            left.popleft()
        part = [block for block in islice(left, MAX_PART) if self._is_in_slab(block, emptying.slab)]
        if any(block.demoted_from == self.index for block in part):
            return []
        if not part or not all(map(self._evictable_for_put(), part)):
            self._stop_emptying(key)
            return None
        return part

    def _is_in_slab(self, block: Block, number: int) -> bool:
        return not block.is_dropped and block.is_in(self.index) and self._slot_index(block) >> POSITION_BITS == number

    def _stop_emptying(self, key: int | str) -> None:
        assert self._slabs is not None, "elsewhere a block leaves alone"
        self._slabs.open_slab(self._emptying.pop(key).slab)

    def _in_parts(self, key: int | str, blocks: list[Block]) -> list[Block]:
        """Return the first part of a slab's blocks; `_next_part` returns the others."""
        if len(blocks) <= MAX_PART or self._slabs is None:
            return blocks
        number = self._slot_index(blocks[0]) >> POSITION_BITS
        self._slabs.close_slab(number)
        self._emptying[key] = _Emptying(number, deque(blocks))
        return blocks[:MAX_PART]

    def _coldest_whole_slab(self, key: int | str, find: Callable[[Callable[[Block], bool]], Block | None]) -> list[Block]:
        """Return the first part of the blocks of a slab that can be emptied; empty if every examined slab has a lease,
        pin or open put.

        `find` returns the coldest block that satisfies a predicate. `key` identifies the caller that gets the other
        parts. Slabs that cannot be emptied are skipped: evicting their blocks would free no slab.
        """
        known: dict[int, bool] = {}
        walked, may_leave = 0, self._evictable_for_put()

        def can_go_with_its_slab(block: Block) -> bool:
            nonlocal walked
            place = self._slot_index(block) if self._slabs is None else self._slot_index(block) >> POSITION_BITS
            if place not in known:
                known[place], seen = self._can_be_emptied(block, may_leave) if walked < MAX_WALKED else (False, 0)
                walked += seen
            return known[place]

        coldest = find(can_go_with_its_slab)
        return self._in_parts(key, self._mates(coldest)) if coldest is not None else []

    def _can_be_emptied(self, block: Block, may_leave: IsEvictable) -> tuple[bool, int]:
        """Return whether all blocks in the block's slab are evictable, and the number of slots examined."""
        slot = self._slot(block)
        if self._slabs is None:
            return may_leave(block), 1
        if self._slabs.slab_used(slot) != self._by_slot.count(slot.index):
            return False, 1  # the slab has an open put
        mates = self._by_slot.mates(slot.index)
        staying = next((place for place, holder in enumerate(mates) if holder is not None and not may_leave(holder)), None)
        return (True, len(mates)) if staying is None else (False, staying + 1)

    def _slot(self, block: Block) -> Slot:
        slot = block.slot_in(self.index)
        assert slot is not None
        return slot

    def _slot_index(self, block: Block) -> int:
        """Index of the block's slot here."""
        return block.columns.slot_indexes[block] if self.index == DRAM else self._slot(block).index

    def __len__(self) -> int:
        """Number of blocks with a copy here."""
        return self._count


def evictable_in(tier: int) -> IsEvictable:
    """Return a predicate: True if a block's copy in that tier is neither in use nor held."""
    in_use = IN_USE[tier]

    def is_evictable(block: Block) -> bool:
        columns = block.columns  # inlined: called per victim
        return not (columns.readers[block] or columns.states[block] & in_use)

    return is_evictable
