"""SIEVE: FIFO in which a key that was read since the hand last passed gets another round.

A read only sets a bit, so it is cheaper than LRU under many reads, and keys read once are evicted early.
"""

from collections.abc import Callable, Iterator
from typing import Generic, cast

from kvstore.tiers.policies.interface import EvictionPolicy, K, in_two_rounds


class _Node(Generic[K]):
    __slots__ = ("key", "newer", "older", "visited")

    def __init__(self, key: K) -> None:
        self.key = key
        self.visited = False
        self.older: _Node[K] = self
        self.newer: _Node[K] = self


class Sieve(EvictionPolicy[K]):
    """A ring of keys in order of arrival, and a hand that moves from the oldest to the newest.

    The hand stays at the victim; when that is removed, it moves to the next newer key. A refused key keeps its
    position. Source: Zhang, Yang, Yue, Vigfusson, Rashmi, SIEVE is Simpler than LRU, NSDI 2024.
    """

    name = "sieve"

    def __init__(self) -> None:
        self._nodes: dict[K, _Node[K]] = {}
        self._keys = self._nodes
        # Sentinel between the newest key and the oldest: from here the hand starts at the oldest.
        self._end: _Node[K] = _Node(cast("K", None))
        self._hand = self._end

    def insert(self, key: K, parent: K | None = None) -> None:
        if key in self._nodes:
            self._nodes[key].visited = True
            return
        node = self._nodes[key] = _Node(key)
        node.older, node.newer = self._end.older, self._end
        node.older.newer = node.newer.older = node

    def touch(self, key: K) -> None:
        node = self._nodes.get(key)
        if node is not None:
            node.visited = True

    def remove(self, key: K) -> None:
        node = self._nodes.pop(key, None)
        if node is None:
            return
        if self._hand is node:
            self._hand = node.newer
        node.older.newer, node.newer.older = node.newer, node.older

    def victim(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        # One round clears every bit, so two find any evictable key. Only refusals count towards max_scan: clearing a bit is paid
        # for by its touch, and a tier of popular keys would otherwise have no victim.
        refusals = 0
        for _ in range(2 * len(self._nodes)):
            if refusals == self.max_scan:
                break
            if self._hand is self._end:
                self._hand = self._end.newer
            node = self._hand
            if node.visited:
                node.visited = False
            elif evictable(node.key):
                return node.key
            else:
                refusals += 1
            self._hand = node.newer
        return None

    def next_victims(self, count: int, evictable: Callable[[K], bool] = lambda key: True) -> list[K]:
        return in_two_rounds(self._round(), count, evictable, self.max_scan)

    def _round(self) -> Iterator[tuple[K, bool]]:
        """Iterate over all keys from the hand on, with their bits."""
        node = self._hand
        for _ in range(len(self._nodes)):
            if node is self._end:
                node = node.newer
            yield node.key, node.visited
            node = node.newer

    def check_integrity(self) -> None:
        seen = set()
        node = self._end
        while (node := node.newer) is not self._end:
            assert self._nodes[node.key] is node
            assert node.newer.older is node
            seen.add(node.key)
        assert len(seen) == len(self._nodes)
        assert self._hand is self._end or self._nodes[self._hand.key] is self._hand, "the hand stands at a key that left"
