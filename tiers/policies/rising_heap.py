"""Priority queue for ranks that only rise: the heap is updated lazily, when a key reaches the top."""

import heapq
from collections.abc import Callable
from typing import Final, Generic

from kvstore.tiers.policies.interface import K

SLACK: Final = 64
"""Stale entries tolerated for any number of keys: a heap of few keys is not rebuilt at each removal."""


class RisingHeap(Generic[K]):
    """Keys by rank, lowest first. Ranks are unique.

    `raise_to` is O(1), the rest O(log n) amortised. A key's heap entry may have an earlier rank; it is corrected, or
    dropped, at the top. Stale entries never exceed the number of keys plus SLACK.
    """

    def __init__(self) -> None:
        self._ranks: dict[K, int] = {}
        self._queued: dict[K, int] = {}
        """Key, present or removed -> the rank of its valid heap entry: its rank or a lower one."""
        self._heap: list[tuple[int, K]] = []

    def raise_to(self, key: K, rank: int) -> None:
        """Raise the rank of a present key."""
        self._ranks[key] = rank

    def add(self, key: K, rank: int) -> None:
        """Add an absent key."""
        self._ranks[key] = rank
        # A key added again with the same rank (a leaf that became one again) reuses its entry: two would duplicate the key.
        if self._queued.get(key, rank + 1) > rank:
            self._queued[key] = rank
            heapq.heappush(self._heap, (rank, key))

    def remove(self, key: K) -> None:
        """Remove a present key."""
        del self._ranks[key]
        if len(self._heap) > 2 * len(self._ranks) + SLACK:
            self._queued = dict(self._ranks)
            self._heap = [(rank, key) for key, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def bound(self) -> int:
        """Return a lower bound of all ranks; exact right after `lowest` found a key. There must be a key."""
        return self._heap[0][0]

    def lowest(self, evictable: Callable[[K], bool], max_scan: int) -> K | None:
        """Return the evictable key of lowest rank, or None; tests at most `max_scan` keys."""
        heap, found = self._heap, None
        refused: list[tuple[int, K]] = []
        while heap and len(refused) < max_scan:
            rank, key = heap[0]
            if self._queued.get(key) != rank:
                heapq.heappop(heap)
            elif (now := self._ranks.get(key)) is None:
                heapq.heappop(heap)
                del self._queued[key]
            elif now != rank:
                self._queued[key] = now
                heapq.heapreplace(heap, (now, key))
            elif evictable(key):
                found = key
                break
            else:
                refused.append(heapq.heappop(heap))
        for entry in refused:
            heapq.heappush(heap, entry)
        return found

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: K) -> bool:
        return key in self._ranks

    def check_integrity(self) -> None:
        """Assert that each key has one valid entry. For tests; O(keys)."""
        assert self._ranks.keys() <= self._queued.keys()
        assert all(self._queued[key] <= rank for key, rank in self._ranks.items())
        counting = [key for rank, key in self._heap if self._queued.get(key) == rank]
        assert len(counting) == len(set(counting)) == len(self._queued)
        assert len(self._heap) <= 2 * len(self._ranks) + SLACK + 1
