"""Limits of tenants and of the block table: bytes and slabs by tier, and blocks. Bookkeeping; the node's loop is the only caller.

The tiers count a tenant's bytes and slabs (`Tier.tenant_bytes`, `SlabTier.tenant_slabs`), the tables of visible blocks and open puts its
blocks: all of it with the slot, and nothing per block here. A tenant at its limit makes room out of its own blocks (evictor.py); one above
it, because the limit was lowered or because what an earlier process left is found again, has its surplus leave in the background,
coldest first. Where as many blocks are known as may be, of all tenants or of one, the coldest leaves the node for the next one.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from kvstore.protocol.errors import QuotaExceeded
from kvstore.protocol.settings import format_size
from kvstore.security.quotas.quota import SLABS, UNLIMITED, Quotas
from kvstore.store.block_table.block import DRAM, TIERS, Block
from kvstore.store.block_table.evictor import SURPLUS_BLOCKS, Evictor
from kvstore.store.block_table.holds import Holds
from kvstore.store.block_table.open_puts import OpenPuts
from kvstore.store.block_table.tier_view import TierView
from kvstore.store.block_table.visible_blocks import VisibleBlocks

TABLE_BYTES: Final = 470
"""Of a block with a copy in one tier: its row, key, tables and the default policy (404 bytes measured in prompts of 16 blocks, 309 without
parents where many come at a time). A value of a block that is stored in 2, 4 or 8 values takes some 150, 70 and 30 more."""

INDEX_BYTES: Final = 176
"""Of a block that the shared index shows to clients of the host, with a key of 16 bytes: 80, and 96 more in the larger index while it
grows."""

REMEMBERED_BYTES: Final = 400
"""Of a block that left and that the default policy remembers (396 measured where blocks have no parents, 236 in prompts of 50)."""

REMEMBERED_SHARE: Final = 0.25
"""Of the table's memory, for these: a policy remembers several times as many as are there."""


class TenantUsage(NamedTuple):
    """Of one tenant: bytes by tier, from HBM down, blocks, open puts among them, and slabs of HBM and DRAM."""

    tiers: tuple[int, int, int] = (0, 0, 0)
    blocks: int = 0
    slabs: tuple[int, int] = (0, 0)


NO_USE: Final = TenantUsage()


class BlockQuotas:
    """See the module. A part of the block table."""

    def __init__(self, visible: VisibleBlocks, puts: OpenPuts, levels: Mapping[int, TierView], holds: Holds) -> None:
        self._holds = holds
        self._visible = visible
        self._puts = puts
        self._levels = levels
        self._quotas = UNLIMITED
        self.crowded: set[str] = set()
        """Tenants that had more blocks than they may when they were last looked at: relief sees to them."""

    def set(self, quotas: Quotas) -> None:
        """These are in force from now on."""
        self._quotas = UNLIMITED if quotas == UNLIMITED else quotas
        self._holds.set_quotas(self._quotas)
        for index, level in self._levels.items():
            level.limits.set({name: quota.of_tier(index) for name, quota in quotas.tenants.items()}, quotas.default.of_tier(index))
            slabs = {name: quota.slabs_of_tier(index) for name, quota in quotas.tenants.items()}
            level.slab_limits.set(slabs, quotas.default.slabs_of_tier(index))
        self.crowded = {tenant for tenant in self._visible.tenants() if self.surplus_blocks(tenant) > 0}

    @property
    def now(self) -> Quotas:
        return self._quotas

    def blocks_left(self, tenant: str) -> int | None:
        """How many more blocks the tenant may have, none or less where it has all; None: there is no limit."""
        if self._quotas is UNLIMITED:
            return None
        limit = self._quotas.of(tenant).blocks
        return None if limit is None else limit - self._blocks_of(tenant)

    def surplus_blocks(self, tenant: str) -> int:
        """Blocks that the tenant has above its limit."""
        left = self.blocks_left(tenant)
        return 0 if left is None else max(0, -left)

    def check(self, tenant: str, size_bytes: int) -> None:
        """Raises QuotaExceeded for a value that the tenant's quota can never hold."""
        if self._quotas is UNLIMITED:
            return
        quota = self._quotas.of(tenant)
        limit = quota.of_tier(DRAM)
        if limit is not None and self._levels[DRAM].tier.slot_bytes(size_bytes, tenant=tenant) > limit:
            raise QuotaExceeded(
                f"a value of {format_size(size_bytes)} is larger than what tenant {tenant!r} may have in DRAM, "
                f"{format_size(limit)} (dram_bytes)"
            )
        for name in ("blocks", SLABS[DRAM]):
            if getattr(quota, name) == 0:
                raise QuotaExceeded(f"tenant {tenant!r} may have no {name.replace('_', ' ')} here ({name})")

    def exceeded(self, tenant: str, size_bytes: int) -> QuotaExceeded | None:
        """What a put of this size fails with for which no room was freed; None: no quota was in its way."""
        level, left = self._levels[DRAM], self.blocks_left(tenant)
        if left is not None and left <= 0:
            what = f"{self._quotas.of(tenant).blocks} blocks (blocks)"
        elif level.slab_limits.lacks(size_bytes, tenant):
            what = f"{self._quotas.of(tenant).dram_slabs} slabs of DRAM (dram_slabs), none with room for {format_size(size_bytes)}"
        elif level.lacks_bytes(size_bytes, tenant):
            what = f"{format_size(self._quotas.of(tenant).of_tier(DRAM) or 0)} in DRAM (dram_bytes)"
        else:
            return None
        return QuotaExceeded(
            f"tenant {tenant!r} has all that its quota gives it at this node, {what}, and none of its blocks could leave before the "
            "deadline: let some go, or have the operator raise it"
        )

    def use(self) -> dict[str, TenantUsage]:
        """Of each tenant that has something here."""
        tiers = [self._levels[index].tier.tenant_bytes if index in self._levels else {} for index in range(len(TIERS))]
        names = self._visible.tenants() | self._puts.tenants() | {name for used in tiers for name in used}
        slabs = [self._levels[index].slab_limits.held() if index in self._levels else {} for index in range(len(SLABS))]
        return {
            name: TenantUsage(
                (tiers[0].get(name, 0), tiers[1].get(name, 0), tiers[2].get(name, 0)),
                self._blocks_of(name),
                (slabs[0].get(name, 0), slabs[1].get(name, 0)),
            )
            for name in names
        }

    def _blocks_of(self, tenant: str) -> int:
        return self._visible.count_of(tenant) + self._puts.count_of(tenant)


