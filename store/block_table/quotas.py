"""Quotas of tenants, and the limit of blocks known at once. Bookkeeping; called from the node's loop.

Usage is not counted here: tiers count a tenant's bytes and slabs (`Tier.tenant_bytes`, `SlabTier.tenant_slabs`),
visible blocks and open puts its blocks. A tenant at its quota evicts its own blocks (evictor.py). A tenant above it,
after a lowered quota or a restart, has blocks evicted in the background, coldest first. At the block limit, of all
tenants or of one, the coldest block is evicted for the next one.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from kvstore.protocol.errors import QuotaExceeded
from kvstore.protocol.settings import format_size
from kvstore.security.quotas.quota import SLABS, UNLIMITED, Quotas
from kvstore.store.block_table.block import DRAM, TIERS, Block
from kvstore.store.block_table.evictor import MAX_QUOTA_EVICTIONS, Evictor
from kvstore.store.block_table.holds import Holds
from kvstore.store.block_table.open_puts import OpenPuts
from kvstore.store.block_table.tier_view import TierView
from kvstore.store.block_table.visible_blocks import VisibleBlocks

TABLE_BYTES: Final = 470
"""Bytes per block with a copy in one tier: row, key, tables and default policy. Measured: 404 in prompts of 16 blocks,
309 without parents in large batches. Values of a block stored in 2, 4 or 8 parts take about 150, 70 and 30 more."""

INDEX_BYTES: Final = 176
"""Bytes per block in the shared-memory index, with a key of 16 bytes: 80, and 96 in the larger index during growth."""

REMEMBERED_BYTES: Final = 400
"""Bytes per evicted block that the default policy remembers. Measured: 396 without parents, 236 in prompts of 50."""

REMEMBERED_SHARE: Final = 0.25
"""Share of the table's memory for remembered blocks: a policy remembers several times as many as exist."""


class TenantUsage(NamedTuple):
    """Usage of one tenant: bytes by tier from HBM down, blocks including open puts, slabs of HBM and DRAM."""

    tiers: tuple[int, int, int] = (0, 0, 0)
    blocks: int = 0
    slabs: tuple[int, int] = (0, 0)


NO_USE: Final = TenantUsage()


