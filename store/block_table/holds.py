"""Holds: blocks that a lookup found are kept in their tier until they are loaded. Bookkeeping; `now_ns` is passed in.

A hold has a client's number and covers any number of blocks; a block may be in several. It ends by release, by the end
of the connection, or at its time. Until then ON_HOLD is set in the block's state and victim searches skip it.

A hold yields to a forced `remove`, a drain, and a lowered quota. It also yields to a new block for which nothing else
is evictable, so that holds never fail a put.

Held blocks are at most 1/SHARE of each tier, and of a tenant's quota there. Beyond that a lookup gets no hold.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore.security.quotas.quota import UNLIMITED, Quotas
from kvstore.store.block_table.block import DROPPED, FASTEST, ON_HOLD, TIERS, Block

SHARE: Final = 10
"""1/SHARE of a tier, or of a tenant's quota, may be held."""
MAX_ENTRIES: Final = 1 << 17
"""Blocks in all holds together, counted once per hold: about 20 MB."""
MIN_STALE_ENTRIES: Final = 1024
"""The expiry heap is rebuilt when entries of ended holds are the majority, and at least this many."""

_COUNT_SHIFT: Final = 2
_ONE: Final = 1 << _COUNT_SHIFT
"""A held block's value: its tier in the low bits, its number of holds above."""
Name = tuple[str, int]
"""Tenant, and the number that its client chose."""


@dataclass(slots=True, eq=False)
class _Hold:
    name: Name
    owner: object
    until_ns: int
    blocks: set[Block] = field(default_factory=set)


