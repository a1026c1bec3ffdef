"""GDSF, Greedy-Dual-Size-Frequency: LFU with ageing. New and used keys start from the rank of the last victim.

A policy of a node orders values of one size class, so size and cost are equal: a key's rank is the age at its last use
plus its number of uses.
"""

from collections.abc import Callable
from typing import Final

from kvstore.tiers.policies.interface import EvictionPolicy, K
from kvstore.tiers.policies.rising_heap import RisingHeap

ORDER_BITS: Final = 64
"""Low bits of a rank, for the order of uses: among equals the least recently used key is evicted."""


class GDSF(EvictionPolicy[K]):
    """Evicts the key of lowest rank; its rank becomes the age. A touch is O(1), an eviction O(log n) amortised.

    Source: Cherkasova, Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy, HP Labs 1998.
    """

    name = "gdsf"
    has_pure_victim = True

    def __init__(self) -> None:
        self._uses: dict[K, int] = {}
        self._keys = self._uses
        self._order: RisingHeap[K] = RisingHeap()
        self._age = 0
        self._clock = 0

    def insert(self, key: K, parent: K | None = None) -> None:
        if key in self._uses:
            self.touch(key)
            return
        self._uses[key] = 1
        self._order.add(key, self._rank_of_use(1))

    def touch(self, key: K) -> None:
        if key in self._uses:
            uses = self._uses[key] = self._uses[key] + 1
            self._order.raise_to(key, self._rank_of_use(uses))

    def _rank_of_use(self, uses: int) -> int:
        self._clock += 1
        return (self._age + uses) << ORDER_BITS | self._clock

    def remove(self, key: K) -> None:
        if self._uses.pop(key, None) is not None:
            # Not the key's own rank: deleting a popular key would age all others.
            self._age = max(self._age, self._order.bound() >> ORDER_BITS)
            self._order.remove(key)

    def victim(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        return self._order.lowest(evictable, self.max_scan)

    def check_integrity(self) -> None:
        self._order.check_integrity()
        assert len(self._order) == len(self._uses)
        assert all(key in self._order for key in self._uses)
