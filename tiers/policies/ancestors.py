"""Parents as callers name them need not form a tree: policies that evict leaves only refuse the link that would close a cycle.

The keys of a cycle would each wait for the next one to be evicted, so none would ever leave. Hash chains make no cycle, a caller can.
"""

from collections.abc import Callable

from kvstore.tiers.policies.interface import K


def closes_cycle(key: K, parent: K, parent_of: Callable[[K], K | None], max_steps: int) -> bool:
    """Return whether `key`, which is absent, would be its own ancestor below `parent`.

    `parent_of` gives the parent of a present key, and None for an absent one or one without a parent. True after `max_steps` ancestors,
    too: without the link the key is evicted like the first block of a prompt, which is safe.
    """
    above: K | None = parent
    for _ in range(max_steps):
        if above is None:
            return False
        if above == key:
            return True
        above = parent_of(above)
    return above is not None


def has_cycle(key: K, parent_of: Callable[[K], K | None]) -> bool:
    """Return whether `key` is its own ancestor. For tests."""
    seen: set[K] = set()
    above = parent_of(key)
    while above is not None and above not in seen:
        if above == key:
            return True
        seen.add(above)
        above = parent_of(above)
    return False
