"""A mapping that knows which of its entries to evict next, by SIEVE: first in, first out, but an entry that was got since the hand last
passed stays for another round.

It evicts nothing by itself: its owner asks for a victim and removes it. Not a policy of the tiers: those order keys and own no values.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar, cast

from kvstore.protocol.errors import InvalidArgument

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Node(Generic[K, V]):
    __slots__ = ("is_visited", "key", "newer", "older", "value")

    def __init__(self, key: K, value: V) -> None:
        self.key = key
        self.value = value
        self.is_visited = False
        self.older: _Node[K, V] = self
        self.newer: _Node[K, V] = self


def _always(key: object, value: object) -> bool:
    return True


class Sieve(Generic[K, V]):
    """Entries in a ring in the order of arrival, and a hand that moves from the oldest to the newest and round again. Not thread-safe.

    New entries are the newest and not visited; `get` marks them visited; the hand clears the marks that it passes and stops at the
    first entry without one. Every operation is O(1), amortised for `victim` while nothing is refused.
    Source: Zhang, Yang, Yue, Vigfusson, Rashmi, SIEVE is Simpler than LRU, NSDI 2024.
    """

    def __init__(self) -> None:
        self._nodes: dict[K, _Node[K, V]] = {}
        # Empty, between the newest entry and the oldest: a hand that stands here is about to start at the oldest.
        self._end: _Node[K, V] = _Node(cast("K", None), cast("V", None))
        self._hand = self._end

    def get(self, key: K) -> V | None:
        """The value under `key`, which is now visited; None if there is none."""
        node = self._nodes.get(key)
        if node is None:
            return None
        node.is_visited = True
        return node.value

    def peek(self, key: K) -> V | None:
        """The value under `key`; None if there is none. Does not count as a visit."""
        node = self._nodes.get(key)
        return None if node is None else node.value

    def insert(self, key: K, value: V) -> None:
        """Add the newest entry, not visited. Raises InvalidArgument when the key is present; nothing has changed then."""
        if key in self._nodes:
            raise InvalidArgument(f"{key!r} is present: remove it before another value is inserted")
        node = self._nodes[key] = _Node(key, value)
        node.older, node.newer = self._end.older, self._end
        node.older.newer = node.newer.older = node

    def remove(self, key: K) -> V | None:
        """Take an entry out and return its value; None if there is none. A hand that stood there moves on to the next newer entry."""
        node = self._nodes.pop(key, None)
        if node is None:
            return None
        if self._hand is node:
            self._hand = node.newer
        node.older.newer, node.newer.older = node.newer, node.older
        return node.value

    def victim(self, evictable: Callable[[K, V], bool] = _always) -> tuple[K, V] | None:
        """The entry to evict next; None when `evictable` refuses all. The hand stays at it, and it stays until `remove`.

        A refused entry loses its mark, keeps its place and is passed over. Looks at each entry twice at most: `evictable` must not
        change the mapping, and answer the same for an entry each time.
        """
        # One round clears every mark, so that the second finds whatever may leave.
        for _ in range(2 * len(self._nodes)):
            if self._hand is self._end:
                self._hand = self._end.newer
            node = self._hand
            if node.is_visited:
                node.is_visited = False
            elif evictable(node.key, node.value):
                return node.key, node.value
            self._hand = node.newer
        return None

    def items(self) -> Iterator[tuple[K, V]]:
        """(key, value), the oldest first, without visiting them. The mapping must not change meanwhile."""
        for key, node in self._nodes.items():
            yield key, node.value

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: K) -> bool:
        return key in self._nodes

    def check_integrity(self) -> None:
        """Assert that ring, table and hand agree. For tests; O(entries)."""
        ring = []
        node = self._end
        while (node := node.newer) is not self._end:
            assert self._nodes[node.key] is node
            assert node.newer.older is node, "the ring is not the same both ways"
            ring.append(node.key)
        assert ring == list(self._nodes), "the ring is not in the order of arrival"
        assert self._hand is self._end or self._nodes.get(self._hand.key) is self._hand, "the hand stands at an entry that left"