class BlockLimit:
    """See the module."""

    def __init__(
        self,
        visible: VisibleBlocks,
        puts: OpenPuts,
        levels: Mapping[int, TierView],
        quotas: BlockQuotas,
        drop: Callable[[Block], None],
        room: Evictor,
        *,
        max_blocks: int | None,
    ) -> None:
        """`levels` by index, fastest first; `max_blocks` of all tenants together, None: any number."""
        self._visible = visible
        self._puts = puts
        self._lowest_first = list(levels.values())[::-1]
        self._quotas = quotas
        self._drop = drop
        self._room = room
        self._max_blocks = max_blocks
        self._in_vain: set[str] = set()
        """Tenants of whose surplus nothing could leave since the last `look_again`."""

    def at_most(self, tenant: str, count: int) -> int:
        """As many of so many blocks of the tenant as there is a place for now."""
        if self._max_blocks is not None:
            count = min(count, self._max_blocks - len(self._visible) - len(self._puts))
        left = self._quotas.blocks_left(tenant)
        return count if left is None else min(count, left)

    def may_know_one_more(self, tenant: str) -> bool:
        """Have blocks leave until there is a place for one of the tenant: its own where it has as many as it may. False: none
        can, or the tenant has more than it may and enough have left in this turn."""
        while (left := self._quotas.blocks_left(tenant)) is not None and left <= 0:
            if (left < 0 and not self._room.may_take(1)) or not self._evict_of(tenant):
                return False
        while self._max_blocks is not None and len(self._visible) + len(self._puts) >= self._max_blocks:
            has_left = self._evict(lambda level: level.order.coldest(level.may_leave_now()), for_quota=False)
            if not (has_left or any(self._room.holds_give_way(level, None) for level in self._lowest_first)):
                return False
        return True

    def take_surplus(self) -> None:
        """Blocks leave that are more than their tenant may have, SURPLUS_BLOCKS at most; the others by the next calls."""
        left = SURPLUS_BLOCKS
        for tenant in self._quotas.crowded - self._in_vain:
            while left and self._quotas.surplus_blocks(tenant) and self._evict_of(tenant):
                left -= 1
            if not self._quotas.surplus_blocks(tenant):
                self._quotas.crowded.discard(tenant)
            elif left:
                self._in_vain.add(tenant)

    def look_again(self) -> None:
        """As of Room."""
        self._in_vain.clear()

    def _evict_of(self, tenant: str) -> bool:
        return self._evict(lambda level: level.order.coldest_of(tenant, level.may_leave_now()), for_quota=True)

    def _evict(self, coldest: Callable[[TierView], Block | None], *, for_quota: bool) -> bool:
        """Have the block leave that `coldest` gives of the lowest tier where there is one. False: there is none."""
        for level in self._lowest_first:
            block = coldest(level)
            if block is not None:
                level.counts.evict(block.last_access)
                if for_quota:
                    level.counts.quota_evictions += 1
                else:
                    level.counts.table_evictions += 1
                self._drop(block)
                return True
        return False


def most_blocks(max_table_bytes: int) -> int:
    """How many blocks may be known in so much memory."""
    return max(1, int(max_table_bytes * (1 - REMEMBERED_SHARE)) // TABLE_BYTES)


def most_index_bytes(max_table_bytes: int) -> int:
    """What the shared index of so many blocks takes: a memfd, beside the table's memory."""
    return most_blocks(max_table_bytes) * INDEX_BYTES


def most_remembered(max_table_bytes: int) -> int:
    """How many that left may be remembered, all tiers together."""
    return int(max_table_bytes * REMEMBERED_SHARE) // REMEMBERED_BYTES


def table_bytes(blocks: int, remembered: int) -> int:
    """What so many blocks, and so many that left, take."""
    return blocks * TABLE_BYTES + remembered * REMEMBERED_BYTES
