"""Free DRAM slots for puts, and slots opened ahead for a connection's next put. Part of the block table.

A connection has at most one slot ahead. It belongs to no key and no block, and counts as used memory of the tier and of
the tenant's quota. It is freed when
- its connection ends;
- it was idle for IDLE_NS;
- another put finds no slot (`take_back`).

A slot that its writer is writing is not taken back; the shared page records that (protocol/writer_page.py).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.writer_page import MAX_SLOT_AHEAD_BYTES
from kvstore.store.block_table.evictor import Evictor
from kvstore.store.block_table.quotas import BlockLimit
from kvstore.store.block_table.tier_view import TierView
from kvstore.tiers.tier import Slot, TierFull

IDLE_NS: Final = 1_000_000_000

MAX_SHARE: Final = 16
"""All slots ahead take at most 1/16 of DRAM."""


class FreeSlots:
    """Allocates DRAM slots for many new blocks at once. Unused ones are returned by `free`."""

    def __init__(self, ingest_tier: TierView, block_limit: BlockLimit, evictor: Evictor) -> None:
        """`ingest_tier` is DRAM."""
        self._ingest_tier = ingest_tier
        self._block_limit = block_limit
        self._evictor = evictor

    def spare_slots(self, tenant: str, size_bytes: int, count: int) -> list[Slot]:
        """Return up to `count` free slots for `open_at`, without evictions. Unused ones must be freed before any other
        call to the table."""
        count = self._ingest_tier.within_limit(tenant, size_bytes, self._block_limit.at_most(tenant, count))
        tier, found = self._ingest_tier.tier, list[Slot]()
        try:
            while len(found) < count and not self._ingest_tier.slab_limits.lacks(size_bytes, tenant):
                found += tier.allocate_unused(size_bytes, tenant=tenant, count=count - len(found)) or [
                    tier.allocate(size_bytes, tenant=tenant)  # opens another slab
                ]
        except TierFull:
            pass
        except KVStoreError:
            self.free(found)
            raise
        return found

    def free_slots(self, tenant: str, size_bytes: int, count: int, *, may_drop: bool = False) -> list[Slot]:
        """As `spare_slots`, but evict blocks that can be dropped at once if too few are free. `may_drop`: see
        `Evictor.make`."""
        found = self.spare_slots(tenant, size_bytes, count)
        while len(found) < count and self._evictor.free_at_once(
            self._ingest_tier, size_bytes, tenant, count - len(found), may_drop=may_drop
        ):
            more = self.spare_slots(tenant, size_bytes, count - len(found))
            if not more:
                break
            found += more
        return found

    def free(self, slots: Iterable[Slot]) -> None:
        """Free unused slots of `spare_slots` or `free_slots`."""
        for slot in slots:
            self._ingest_tier.tier.free(slot)


class Page(Protocol):
    """Shared page in which a writer is offered its slot."""

    def offer(self, number: int, slab: int, offset: int, size_bytes: int, slabs_ahead: Sequence[int] = ()) -> None:
        """Offer a slot to the writer, and slabs to map in advance."""

    def withdraw(self, number: int) -> bool:
        """Withdraw the offer. Return False if the writer is writing the slot; it stays offered."""

    def clear(self) -> None:
        """Clear the offer. The writer must not be writing."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotAhead:
    """Slot opened at `since_ns` (monotonic) for the writer that shares `page`."""

    number: int
    tenant: str
    slot: Slot
    page: Page
    since_ns: int


class SlotsAhead:
    """Slots ahead by owner. Not thread-safe: called from the node's loop."""

    def __init__(self, slots: FreeSlots, *, capacity_bytes: int) -> None:
        """`capacity_bytes` is DRAM's."""
        self._slots = slots
        self._max_bytes = capacity_bytes // MAX_SHARE
        self._of_owner: dict[object, SlotAhead] = {}
        self._next_number = 1
        self.bytes = 0
        """Sum of the values' sizes that fit into open slots."""
        self.taken_back = 0
        """Slots taken back from connected writers."""

    def __len__(self) -> int:
        return len(self._of_owner)

    def of(self, owner: object, number: int) -> SlotAhead | None:
        """Return the owner's slot if it has that number."""
        ahead = self._of_owner.get(owner)
        return ahead if ahead is not None and ahead.number == number else None

    def open(self, owner: object, tenant: str, size_bytes: int, page: Page, *, now_ns: int) -> SlotAhead | None:
        """Replace the owner's idle slot by a new one, evicting as for a put. The caller offers it in the page. None:
        the size is not opened ahead, or no slot is free."""
        self.close(owner)
        if not 0 < size_bytes <= MAX_SLOT_AHEAD_BYTES or self.bytes + size_bytes > self._max_bytes:
            return None
        found: list[Slot] = []
        with suppress(KVStoreError):  # the writer's next put reports the error
            found = self._slots.free_slots(tenant, size_bytes, 1)
        if not found:
            return None
        ahead = self._of_owner[owner] = SlotAhead(self._next_number, tenant, found[0], page, now_ns)
        self._next_number += 1
        self.bytes += size_bytes
        return ahead

    def used(self, owner: object) -> None:
        """Hand the owner's slot over to a block."""
        ahead = self._of_owner.pop(owner)
        ahead.page.clear()
        self.bytes -= ahead.slot.size_bytes

    def close(self, owner: object) -> None:
        """Free the owner's slot, which is not being written."""
        ahead = self._of_owner.get(owner)
        if ahead is not None:
            self._free(owner, ahead)

    def withdraw(self, owner: object) -> bool:
        """Free the owner's slot unless it is being written. Return True if it has none any more."""
        ahead = self._of_owner.get(owner)
        if ahead is None:
            return True
        is_idle = ahead.page.withdraw(ahead.number)
        if is_idle:
            self._free(owner, ahead)
        return is_idle

    def expire(self, *, now_ns: int) -> None:
        """Take back slots that were idle for IDLE_NS."""
        self._take_back(lambda ahead: ahead.since_ns + IDLE_NS <= now_ns)

    def take_back(self) -> bool:
        """Take back all slots that are not being written. Return True if there was one."""
        return self._take_back(lambda ahead: True)

    def _take_back(self, is_wanted: Callable[[SlotAhead], bool]) -> bool:
        before = self.taken_back
        for owner, ahead in list(self._of_owner.items()):
            if is_wanted(ahead) and ahead.page.withdraw(ahead.number):
                self._free(owner, ahead)
                self.taken_back += 1
        return self.taken_back > before

    def _free(self, owner: object, ahead: SlotAhead) -> None:
        self.used(owner)
        self._slots.free([ahead.slot])
