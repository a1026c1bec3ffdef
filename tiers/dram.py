"""DRAM tier: blocks in shared memory, which clients of the same host map and read in place.

Combines SlabTier (slot allocation) with a MemfdPool (memory of the slabs). The node passes slab descriptors (`slab_fd`)
and slot locations (`locate`) to clients.
"""

import os
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.protocol.errors import ConfigError, StaleHandle, Unauthorized
from kvstore.protocol.settings import format_size
from kvstore.tiers.huge_pages import HUGE_PAGE_BYTES
from kvstore.tiers.memfd import Bytes, MemfdPool
from kvstore.tiers.slab import chosen_first_bytes, chosen_slab_bytes
from kvstore.tiers.slabs import POSITION_BITS, POSITION_MASK, SlabTier, growth_sizes, position_of
from kvstore.tiers.tier import Record, Slot

Column = npt.NDArray[np.int64]


class DramTier(SlabTier):
    """Tier whose slabs are memfds. `prefault_step` may run in one other thread; see Tier for the rest."""

    name = "dram"

    def __init__(
        self,
        capacity_bytes: int,
        *,
        slab_bytes: int | None = None,
        hugepages: bool = False,
        transparent_hugepages: bool = True,
    ) -> None:
        """Allocate all of the memory.

        Args:
          hugepages: use reserved huge pages if enough are free; the property tells.
          transparent_hugepages: request transparent huge pages (madvise).

        Raises ConfigError: the capacity is 0 or exceeds the machine's memory, or the system refuses so much shared
        memory.
        """
        physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if capacity_bytes > physical_bytes:
            raise ConfigError(
                f"a DRAM tier of {format_size(capacity_bytes)} does not fit into this machine's {format_size(physical_bytes)} of memory"
            )
        first_bytes = chosen_first_bytes(slab_bytes, capacity_bytes)
        is_chosen = slab_bytes is None
        slab_bytes = chosen_slab_bytes(slab_bytes, capacity_bytes)
        if is_chosen and hugepages:  # part of a page takes a whole one
            slab_bytes = max(1, slab_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._pool = MemfdPool(
            capacity_bytes,
            slab_bytes=slab_bytes,
            first_sizes=growth_sizes(first_bytes, slab_bytes),
            hugepages=hugepages,
            transparent_hugepages=transparent_hugepages,
        )
        if self._pool.hugepages:
            first_bytes = min(max(first_bytes, HUGE_PAGE_BYTES), slab_bytes)  # less would take a whole page anyway
        super().__init__(capacity_bytes, slab_bytes=slab_bytes, first_bytes=first_bytes, backing=self._pool)

    @property
    def hugepages(self) -> bool:
        """True if the memory is in reserved huge pages."""
        return self._pool.hugepages

    @property
    def prefaulted_bytes(self) -> int:
        """Bytes whose pages are present; `capacity_bytes` once prefaulting is complete."""
        return self._pool.prefaulted_bytes

    @property
    def has_cold(self) -> threading.Event:
        """Set while `prefault_step` has work. The prefault thread clears it before each step and waits for it."""
        return self._pool.has_cold

    def prefault_step(self, max_bytes: int) -> bool:
        """Fault in up to `max_bytes`, memory of slabs first. Returns whether more is left. Releases the GIL."""
        return self._pool.prefault_step(max_bytes)

    def is_warm(self, slab_id: int) -> bool:
        """Return True if all pages of the slab have been faulted in."""
        return not self._pool.memory(slab_id).untouched_bytes

    def view(self, slot: Slot) -> memoryview:
        """Return the slot's memory, writable. For the node only; valid until the slot is freed. Raises StaleHandle."""
        return self._bytes(slot).data

    def fill(self, slot: Slot, value: memoryview) -> tuple[int, int]:
        """Copy a small value of the slot's size into it and return its location, as `locate`. Raises StaleHandle."""
        slab_id, offset_bytes = location = self.locate(slot)
        self._pool.memory(slab_id).bytes.data[offset_bytes : offset_bytes + slot.size_bytes] = value
        return location

    def locate(self, slot: Slot) -> tuple[int, int]:
        """Return (slab id, offset in bytes) of the slot. Slab ids are never reused. Raises StaleHandle."""
        slab = self.find(slot)
        return slab.number, position_of(slot) * slab.group.slot_bytes

    def locate_all(self, indexes: Column) -> tuple[Column, Column]:
        """Return (slab ids, offsets in bytes) of many slots, given by their indices."""
        slabs, positions = indexes >> POSITION_BITS, indexes & POSITION_MASK
        numbers = sorted(set(slabs.tolist()))  # np.unique loads numpy.ma on first use: 7 ms of a node's first put
        if len(numbers) == 1:
            return slabs, positions * self.slab(numbers[0]).group.slot_bytes
        slot_bytes = np.array([self.slab(number).group.slot_bytes for number in numbers], np.int64)
        return slabs, positions * slot_bytes[np.searchsorted(numbers, slabs)]

    def slab_fd(self, slab_id: int, *, writable: bool, tenant: str) -> int:
        """Return a new descriptor of the slab's memory for a process of `tenant`. The caller closes it.

        Raises StaleHandle (no such slab) or Unauthorized (the slab belongs to another tenant).
        """
        if self.slab(slab_id).group.tenant != tenant:
            raise Unauthorized(f"slab {slab_id} does not belong to tenant {tenant!r}")
        return self._pool.memory(slab_id).export(writable=writable)

    def slab_memory(self, slab_id: int, *, tenant: str) -> memoryview:
        """Return the slab's memory read-only, for `tenant`; valid while the slab exists. Raises as `slab_fd`."""
        if self.slab(slab_id).group.tenant != tenant:
            raise Unauthorized(f"slab {slab_id} does not belong to tenant {tenant!r}")
        return self._pool.memory(slab_id).bytes.data.toreadonly()

    @property
    def slabs_released(self) -> int:
        """Slabs released since the tier was made. When it rises, holders of mappings check `has_slab`."""
        return self._pool.slabs_released

    def has_slab(self, slab_id: int) -> bool:
        """Return True if the slab exists. A slab is released when another tenant or size class needs its memory."""
        try:
            self.slab(slab_id)
        except StaleHandle:
            return False
        return True

    def slab_bytes(self, slab_id: int) -> int:
        """Return the size of the slab's memory. Raises StaleHandle."""
        return self.slab(slab_id).size_bytes

    def write_batch(self, records: Sequence[Record]) -> None:
        targets = [self._bytes(record.slot) for record in records]
        self._check_sizes(records)
        for target, record in zip(targets, records, strict=True):
            target[:] = np.frombuffer(record.data, np.uint8)

    def read_batch_into(self, slots: Sequence[Slot], destinations: Sequence[memoryview]) -> list[Exception | None]:
        return [self._read_into(slot, destination) for slot, destination in zip(slots, destinations, strict=True)]

    def check_integrity(self) -> None:
        super().check_integrity()
        self._pool.check_integrity()

    def close(self) -> None:
        self._pool.close()

    def _read_into(self, slot: Slot, destination: memoryview) -> StaleHandle | None:
        try:
            source = self._bytes(slot)
        except StaleHandle as stale:
            return stale
        np.frombuffer(destination, np.uint8)[:] = source
        return None

    def _bytes(self, slot: Slot) -> Bytes:
        slab_id, offset_bytes = self.locate(slot)
        return self._pool.memory(slab_id).bytes[offset_bytes : offset_bytes + slot.size_bytes]
