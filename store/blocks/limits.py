"""How many bytes of one tier each tenant may take, and who takes more. Bookkeeping; the node's loop is the only caller."""

from collections.abc import Mapping

from kvstore.store.blocks.block import Block
from kvstore.tiers.slab_tier import SlabTier
from kvstore.tiers.tier import Tier


class TierLimits:
    """What is leaving for a lower tier is counted until it has left."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self._limits: Mapping[str, int | None] = {}
        self._default: int | None = None
        self.are_any = False
        """Whether anybody has a limit: nothing else need be asked else."""
        self.surplus: set[str] = set()
        """Tenants that had more than their limit when they were last looked at: what they have goes first."""
        self._leaving_bytes: dict[str, int] = {}

    def set(self, limits: Mapping[str, int | None], default: int | None) -> None:
        """By tenant, and of all others; None: no limit."""
        self._limits, self._default = limits, default
        self.are_any = default is not None or any(limit is not None for limit in limits.values())
        self.surplus = {tenant for tenant in self._tier.tenant_bytes if self.is_above(tenant)}

    def of(self, tenant: str) -> int | None:
        return self._limits.get(tenant, self._default)

    def left_bytes(self, tenant: str) -> int | None:
        """What the tenant may take yet, less than 0 where it has too much; None: no limit."""
        limit = self.of(tenant)
        return None if limit is None else limit - self._tier.tenant_bytes.get(tenant, 0)

    def is_above(self, tenant: str) -> bool:
        """The tenant has more than it may, whatever of it is leaving."""
        left_bytes = self.left_bytes(tenant)
        return left_bytes is not None and left_bytes < 0

    def leaving_bytes(self, tenant: str) -> int:
        """Bytes of the tenant's blocks that are being copied to a lower tier in order to leave this one."""
        return self._leaving_bytes.get(tenant, 0)

    def count_leaving(self, block: Block, times: int) -> None:
        """The block is leaving (1), or no more (-1)."""
        left_bytes = self._leaving_bytes.get(block.tenant, 0) + times * block.size_bytes
        if left_bytes:
            self._leaving_bytes[block.tenant] = left_bytes
        else:
            self._leaving_bytes.pop(block.tenant, None)


class SlabLimits:
    """A tenant above its limit takes no further slab; what it has leaves in the background, or for others."""

    def __init__(self, tier: SlabTier | None) -> None:
        """None: the tier has no slabs, and nobody a limit."""
        self._tier = tier
        self._limits: Mapping[str, int | None] = {}
        self._default: int | None = None
        self._are_any = False
        self.surplus: set[str] = set()
        """Tenants that had more than their limit when they were last looked at: what they have goes first."""

    def set(self, limits: Mapping[str, int | None], default: int | None) -> None:
        """By tenant, and of all others; None: no limit."""
        self._limits, self._default = limits, default
        self._are_any = default is not None or any(limit is not None for limit in limits.values())
        self.surplus = {tenant for tenant in self.held() if self.is_above(tenant)}

    def held(self) -> Mapping[str, int]:
        """The slabs of each tenant that has values in any, those that are being written or still read included."""
        return self._tier.tenant_slabs if self._tier is not None else {}

    def lacks(self, size_bytes: int, tenant: str) -> bool:
        """Whether one more value of this size would be in a slab that the tenant may not have. Raises InvalidArgument."""
        if not self._are_any or self._tier is None:
            return False
        left = self._left(tenant)
        return left is not None and left <= 0 and self._tier.needs_slab(size_bytes, tenant=tenant)

    def is_above(self, tenant: str) -> bool:
        left = self._left(tenant)
        return left is not None and left < 0

    def _left(self, tenant: str) -> int | None:
        limit = self._limits.get(tenant, self._default)
        return None if limit is None else limit - self.held().get(tenant, 0)
