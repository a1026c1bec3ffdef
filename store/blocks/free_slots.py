"""Slots in DRAM for new blocks, before there are any: those that are free as it is, and those of blocks that leave at once.

They are nobody's until a put has them (`BlockTable.open_at`), and given back where none comes. A part of the block table.
"""

from collections.abc import Iterable

from kvstore.protocol.errors import KVStoreError
from kvstore.store.blocks.crowding import Crowding
from kvstore.store.blocks.level import Level
from kvstore.store.blocks.room import Room
from kvstore.tiers.tier import Slot, TierFull


class FreeSlots:
    """See the module."""

    def __init__(self, landing: Level, crowding: Crowding, room: Room, *, is_lowest: bool) -> None:
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
        see `Room.make`."""
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
