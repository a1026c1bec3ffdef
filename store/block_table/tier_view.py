"""One tier as the block table sees it: which blocks have a copy there, in what order they would leave, and how much is leaving already."""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Final

from kvstore.store.block_table.access_counts import TierCounts
from kvstore.store.block_table.block import DRAM, HELD, IN_USE, Block, BlockColumns, Loss
from kvstore.store.block_table.eviction_order import EvictionOrder
from kvstore.store.block_table.limits import SlabLimits, TierLimits
from kvstore.store.block_table.replicated_victims import LOOK_AHEAD, ReplicatedVictims
from kvstore.store.block_table.rows import Numbers, groups_in, places_in, read
from kvstore.store.block_table.slab_index import SlabIndex
from kvstore.store.block_table.uncommitted import UNDECIDED
from kvstore.tiers.slabs import POSITION_BITS, SlabTier
from kvstore.tiers.tier import Slot, Tier

MAX_WALKED: Final = 1 << 13
"""Slots looked at for one slab that can be emptied, and those of the slab that takes it beyond: some 20 ms. A tenant with a pinned block at
the end of each of 256 slabs stopped the node for half a second, and again at each attempt of a put that waited."""

MAX_PART: Final = 1024
"""Blocks of a slab that leave in one go, some 20 ms: a slab of small blocks has tens of thousands."""

MayLeave = Callable[[Block], bool]


@dataclass(slots=True)
class _Emptying:
    """A slab that is emptied part by part. It is closed meanwhile, or what is put there would be in the way."""

    slab: int
    left: deque[Block]
    is_wanted: bool = True
    """Somebody has asked for the next part since the last `look_again`."""


@dataclass(slots=True)
class EncodedTotals:
    """What a tier's encoded copies come to: the bytes of their values, those stored, the payload's share of these, the elements."""

    value_bytes: int = 0
    stored_bytes: int = 0
    payload_bytes: int = 0
    elements: int = 0

    def count(self, block: Block, loss: Loss | None, times: int) -> None:
        """Add (1) or take away (-1) a copy, if it is encoded."""
        if loss is None or loss.encoding is None:
            return
        self.value_bytes += times * block.size_bytes
        self.stored_bytes += times * loss.encoding.size_bytes
        self.payload_bytes += times * loss.encoding.payload_bytes
        self.elements += times * loss.encoding.elements


