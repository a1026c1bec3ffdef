"""Room in the tiers: who leaves one for something new, at once or once a copy of it is in a lower tier. It plans these copies, and those
up to HBM; the mover makes them (store/tiering/mover.py), and the block table records them when they are done (`BlockTable.finish_move`).

It owns the planned copies until they are taken, and no block: what leaves at once leaves by copies.py.
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
from kvstore.store.block_table.uncommitted import UNDECIDED
from kvstore.tiers.tier import Slot, TierFull
from kvstore.tiers.value_codec import Encoding

PROMOTE_AT_HITS = 2
"""A block below DRAM is copied up on its second hit there: 76 % of a production trace's blocks are read at most once more."""

SURPLUS_BLOCKS = 512
"""Blocks that leave at once for a quota that was lowered: a few milliseconds, and the loop serves others in between."""

EXTRA_BLOCKS = 1024
"""Blocks that leave in one turn of the loop beyond one for each newcomer: those that a lowered quota is short of, or whose room one large
value takes. Some 20 ms; who wants more has it in the next turns, and others are served in between. Of a slab a part leaves whole."""

MAX_LEAVING = 512
"""Blocks of a tier that are being copied down at once to make room ahead. They stay first in the order meanwhile, and whoever looks for a
victim passes by them: four thousand, planned one by one, stopped the loop for seconds."""

MAX_LOOKED = 4096
"""Blocks looked at in one turn for those that leave next: a few milliseconds. What is left is for the next turns."""

LEAVING_AT_ONCE = 512
"""Blocks of a batch that leave in one go: no policy remembers many more than it may meanwhile, which is looked at afterwards."""


@dataclass(slots=True, eq=False)
class TierMove:
    """A planned copy of `block` from one tier to another; `block.moving` is set until `BlockTable.finish_move`.

    `encoding` is what the copy will be, where `slot` has room for the encoded value only.
    """

    block: Block
    source: int
    target: int
    slot: Slot
    encoding: Encoding | None = None


