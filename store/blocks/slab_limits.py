"""In how many slabs of one tier each tenant may have values, and who has them in more. Bookkeeping; the node's loop is the only caller.

A slab is one tenant's, so one value keeps the memory of a whole one from everybody else: a tenant of few bytes may hold many, where it
stores values of many sizes or most of what it stored has left. A slab in which it has nothing counts for nobody.
"""

from collections.abc import Mapping

from kvstore.tiers.slab_tier import SlabTier


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

    def check_integrity(self) -> None:
        """Assert that whoever has too many is known. For tests; O(tenants)."""
        assert {tenant for tenant in self.held() if self.is_above(tenant)} <= self.surplus
