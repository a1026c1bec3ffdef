"""What each tenant takes of a node against what it may: bytes and slabs by tier, and blocks. Bookkeeping; the node's loop is the only
caller.

The tiers count a tenant's bytes and slabs (`Tier.tenant_bytes`, `SlabTier.tenant_slabs`), the tables of visible blocks and open puts its
blocks: all of it with the slot, and nothing per block here. A tenant at its limit makes room out of its own blocks (room.py); one above
it, because the limit was lowered or because what an earlier process left is found again, has its surplus leave in the background,
coldest first.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from kvstore.protocol.errors import QuotaExceeded
from kvstore.protocol.settings import format_size
from kvstore.security.quotas.quota import SLABS, UNLIMITED, Quotas
from kvstore.store.blocks.block import DRAM, TIERS
from kvstore.store.blocks.holds import Holds
from kvstore.store.blocks.level import Level
from kvstore.store.blocks.open_puts import OpenPuts
from kvstore.store.blocks.visible import VisibleBlocks


class Use(NamedTuple):
    """Of one tenant: bytes by tier, from HBM down, blocks, open puts among them, and slabs of HBM and DRAM."""

    tiers: tuple[int, int, int] = (0, 0, 0)
    blocks: int = 0
    slabs: tuple[int, int] = (0, 0)


NO_USE: Final = Use()


class BlockQuotas:
    """See the module. A part of the block table."""

    def __init__(self, visible: VisibleBlocks, puts: OpenPuts, levels: Mapping[int, Level], holds: Holds) -> None:
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

    def use(self) -> dict[str, Use]:
        """Of each tenant that has something here."""
        tiers = [self._levels[index].tier.tenant_bytes if index in self._levels else {} for index in range(len(TIERS))]
        names = self._visible.tenants() | self._puts.tenants() | {name for used in tiers for name in used}
        slabs = [self._levels[index].slab_limits.held() if index in self._levels else {} for index in range(len(SLABS))]
        return {
            name: Use(
                (tiers[0].get(name, 0), tiers[1].get(name, 0), tiers[2].get(name, 0)),
                self._blocks_of(name),
                (slabs[0].get(name, 0), slabs[1].get(name, 0)),
            )
            for name in names
        }

    def _blocks_of(self, tenant: str) -> int:
        return self._visible.count_of(tenant) + self._puts.count_of(tenant)
