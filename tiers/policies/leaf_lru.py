"""LRU over the leaves of the prefix tree: a block is never evicted before a present block that follows it in a prompt.

A block is usable only while all blocks before it are present. Plain LRU evicts a prompt's first blocks first; the rest
is then useless until it is evicted too.
"""

from collections.abc import Callable

from kvstore.tiers.policies.interface import EvictionPolicy, K
from kvstore.tiers.policies.prefix.nodes import closes_cycle, has_cycle
from kvstore.tiers.policies.rising_heap import RisingHeap


class LeafLRU(EvictionPolicy[K]):
    """Evicts the least recently used key without present children. A touch is O(1), an eviction O(log n) amortised.

    While every leaf is refused there is no victim. A parent that would close a cycle is ignored (see `closes_cycle`),
    so there is always a leaf. Source: Zheng et al., SGLang: Efficient Execution of Structured Language Model Programs
    (RadixAttention), NeurIPS 2024.
    """

    name = "leaf_lru"
    has_pure_victim = True

    def __init__(self) -> None:
        self._parents: dict[K, K | None] = {}
        self._keys = self._parents
        self._children: dict[K, int] = {}
        """Key, present or not -> number of present children, if any."""
        self._used: dict[K, int] = {}
        self._leaves: RisingHeap[K] = RisingHeap()
        self._clock = 0

    def insert(self, key: K, parent: K | None = None) -> None:
        if key in self._parents:
            self.touch(key)
            return
        if parent == key:
            parent = None
        if parent is not None and key in self._children and closes_cycle(key, parent, self._parents.get, self.max_scan):
            parent = None
        self._clock += 1
        self._parents[key] = parent
        self._used[key] = self._clock
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
            if parent in self._leaves:
                self._leaves.remove(parent)
        if key not in self._children:
            self._leaves.add(key, self._clock)

    def touch(self, key: K) -> None:
        if key in self._used:
            self._clock += 1
            self._used[key] = self._clock
            if key not in self._children:
                self._leaves.raise_to(key, self._clock)

    def remove(self, key: K) -> None:
        if key not in self._parents:
            return
        parent = self._parents.pop(key)
        del self._used[key]
        if key in self._leaves:
            self._leaves.remove(key)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                if parent in self._used:
                    self._leaves.add(parent, self._used[parent])

    def victim(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        return self._leaves.lowest(evictable, self.max_scan)

    def check_integrity(self) -> None:
        self._leaves.check_integrity()
        assert self._parents.keys() == self._used.keys()
        children: dict[K, int] = {}
        for parent in self._parents.values():
            if parent is not None:
                children[parent] = children.get(parent, 0) + 1
        assert self._children == children
        assert all((key in self._leaves) == (key not in children) for key in self._parents)
        assert len(self._leaves) <= len(self._parents)
        assert not any(has_cycle(key, self._parents.get) for key in self._parents)
