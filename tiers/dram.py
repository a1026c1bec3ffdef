"""The DRAM tier: blocks in shared memory that clients on the same host map and copy from, or read in place.

It puts SlabTier (which slot) over a MemfdPool (whose memory) and copies. It does not talk to clients: the node passes
descriptors (`slab_fd`) and places (`locate`) to them.
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
    """See the module and Tier. `prefault_step` may run in any one thread beside the rest."""

    name = "dram"

    def __init__(
        self,
        capacity_bytes: int,
        *,
        slab_bytes: int | None = None,
        hugepages: bool = False,
        transparent_hugepages: bool = True,
    ) -> None:
        """`hugepages` are used when the system has enough of them reserved: see the property. `transparent_hugepages` asks for those that
        the kernel gives by itself.

        Raises ConfigError: no capacity, more than the machine's memory, or the system refuses so much shared memory.
        """
        physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if capacity_bytes > physical_bytes:
            raise ConfigError(
                f"a DRAM tier of {format_size(capacity_bytes)} does not fit into this machine's {format_size(physical_bytes)}"
            )
        first_bytes = chosen_first_bytes(slab_bytes, capacity_bytes)
        is_chosen = slab_bytes is None
        slab_bytes = chosen_slab_bytes(slab_bytes, capacity_bytes)
        if is_chosen and hugepages:  # what is no whole page takes one all the same
            slab_bytes = max(1, slab_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self._pool = MemfdPool(
            capacity_bytes,
            slab_bytes=slab_bytes,
            first_sizes=growth_sizes(first_bytes, slab_bytes),
            hugepages=hugepages,
            transparent_hugepages=transparent_hugepages,
        )
        if self._pool.hugepages:
            first_bytes = min(max(first_bytes, HUGE_PAGE_BYTES), slab_bytes)  # less would take a whole page, too
        super().__init__(capacity_bytes, slab_bytes=slab_bytes, first_bytes=first_bytes, backing=self._pool)

    @property
    def hugepages(self) -> bool:
        """Whether the memory made at the start is in huge pages that were reserved."""
        return self._pool.hugepages

    @property
    def prefaulted_bytes(self) -> int:
        """How far `prefault_step` has come; `capacity_bytes` in the end."""
        return self._pool.prefaulted_bytes

    @property
    def has_cold(self) -> threading.Event:
        """Set whenever there is more for `prefault_step`; the thread that calls it may wait for it, and clears it before."""
        return self._pool.has_cold

    def prefault_step(self, max_bytes: int) -> bool:
        """Fault in up to `max_bytes` more, of slabs first; whether something is left. Releases the GIL."""
        return self._pool.prefault_step(max_bytes)

    def is_warm(self, slab_id: int) -> bool:
        """Whether all pages of the slab have been faulted in."""
        return not self._pool.memory(slab_id).untouched_bytes

    def view(self, slot: Slot) -> memoryview:
        """The slot's own memory, writable. For the node only, and only until the slot is given back. Raises StaleHandle."""
        return self._bytes(slot).data

    def fill(self, slot: Slot, value: memoryview) -> tuple[int, int]:
        """Write a small value of the slot's size; where that is, as of `locate`. Raises StaleHandle."""
        slab_id, offset_bytes = location = self.locate(slot)
        self._pool.memory(slab_id).bytes.data[offset_bytes : offset_bytes + slot.size_bytes] = value
        return location

    def locate(self, slot: Slot) -> tuple[int, int]:
        """(slab id, offset in bytes) of the slot. Slab ids are never used again. Raises StaleHandle."""
        slab = self.find(slot)
        return slab.number, position_of(slot) * slab.group.slot_bytes

    def locate_all(self, indexes: Column) -> tuple[Column, Column]:
        """As `locate` for many slots, by their indexes: slab ids, and offsets in bytes."""
        slabs, positions = indexes >> POSITION_BITS, indexes & POSITION_MASK
        numbers = sorted(set(slabs.tolist()))  # np.unique loads numpy.ma at its first call, for 7 ms of a node's first put
        if len(numbers) == 1:
            return slabs, positions * self.slab(numbers[0]).group.slot_bytes
        slot_bytes = np.array([self.slab(number).group.slot_bytes for number in numbers], np.int64)
        return slabs, positions * slot_bytes[np.searchsorted(numbers, slabs)]

    def slab_fd(self, slab_id: int, *, writable: bool, tenant: str) -> int:
        """A new descriptor of the slab's memory for a process of `tenant`; the caller closes it.

        Raises StaleHandle (no such slab any more), Unauthorized (the slab is another tenant's).
        """
        if self.slab(slab_id).group.tenant != tenant:
            raise Unauthorized(f"slab {slab_id} is not {tenant!r}'s")
        return self._pool.memory(slab_id).export(writable=writable)

    def slab_memory(self, slab_id: int, *, tenant: str) -> memoryview:
        """The slab's whole memory, to be read for `tenant` until the slab is gone. Raises as `slab_fd`."""
        if self.slab(slab_id).group.tenant != tenant:
            raise Unauthorized(f"slab {slab_id} is not {tenant!r}'s")
        return self._pool.memory(slab_id).bytes.data.toreadonly()

    @property
    def slabs_released(self) -> int:
        """Slabs given up since the tier was made: whoever maps some may ask `has_slab` when it rises."""
        return self._pool.slabs_released

    def has_slab(self, slab_id: int) -> bool:
        """Whether the slab is there: it goes when its memory is needed for another tenant or size."""
        try:
            self.slab(slab_id)
        except StaleHandle:
            return False
        return True

    def slab_bytes(self, slab_id: int) -> int:
        """The size of the slab's memory. Raises StaleHandle."""
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
