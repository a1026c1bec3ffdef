"""Prefetches for expected reads: a retention hint says when blocks are read again (`reuse_s`), as a session's next turn.

Shortly before that time the blocks that are only below DRAM by then are queued (prefetcher.py), behind puts. While most
prefetched blocks of the node are wasted, few are.
"""

from bisect import insort
from collections.abc import Sequence
from itertools import takewhile
from typing import Final

from kvstore.store.reads.prefetcher import Prefetcher

LEAD_SHARE: Final = 0.1
"""Share of the expected time by which blocks are brought up earlier: expectations are no more exact."""
MIN_LEAD_NS: Final = 250_000_000
MAX_LEAD_NS: Final = 5_000_000_000
MAX_KEYS: Final = 65_536
"""Keys that wait, about 8 MB. Beyond that those expected last are dropped: a hint of a read in a week would otherwise
keep out all others until then."""
TRIED_OF: Final = 16
"""While prefetches are wasteful, one hint of so many is tried."""


class ExpectedPrefetches:
    """Expected reads of a node's blocks, by time. Not thread-safe: called from the node's loop."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher
        self._due: list[tuple[int, int, str, Sequence[bytes]]] = []
        """Time, number, tenant and keys; ascending."""
        self._made = 0
        self._waiting = 0
        """Keys in `_due`."""
        self.queued = 0
        """Blocks queued for expected reads, since the start."""

    def expect(self, tenant: str, keys: Sequence[bytes], after_ns: int, now_ns: int) -> None:
        """Prefetch the tenant's blocks shortly before `after_ns` have passed."""
        lead_ns = min(max(int(after_ns * LEAD_SHARE), MIN_LEAD_NS), MAX_LEAD_NS)
        self._made += 1
        self._waiting += len(keys)
        insort(self._due, (now_ns + max(after_ns - lead_ns, 0), self._made, tenant, keys))
        while self._waiting > MAX_KEYS:
            self._waiting -= len(self._due.pop()[-1])

    def step(self, now_ns: int) -> None:
        """Queue what is due. Called periodically."""
        due = list(takewhile(lambda one: one[0] <= now_ns, self._due))
        del self._due[: len(due)]
        for _, number, tenant, keys in due:
            self._waiting -= len(keys)
            if not self._prefetcher.is_wasteful or number % TRIED_OF == 0:
                self.queued += self._prefetcher.queue(tenant, keys)
