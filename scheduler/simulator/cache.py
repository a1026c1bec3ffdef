"""The prefix cache in the DRAM of one simulated instance. It holds names of blocks, no bytes, and keeps the scheduler's index true."""

from collections.abc import Hashable, Sequence
from typing import TypeAlias

from kvstore.scheduler.prefix_index import PrefixIndex
from kvstore.tiers.policies.interface import EvictionPolicy

Key: TypeAlias = Hashable


class LocalCache:
    """At most `capacity_blocks` blocks; the policy says which leave. Whatever enters or leaves is told to the index as `instance`."""

    def __init__(self, instance: int, capacity_blocks: int, policy: EvictionPolicy[Key], index: PrefixIndex[Key]) -> None:
        self._instance = instance
        self._capacity_blocks = capacity_blocks
        self._policy = policy
        self._index = index

    def match(self, keys: Sequence[Key]) -> int:
        """The number of leading blocks of `keys` that are here. No access."""
        for number, key in enumerate(keys):
            if key not in self._policy:
                return number
        return len(keys)

    def touch(self, keys: Sequence[Key]) -> None:
        """They were read."""
        for key in keys:
            self._policy.touch(key)

    def insert(self, keys: Sequence[Key], *, first: int) -> None:
        """The blocks keys[first:] of a prompt are here now. Of a prompt longer than the cache only the leading ones enter: a tail
        without its head is of no use."""
        for number in range(first, min(len(keys), self._capacity_blocks)):
            key = keys[number]
            if key in self._policy:
                self._policy.touch(key)
                continue
            if len(self._policy) >= self._capacity_blocks:
                self._evict()
            self._policy.insert(key, keys[number - 1] if number else None)
            self._index.add(self._instance, (key,))

    def __len__(self) -> int:
        return len(self._policy)

    def __contains__(self, key: Key) -> bool:
        return key in self._policy

    def _evict(self) -> None:
        victim = self._policy.victim()
        assert victim is not None, "nothing is pinned here, so a full cache has a victim"
        self._policy.remove(victim)
        self._index.remove(self._instance, (victim,))
