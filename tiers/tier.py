"""Interface of a storage tier: an allocator of slots, and copies into and out of them.

A tier knows neither keys nor accesses. The node's block table decides which block goes to which tier and which one is
evicted. Space is counted in slot bytes, per tenant, so that `used_bytes + quarantined_bytes + free_bytes ==
capacity_bytes` always holds.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes. A tier never keeps a reference to one after the call returns."""


class TierFull(Exception):
    """No slot of this size is free. Internal to the node: the block table catches it and evicts."""


class Slot(NamedTuple):
    """Handle of an allocated slot of `size_bytes` bytes.

    `index` identifies the slot; `generation` identifies one allocation of it. Freeing a slot makes its handle stale:
    later calls with it raise StaleHandle instead of reaching the next value. Freeing one slot of a `group` lets another
    value of the same group be allocated at once. A NamedTuple, because one is made for every block and tier.
    """

    index: int  # type: ignore[assignment]  # the place, not tuple.index
    generation: int
    size_bytes: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One value to write with `Tier.write_batch`, and the metadata that a durable tier keeps with it.

    `checksum` is the xxh3_64 of `data`. `tag` is opaque to the tier, at most 4,096 bytes; `recover` returns it.
    """

    slot: Slot
    data: Buffer
    checksum: int = 0
    tag: bytes = b""


@dataclass(frozen=True, slots=True)
class Recovered:
    """A value that a durable tier found on disk: its slot, checksum and tag. Its bytes have not been read."""

    slot: Slot
    checksum: int
    tag: bytes


class Tier(ABC):
    """Base class of the HBM, DRAM and NVMe tiers.

    Threads: `allocate`, `free`, `quarantine` and `release` are called on the node's event loop only. `write_batch`,
    `flush` and `read_batch_into` may run concurrently in any number of threads, on slots that the loop neither frees
    nor reuses and that no other thread writes.
    """

    name: ClassVar[str]
    durable: ClassVar[bool] = False
    """Values survive the process; `recover` returns them."""

    @property
    @abstractmethod
    def capacity_bytes(self) -> int: ...

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes of allocated slots, slot rounding included."""

    @property
    @abstractmethod
    def quarantined_bytes(self) -> int:
        """Bytes of slots that were freed while a reader may still have them mapped."""

    @property
    @abstractmethod
    def tenant_bytes(self) -> Mapping[str, int]:
        """Slot bytes by tenant, quarantined ones included; tenants without slots are absent. A live view."""

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes - self.quarantined_bytes

    @property
    def health(self) -> str:
        """`ok`, or one line that describes the failure. A tier that is not `ok` accepts no new values."""
        return "ok"

    @property
    def written_bytes(self) -> int:
        """Bytes written to a durable tier's device since it was opened: values, padding and metadata."""
        return 0

    @abstractmethod
    def allocate(self, size_bytes: int, *, tenant: str = "") -> Slot:
        """Return a free slot for `size_bytes` (1 byte to 1 GiB). Its content is undefined until written.

        Raises:
            TierFull: no slot is free; nothing changed.
            TierFailed: the tier is out of order.
            InvalidArgument: the size is out of range, or larger than the tier.
        """

    def allocate_unused(self, size_bytes: int, *, tenant: str, count: int) -> list[Slot]:
        """Return up to `count` slots that are free without eviction, possibly none. Raises InvalidArgument."""
        return []

    def group(self, size_bytes: int, *, tenant: str = "") -> int:
        """Return the group of slots of this size and tenant; see Slot."""
        return 0

    def slot_bytes(self, size_bytes: int, *, tenant: str = "") -> int:
        """Return the capacity that a slot of this size and tenant takes. Raises InvalidArgument."""
        return size_bytes

    @abstractmethod
    def write_batch(self, records: Sequence[Record]) -> None:
        """Copy each record's data (exactly `slot.size_bytes` bytes) into its slot. A durable tier has it on the device
        on return.

        Atomic in a durable tier. Raises StaleHandle, TierFull (the device is full, nothing was written), TierFailed.
        """

    @abstractmethod
    def read_batch_into(self, slots: Sequence[Slot], destinations: Sequence[memoryview]) -> list[Exception | None]:
        """Copy each slot into its destination (writable, `size_bytes` long) and return one result per slot.

        A result is None (copied, and verified in a durable tier) or an error: StaleHandle, ChecksumMismatch, Corrupt
        (decoding failed), TierFailed. After an error that destination's content is undefined; other slots are
        unaffected. NVMe decodes encoded values into larger destinations.
        """

    def flush(self) -> None:
        """Make every earlier `free` durable, if the tier is. Raises TierFull or TierFailed when it cannot."""

    @abstractmethod
    def free(self, slot: Slot) -> None:
        """Free the slot for immediate reuse. Raises StaleHandle if it is not allocated."""

    def quarantine(self, slot: Slot) -> None:
        """Free the slot, but do not reuse it before `release`: a reader may still have it mapped."""
        self.free(slot)

    def release(self, slot: Slot) -> None:
        """Make a quarantined slot reusable: its last reader is done."""

    def recover(self) -> Iterator[Recovered]:
        """Yield the values that a durable tier held when it was opened. Call once, before any `allocate`."""
        return iter(())

    def adopt(self, slot: Slot, *, tenant: str) -> Slot:
        """Assign a recovered value to its tenant, which the tier does not store. Returns the slot to use from now on."""
        return slot

    def free_batch(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self.free(slot)

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert the tier's invariants. For tests; O(slots)."""

    @abstractmethod
    def close(self) -> None:
        """Release the device. Slots and views must not be used afterwards. A second close is a no-op."""
