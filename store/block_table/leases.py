"""Read leases on mapped blocks: owner, blocks, end. Pure; `now_ns` is passed in."""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.store.block_table.block import Block

MIN_STALE_ENTRIES = 1024
"""The expiry heap is rebuilt when entries of ended leases are the majority, and at least this many."""


@dataclass(slots=True, eq=False)
class ReadLease:
    """The owner's right to read the blocks' slots until `until_ns`."""

    lease_id: int
    owner: object
    blocks: Sequence[Block]
    until_ns: int


class Leases:
    """Leases by id and owner. The caller has acquired every block; `release_block` is called for each, exactly once."""

    def __init__(self, release_block: Callable[[Block], None]) -> None:
        self._release_block = release_block
        self._leases: dict[int, ReadLease] = {}
        self._by_owner: dict[object, set[int]] = {}
        self._expiry: list[tuple[int, int]] = []
        self._next_id = 1

    def grant(self, owner: object, blocks: Sequence[Block], until_ns: int) -> int:
        """Return the id of a new lease, never 0."""
        lease = ReadLease(self._next_id, owner, blocks, until_ns)
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        self._by_owner.setdefault(owner, set()).add(lease.lease_id)
        heapq.heappush(self._expiry, (until_ns, lease.lease_id))
        return lease.lease_id

    def release(self, owner: object, lease_id: int) -> None:
        """End a lease. Unknown leases and those of other owners are ignored: a release races with expiry."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.owner is owner:
            self._end(lease)

    def forget_owner(self, owner: object) -> None:
        for lease_id in list(self._by_owner.get(owner, ())):
            self._end(self._leases[lease_id])

    def expire(self, *, now_ns: int) -> int:
        """End expired leases; return their number."""
        count = 0
        while self._expiry and self._expiry[0][0] <= now_ns:
            lease = self._leases.get(heapq.heappop(self._expiry)[1])
            if lease is not None:
                self._end(lease)
                count += 1
        return count

    def _end(self, lease: ReadLease) -> None:
        del self._leases[lease.lease_id]
        mine = self._by_owner[lease.owner]
        mine.discard(lease.lease_id)
        if not mine:
            del self._by_owner[lease.owner]
        if len(self._expiry) > 2 * len(self._leases) + MIN_STALE_ENTRIES:
            self._expiry = [(one.until_ns, one.lease_id) for one in self._leases.values()]
            heapq.heapify(self._expiry)
        for block in lease.blocks:
            self._release_block(block)

    def __len__(self) -> int:
        return len(self._leases)
