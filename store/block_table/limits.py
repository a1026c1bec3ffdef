"""Byte and slab limits of tenants in one tier, and which tenants exceed them. Bookkeeping; called from the node's loop."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from kvstore.store.block_table.block import Block
from kvstore.tiers.slabs import SlabTier
from kvstore.tiers.tier import Tier


class _Limits(ABC):
    """Limits of one kind, by tenant."""

    def __init__(self) -> None:
        self._limits: Mapping[str, int | None] = {}
        self._default: int | None = None
        self.are_any = False
        """True if any tenant has a limit."""
        self.over_quota: set[str] = set()
        """Tenants above their limit at the last check. Their blocks are evicted first."""

    @abstractmethod
    def held(self) -> Mapping[str, int]:
        """Usage by tenant."""

    def set(self, limits: Mapping[str, int | None], default: int | None) -> None:
        """Set limits by tenant, and of all others; None: no limit."""
        self._limits, self._default = limits, default
        self.are_any = default is not None or any(limit is not None for limit in limits.values())
        self.over_quota = {tenant for tenant in self.held() if self.is_above(tenant)}

    def left(self, tenant: str) -> int | None:
        """Unused part of the tenant's limit, negative if exceeded; None: no limit."""
        limit = self._limits.get(tenant, self._default)
        return None if limit is None else limit - self.held().get(tenant, 0)

    def is_above(self, tenant: str) -> bool:
        """Return True if the tenant exceeds its limit, demotions in progress included."""
        left = self.left(tenant)
        return left is not None and left < 0


class TierLimits(_Limits):
    """Byte limits. Demotions count as used until they are done."""

    def __init__(self, tier: Tier) -> None:
        super().__init__()
        self._tier = tier
        self._demoting_bytes: dict[str, int] = {}

    def held(self) -> Mapping[str, int]:
        return self._tier.tenant_bytes

    def demoting_bytes(self, tenant: str) -> int:
        """Bytes of the tenant's blocks that are being demoted."""
        return self._demoting_bytes.get(tenant, 0)

    def count_demotion(self, block: Block, times: int) -> None:
        """Count the start (1) or end (-1) of a block's demotion."""
        left_bytes = self._demoting_bytes.get(block.tenant, 0) + times * block.size_bytes
        if left_bytes:
            self._demoting_bytes[block.tenant] = left_bytes
        else:
            self._demoting_bytes.pop(block.tenant, None)


class SlabLimits(_Limits):
    """Slab limits. A slab belongs to one tenant, so a single value occupies a whole one. A tenant with few bytes may
    hold many slabs if its values have many sizes or most were evicted. Empty slabs count for no tenant.

    A tenant above its limit gets no further slab; its blocks are evicted in the background or for others.
    """

    def __init__(self, tier: SlabTier | None) -> None:
        """None: the tier has no slabs, and no tenant a limit."""
        super().__init__()
        self._tier = tier

    def held(self) -> Mapping[str, int]:
        """Slabs by tenant, including those with open puts or readers only."""
        return self._tier.tenant_slabs if self._tier is not None else {}

    def lacks(self, size_bytes: int, tenant: str) -> bool:
        """Return True if one more value of this size needs a slab beyond the tenant's limit. Raises InvalidArgument."""
        if not self.are_any or self._tier is None:
            return False
        left = self.left(tenant)
        return left is not None and left <= 0 and self._tier.needs_slab(size_bytes, tenant=tenant)
