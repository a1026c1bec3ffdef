"""LRU: evicts the least recently used key."""

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from kvstore.tiers.policies.interface import EvictionPolicy, K


class LRU(EvictionPolicy[K]):
    """Keys ordered by last use. Source: Denning, The Working Set Model for Program Behavior, CACM 1968.

    An OrderedDict, not a dict: a dict finds its first key by stepping over every key deleted in front of it, which made
    a victim among a million keys cost hundreds of microseconds.
    """

    name = "lru"
    has_pure_victim = True

    def __init__(self) -> None:
        self._keys: OrderedDict[K, None] = OrderedDict()

    def insert(self, key: K, parent: K | None = None) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)

    def touch(self, key: K) -> None:
        if key in self._keys:
            self._keys.move_to_end(key)

    def remove(self, key: K) -> None:
        self._keys.pop(key, None)

    def victim(self, evictable: Callable[[K], bool] = lambda key: True) -> K | None:
        return next(filter(evictable, islice(self._keys, self.max_scan)), None)

    def check_integrity(self) -> None:
        assert list(self._keys) == list(dict.fromkeys(self._keys))
