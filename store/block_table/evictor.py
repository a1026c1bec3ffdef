"""Eviction: frees space in the tiers for new blocks, and plans demotions and promotions.

A victim is dropped at once or demoted first. The evictor owns planned moves until `take_moves`; the mover executes them
(store/tiering/mover.py) and the block table records them (`BlockTable.finish_move`).
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from kvstore.protocol.errors import KVStoreError
from kvstore.store.block_table.block import DRAM, HBM, NVME, Block
from kvstore.store.block_table.copies import BlockCopies
from kvstore.store.block_table.holds import Holds
from kvstore.store.block_table.rows import read, rows_of
from kvstore.store.block_table.tier_view import TierView
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.tiers.tier import Slot, TierFull
from kvstore.tiers.value_codec import Encoding

PROMOTE_AT_HITS = 2
"""A block below DRAM is promoted on its second hit there: 76 % of a production trace's blocks are read at most once
more."""

MAX_QUOTA_EVICTIONS = 512
"""Blocks evicted per call after a quota was lowered: a few milliseconds."""

MAX_EXTRA_EVICTIONS = 1024
"""Evictions per loop iteration beyond one per new block, for a lowered quota or a large value: about 20 ms. The rest
follows in later iterations. A slab's part is evicted whole."""

MAX_DEMOTIONS = 512
"""Blocks of a tier that are being demoted at once. They stay first in the eviction order, and every victim search skips
them: 4,000, planned one by one, stopped the loop for seconds."""

MAX_CANDIDATES = 4096
"""Candidates examined per call: a few milliseconds. The rest follows in later calls."""

DROP_BATCH = 512
"""Blocks dropped at once. Policies may exceed their memory bound by this many, until the check afterwards."""


@dataclass(slots=True, eq=False)
class TierMove:
    """Planned copy of `block` from one tier to another. `block.moving` is set until `BlockTable.finish_move`. With
    `encoding`, `slot` fits the encoded value only."""

    block: Block
    source: int
    target: int
    slot: Slot
    encoding: Encoding | None = None


