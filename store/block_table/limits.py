"""How many bytes and slabs of one tier each tenant may take, and who takes more. Bookkeeping; the node's loop is the only caller."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from kvstore.store.block_table.block import Block
from kvstore.tiers.slabs import SlabTier
from kvstore.tiers.tier import Tier


class _Limits(ABC):
    """What each tenant may take, and who takes more."""

    def __init__(self) -> None:
        self._limits: Mapping[str, int | None] = {}
        self._default: int | None = None
        self.are_any = False
        """Whether any tenant has a limit: nothing else need be asked else."""
        self.surplus: set[str] = set()
        """Tenants that had more than their limit when they were last looked at: what they have goes first."""

    @abstractmethod
    def held(self) -> Mapping[str, int]:
        """What each tenant takes that takes anything."""

    def set(self, limits: Mapping[str, int | None], default: int | None) -> None:
        """By tenant, and of all others; None: no limit."""
        self._limits, self._default = limits, default
        self.are_any = default is not None or any(limit is not None for limit in limits.values())
        self.surplus = {tenant for tenant in self.held() if self.is_above(tenant)}

    def left(self, tenant: str) -> int | None:
        """What the tenant may take yet, less than 0 where it has too much; None: no limit."""
        limit = self._limits.get(tenant, self._default)
        return None if limit is None else limit - self.held().get(tenant, 0)

    def is_above(self, tenant: str) -> bool:
        """The tenant has more than it may, whatever of it is leaving."""
        left = self.left(tenant)
        return left is not None and left < 0


class TierLimits(_Limits):
    """Of bytes. What is leaving for a lower tier is counted until it has left."""

    def __init__(self, tier: Tier) -> None:
        super().__init__()
        self._tier = tier
        self._leaving_bytes: dict[str, int] = {}

    def held(self) -> Mapping[str, int]:
        return self._tier.tenant_bytes

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


class SlabLimits(_Limits):
    """Of slabs. A slab is one tenant's, so one value keeps the memory of a whole one from all others: a tenant of few bytes may hold many,
    where it stores values of many sizes or most of what it stored has left. A slab in which it has nothing counts for no tenant.

    A tenant above its limit takes no further slab; what it has leaves in the background, or for others."""

    def __init__(self, tier: SlabTier | None) -> None:
        """None: the tier has no slabs, and no tenant a limit."""
        super().__init__()
        self._tier = tier

    def held(self) -> Mapping[str, int]:
        """Slabs in which values are being written or still read count."""
        return self._tier.tenant_slabs if self._tier is not None else {}

    def lacks(self, size_bytes: int, tenant: str) -> bool:
        """Whether one more value of this size would be in a slab that the tenant may not have. Raises InvalidArgument."""
        if not self.are_any or self._tier is None:
            return False
        left = self.left(tenant)
        return left is not None and left <= 0 and self._tier.needs_slab(size_bytes, tenant=tenant)
