"""Slab allocator of the DRAM and HBM tiers: assigns slabs to groups and slots to values. Owns no memory.

- A slab belongs to one *group*: one tenant and one slot size. A SlabAllocator provides its memory (memfds, ranges of an
  arena).
- A slab takes exactly the bytes that its slots need, so a tier of N x B bytes holds N blocks of B bytes for any N and
  B.
- A group's first slab is small. Each further slab has up to GROWTH times the group's bytes, until slabs have full size.
  Many small tenants
  fit, and a large one has few slabs.
- A vacant slab stays with its group, mapped and warm, until another group needs the bytes.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import compress, islice, pairwise, repeat
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import InvalidArgument, StaleHandle
from kvstore.protocol.frames import MAX_VALUE_BYTES
from kvstore.protocol.settings import format_size
from kvstore.tiers.slab import Slab, SlabGroup, rounded_size
from kvstore.tiers.tier import Record, Slot, Tier, TierFull

IndexColumn = npt.NDArray[np.int64]
GenerationColumn = npt.NDArray[np.uint64]
"""Slot indices, and slot generations."""

POSITION_BITS = 20
"""A slot's index is `slab << POSITION_BITS | position`. Slab numbers are never reused, so the index of a released slab
is never reused.
"""

POSITION_MASK = (1 << POSITION_BITS) - 1

make_slot = partial(tuple.__new__, Slot)
"""Slot._make at a third of the cost, for a tuple that has all fields."""

GROWTH = 3
"""Largest ratio of a new slab to its group's bytes: at least a quarter of a group's memory was in demand before. Slabs
of 1/64, 3/64 and 12/64 precede the first full one (and 48/64 where full slabs are 64 times the first).
"""


EXACT_CLASSES = 16
"""Value sizes per tenant that get slots of exactly that size; later sizes are rounded up."""


class SlabAllocator(Protocol):
    """Source of slab memory."""

    def acquire(self, slab: int, slot_bytes: int, count: int, tenant: str) -> int:
        """Acquire memory for `count` slots of slab number `slab`, or for as many as fit; returns how many, 0 for none."""

    def release(self, slab: int) -> None:
        """Release the slab's memory, which may then serve another slab."""

    def has_warm(self, slot_bytes: int, count: int, tenant: str) -> bool:
        """Return True if prefaulted memory for such a slab is available."""