class TierView:
    """See the module. It frees and copies nothing. The block table is the only caller."""

    def __init__(
        self,
        index: int,
        tier: Tier,
        order: EvictionOrder,
        *,
        watermarks: tuple[float, float],
        may_leave_now: Callable[[], MayLeave],
        may_leave_of: Callable[[str], MayLeave] | None = None,
        goes_down: Callable[[], bool] | None = None,
    ) -> None:
        """`watermarks` are the high and the low one, as shares of the capacity. `may_leave_now` returns for one search whether nobody
        uses a block's copy here, `may_leave_of` the same for a tenant's blocks only.
        `goes_down`: what makes room here is copied to a lower tier first; None: there is none."""
        self.index = index
        self.may_leave_now = may_leave_now
        self._may_leave_of = may_leave_of or (lambda tenant: may_leave_now())
        self._goes_down = goes_down
        self.tier = tier
        self.high_bytes, self.low_bytes = (tier.capacity_bytes * share for share in watermarks)
        self.counts = TierCounts()
        self.order = order
        self.spares = ReplicatedVictims(index)
        """Of the lowest tier: what leaves another one leaves no node."""
        self.leaving_bytes = 0
        """Bytes of blocks that are being copied to a lower tier in order to leave this one."""
        self.leaving_blocks = 0
        """How many these are."""
        self.is_relieved = False
        """It was above its high watermark, and blocks leave it until it is at the low one."""
        self.limits = TierLimits(tier)
        self.is_suspended = False
        self.encoded = EncodedTotals()
        self._count = 0
        self._slabs = tier if isinstance(tier, SlabTier) else None
        self.slab_limits = SlabLimits(self._slabs)
        self._by_slot = SlabIndex()
        """Kept for slabs only: elsewhere a slot has no mates."""
        self._emptying: dict[int | str, _Emptying] = {}
        """For which group, or of which tenant that has too much."""

    @property
    def takes_values(self) -> bool:
        return not self.is_suspended and self.tier.health == "ok"

    def add(self, block: Block) -> None:
        """The block's slot here holds its value from now on."""
        columns = block.columns  # for DRAM, where each put comes by: a method each would be a microsecond together
        self.order.insert(block, columns.groups[block] if self.index == DRAM else block.group_in(self.index))
        self._count += 1
        if self._slabs is not None:
            self._by_slot.add(columns.places[block] if self.index == DRAM else self._place(block), block)
        if columns.others:
            self.encoded.count(block, block.loss_in(self.index), 1)

    def add_all(self, blocks: Sequence[Block], rows: Numbers) -> None:
        """As `add`, of blocks in DRAM that have no lossy copies, and these rows."""
        groups: list[int] = groups_in(blocks[0].columns, rows).tolist()
        for group in dict.fromkeys(groups):
            is_all = groups.count(group) == len(groups)
            mine = blocks if is_all else [block for block, other in zip(blocks, groups, strict=True) if other == group]
            self.order.insert_all(mine, group)
        self._count += len(blocks)
        if self._slabs is not None:
            self._by_slot.add_all(places_in(blocks[0].columns, rows), blocks)

    def remove(self, block: Block) -> None:
        """The block's slot here is about to go, as is what `lossy` says of it."""
        if block.columns.others:
            self.encoded.count(block, block.loss_in(self.index), -1)
        columns = block.columns
        self.order.remove(block, columns.groups[block] if self.index == DRAM else block.group_in(self.index))
        self._count -= 1
        if self._slabs is not None:
            self._by_slot.remove(columns.places[block] if self.index == DRAM else self._place(block))

    def take_coldest(self, group: int, tenant: str, count: int) -> list[Block]:
        """Up to `count` blocks of the tenant that `victims` would give for newcomers of its `group`, one after the other, as long as those
        are the coldest of the group itself that are nowhere else: they are in no order any more, and `remove_all` has to follow."""
        if self.limits.surplus or self.slab_limits.surplus or self.spares.has_any(group) or not self.order.asks_all:
            return []
        colder = self.order.coldest_elsewhere(group, self.may_leave_now())
        colder_access = colder.last_access if colder is not None else None
        elsewhere, is_retired = ~HELD[self.index], self.order.is_retired

        def may_evict(block: Block) -> bool:
            columns = block.columns
            is_coldest = (
                colder_access is None or colder_access >= columns.last_accesses[block] or (is_retired is not None and is_retired(block))
            )
            return is_coldest and not columns.held[block] & elsewhere

        found = self.order.take_victims(group, count, self._may_leave_of(tenant), may_evict)
        self.spares.have_left(group, len(found))
        return found

    def remove_all(self, blocks: Sequence[Block], rows: Numbers) -> None:
        """As `remove`, of blocks in DRAM that `take_coldest` gave, and these rows."""
        for block in blocks if blocks[0].columns.others else ():
            self.encoded.count(block, block.loss_in(self.index), -1)
        self._count -= len(blocks)
        if self._slabs is not None:
            self._by_slot.remove_all(places_in(blocks[0].columns, rows))

    def free_all(self, columns: BlockColumns, rows: Numbers) -> None:
        """Free the slots in DRAM of blocks that nobody uses any more."""
        assert self._slabs is not None, "DRAM is made of slabs"
        self._slabs.free_indices(places_in(columns, rows), read(columns.slot_generations, rows))

    def lacks_quota(self, size_bytes: int, tenant: str) -> bool:
        """Whether one more value of this size is more than the tenant may have here. Raises InvalidArgument."""
        return self.lacks_bytes(size_bytes, tenant) or self.slab_limits.lacks(size_bytes, tenant)

    def lacks_bytes(self, size_bytes: int, tenant: str) -> bool:
        """As `lacks_quota`, of bytes alone."""
        if not self.limits.are_any:
            return False
        left_bytes = self.limits.left(tenant)
        return left_bytes is not None and self.tier.slot_bytes(size_bytes, tenant=tenant) > left_bytes

    def within_limit(self, tenant: str, size_bytes: int, count: int) -> int:
        """How many of so many values of that size the tenant may have here besides those that it has: if any, perhaps more than its slabs
        have room for. Raises InvalidArgument."""
        if self.slab_limits.lacks(size_bytes, tenant):
            return 0
        left_bytes = self.limits.left(tenant) if self.limits.are_any else None
        return count if left_bytes is None else min(count, left_bytes // self.tier.slot_bytes(size_bytes, tenant=tenant))

    def count_leaving(self, block: Block, times: int) -> None:
        """The block is being copied to a lower tier in order to leave this one (1), or no more (-1)."""
        self.leaving_bytes += times * block.size_bytes
        self.leaving_blocks += times
        self.limits.count_leaving(block, times)

    def own_victims(self, size_bytes: int, tenant: str) -> list[Block]:
        """Who leaves for a newcomer of a tenant at its limit: its own coldest block. Where it is a slab that it lacks and that block is in
        none of the newcomer's size, all blocks of the coldest slab that can be emptied; else the coldest of that size."""
        may_leave = self._may_make_room()
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
        """Who leaves once it has room in its limit, where what has left was of another size: all blocks of one of its slabs, MAX_PART at
        once. None while those before are being copied down."""
        if (part := self._next_part(tenant)) is not None:
            return part
        return self._coldest_whole_slab(tenant, functools.partial(self.order.coldest_of, tenant))

    def victims(self, group: int) -> list[Block]:
        """Who leaves for a newcomer of `group`: all blocks of a slab of a tenant above its limit; else a block of the group whose namespace
        is retired, its coldest block, or all blocks of the slab that another group owes it, MAX_PART at once. None while those before are
        being copied down."""
        if (part := self._next_part(group)) is not None:
            return part
        for limits in (self.limits, self.slab_limits):
            for tenant in limits.surplus:
                if limits.is_above(tenant) and (found := self.own_slab(tenant)):
                    return found
        may_leave = self._may_make_room()
        if (retired := self.order.retired_victim(group, may_leave)) is not None:
            return [retired]
        own = self.spares.next(group, may_leave) or self.order.victim(group, may_leave)
        if own is None and self._goes_down is not None:
            own = self.order.victim(group, self.may_leave_now())  # it is waited for, and does not take the memory of others for nothing
        if own is not None:
            colder = self.order.coldest_elsewhere(group, may_leave)
            if colder is None or colder.last_access >= own.last_access:
                return [own]
            if not self.order.owe(group, own.size_bytes, lambda: self._price(colder, own)):
                return [own]
        return self._coldest_whole_slab(group, functools.partial(self.order.coldest_elsewhere, group)) or ([own] if own is not None else [])

    def _may_make_room(self) -> MayLeave:
        """As `may_leave_now`, without what the master has not decided about where that cannot go down: whoever needs room would wait for
        it, though others could leave."""
        may_leave = self.may_leave_now()
        if self._goes_down is None or not self._goes_down():
            return may_leave
        return lambda block: block.generation != UNDECIDED and may_leave(block)

    def coldest(self, group: int, count: int = LOOK_AHEAD) -> list[Block]:
        """Those of the group that leave next and that the master knows, so many at most."""
        may_leave = self.may_leave_now()
        return self.order.next_victims(group, lambda block: block.generation != UNDECIDED and may_leave(block), count)

    def coldest_of_all(self, group: int, count: int) -> list[Block]:
        """As `coldest`, as far as no block of another group is colder and no tenant is above its limit. One look finds them all: one for
        each would pass by all that are on their way down again."""
        if self.limits.surplus or self.slab_limits.surplus:
            return []
        colder = self.order.coldest_elsewhere(group, self.may_leave_now())
        blocks = self.coldest(group, count)
        return blocks if colder is None else list(takewhile(lambda block: block.last_access <= colder.last_access, blocks))

    def coldest_group(self) -> int | None:
        """The group whose next block to leave was read longest ago; None: nothing may leave."""
        block = self.order.coldest(self.may_leave_now())
        return block.group_in(self.index) if block is not None else None

    def _price(self, colder: Block, own: Block) -> int:
        """Bytes the group of `own` gives up before it gets the slab of `colder`: none if all that is there was read before `own` was."""
        slot, access = self._slot(colder), own.last_access
        used, mates = (1, [colder]) if self._slabs is None else (self._slabs.slab_used(slot), self._mates(colder))
        is_colder = used == len(mates) and all(mate.last_access < access for mate in mates)
        return 0 if is_colder else slot.size_bytes if self._slabs is None else self._slabs.slab_value_bytes(slot)

    def _mates(self, block: Block) -> list[Block]:
        """The blocks in the block's slab, itself among them."""
        if self._slabs is None:
            return [block]
        return [mate for mate in self._by_slot.mates(self._place(block)) if mate is not None]

    def look_again(self) -> None:
        """To be called now and then: slabs that nobody wants emptied any more can be used again."""
        for key, emptying in list(self._emptying.items()):
            if not emptying.is_wanted:
                self._stop_emptying(key)
            emptying.is_wanted = False

    def _next_part(self, key: int | str) -> list[Block] | None:
        """The next blocks of the slab that is being emptied, none while some are being copied down; None: there is no such slab, or
        something in it is needed again."""
        emptying = self._emptying.get(key)
        if emptying is None:
            return None
        emptying.is_wanted, left = True, emptying.left
        while left and not self._is_in_slab(left[0], emptying.slab):
            left.popleft()
        part = [block for block in islice(left, MAX_PART) if self._is_in_slab(block, emptying.slab)]
        if any(block.leaving == self.index for block in part):
            return []
        if not part or not all(map(self._may_make_room(), part)):
            self._stop_emptying(key)
            return None
        return part

    def _is_in_slab(self, block: Block, number: int) -> bool:
        return not block.is_gone and block.is_in(self.index) and self._place(block) >> POSITION_BITS == number

    def _stop_emptying(self, key: int | str) -> None:
        assert self._slabs is not None, "elsewhere a block leaves alone"
        self._slabs.open_slab(self._emptying.pop(key).slab)

    def _in_parts(self, key: int | str, blocks: list[Block]) -> list[Block]:
        """The first part of a slab's blocks; `_next_part` gives the others."""
        if len(blocks) <= MAX_PART or self._slabs is None:
            return blocks
        number = self._place(blocks[0]) >> POSITION_BITS
        self._slabs.close_slab(number)
        self._emptying[key] = _Emptying(number, deque(blocks))
        return blocks[:MAX_PART]

    def _coldest_whole_slab(self, key: int | str, find: Callable[[Callable[[Block], bool]], Block | None]) -> list[Block]:
        """All blocks of a slab that can be emptied at once; none when a lease, pin or open put is in every slab that is looked at. `find`
        gives the coldest block of which something is true, of the groups to choose from. Of a large slab the first part; `key` names who is
        to have the others.

        Blocks of a slab that stays occupied would leave for nothing.
        """
        known: dict[int, bool] = {}
        walked, may_leave = 0, self._may_make_room()

        def can_go_with_its_slab(block: Block) -> bool:
            nonlocal walked
            place = self._place(block) if self._slabs is None else self._place(block) >> POSITION_BITS
            if place not in known:
                known[place], seen = self._can_be_emptied(block, may_leave) if walked < MAX_WALKED else (False, 0)
                walked += seen
            return known[place]

        coldest = find(can_go_with_its_slab)
        return self._in_parts(key, self._mates(coldest)) if coldest is not None else []

    def _can_be_emptied(self, block: Block, may_leave: MayLeave) -> tuple[bool, int]:
        """Whether all in the block's slab may leave, and how many slots were looked at for it."""
        slot = self._slot(block)
        if self._slabs is None:
            return may_leave(block), 1
        if self._slabs.slab_used(slot) != self._by_slot.count(slot.index):
            return False, 1  # an open put's
        mates = self._by_slot.mates(slot.index)
        staying = next((place for place, holder in enumerate(mates) if holder is not None and not may_leave(holder)), None)
        return (True, len(mates)) if staying is None else (False, staying + 1)

    def _slot(self, block: Block) -> Slot:
        slot = block.slot_in(self.index)
        assert slot is not None
        return slot

    def _place(self, block: Block) -> int:
        """The index of its slot here."""
        return block.columns.places[block] if self.index == DRAM else self._slot(block).index

    def __len__(self) -> int:
        """Blocks with a copy here."""
        return self._count


def evictable_in(tier: int) -> MayLeave:
    """Whether nobody uses a block's copy in that tier, or holds it there."""
    in_use = IN_USE[tier]

    def is_evictable(block: Block) -> bool:
        columns = block.columns  # asked for each that leaves: a property would be a third more
        return not (columns.readers[block] or columns.states[block] & in_use)

    return is_evictable
