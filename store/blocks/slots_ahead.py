"""Slots in DRAM that are opened ahead for the next put of a connection: who has which, and when the node takes them back. Pure.

A connection has one slot ahead at most. It belongs to no key and no block. It counts as used memory, of the tier and of the tenant's quota,
as the slot of an open put does. It goes back to the tier when
- its connection ends;
- it was idle for IDLE_NS;
- another put finds no room, or would have to wait for it (`take_back`).

A slot that its writer is writing is not taken back: the page, which both share, says so (protocol/writer_page.py).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.writer_page import MAX_SLOT_AHEAD_BYTES
from kvstore.store.blocks.free_slots import FreeSlots
from kvstore.tiers.tier import Slot

IDLE_NS: Final = 1_000_000_000
MAX_SHARE: Final = 16
"""All slots ahead together take at most 1/16 of DRAM."""


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

    def check_integrity(self) -> None:
        """Assert that the bytes add up and that no two writers have one slot. For tests."""
        assert self.bytes == sum(ahead.slot.size_bytes for ahead in self._of_owner.values()) <= self._max_bytes
        assert len({ahead.slot.index for ahead in self._of_owner.values()}) == len(self._of_owner)