class Evictor:
    """See the module. The node's loop is the only caller."""

    def __init__(
        self,
        levels: Mapping[int, TierView],
        copies: BlockCopies,
        encoding_of: Callable[[Block], Encoding | None] | None,
        holds: Holds,
    ) -> None:
        """`levels` by index, fastest first; the rest as in BlockTable."""
        self._holds = holds
        self._levels = levels
        self._copies = copies
        self._encoding_of = encoding_of
        self._moves: list[TierMove] = []
        self.under_way = 0
        """Copies between tiers that were planned or begun, promotions of the block table's included, and are not finished."""
        self._in_vain: set[tuple[int, str | None, bool]] = set()
        """What was looked for and not found since the last `look_again`: the tier, whose blocks (None: anybody's), whether slabs. A look at
        thousands of blocks that are pinned, or that the master does not know yet, takes milliseconds, and each round of events asks."""
        self._extra_left = EXTRA_BLOCKS
        """In this turn."""
        self._is_cut_short = False
        """Somebody wanted more in this turn."""

    def make(self, level: TierView, size_bytes: int, tenant: str, *, may_wait: bool = True, may_drop: bool = False) -> Slot | None:
        """A slot in the tier, evicting until there is one; of a tenant at its limit only its own blocks leave for it. None: nothing can
        leave at once (demotions may have been planned), or enough has left in this turn.

        With `may_drop` a victim that no lower tier holds leaves the node, instead of being copied down first. Not for a quota, nor all
        blocks of a slab: no watermark makes room ahead for these, and NVMe would get none of them."""
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
                if self.holds_give_way(level, tenant if is_over else None):
                    continue
                return None
            # While enough is leaving already, another copy down would make no room sooner: each retry would plan one more.
            leaving_bytes = level.limits.leaving_bytes(tenant) if is_over else level.leaving_bytes
            is_patient = not may_wait or leaving_bytes >= size_bytes
            is_dropped = may_drop and not is_over and len(victims) == 1
            if is_patient and not is_dropped and not all(self._can_leave_now(block, level) for block in victims):
                return None
            if (len(victims) > 1 or not is_first) and not self.may_take(len(victims)):
                return None
            is_first = False
            still_here = [block for block in victims if not self.evict(block, level, for_quota=is_over, is_dropped=is_dropped)]
            if still_here:
                return None

    def holds_give_way(self, level: TierView, tenant: str | None) -> bool:
        """Whether holds, of the tenant or of all, have ended for a newcomer for which nothing else can leave: it is worth another search.
        Not while something is on its way down, which makes room without that."""
        return not level.leaving_blocks and self._holds.give_way(level.index, tenant)

    def may_take(self, count: int) -> bool:
        """Whether so many blocks may leave beyond one for each newcomer: they are counted. False: not in this turn any more."""
        if self._extra_left <= 0:
            self._is_cut_short = True
            return False
        self._extra_left -= count
        return True

    def next_turn(self) -> bool:
        """The loop has served others. True: somebody wanted more than could leave in the turn before, and should be tried again."""
        is_cut_short, self._is_cut_short, self._extra_left = self._is_cut_short, False, EXTRA_BLOCKS
        return is_cut_short

    def free_at_once(self, level: TierView, size_bytes: int, tenant: str, count: int, *, may_drop: bool = False) -> bool:
        """Have up to `count` blocks leave as `make` would for one value after the other, or all of another group's slab, if they need not
        be copied first. False: none has left. `may_drop` is as for `make`: one look passes by all that are on their way down."""
        if level.lacks_quota(size_bytes, tenant):
            return self._free_own(level, size_bytes, tenant, count)
        group = level.tier.group(size_bytes, tenant=tenant)
        is_lowest = self._lower(level.index) is None
        left = self._free_coldest(level, group, tenant, count) if is_lowest else self._drop_coldest(level, group, count) if may_drop else 0
        has_left = left > 0
        for _ in range(count - left):
            victims = level.victims(group)
            is_dropped = may_drop and len(victims) == 1 and victims[0].generation != UNDECIDED
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
        """Have the group's coldest blocks leave the node, up to `count`, as far as each would be the next victim; how many have left."""
        left = 0
        while left < count:
            blocks = level.take_coldest(group, tenant, min(count - left, LEAVING_AT_ONCE))
            if not blocks:
                break
            level.counts.evict_all(read(blocks[0].columns.last_accesses, rows_of(blocks)).tolist())
            self._copies.drop_all(blocks)
            left += len(blocks)
        return left

    def _drop_coldest(self, level: TierView, group: int, count: int) -> int:
        """As `_free_coldest`, where they could go down and no time is left for it."""
        blocks = level.coldest_of_all(group, count)
        for block in blocks:
            self.evict(block, level, is_dropped=True)
        return len(blocks)

    def _free_own(self, level: TierView, size_bytes: int, tenant: str, count: int) -> bool:
        """As `free_at_once`, of the tenant's own blocks: until its limit has room for so many."""
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
        """Have the block leave the tier. True when its slot is free now, False when it has to be copied down first; with `is_dropped` it
        leaves the node instead. `for_quota`: for its tenant has all that its quota gives it."""
        if block.is_also_outside(level.index):
            self._copies.drop_copy(block, level.index)
            return True
        lower = self._lower(level.index)
        if lower is not None and block.generation == UNDECIDED:
            return False  # it goes down once the master has decided
        if lower is not None and not is_dropped and (self._plan_move(block, level, lower) or lower.index != NVME or self._is_cut_short):
            return False  # cut short: there may be room for it in the next turn
        level.counts.evict(block.last_access)
        level.counts.quota_evictions += for_quota
        self._copies.drop(block)
        return True

    def relieve(self) -> None:
        """Plan demotions from each tier above its high watermark down to the low one, counting those under way: some now, the others by the
        next calls. What a tenant has above its limit leaves, too, down or for good.

        Blocks leave the node for a watermark from the lowest tier only."""
        for level in self._levels.values():
            if level.limits.surplus:
                self._take_surplus(level)
            if level.slab_limits.surplus:
                self._take_surplus_slabs(level)
            if level.tier.used_bytes - level.leaving_bytes > (level.low_bytes if level.is_relieved else level.high_bytes):
                self._relieve(level)
            else:
                level.is_relieved = False

    def look_again(self) -> None:
        """To be called now and then: what could not leave before may by now."""
        self._in_vain.clear()
        for level in self._levels.values():
            level.look_again()

    def warm(self, block: Block) -> None:
        """Plan a copy of a DRAM block to HBM if it was read often enough, there is an HBM tier, and no waiting is needed."""
        hbm = self._levels.get(HBM)
        if hbm is None or block.hits < PROMOTE_AT_HITS or block.is_in(HBM) or block.moving:
            return
        if hbm.takes_values:
            self._plan_move(block, self._levels[DRAM], hbm)

    def save(self, block: Block) -> bool:
        """Plan a copy of the block to NVMe, beside those that it has; False: none can be made, or it is being copied already."""
        source, nvme = block.fastest(), self._levels.get(NVME)
        if nvme is None or source is None or block.is_in(NVME) or block.moving or not nvme.takes_values:
            return False
        return self._plan_move(block, self._levels[source], nvme, stays=True)

    def goes_down(self, index: int) -> bool:
        """Whether there is a lower tier that takes what leaves this one."""
        return self._lower(index) is not None

    def suspend(self, index: int, *, is_suspended: bool) -> None:
        """While suspended a tier gets no new copies, as if it were not there: its device just refused one."""
        self._levels[index].is_suspended = is_suspended

    def take_moves(self) -> list[TierMove]:
        """The copies planned since the last call, for the mover."""
        moves, self._moves = self._moves, []
        return moves

    def _relieve(self, level: TierView) -> None:
        if level.leaving_blocks >= MAX_LEAVING:
            return
        level.is_relieved = False
        if self._lower(level.index) is None and not any(len(other) for other in self._levels.values() if other is not level):
            return  # there is nowhere to go, and no copy is one of several

        def is_too_full() -> bool:
            return level.tier.used_bytes - level.leaving_bytes > level.low_bytes

        for block in self._next_to_leave(level, is_too_full):
            if block.is_also_outside(level.index):
                self._copies.drop_copy(block, level.index)
            else:
                lower = self._lower(level.index)
                if lower is None or not self._plan_move(block, level, lower):
                    level.is_relieved = False
                    return  # nothing is lost for relief alone: a block that cannot go down stays until its room is needed
            level.is_relieved = is_too_full()

    def _next_to_leave(self, level: TierView, is_wanted: Callable[[], bool], tenant: str | None = None) -> Iterator[Block]:
        """The coldest blocks, of that tenant or of all, each when the one before has left or is on its way down: while more are wanted, and
        as many as one turn may take. Twice as many are looked for each time, for each look passes by all that are on their way; but once a
        block has left, the policy has another order."""
        looked, count, what = 0, 1, (level.index, tenant, False)

        def may_leave(block: Block) -> bool:
            nonlocal looked
            looked += 1
            return block.generation != UNDECIDED and is_unused(block)

        while what not in self._in_vain and is_wanted() and looked < MAX_LOOKED and level.leaving_blocks < MAX_LEAVING:
            is_unused = level.may_leave_now()
            blocks = level.order.next_coldest(may_leave, min(count, MAX_LEAVING - level.leaving_blocks), tenant)
            if not blocks:
                self._in_vain.add(what)
                return
            count *= 2
            for block in blocks:
                yield block
                if not block.is_in(level.index):
                    count = 1
                    break
                if not is_wanted():
                    return

    def _take_surplus(self, level: TierView) -> None:
        """The coldest blocks of tenants above their limit leave, SURPLUS_BLOCKS at most; the others by the next calls."""
        limits, left = level.limits, SURPLUS_BLOCKS
        for tenant in list(limits.surplus):
            if not limits.is_above(tenant):
                limits.surplus.discard(tenant)
            for block in islice(self._next_to_leave(level, functools.partial(_has_surplus, level, tenant), tenant), left):
                left -= 1
                if not (self.evict(block, level, for_quota=True) or block.moving):
                    break

    def _take_surplus_slabs(self, level: TierView) -> None:
        """The coldest slabs of tenants that have more than they may are emptied, at least one and then up to SURPLUS_BLOCKS blocks; none
        while something of the tenant is being copied down: its slab may be empty then."""
        limits, left = level.slab_limits, SURPLUS_BLOCKS
        for tenant in list(limits.surplus):
            what = (level.index, tenant, True)
            while left > 0 and what not in self._in_vain and limits.is_above(tenant) and not level.limits.leaving_bytes(tenant):
                slab = level.own_slab(tenant)
                if not slab:
                    self._in_vain.add(what)
                    break
                left -= len(slab)
                for block in slab:
                    self.evict(block, level, for_quota=True)
                if all(block.is_in(level.index) and not block.moving for block in slab):
                    self._in_vain.add(what)
                    break
            if not limits.is_above(tenant):
                limits.surplus.discard(tenant)

    def _plan_move(self, block: Block, source: TierView, target: TierView, *, stays: bool = False) -> bool:
        """`stays`: the copy is to make no room in the source."""
        if block.generation == UNDECIDED:
            return False  # what a durable tier holds comes back with the next process, and must have the generation it was granted
        is_demotion = target.index > source.index
        encoding = None
        if self._encoding_of is not None and (source.index, target.index) == (DRAM, NVME) and not block.stays_raw:
            encoding = self._encoding_of(block)
        size_bytes = block.size_bytes if encoding is None else encoding.size_bytes
        try:
            slot = self.make(target, size_bytes, block.tenant, may_wait=is_demotion)
        except KVStoreError:  # larger than that tier, or it just failed
            return False
        if slot is None:
            return False
        block.moving = True
        self.under_way += 1
        if is_demotion and not stays:
            block.leaving = source.index
            source.count_leaving(block, 1)
        self._moves.append(TierMove(block, source.index, target.index, slot, encoding))
        return True

    def _can_leave_now(self, block: Block, level: TierView) -> bool:
        return block.is_also_outside(level.index) or self._lower(level.index) is None

    def _lower(self, index: int) -> TierView | None:
        """The next lower tier that takes values."""
        levels = (self._levels[lower] for lower in (DRAM, NVME) if lower > index and lower in self._levels)
        return next((level for level in levels if level.takes_values), None)


def _has_surplus(level: TierView, tenant: str) -> bool:
    """Whether the tenant has more there than it may, without what is leaving."""
    return -(level.limits.left(tenant) or 0) > level.limits.leaving_bytes(tenant)