class Holds:
    """Holds of a node, bounded by tier and tenant. Not thread-safe: called from the node's loop."""

    def __init__(self, capacities: Mapping[int, int], *, max_ns: int) -> None:
        """`capacities` are the tiers' bytes, by index. No hold lasts longer than `max_ns`."""
        self._most_bytes = {tier: capacity_bytes // SHARE for tier, capacity_bytes in capacities.items()}
        self._max_ns = max_ns
        self._quotas = UNLIMITED
        self._holds: dict[Name, _Hold] = {}
        """Oldest first."""
        self._by_owner: dict[object, set[_Hold]] = {}
        self._held: dict[Block, int] = {}
        """By held block; see _ONE."""
        self._entries = 0
        self._bytes = [0] * len(TIERS)
        self._of_tenant: dict[str, list[int]] = {}
        """By tenant with held blocks: bytes by tier, then the number of blocks."""
        self._expiry: list[tuple[int, Name]] = []
        self.refused = 0
        """Blocks whose hold was refused, since the start."""
        self.yielded = 0
        """Blocks whose hold ended early, for a new block or a quota."""

    # --- begin and end ---

    def add(self, owner: object, tenant: str, number: int, blocks: Sequence[Block], *, until_ns: int, now_ns: int) -> list[bool]:
        """Hold these blocks until `until_ns`; return for each whether it is held. A known number gets these blocks in
        addition, the later end, and this owner."""
        until_ns = min(until_ns, now_ns + self._max_ns)
        if until_ns <= now_ns:
            self.refused += len(blocks)
            return [False] * len(blocks)
        name = (tenant, number)
        hold = self._holds.get(name) or _Hold(name, owner, until_ns)
        flags = self._take(hold, blocks)
        if not hold.blocks:
            return flags
        hold.until_ns = max(hold.until_ns, until_ns)
        if name not in self._holds:
            self._holds[name] = hold
            heapq.heappush(self._expiry, (until_ns, name))
        elif hold.owner is not owner:
            self._detach_owner(hold)
            hold.owner = owner
        self._by_owner.setdefault(owner, set()).add(hold)
        return flags

    def release(self, tenant: str, number: int) -> None:
        """End the tenant's hold of that number. Unknown numbers are ignored: a release races with expiry."""
        hold = self._holds.get((tenant, number))
        if hold is not None:
            self._end(hold)

    def forget_owner(self, owner: object) -> None:
        """End the holds of a closed connection."""
        for hold in list(self._by_owner.get(owner, ())):
            self._end(hold)

    def expire(self, *, now_ns: int) -> int:
        """End expired holds; return their number."""
        count = 0
        while self._expiry and self._expiry[0][0] <= now_ns:
            _, name = heapq.heappop(self._expiry)
            hold = self._holds.get(name)
            if hold is not None and hold.until_ns > now_ns:  # it was extended
                heapq.heappush(self._expiry, (hold.until_ns, name))
            elif hold is not None:
                self._end(hold)
                count += 1
        return count

    # --- yielding ---

    def yield_oldest(self, tier: int, tenant: str | None = None) -> bool:
        """End the older half of the holds, of `tenant` or of all, for a new block in the tier. Return False if none
        holds anything there. Halving frees whole slabs in a few searches."""
        if not (self._bytes[tier] if tenant is None else self._of_tenant.get(tenant, [0] * len(TIERS))[tier]):
            return False
        mine = [hold for hold in self._holds.values() if tenant is None or hold.name[0] == tenant]
        for hold in mine[: -(-len(mine) // 2)]:
            self.yielded += len(hold.blocks)
            self._end(hold)
        return True

    def set_quotas(self, quotas: Quotas) -> None:
        """Apply quotas. Holds of tenants above their share end, oldest first."""
        self._quotas = quotas
        for hold in list(self._holds.values()):
            tenant = hold.name[0]
            if min(self._left(tenant)) < 0:
                self.yielded += len(hold.blocks)
                self._end(hold)

    # --- totals ---

    def __len__(self) -> int:
        return len(self._holds)

    @property
    def blocks(self) -> int:
        """Number of held blocks."""
        return len(self._held)

    def held_bytes(self, tier: int) -> int:
        """Bytes of values held in that tier."""
        return self._bytes[tier]

    # --- internals ---

    def _take(self, hold: _Hold, blocks: Sequence[Block]) -> list[bool]:
        """Add blocks within the limits; return for each whether it is in the hold. This loop is a lookup's cost for the
        node: 1,024 blocks per call."""
        held, mine, flags = self._held, hold.blocks, list[bool]()
        left, entries_left = self._left(hold.name[0]), MAX_ENTRIES - self._entries
        began = list(left)
        for block in blocks:
            if block in mine:
                flags.append(True)
                continue
            columns = block.columns
            known = held.get(block)
            if entries_left <= 0 or columns.states[block] & DROPPED:
                flags.append(False)
                continue
            if known is None:
                tier, size_bytes = FASTEST[columns.held[block]], columns.sizes[block]
                if tier is None or size_bytes > left[tier] or left[-1] <= 0:
                    flags.append(False)
                    continue
                left[tier] -= size_bytes
                left[-1] -= 1
                columns.states[block] |= ON_HOLD[tier]
                known = tier
            held[block] = known + _ONE
            mine.add(block)
            entries_left -= 1
            flags.append(True)
        self._entries = MAX_ENTRIES - entries_left
        self.refused += flags.count(False)
        self._count(hold.name[0], [before - after for before, after in zip(began, left, strict=True)])
        return flags

    def _left(self, tenant: str) -> list[int]:
        """Return the bytes that the tenant may still hold by tier, then the blocks; negative after a quota was lowered."""
        most, use = self._most_bytes, self._of_tenant.get(tenant, (0,) * (len(TIERS) + 1))
        left = [most.get(tier, 0) - self._bytes[tier] for tier in range(len(TIERS))]
        if self._quotas is UNLIMITED:
            return [*left, MAX_ENTRIES]
        quota = self._quotas.of(tenant)
        for tier in range(len(TIERS)):
            if (limit := quota.of_tier(tier)) is not None:
                left[tier] = min(left[tier], limit // SHARE - use[tier])
        return [*left, MAX_ENTRIES if quota.blocks is None else quota.blocks // SHARE - use[-1]]

    def _count(self, tenant: str, more: Sequence[int]) -> None:
        """Add to the held bytes by tier and to the number of blocks."""
        if not any(more):
            return
        use = self._of_tenant.setdefault(tenant, [0] * (len(TIERS) + 1))
        for at, count in enumerate(more):
            use[at] += count
        for tier in range(len(TIERS)):
            self._bytes[tier] += more[tier]
        if not use[-1]:
            del self._of_tenant[tenant]

    def _detach_owner(self, hold: _Hold) -> None:
        mine = self._by_owner[hold.owner]
        mine.discard(hold)
        if not mine:
            del self._by_owner[hold.owner]

    def _end(self, hold: _Hold) -> None:
        del self._holds[hold.name]
        self._detach_owner(hold)
        self._entries -= len(hold.blocks)
        held, less = self._held, [0] * (len(TIERS) + 1)
        for block in hold.blocks:
            known = held[block] - _ONE
            if known >= _ONE:
                held[block] = known
                continue
            del held[block]
            columns = block.columns
            columns.states[block] &= ~ON_HOLD[known]
            less[known] -= columns.sizes[block]
            less[-1] -= 1
        self._count(hold.name[0], less)
        if len(self._expiry) > 2 * len(self._holds) + MIN_STALE_ENTRIES:
            self._expiry = [(one.until_ns, one.name) for one in self._holds.values()]
            heapq.heapify(self._expiry)
