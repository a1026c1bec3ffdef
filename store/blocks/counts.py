"""What happened in a tier, and how long ago a block was read: plain numbers of the node's loop, which metrics are made of."""

from bisect import bisect_right
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Final

MAX_TENANTS: Final = 64
"""Told apart in the counts of hits; those with the fewest go together under OTHERS."""
OTHERS: Final = "(others)"
MAX_SAMPLES: Final = 1024
FIRST_INTERVAL_NS: Final = 1_000_000_000


@dataclass(slots=True)
class TierCounts:
    """Since the node started."""

    hits: int = 0
    evictions: int = 0
    """Blocks that left the node from this tier."""
    table_evictions: int = 0
    """Of these, those that left because no more blocks may be known."""
    quota_evictions: int = 0
    """Of these, those that left because their tenant has all that its quota gives it."""
    demotions: int = 0
    promotions: int = 0
    tenant_hits: MutableMapping[str, int] = field(default_factory=dict)
    evicted: list[int] = field(default_factory=list)
    """When each block that was evicted lately had been read last, in accesses: for whoever counts ages, who takes them."""

    def hit(self, tenant: str, count: int = 1) -> None:
        self.hits += count
        self.tenant_hits[tenant] = self.tenant_hits.get(tenant, 0) + count

    def evict(self, last_access: int) -> None:
        self.evictions += 1
        self.evicted.append(last_access)

    def evict_all(self, last_accesses: Sequence[int]) -> None:
        self.evictions += len(last_accesses)
        self.evicted += last_accesses

    def tidy(self) -> None:
        """Keep no more than MAX_TENANTS tenants: inventing names is to grow nothing for long."""
        if len(self.tenant_hits) <= MAX_TENANTS:
            return
        fewest = sorted((name for name in self.tenant_hits if name != OTHERS), key=self.tenant_hits.__getitem__)
        for name in fewest[: len(fewest) - MAX_TENANTS // 2]:
            self.tenant_hits[OTHERS] = self.tenant_hits.get(OTHERS, 0) + self.tenant_hits.pop(name)


class AccessClock:
    """From a count of accesses to the time when there were so many, to within an interval that grows with what is remembered: each time
    MAX_SAMPLES are reached every other one is dropped, so that 1024 of them reach back 17 minutes by seconds, or 12 days by 17 minutes."""

    def __init__(self) -> None:
        self._accesses: list[int] = []
        self._times_ns: list[int] = []
        self._interval_ns = FIRST_INTERVAL_NS

    def sample(self, accesses: int, now_ns: int) -> None:
        """There are so many accesses now. To be called more often than each second."""
        if self._times_ns and now_ns - self._times_ns[-1] < self._interval_ns:
            return
        self._accesses.append(accesses)
        self._times_ns.append(now_ns)
        if len(self._times_ns) >= MAX_SAMPLES:
            del self._accesses[1::2], self._times_ns[1::2]
            self._interval_ns *= 2

    def age_ns(self, access: int, now_ns: int) -> int:
        """How long ago that access was: from the sample before it on."""
        at = max(0, bisect_right(self._accesses, access) - 1)
        return max(0, now_ns - self._times_ns[at]) if self._times_ns else 0
