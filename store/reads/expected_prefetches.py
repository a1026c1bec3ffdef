"""Prefetches for expected reads: a retention hint says when blocks are read again (`reuse_s`), as a session's next turn.

Shortly before that time the blocks that are only below DRAM by then are queued (prefetcher.py), behind puts. While most
prefetched blocks of the node are wasted, few are.
"""

import heapq
from collections.abc import Sequence
from typing import Final

from kvstore.store.reads.prefetcher import Prefetcher

LEAD_SHARE: Final = 0.1
"""Share of the expected time by which blocks are brought up earlier: expectations are no more exact."""
MIN_LEAD_NS: Final = 250_000_000
MAX_LEAD_NS: Final = 5_000_000_000
MAX_KEYS: Final = 65_536
"""Keys that wait, about 8 MB; further ones are not prefetched."""
TRIED_OF: Final = 16
"""While prefetches are wasteful, one hint of so many is tried."""


class ExpectedPrefetches:
    """Expected reads of a node's blocks, by time. Not thread-safe: called from the node's loop."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher
        self._due: list[tuple[int, int, str, Sequence[bytes]]] = []
        """Heap of time, number, tenant and keys."""
        self._made = 0
        self._waiting = 0
        """Keys in the heap."""
        self.queued = 0
        """Blocks queued for expected reads, since the start."""

    def expect(self, tenant: str, keys: Sequence[bytes], after_ns: int, now_ns: int) -> None:
        """Prefetch the tenant's blocks shortly before `after_ns` have passed. No-op beyond MAX_KEYS."""
        if self._waiting + len(keys) > MAX_KEYS:
            return
        lead_ns = min(max(int(after_ns * LEAD_SHARE), MIN_LEAD_NS), MAX_LEAD_NS)
        self._made += 1
        self._waiting += len(keys)
        heapq.heappush(self._due, (now_ns + max(after_ns - lead_ns, 0), self._made, tenant, keys))

    def step(self, now_ns: int) -> None:
        """Queue what is due. Called periodically."""
        while self._due and self._due[0][0] <= now_ns:
            _, number, tenant, keys = heapq.heappop(self._due)
            self._waiting -= len(keys)
            if not self._prefetcher.is_wasteful or number % TRIED_OF == 0:
                self.queued += self._prefetcher.queue(tenant, keys)
