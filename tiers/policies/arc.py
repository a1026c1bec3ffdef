"""ARC: two LRU lists, of keys used once and used again, whose sizes adapt to the hits on their ghosts."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain, islice

from kvstore.tiers.policies.interface import EvictionPolicy, K, ObservedCapacity


class ARC(EvictionPolicy[K]):
    """T1, T2 and their ghost lists B1, B2 as in the paper; p is the target size of T1. Every operation is O(1).

    Two differences follow from the interface. A victim is requested before the new key is known, so p adapts to a ghost
    hit after that eviction. A batch requests all victims before its inserts, so keys missing to the capacity count as
    T1's; otherwise a batch would drain T1 down to p and take the rest from T2. Ghosts are at most as many as the
    capacity. Source: Megiddo, Modha, ARC: A self-tuning, low overhead replacement cache, FAST 2003.
    """

    name = "arc"

    def __init__(self) -> None:
        self._once: OrderedDict[K, None] = OrderedDict()
        self._again: OrderedDict[K, None] = OrderedDict()
        self._once_ghosts: OrderedDict[K, None] = OrderedDict()
        self._again_ghosts: OrderedDict[K, None] = OrderedDict()
        self._once_target = 0.0
        self._capacity = ObservedCapacity()

    def insert(self, key: K, parent: K | None = None) -> None:
        if key in self:
            self.touch(key)
            return
        capacity = max(self._capacity.keys, len(self) + 1)
        once_ghosts, again_ghosts = len(self._once_ghosts), len(self._again_ghosts)
        if key in self._once_ghosts:
            self._once_target = min(capacity, self._once_target + max(1.0, again_ghosts / once_ghosts))
            del self._once_ghosts[key]
            self._again[key] = None
        elif key in self._again_ghosts:
            self._once_target = max(0.0, self._once_target - max(1.0, once_ghosts / again_ghosts))
            del self._again_ghosts[key]
            self._again[key] = None
        else:
            self._once[key] = None
        self._forget(capacity)

    def _forget(self, capacity: int) -> None:
        """Limit T1 and B1 to `capacity` keys, and all four lists to twice that."""
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > capacity:
            self._once_ghosts.popitem(last=False)
        while self._again_ghosts and len(self) + len(self._once_ghosts) + len(self._again_ghosts) > 2 * capacity:
            self._again_ghosts.popitem(last=False)

    def touch(self, key: K) -> None:
        if key in self._again:
            self._again.move_to_end(key)
        elif key in self._once:
            del self._once[key]
            self._again[key] = None

    def remove(self, key: K) -> None:
        if key in self._once:
            del self._once[key]
            self._once_ghosts[key] = None
        elif key in self._again:
            del self._again[key]
            self._again_ghosts[key] = None

    def victim(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        count = len(self)
        return next(filter(evictable, self._in_order(self._capacity.observe(count) - count)), None)

    def next_victims(self, count: int, evictable: Callable[[K], bool] = lambda key: True) -> list[K]:
        missing = max(0, self._capacity.keys - len(self))
        return list(islice(filter(evictable, self._in_order(missing)), count))

    def _in_order(self, missing: int) -> Iterator[K]:
        """Iterate over the first keys to evict while so many are missing to the capacity."""
        is_once_first = len(self._once) + missing > self._once_target
        lists = (self._once, self._again) if is_once_first else (self._again, self._once)
        return islice(chain.from_iterable(lists), self.max_scan)

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __contains__(self, key: K) -> bool:
        return key in self._once or key in self._again

    def check_integrity(self) -> None:
        everywhere = [*self._once, *self._again, *self._once_ghosts, *self._again_ghosts]
        assert len(set(everywhere)) == len(everywhere)
        assert self._once_target >= 0
