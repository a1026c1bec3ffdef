"""S3-FIFO: three FIFO queues. Keys used once pass through a small queue and do not disturb the main one."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

from kvstore.tiers.policies.interface import EvictionPolicy, K, ObservedCapacity, in_two_rounds

SMALL_SHARE: Final = 0.1
"""Fraction of the capacity for new keys. This and the next three as in the authors' implementation."""
GHOST_SHARE: Final = 0.9
"""Ghosts of the small queue, as a fraction of the capacity."""
PROMOTE_AT_USES: Final = 2
"""Uses in the small queue that promote a key to the main queue."""
MAX_USES: Final = 3


class S3FIFO(EvictionPolicy[K]):
    """A small queue, a main queue in which used keys are reinserted, and ghosts of the small queue, which return to the
    main queue. A touch only counts. Every operation is O(1), a victim amortised over touches.

    Source: Yang, Zhang, Qiu, Yue, Rashmi, FIFO queues are all you need for cache eviction, SOSP 2023.
    """

    name = "s3fifo"

    def __init__(self) -> None:
        self._uses: dict[K, int] = {}
        self._keys = self._uses
        self._small: OrderedDict[K, None] = OrderedDict()
        self._main: OrderedDict[K, None] = OrderedDict()
        self._ghosts: OrderedDict[K, None] = OrderedDict()
        self._capacity = ObservedCapacity()
        self._last_victim: K | None = None
        """The search for a victim moves keys, after which the other queue may be due; the same victim is returned until
        it is removed.
        """

    def insert(self, key: K, parent: K | None = None) -> None:
        if key in self._uses:
            self.touch(key)
            return
        self._uses[key] = 0
        if key in self._ghosts:
            del self._ghosts[key]
            self._main[key] = None
        else:
            self._small[key] = None
        # Not in `remove`: the victim's ghost must not displace the ghost of the key that it is evicted for.
        while len(self._ghosts) > GHOST_SHARE * max(self._capacity.keys, len(self._uses)):
            self._ghosts.popitem(last=False)

    def touch(self, key: K) -> None:
        uses = self._uses.get(key, MAX_USES)
        if uses < MAX_USES:
            self._uses[key] = uses + 1

    def remove(self, key: K) -> None:
        if self._uses.pop(key, None) is None:
            return
        if key in self._small:
            del self._small[key]
            self._ghosts[key] = None
        else:
            del self._main[key]

    def victim(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        capacity = self._capacity.observe(len(self._uses))
        last_victim = self._last_victim
        if last_victim is not None and last_victim in self._uses and not self._is_popular(last_victim) and evictable(last_victim):
            return last_victim
        asked = 0
        for queue in self._queues(capacity):
            self._last_victim, refusals = self._first(queue, evictable, self.max_scan - asked)
            asked += refusals
            if self._last_victim is not None:
                break
        return self._last_victim

    def next_victims(self, count: int, evictable: Callable[[K], bool] = lambda key: True) -> list[K]:
        return in_two_rounds(self._in_order(), count, evictable, self.max_scan)

    def _in_order(self) -> Iterator[tuple[K, bool]]:
        """Iterate over all keys, with True for those that are due to be reinserted."""
        last_victim = self._last_victim
        if last_victim is not None and last_victim in self._uses:
            yield last_victim, self._is_popular(last_victim)
        for queue in self._queues(max(self._capacity.keys, len(self._uses))):
            yield from ((key, self._is_popular(key)) for key in queue if key != last_victim)

    def _queues(self, capacity: int) -> tuple[OrderedDict[K, None], OrderedDict[K, None]]:
        """Return the queue to evict from, and the other."""
        is_main_full = len(self._main) > capacity - int(SMALL_SHARE * capacity)
        return (self._main, self._small) if is_main_full else (self._small, self._main)

    def _first(self, queue: OrderedDict[K, None], evictable: Callable[[K], bool], max_scan: int) -> tuple[K | None, int]:
        """Return the queue's first evictable key that is not popular, and the number of refused keys, which keep their
        order.
        """
        refused: list[K] = []
        found = None
        while queue and len(refused) < max_scan:
            key = next(iter(queue))
            if self._is_popular(key):
                self._reinsert(key)
            elif evictable(key):
                found = key
                break
            else:
                refused.append(key)
                del queue[key]
        for key in reversed(refused):
            queue[key] = None
            queue.move_to_end(key, last=False)
        return found, len(refused)

    def _is_popular(self, key: K) -> bool:
        return self._uses[key] >= (PROMOTE_AT_USES if key in self._small else 1)

    def _reinsert(self, key: K) -> None:
        if key in self._small:
            del self._small[key]
            self._main[key] = None
            self._uses[key] = 0
        else:
            self._main.move_to_end(key)
            self._uses[key] -= 1

    def check_integrity(self) -> None:
        assert not self._small.keys() & self._main.keys()
        assert self._small.keys() | self._main.keys() == self._uses.keys()
        assert not self._ghosts.keys() & self._uses.keys()
        assert all(0 <= uses <= MAX_USES for uses in self._uses.values())