class SlabTier(Tier):
    """Base class of the tiers that allocate by slabs (dram, hbm). Subclasses provide the memory and the copies.

    Operations are O(1) except creating or reclaiming a slab. Not thread-safe; `find` may be called from another thread
    for slots that stay allocated. Invariant: used + quarantined + free == capacity; free counts free slots and
    unassigned bytes.
    """

    capacity_bytes: int = 0
    used_bytes: int = 0
    quarantined_bytes: int = 0
    tenant_bytes: dict[str, int] = {}

    def __init__(self, capacity_bytes: int, *, slab_bytes: int, backing: SlabAllocator, first_bytes: int | None = None) -> None:
        """`slab_bytes` is the size of full slabs, `first_bytes` (default: the same) that of a group's first slab. A
        larger slot gets a slab of its own. All are at least 1.
        """
        self.capacity_bytes = capacity_bytes
        self.tenant_bytes = {}
        self.tenant_slabs: dict[str, int] = {}
        """Number of slabs per tenant that are not vacant; no other tenant can use their memory."""
        self._slab_bytes = slab_bytes
        self._first_bytes = first_bytes if first_bytes is not None else slab_bytes
        self._backing = backing
        self._exact_sizes: dict[str, set[int]] = {}
        """By tenant, the value sizes that have slots of exactly that size."""
        self._groups: list[SlabGroup] = []
        self._group_of: dict[tuple[str, int], SlabGroup] = {}
        self._slabs: dict[int, Slab] = {}
        self._vacant: dict[int, Slab] = {}
        self._unassigned_bytes = capacity_bytes
        self._next_slab = 0
        self._generation = 0

    def allocate(self, size_bytes: int, tenant: str = "") -> Slot:
        group = self._group_of.get((tenant, size_bytes)) or self._classified_group(size_bytes, tenant)
        slab = next(iter(group.open.values()), None) or self._occupy_slab(group)
        generations, returned = slab.generations, slab.returned
        # One counter for all positions: no generation has to be kept for positions of released slabs.
        self._generation = generation = self._generation + 1
        if returned:
            position = returned.pop()
            generations[position], slab.sizes[position] = generation, size_bytes
        else:
            position = len(generations)
            generations.append(generation)
            slab.sizes.append(size_bytes)
        slab.used += 1
        if not returned and len(generations) == slab.count:
            del group.open[slab.number]
        group.used += 1
        self.used_bytes += group.slot_bytes
        self.tenant_bytes[tenant] = self.tenant_bytes.get(tenant, 0) + group.slot_bytes
        return make_slot((slab.number << POSITION_BITS | position, generation, size_bytes, group.number))

    def allocate_unused(self, size_bytes: int, tenant: str, count: int) -> list[Slot]:
        """Return up to `count` free slots of one open or vacant slab, by ascending position, all of one generation.
        Prefers slots that were used before. Raises InvalidArgument.
        """
        group = self._group_of.get((tenant, size_bytes)) or self._classified_group(size_bytes, tenant)
        slab = next(iter(group.open.values()), None) or next(iter(group.vacant.values()), None)
        if slab is None or count < 1:
            return []
        if slab.number in group.vacant:
            self._open(slab)
        self._generation += 1
        generations, returned, number, generation = slab.generations, slab.returned, group.number, self._generation
        base = slab.number << POSITION_BITS
        positions = sorted(returned[-count:]) or range(slab.touched, min(slab.count, slab.touched + count))
        columns = zip(map(base.__or__, positions), repeat(generation), repeat(size_bytes), repeat(number))
        found = list(map(make_slot, columns))
        if returned:
            np.frombuffer(generations, np.uint64)[positions] = generation
            np.frombuffer(slab.sizes, np.uint32)[positions] = size_bytes
            del returned[-count:]
        else:
            generations.extend(array("Q", (generation,)) * len(found))
            slab.sizes.extend(array("I", (size_bytes,)) * len(found))
        slab.used += len(found)
        if not returned and len(generations) == slab.count:
            del group.open[slab.number]
        group.used += len(found)
        self.used_bytes += len(found) * group.slot_bytes
        self.tenant_bytes[tenant] = self.tenant_bytes.get(tenant, 0) + len(found) * group.slot_bytes
        return found

    def free(self, slot: Slot) -> None:
        slab, position = self.find(slot), position_of(slot)
        self._clear_position(slab, position)
        self._return_positions(slab, (position,))

    def free_batch(self, slots: Iterable[Slot]) -> None:
        """As `free`, for each slot. Raises StaleHandle before any slot of the slab at fault is freed."""
        slots = list(slots)
        self.free_indices(np.array([slot.index for slot in slots], np.int64), np.array([slot.generation for slot in slots], np.uint64))

    def free_indices(self, indexes: IndexColumn, generations: GenerationColumn) -> None:
        """As `free_batch`, for slots given by their indices and generations."""
        numbers, positions = indexes >> POSITION_BITS, indexes & POSITION_MASK
        for begin, end in pairwise([0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)] if len(numbers) else ()):
            slab, freed = self.slab(int(numbers[begin])), positions[begin:end]
            # Keep no view of a column: an array with exported buffers cannot grow.
            known = np.frombuffer(slab.generations, np.uint64)[freed]
            if (known != generations[begin:end]).any() or len(set(freed.tolist())) < end - begin:
                raise StaleHandle(f"some of these {end - begin} slots of slab {slab.number} were freed before")
            np.frombuffer(slab.generations, np.uint64)[freed] = 0
            slab.used -= end - begin
            slab.group.used -= end - begin
            self.used_bytes -= (end - begin) * slab.group.slot_bytes
            self._return_positions(slab, freed.tolist())

    def quarantine(self, slot: Slot) -> None:
        slab, position = self.find(slot), position_of(slot)
        self._clear_position(slab, position)
        slab.quarantined[position] = slot.generation
        self.quarantined_bytes += slab.group.slot_bytes

    def release(self, slot: Slot) -> None:
        """Raises StaleHandle unless the slot is in quarantine."""
        slab, position = self._slabs.get(slab_number_of(slot)), position_of(slot)
        if slab is None or slab.quarantined.get(position) != slot.generation:
            raise StaleHandle(f"slot {slot.index} is not in quarantine")
        del slab.quarantined[position]
        self.quarantined_bytes -= slab.group.slot_bytes
        self._return_positions(slab, (position,))

    def find(self, slot: Slot) -> Slab:
        """Return the slab of an allocated slot. Raises StaleHandle if the slot was freed."""
        slab = self._slabs.get(slab_number_of(slot))
        if slab is not None:
            position = slot.index & POSITION_MASK
            if slab.generations[position] == slot.generation and slab.sizes[position] == slot.size_bytes:
                return slab
        raise StaleHandle(f"slot {slot.index} was freed after generation {slot.generation}")

    def group(self, size_bytes: int, tenant: str = "") -> int:
        """Return the number of the group for this size and tenant; constant over the allocator's life. Raises
        InvalidArgument.
        """
        return (self._group_of.get((tenant, size_bytes)) or self._classified_group(size_bytes, tenant)).number

    def slot_bytes(self, size_bytes: int, tenant: str = "") -> int:
        """Return the bytes that a slot for this size and tenant takes. Raises InvalidArgument."""
        return (self._group_of.get((tenant, size_bytes)) or self._classified_group(size_bytes, tenant)).slot_bytes

    def needs_slab(self, size_bytes: int, tenant: str) -> bool:
        """Return True if the next allocation of this size opens a slab in which the tenant has no slot yet.

        Raises InvalidArgument.
        """
        return not (self._group_of.get((tenant, size_bytes)) or self._classified_group(size_bytes, tenant)).open

    def slab_value_bytes(self, slot: Slot) -> int:
        """Return the sum of the value sizes in the slot's slab. O(slots)."""
        slab = self.find(slot)
        return sum(compress(slab.sizes, slab.generations))

    def slab_used(self, slot: Slot) -> int:
        """Return the number of allocated slots in the slot's slab."""
        return self.find(slot).used

    def slab(self, number: int) -> Slab:
        """Return the slab. Raises StaleHandle if it does not exist or was released."""
        slab = self._slabs.get(number)
        if slab is None:
            raise StaleHandle(f"slab {number} does not exist or was released")
        return slab

    def close_slab(self, number: int) -> None:
        """Stop allocating from a slab that is being emptied, until it is vacant or `open_slab` is called. Raises
        StaleHandle.
        """
        slab = self.slab(number)
        slab.is_closed = not slab.is_vacant
        if slab.is_closed:
            slab.group.open.pop(number, None)

    def open_slab(self, number: int) -> None:
        """Allocate from the slab again. No-op for a slab that was released or is not closed."""
        slab = self._slabs.get(number)
        if slab is not None and slab.is_closed:
            slab.is_closed = False
            if slab.returned or slab.touched < slab.count:
                slab.group.open[number] = slab

    def reserve_slabs(self, group: int, count: int) -> list[int]:
        """Create up to `count` vacant slabs for the group ahead of need and return their numbers in order of use.

        They take unassigned bytes, then vacant slabs of the tenant's other groups. A group that has not grown to full
        slabs gets none: it may never need another.
        """
        owner = self._groups[group]
        is_grown = owner.size_bytes >= self._slab_bytes or self._first_bytes >= self._slab_bytes
        while is_grown and len(owner.vacant) < count:
            has_bytes = self._has_warm(owner) or self._reclaim_own_vacant(owner) or self._unassigned_bytes >= self._wanted_bytes(owner)
            if not has_bytes or self._new_slab(owner) is None:
                break
        return list(islice(owner.vacant, count))

    def check_integrity(self) -> None:
        """Assert that bytes add up and that every position is in exactly one state. For tests; O(slots)."""
        slabs = self._slabs.values()
        assert self._unassigned_bytes + sum(slab.size_bytes for slab in slabs) == self.capacity_bytes
        assert self._unassigned_bytes >= 0
        assert self.used_bytes == sum(slab.used * slab.group.slot_bytes for slab in slabs)
        assert self.quarantined_bytes == sum(len(slab.quarantined) * slab.group.slot_bytes for slab in slabs)
        by_tenant: dict[str, int] = {}
        for slab in slabs:
            taken_bytes = (slab.used + len(slab.quarantined)) * slab.group.slot_bytes
            by_tenant[slab.group.tenant] = by_tenant.get(slab.group.tenant, 0) + taken_bytes
        assert self.tenant_bytes == {tenant: taken_bytes for tenant, taken_bytes in by_tenant.items() if taken_bytes}
        assert self.tenant_slabs == Counter(slab.group.tenant for slab in slabs if not slab.is_vacant)
        assert set(self._vacant) == {slab.number for slab in slabs if slab.is_vacant}
        for slab in slabs:
            used = [position for position, generation in enumerate(slab.generations) if generation]
            assert slab.used == len(used)
            assert len(slab.sizes) == slab.touched
            states = sorted([*used, *slab.quarantined, *slab.returned])
            assert states == list(range(slab.touched)), f"slab {slab.number}: a position is lost or in two states"
            assert slab.touched <= slab.count
            has_room = bool(slab.returned) or slab.touched < slab.count
            assert (slab.number in slab.group.open) == (has_room and not slab.is_vacant and not slab.is_closed), slab.number
            assert not (slab.is_closed and slab.is_vacant)
            assert (slab.number in slab.group.vacant) == slab.is_vacant, slab.number
        for group in self._groups:
            assert group.used == sum(slab.used for slab in slabs if slab.group is group)
            assert group.size_bytes == sum(slab.size_bytes for slab in slabs if slab.group is group)
            assert all(self._slabs.get(number) is slab for number, slab in (group.open | group.vacant).items())

    def _clear_position(self, slab: Slab, position: int) -> None:
        slab.generations[position] = 0
        slab.used -= 1
        slab.group.used -= 1
        self.used_bytes -= slab.group.slot_bytes

    def _return_positions(self, slab: Slab, positions: Sequence[int]) -> None:
        slab.returned += positions
        group = slab.group
        left_bytes = self.tenant_bytes[group.tenant] - len(positions) * group.slot_bytes
        if left_bytes:
            self.tenant_bytes[group.tenant] = left_bytes
        else:
            del self.tenant_bytes[group.tenant]
        if slab.is_vacant:
            slab.is_closed = False
            group.open.pop(slab.number, None)
            group.vacant[slab.number] = self._vacant[slab.number] = slab
            self._count_occupied_slab(group.tenant, -1)
        elif not slab.is_closed:
            group.open[slab.number] = slab

    def _classified_group(self, size_bytes: int, tenant: str) -> SlabGroup:
        slot_bytes = self._slot_bytes_of(size_bytes, tenant)
        group = self._group_of.get((tenant, slot_bytes))
        if group is None:
            group = SlabGroup(len(self._groups), tenant, slot_bytes)
            self._groups.append(group)
            self._group_of[tenant, slot_bytes] = group
        return group

    def _slot_bytes_of(self, size_bytes: int, tenant: str) -> int:
        """Return the slot size for a value size; constant once chosen. Raises InvalidArgument if no such value can ever
        fit.
        """
        if not 1 <= size_bytes <= MAX_VALUE_BYTES:
            raise InvalidArgument(f"a value has 1 byte to {format_size(MAX_VALUE_BYTES)}, not {size_bytes:,} bytes")
        if size_bytes > self.capacity_bytes:
            raise InvalidArgument(f"{format_size(size_bytes)} cannot fit into a tier of {format_size(self.capacity_bytes)}")
        exact_sizes = self._exact_sizes.setdefault(tenant, set())
        if size_bytes not in exact_sizes and len(exact_sizes) >= EXACT_CLASSES:
            return min(rounded_size(size_bytes), self.capacity_bytes)
        exact_sizes.add(size_bytes)
        return size_bytes

    def _check_sizes(self, records: Sequence[Record]) -> None:
        """Raises InvalidArgument if a record's data does not have its slot's size."""
        for record in records:
            if (size_bytes := memoryview(record.data).nbytes) != record.slot.size_bytes:
                raise InvalidArgument(f"{size_bytes} bytes of data for a slot of {record.slot.size_bytes}")

    def _wanted_bytes(self, group: SlabGroup) -> int:
        aim_bytes = min(self._slab_bytes, max(self._first_bytes, GROWTH * group.size_bytes))
        count = min(max(1, aim_bytes // group.slot_bytes), 1 << POSITION_BITS)
        return count * group.slot_bytes

    def _occupy_slab(self, group: SlabGroup) -> Slab:
        """Open a vacant slab of the group, or a new one. Raises TierFull."""
        slab = next(iter(group.vacant.values()), None) or self._add_slab(group)
        if slab is None:
            raise TierFull
        self._open(slab)
        return slab

    def _open(self, slab: Slab) -> None:
        """Move a vacant slab to the open ones, before a slot is allocated in it."""
        group = slab.group
        del group.vacant[slab.number], self._vacant[slab.number]
        group.open[slab.number] = slab
        self._count_occupied_slab(group.tenant, 1)

    def _count_occupied_slab(self, tenant: str, change: int) -> None:
        """Count one slab with slots of the tenant more (1) or less (-1)."""
        left = self.tenant_slabs.get(tenant, 0) + change
        if left:
            self.tenant_slabs[tenant] = left
        else:
            del self.tenant_slabs[tenant]

    def _add_slab(self, group: SlabGroup) -> Slab | None:
        """Create a vacant slab from unassigned bytes, reclaiming the longest-vacant slabs if these are too few."""
        vacant_bytes = sum(slab.size_bytes for slab in self._vacant.values()) if self._vacant else 0
        if self._unassigned_bytes + vacant_bytes < group.slot_bytes:
            return None
        while self._vacant and self._unassigned_bytes < self._wanted_bytes(group):
            self._reclaim_vacant()
        while (slab := self._new_slab(group)) is None and self._vacant:
            self._reclaim_vacant()
        return slab

    def _new_slab(self, group: SlabGroup) -> Slab | None:
        count = min(self._wanted_bytes(group), self._unassigned_bytes) // group.slot_bytes
        count = self._backing.acquire(self._next_slab, group.slot_bytes, count, group.tenant)
        if not count:
            return None
        slab = Slab(self._next_slab, group, count)
        self._next_slab += 1
        self._unassigned_bytes -= slab.size_bytes
        group.size_bytes += slab.size_bytes
        self._slabs[slab.number] = self._vacant[slab.number] = group.vacant[slab.number] = slab
        return slab

    def _has_warm(self, group: SlabGroup) -> bool:
        """Return True if unassigned bytes suffice for another slab of the group and are prefaulted."""
        wanted_bytes = self._wanted_bytes(group)
        count = wanted_bytes // group.slot_bytes
        return self._unassigned_bytes >= wanted_bytes and self._backing.has_warm(group.slot_bytes, count, group.tenant)

    def _reclaim_own_vacant(self, group: SlabGroup) -> bool:
        """Reclaim vacant slabs of the group's tenant, longest vacant first, until another slab of the group fits.
        Returns False if they are too few.

        Skips slabs that were reserved ahead of need: two groups would reclaim each other's in turn.
        """
        old = [slab for slab in self._vacant.values() if slab.group is not group and slab.group.tenant == group.tenant and slab.touched]
        wanted_bytes = self._wanted_bytes(group)
        if not old or self._unassigned_bytes + sum(slab.size_bytes for slab in old) < wanted_bytes:
            return False
        self._reclaim_vacant(old.pop(0).number)
        while self._unassigned_bytes < wanted_bytes:
            self._reclaim_vacant(old.pop(0).number)
        return True

    def _reclaim_vacant(self, number: int | None = None) -> None:
        """Turn a vacant slab (default: the longest vacant) into unassigned bytes."""
        slab = self._vacant.pop(next(iter(self._vacant)) if number is None else number)
        del self._slabs[slab.number]
        del slab.group.vacant[slab.number]
        self._unassigned_bytes += slab.size_bytes
        slab.group.size_bytes -= slab.size_bytes
        self._backing.release(slab.number)


def growth_sizes(first_bytes: int, slab_bytes: int) -> list[int]:
    """Return the sizes of a group's slabs before its first full one, ascending, without rounding to slots."""
    sizes: list[int] = []
    while (size_bytes := max(first_bytes, GROWTH * sum(sizes))) < slab_bytes:
        sizes.append(size_bytes)
    return sizes


def slab_number_of(slot: Slot) -> int:
    """Return the number of the slot's slab."""
    return slot.index >> POSITION_BITS


def position_of(slot: Slot) -> int:
    """Return the slot's position in its slab; its bytes begin at position x slot_bytes."""
    return slot.index & POSITION_MASK