class Evictor:
    """Frees slots and plans moves. Not thread-safe: called from the node's loop."""

    def __init__(
        self,
        levels: Mapping[int, TierView],
        copies: BlockCopies,
        encoding_of: Callable[[Block], Encoding | None] | None,
        holds: Holds,
        *,
        write_worth: float,
    ) -> None:
        """`levels` are the tier views by index, fastest first. The rest as in BlockTable."""
        self._holds = holds
        self._write_worth = write_worth
        self._levels = levels
        self._copies = copies
        self._encoding_of = encoding_of
        self._moves: list[TierMove] = []
        self.under_way = 0
        """Moves planned or in progress, including the table's promotions."""
        self._failed_searches: set[tuple[int, str | None, bool]] = set()
        """Searches that found nothing since the last `retry_failed_searches`: tier, tenant (None: all), whether for
        slabs. A search over thousands of pinned or uncommitted blocks takes milliseconds and would run in every round
        of events."""
        self._extra_left = MAX_EXTRA_EVICTIONS
        """MAX_EXTRA_EVICTIONS left in this iteration."""
        self._is_cut_short = False
        """More evictions were requested than this iteration permits."""

    def make(self, level: TierView, size_bytes: int, tenant: str, *, may_wait: bool = True, may_drop: bool = False) -> Slot | None:
        """Return a slot in the tier, evicting until one is free. For a tenant at its quota only its own blocks are
        evicted.

        Returns None if nothing can be dropped at once (demotions may have been planned), or this iteration's evictions
        are used up. With `may_drop` a victim without a copy in a lower tier is dropped instead of demoted first; not
        for a quota and not for a whole slab, because no watermark frees space ahead for these and NVMe would get none
        of them.
        """
        is_over, is_first = False, True
        while True:
            try:
                if level.lacks_quota(size_bytes, tenant):
                    is_over, victims = True, level.own_victims(size_bytes, tenant)
                else:
                    return level.tier.allocate(size_bytes, tenant=tenant)
            except TierFull:
                victims = level.own_slab(tenant) if is_over else level.victims(level.tier.group(size_bytes, tenant=tenant))
            if not victims:
                if self.yield_holds(level, tenant if is_over else None):
                    continue
                return None
            # If enough is being demoted, another demotion frees space no sooner; each retry would plan one more.
            demoting_bytes = level.limits.demoting_bytes(tenant) if is_over else level.demoting_bytes
            is_patient = not may_wait or demoting_bytes >= size_bytes
            is_dropped = may_drop and not is_over and len(victims) == 1
            if is_patient and not is_dropped and not all(self._can_leave_now(block, level) for block in victims):
                return None
            if (len(victims) > 1 or not is_first) and not self.may_take(len(victims)):
                return None
            is_first = False
            still_here = [block for block in victims if not self.evict(block, level, for_quota=is_over, is_dropped=is_dropped)]
            if still_here:
                return None

    def yield_holds(self, level: TierView, tenant: str | None) -> bool:
        """End holds for a new block if nothing else is evictable. Return True if a new search is worthwhile. No-op
        while demotions are in progress."""
        return not level.demoting_blocks and self._holds.yield_oldest(level.index, tenant)

    def may_take(self, count: int) -> bool:
        """Count evictions beyond one per new block. Return False if this iteration permits no more."""
        if self._extra_left <= 0:
            self._is_cut_short = True
            return False
        self._extra_left -= count
        return True

    def begin_iteration(self) -> bool:
        """Start a new loop iteration. Return True if the last one was cut short and its requests should be retried."""
        is_cut_short, self._is_cut_short, self._extra_left = self._is_cut_short, False, MAX_EXTRA_EVICTIONS
        return is_cut_short

    def free_at_once(self, level: TierView, size_bytes: int, tenant: str, count: int, *, may_drop: bool = False) -> bool:
        """Drop up to `count` blocks as `make` would in turn, or a slab of another group, if they need not be demoted
        first. Return False if none was dropped. With `may_drop`, a single search skips all blocks that are being
        demoted."""
        if level.lacks_quota(size_bytes, tenant):
            return self._free_own(level, size_bytes, tenant, count)
        group = level.tier.group(size_bytes, tenant=tenant)
        is_lowest = self._lower(level.index) is None
        left = self._free_coldest(level, group, tenant, count) if is_lowest else self._drop_coldest(level, group, count) if may_drop else 0
        has_left = left > 0
        for _ in range(count - left):
            victims = level.victims(group)
            is_dropped = may_drop and len(victims) == 1 and victims[0].generation != UNCOMMITTED
            if not victims or not (is_lowest or is_dropped or all(block.is_also_outside(level.index) for block in victims)):
                break
            if len(victims) > 1 and not self.may_take(len(victims)):
                break
            other = victims[0].group_in(level.index)
            for block in victims:
                self.evict(block, level, is_dropped=is_dropped)
            has_left = True
            if other != group:
                break
        return has_left

    def _free_coldest(self, level: TierView, group: int, tenant: str, count: int) -> int:
        """Drop the group's coldest blocks from the node, up to `count`, while each is the next victim. Return their
        number."""
        left, released = 0, level.order.released
        while left < count:
            blocks = level.take_coldest(group, tenant, min(count - left, DROP_BATCH))
            if not blocks:
                break
            level.counts.evict_all(read(blocks[0].columns.last_accesses, rows_of(blocks)).tolist())
            self._copies.drop_all(blocks)
            left += len(blocks)
        level.counts.secondary_evictions += level.order.released - released
        return left

    def _drop_coldest(self, level: TierView, group: int, count: int) -> int:
        """As `_free_coldest`, for blocks that could be demoted if there were time."""
        blocks = level.coldest_of_all(group, count)
        for block in blocks:
            self.evict(block, level, is_dropped=True)
        return len(blocks)

    def _free_own(self, level: TierView, size_bytes: int, tenant: str, count: int) -> bool:
        """As `free_at_once`, with the tenant's own blocks, until its quota permits `count` values."""
        has_left, due = False, count
        while level.within_limit(tenant, size_bytes, count) < count:
            victims = level.own_victims(size_bytes, tenant)
            if not victims or not all(self._can_leave_now(block, level) for block in victims):
                break
            due -= len(victims)
            if due < 0 and not self.may_take(len(victims)):
                break
            for block in victims:
                has_left |= self.evict(block, level, for_quota=True)
        return has_left

    def evict(self, block: Block, level: TierView, *, for_quota: bool = False, is_dropped: bool = False) -> bool:
        """Evict the block from the tier. Return True if its slot is free now, False if it must be demoted first.
        `is_dropped`: drop it instead of demoting it. `for_quota`: counted as a quota eviction."""
        if block.is_also_outside(level.index):
            self._copies.drop_copy(block, level.index)
            return True
        is_secondary = block.is_secondary
        lower = self._lower(level.index) if not is_secondary else None
        if lower is not None and block.generation == UNCOMMITTED:
            return False  # demoted once it is committed
        is_not_written = lower is not None and not is_dropped and not self._is_worth_a_write(block, level, lower)
        is_dropped |= is_not_written
        if lower is not None and not is_dropped and (self._plan_move(block, level, lower) or lower.index != NVME or self._is_cut_short):
            return False  # cut short: retry in the next iteration
        level.counts.evict(block.last_access)
        level.counts.quota_evictions += for_quota
        level.counts.not_written += is_not_written and not for_quota
        level.counts.secondary_evictions += is_secondary and not for_quota
        self._copies.drop(block)
        return True

    def demote_to_low_watermark(self) -> None:
        """Plan demotions from each tier above its high watermark down to the low one, some per call. Also evict what
        tenants have over quota.

        Only the lowest tier's evictions drop blocks from the node for a watermark.
        """
        for level in self._levels.values():
            if level.limits.over_quota:
                self._evict_over_quota(level)
            if level.slab_limits.over_quota:
                self._evict_over_quota_slabs(level)
            if level.tier.used_bytes - level.demoting_bytes > (level.low_bytes if level.is_demoting else level.high_bytes):
                self._demote_to_low_watermark(level)
            else:
                level.is_demoting = False

    def retry_failed_searches(self) -> None:
        """Repeat searches that found nothing. Called periodically."""
        self._failed_searches.clear()
        for level in self._levels.values():
            level.retry_failed_searches()

    def promote_to_hbm(self, block: Block) -> None:
        """Plan a copy of a DRAM block to HBM if it was read often enough and a slot is free at once."""
        hbm = self._levels.get(HBM)
        if hbm is None or block.hits < PROMOTE_AT_HITS or block.is_in(HBM) or block.moving:
            return
        if hbm.takes_values:
            self._plan_move(block, self._levels[DRAM], hbm)

    def save(self, block: Block) -> bool:
        """Plan an additional copy in NVMe. Return False if none can be made, or the block is moving."""
        source, nvme = block.fastest(), self._levels.get(NVME)
        if nvme is None or source is None or block.is_in(NVME) or block.moving or not nvme.takes_values:
            return False
        return self._plan_move(block, self._levels[source], nvme, keeps_source=True)

    def has_lower_tier(self, index: int) -> bool:
        """Return True if a lower tier takes this tier's victims."""
        return self._lower(index) is not None

    def suspend(self, index: int, *, is_suspended: bool, refusal: str = "") -> None:
        """Suspend or resume a tier. A suspended tier gets no new copies: its device has refused one, with this error."""
        self._levels[index].is_suspended, self._levels[index].refusal = is_suspended, refusal

    def take_moves(self) -> list[TierMove]:
        """Return and clear the moves planned since the last call."""
        moves, self._moves = self._moves, []
        return moves

    def _demote_to_low_watermark(self, level: TierView) -> None:
        if level.demoting_blocks >= MAX_DEMOTIONS:
            return
        level.is_demoting = False
        if self._lower(level.index) is None and not any(len(other) for other in self._levels.values() if other is not level):
            return  # no lower tier, and no second copies

        def is_too_full() -> bool:
            return level.tier.used_bytes - level.demoting_bytes > level.low_bytes

        for block in self._next_to_leave(level, is_too_full):
            if block.is_also_outside(level.index):
                self._copies.drop_copy(block, level.index)
            elif block.is_secondary:
                self.evict(block, level)
            else:
                lower = self._lower(level.index)
                if lower is not None and not self._is_worth_a_write(block, level, lower):
                    level.counts.not_written += 1
                    self.evict(block, level, is_dropped=True)
                elif lower is None or not self._plan_move(block, level, lower):
                    level.is_demoting = False
                    return  # a watermark alone drops no block that cannot be demoted
            level.is_demoting = is_too_full()

    def _next_to_leave(self, level: TierView, is_wanted: Callable[[], bool], tenant: str | None = None) -> Iterator[Block]:
        """Iterate over the coldest blocks, of `tenant` or of all, while `is_wanted` and the limits permit. The caller
        evicts each or plans its demotion before the next.

        Each search skips all blocks in progress, so the searched count doubles. After a drop the policy's order has
        changed, and the count restarts at 1.
        """
        examined, count, what = 0, 1, (level.index, tenant, False)

        def may_leave(block: Block) -> bool:
            nonlocal examined
            examined += 1
            return block.generation != UNCOMMITTED and is_unused(block)

        while what not in self._failed_searches and is_wanted() and examined < MAX_CANDIDATES and level.demoting_blocks < MAX_DEMOTIONS:
            is_unused = level.evictable_now()
            blocks = level.order.next_coldest(may_leave, min(count, MAX_DEMOTIONS - level.demoting_blocks), tenant)
            if not blocks:
                self._failed_searches.add(what)
                return
            count *= 2
            for first in blocks:
                if not is_unused(first):
                    continue  # it is being demoted already, behind an earlier block of its prompt
                block: Block | None = first
                while block is not None:
                    yield block
                    if not block.is_in(level.index):
                        break
                    if not is_wanted():
                        return
                    block = self._next_of_prompt(level, block, may_leave)
                if block is not None:
                    count = 1
                    break

    @staticmethod
    def _next_of_prompt(level: TierView, block: Block, may_leave: Callable[[Block], bool]) -> Block | None:
        """Return the block that leaves after one that is being demoted, so that a prompt is demoted from its end although
        its last blocks are still here. Other prompts would lose their last blocks instead."""
        if not block.moving or level.demoting_blocks >= MAX_DEMOTIONS:
            return None
        behind = level.order.next_after(block, block.group_in(level.index))
        return behind if behind is not None and behind.is_in(level.index) and may_leave(behind) else None

    def _evict_over_quota(self, level: TierView) -> None:
        """Evict the coldest blocks of tenants over quota, at most MAX_QUOTA_EVICTIONS per call."""
        limits, left = level.limits, MAX_QUOTA_EVICTIONS
        for tenant in list(limits.over_quota):
            if not limits.is_above(tenant):
                limits.over_quota.discard(tenant)
            for block in islice(self._next_to_leave(level, functools.partial(_is_over_quota, level, tenant), tenant), left):
                left -= 1
                if not (self.evict(block, level, for_quota=True) or block.moving):
                    break

    def _evict_over_quota_slabs(self, level: TierView) -> None:
        """Empty the coldest slabs of tenants with too many, at least one and up to MAX_QUOTA_EVICTIONS blocks. None
        while a demotion of the tenant is in progress: its slab may become empty."""
        limits, left = level.slab_limits, MAX_QUOTA_EVICTIONS
        for tenant in list(limits.over_quota):
            what = (level.index, tenant, True)
            while left > 0 and what not in self._failed_searches and limits.is_above(tenant) and not level.limits.demoting_bytes(tenant):
                slab = level.own_slab(tenant)
                if not slab:
                    self._failed_searches.add(what)
                    break
                left -= len(slab)
                for block in slab:
                    self.evict(block, level, for_quota=True)
                if all(block.is_in(level.index) and not block.moving for block in slab):
                    self._failed_searches.add(what)
                    break
            if not limits.is_above(tenant):
                limits.over_quota.discard(tenant)

    def _plan_move(self, block: Block, source: TierView, target: TierView, *, keeps_source: bool = False) -> bool:
        """`keeps_source`: the copy frees no space in the source."""
        if block.generation == UNCOMMITTED:
            return False  # a durable copy survives a restart and needs its generation
        is_demotion = target.index > source.index
        encoding = None
        if self._encoding_of is not None and (source.index, target.index) == (DRAM, NVME) and not block.stays_raw:
            encoding = self._encoding_of(block)
        size_bytes = block.size_bytes if encoding is None else encoding.size_bytes
        try:
            slot = self.make(target, size_bytes, block.tenant, may_wait=is_demotion)
        except KVStoreError:  # larger than that tier, or the tier failed
            return False
        if slot is None:
            return False
        block.moving = True
        self.under_way += 1
        if is_demotion and not keeps_source:
            block.demoted_from = source.index
            source.count_demotion(block, 1)
        self._moves.append(TierMove(block, source.index, target.index, slot, encoding))
        return True

    def _is_worth_a_write(self, block: Block, source: TierView, target: TierView) -> bool:
        """Return False if the lowest tier is full and the block that would leave it is worth as much as this one."""
        tier = target.tier
        if self._lower(target.index) is not None or tier.free_bytes >= tier.slot_bytes(block.size_bytes, tenant=block.tenant):
            return True
        worth = source.order.worth(block, block.group_in(source.index))
        if worth is None:
            return True
        victim = target.order.victim(tier.group(block.size_bytes, tenant=block.tenant), target.evictable_now())
        if victim is None or victim.is_also_outside(target.index):
            return True
        lost = target.order.worth(victim, victim.group_in(target.index))
        return lost is None or worth == lost or worth > self._write_worth * lost  # equal: of one class and age, the newer stays

    def _can_leave_now(self, block: Block, level: TierView) -> bool:
        return block.is_also_outside(level.index) or block.is_secondary or self._lower(level.index) is None

    def _lower(self, index: int) -> TierView | None:
        """Return the next lower tier that takes values."""
        levels = (self._levels[lower] for lower in (DRAM, NVME) if lower > index and lower in self._levels)
        return next((level for level in levels if level.takes_values), None)


def _is_over_quota(level: TierView, tenant: str) -> bool:
    """Return True if the tenant is over quota there, not counting demotions in progress."""
    return -(level.limits.left(tenant) or 0) > level.limits.demoting_bytes(tenant)