class BlockQuotas:
    """Quotas in force, and usage by tenant. Part of the block table."""

    def __init__(self, visible: VisibleBlocks, puts: OpenPuts, levels: Mapping[int, TierView], holds: Holds) -> None:
        self._holds = holds
        self._visible = visible
        self._puts = puts
        self._levels = levels
        self._quotas = UNLIMITED
        self.over_block_quota: set[str] = set()
        """Tenants above their block quota at the last check."""

    def set(self, quotas: Quotas) -> None:
        """Apply quotas."""
        self._quotas = UNLIMITED if quotas == UNLIMITED else quotas
        self._holds.set_quotas(self._quotas)
        for index, level in self._levels.items():
            level.limits.set({name: quota.of_tier(index) for name, quota in quotas.tenants.items()}, quotas.default.of_tier(index))
            slabs = {name: quota.slabs_of_tier(index) for name, quota in quotas.tenants.items()}
            level.slab_limits.set(slabs, quotas.default.slabs_of_tier(index))
        self.over_block_quota = {tenant for tenant in self._visible.tenants() if self.blocks_over_quota(tenant) > 0}

    @property
    def now(self) -> Quotas:
        return self._quotas

    def blocks_left(self, tenant: str) -> int | None:
        """Unused part of the tenant's block quota, negative if exceeded; None: no limit."""
        if self._quotas is UNLIMITED:
            return None
        limit = self._quotas.of(tenant).blocks
        return None if limit is None else limit - self._blocks_of(tenant)

    def blocks_over_quota(self, tenant: str) -> int:
        """Number of blocks above the tenant's quota."""
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
                f"value of {format_size(size_bytes)} exceeds the DRAM quota of tenant {tenant!r}, {format_size(limit)} (dram_bytes)"
            )
        for name in ("blocks", SLABS[DRAM]):
            if getattr(quota, name) == 0:
                raise QuotaExceeded(f"the quota of tenant {tenant!r} is 0 {name.replace('_', ' ')} ({name})")

    def exceeded(self, tenant: str, size_bytes: int) -> QuotaExceeded | None:
        """Return the error of a put of this size that got no slot; None if no quota was the cause."""
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
            f"tenant {tenant!r} has used its quota on this node, {what}, and none of its blocks could be evicted before the "
            "deadline: remove or unpin some, or raise the quota"
        )

    def use(self) -> dict[str, TenantUsage]:
        """Usage of each tenant with blocks or open puts."""
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
    """Limits on the number of blocks, and the evictions that keep them."""

    def __init__(
        self,
        visible: VisibleBlocks,
        puts: OpenPuts,
        levels: Mapping[int, TierView],
        quotas: BlockQuotas,
        drop: Callable[[Block], None],
        evictor: Evictor,
        *,
        max_blocks: int | None,
    ) -> None:
        """`levels` by index, fastest first. `max_blocks`: of all tenants together; None: no bound."""
        self._visible = visible
        self._puts = puts
        self._lowest_first = list(levels.values())[::-1]
        self._quotas = quotas
        self._drop = drop
        self._evictor = evictor
        self._max_blocks = max_blocks
        self._failed_searches: set[str] = set()
        """Tenants over quota without an evictable block since the last `retry_failed_searches`."""

    def at_most(self, tenant: str, count: int) -> int:
        """Return how many of `count` further blocks of the tenant the limits permit without evictions."""
        if self._max_blocks is not None:
            count = min(count, self._max_blocks - len(self._visible) - len(self._puts))
        left = self._quotas.blocks_left(tenant)
        return count if left is None else min(count, left)

    def make_space_for_one(self, tenant: str) -> bool:
        """Evict until one more block of the tenant is permitted: its own at its quota. Return False if none is
        evictable, or the tenant is over quota and this iteration's evictions are used up."""
        while (left := self._quotas.blocks_left(tenant)) is not None and left <= 0:
            if (left < 0 and not self._evictor.may_take(1)) or not self._evict_of(tenant):
                return False
        while self._max_blocks is not None and len(self._visible) + len(self._puts) >= self._max_blocks:
            has_left = self._evict(lambda level: level.order.coldest(level.evictable_now()), for_quota=False)
            if not (has_left or any(self._evictor.yield_holds(level, None) for level in self._lowest_first)):
                return False
        return True

    def evict_over_quota(self) -> None:
        """Evict blocks of tenants over their block quota, at most MAX_QUOTA_EVICTIONS per call."""
        left = MAX_QUOTA_EVICTIONS
        for tenant in self._quotas.over_block_quota - self._failed_searches:
            while left and self._quotas.blocks_over_quota(tenant) and self._evict_of(tenant):
                left -= 1
            if not self._quotas.blocks_over_quota(tenant):
                self._quotas.over_block_quota.discard(tenant)
            elif left:
                self._failed_searches.add(tenant)

    def retry_failed_searches(self) -> None:
        """See `Evictor.retry_failed_searches`."""
        self._failed_searches.clear()

    def _evict_of(self, tenant: str) -> bool:
        return self._evict(lambda level: level.order.coldest_of(tenant, level.evictable_now()), for_quota=True)

    def _evict(self, coldest: Callable[[TierView], Block | None], *, for_quota: bool) -> bool:
        """Evict the block that `coldest` returns for the lowest tier with one. Return False if there is none."""
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
    """Number of blocks that fit into the table's memory."""
    return max(1, int(max_table_bytes * (1 - REMEMBERED_SHARE)) // TABLE_BYTES)


def most_index_bytes(max_table_bytes: int) -> int:
    """Bytes of the shared-memory index of that many blocks: a memfd, beside the table's memory."""
    return most_blocks(max_table_bytes) * INDEX_BYTES


def most_remembered(max_table_bytes: int) -> int:
    """Number of evicted blocks that may be remembered, all tiers together."""
    return int(max_table_bytes * REMEMBERED_SHARE) // REMEMBERED_BYTES


def table_bytes(blocks: int, remembered: int) -> int:
    """Estimated bytes of known and remembered blocks."""
    return blocks * TABLE_BYTES + remembered * REMEMBERED_BYTES
