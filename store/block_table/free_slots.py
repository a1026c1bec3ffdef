"""Slots in DRAM before a put has them: free ones, those of blocks that leave at once, and those opened ahead for a connection.

Slots of FreeSlots are given back where no put comes. A part of the block table.

A connection has one slot ahead at most. It belongs to no key and no block. It counts as used memory, of the tier and of the tenant's quota,
as the slot of an open put does. It goes back to the tier when
- its connection ends;
- it was idle for IDLE_NS;
- another put finds no room, or would have to wait for it (`take_back`).

A slot that its writer is writing is not taken back: the page, which both share, says so (protocol/writer_page.py).
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
"""All slots ahead together take at most 1/16 of DRAM."""


class FreeSlots:
    """See the module."""

    def __init__(self, landing: TierView, crowding: BlockLimit, room: Evictor, *, is_lowest: bool) -> None:
        """`landing` is DRAM; `is_lowest`: what leaves there leaves the node."""
        self._landing = landing
        self._crowding = crowding
        self._room = room
        self._is_lowest = is_lowest

    def spare_slots(self, tenant: str, size_bytes: int, count: int) -> list[Slot]:
        """Up to `count` slots in DRAM for new blocks of that size that nobody has to leave for, for `open_at` to use at once: what is not
        used has to be given back (`give_back`) before anything else is asked of the table."""
        count = self._landing.within_limit(tenant, size_bytes, self._crowding.at_most(tenant, count))
        tier, found = self._landing.tier, list[Slot]()
        try:
            while len(found) < count and not self._landing.slab_limits.lacks(size_bytes, tenant):
                found += tier.allocate_unused(size_bytes, tenant=tenant, count=count - len(found)) or [
                    tier.allocate(size_bytes, tenant=tenant)  # the first of another slab
                ]
        except TierFull:
            pass
        except KVStoreError:
            self.give_back(found)
            raise
        return found

    def guest_slot(self, tenant: str, size_bytes: int) -> Slot | None:
        """A slot in DRAM for a block that nobody has to leave the node for, for `open_at`; None: there is none. With a lower tier there is
        none above DRAM's high watermark, for something would be copied down for it, and something else leave there."""
        level = self._landing
        if not self._is_lowest and level.tier.used_bytes + size_bytes > level.high_bytes:
            return None
        return next(iter(self.spare_slots(tenant, size_bytes, 1)), None)

    def free_slots(self, tenant: str, size_bytes: int, count: int, *, may_drop: bool = False) -> list[Slot]:
        """As `spare_slots`; and where those are too few, of blocks that leave for these as they would for one after the other. `may_drop`:
        see `Evictor.make`."""
        found = self.spare_slots(tenant, size_bytes, count)
        while len(found) < count and self._room.free_at_once(self._landing, size_bytes, tenant, count - len(found), may_drop=may_drop):
            more = self.spare_slots(tenant, size_bytes, count - len(found))
            if not more:
                break
            found += more
        return found

    def give_back(self, slots: Iterable[Slot]) -> None:
        """Slots of `spare_slots` or `free_slots` that no put has."""
        for slot in slots:
            self._landing.tier.free(slot)


class Page(Protocol):
    """Where a writer is offered its slot."""

    def offer(self, number: int, slab: int, offset: int, size_bytes: int, slabs_ahead: Sequence[int] = ()) -> None:
        """The writer may write this slot from now on, and is to map the slabs meanwhile."""

    def withdraw(self, number: int) -> bool:
        """Whether the writer does not write the slot, and does not begin to. False: it does, and the slot stays offered."""

    def clear(self) -> None:
        """No slot is offered. For a writer that writes none now."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotAhead:
    """One slot, opened at `since_ns` (monotonic) for the writer that shares `page`."""

    number: int
    tenant: str
    slot: Slot
    page: Page
    since_ns: int


class SlotsAhead:
    """See the module. The block table's; the node's loop is the only caller."""

    def __init__(self, slots: FreeSlots, *, capacity_bytes: int) -> None:
        """`capacity_bytes` is DRAM's."""
        self._slots = slots
        self._max_bytes = capacity_bytes // MAX_SHARE
        self._of_owner: dict[object, SlotAhead] = {}
        self._next_number = 1
        self.bytes = 0
        """Of the values that fit into those that are open."""
        self.taken_back = 0
        """Slots that were taken back from a writer that was connected."""

    def __len__(self) -> int:
        return len(self._of_owner)

    def of(self, owner: object, number: int) -> SlotAhead | None:
        """The owner's slot, if that is its number."""
        ahead = self._of_owner.get(owner)
        return ahead if ahead is not None and ahead.number == number else None

    def open(self, owner: object, tenant: str, size_bytes: int, page: Page, *, now_ns: int) -> SlotAhead | None:
        """Open a slot in place of the one that `owner` has, which it does not write now. Blocks leave for it as for a put.

        The caller offers it in the page. None: the size is none that is opened ahead, or there is no room.
        """
        self.close(owner)
        if not 0 < size_bytes <= MAX_SLOT_AHEAD_BYTES or self.bytes + size_bytes > self._max_bytes:
            return None
        found: list[Slot] = []
        with suppress(KVStoreError):  # the writer's next put is told what is wrong
            found = self._slots.free_slots(tenant, size_bytes, 1)
        if not found:
            return None
        ahead = self._of_owner[owner] = SlotAhead(self._next_number, tenant, found[0], page, now_ns)
        self._next_number += 1
        self.bytes += size_bytes
        return ahead

    def used(self, owner: object) -> None:
        """A block has the owner's slot from now on."""
        ahead = self._of_owner.pop(owner)
        ahead.page.clear()
        self.bytes -= ahead.slot.size_bytes

    def close(self, owner: object) -> None:
        """The owner is gone, or does not write its slot now: free it."""
        ahead = self._of_owner.get(owner)
        if ahead is not None:
            self._free(owner, ahead)

    def withdraw(self, owner: object) -> bool:
        """Take back the owner's slot unless it is being written: whether it has none any more."""
        ahead = self._of_owner.get(owner)
        if ahead is None:
            return True
        is_idle = ahead.page.withdraw(ahead.number)
        if is_idle:
            self._free(owner, ahead)
        return is_idle

    def expire(self, *, now_ns: int) -> None:
        """Take back the slots that were idle for too long."""
        self._take_back(lambda ahead: ahead.since_ns + IDLE_NS <= now_ns)

    def take_back(self) -> bool:
        """Take back every slot that is not being written: another put needs room. Whether there was one."""
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
        self._slots.give_back([ahead.slot])
