"""What a tier is: slots of bytes with a capacity. It does not know keys, hits, or which block deserves to stay.

The node's block table says what goes where and what leaves; a tier allocates, copies and frees. Space is counted in slot
bytes, so that at any time `used_bytes + quarantined_bytes + free_bytes == capacity_bytes`, and told apart by tenant.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes. A tier never keeps a reference to one after the call returns."""


class TierFull(Exception):
    """No slot of this size is free now. Internal to the node: the block table answers by evicting, the caller never sees it."""


class Slot(NamedTuple):
    """A place for `size_bytes` bytes in one tier.

    `index` names the place, `generation` the use of it: freeing a slot raises the generation of its place, so an old Slot is
    refused (StaleHandle) instead of reaching another block's bytes. `group` is what the slot can be traded for: freeing one
    slot of a group makes room for another of the same group at once. A tuple because one is made for every block and tier.
    """

    index: int  # type: ignore[assignment]  # the place, not tuple.index
    generation: int
    size_bytes: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One value for `Tier.write_batch`, with what a durable tier must remember of it.

    `checksum` is the xxh3_64 of `data`; `tag` is opaque to the tier, at most 4,096 bytes, and comes back from `recover`.
    """

    slot: Slot
    data: Buffer
    checksum: int = 0
    tag: bytes = b""


@dataclass(frozen=True, slots=True)
class Recovered:
    """A value that outlived the process: its slot, checksum and tag. Its bytes have not been read."""

    slot: Slot
    checksum: int
    tag: bytes


class Tier(ABC):
    """A place where values live.

    Threads: `allocate`, `free`, `quarantine` and `release` belong to one thread (the node's loop). `write_batch`, `flush` and
    `read_batch_into` may run in any number of other threads meanwhile, on slots that the loop neither frees nor reuses and no other
    thread writes. A durable tier reads the values of a batch several at once.
    """

    name: ClassVar[str]
    durable: ClassVar[bool] = False
    """Values outlive the process and come back from `recover`."""

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
        """Bytes of slots given back that someone may still be reading."""

    @property
    @abstractmethod
    def tenant_bytes(self) -> Mapping[str, int]:
        """Of each tenant that has any: bytes of its slots, slot rounding included, and those in quarantine. It changes with the tier."""

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes - self.quarantined_bytes

    @property
    def health(self) -> str:
        """`ok`, or one line on what is wrong, for `status`. Anything but `ok` takes no new values."""
        return "ok"

    @property
    def written_bytes(self) -> int:
        """Bytes handed to a durable tier's device since it was opened: values, padding and metadata."""
        return 0

    @abstractmethod
    def allocate(self, size_bytes: int, *, tenant: str = "") -> Slot:
        """A slot for `size_bytes` (1 byte to 1 GiB), its bytes undefined until written.

        Raises:
            TierFull: no room now; nothing changed.
            TierFailed: the tier takes no values any more.
            InvalidArgument: the size is out of range, or larger than the tier can ever hold.
        """

    def allocate_unused(self, size_bytes: int, *, tenant: str, count: int) -> list[Slot]:
        """Up to `count` slots that are free as it is, as `allocate` would give them; none need be found. Raises InvalidArgument."""
        return []

    def group(self, size_bytes: int, *, tenant: str = "") -> int:
        """The group a slot of this size and tenant is (or would be) in: see Slot.group."""
        return 0

    def slot_bytes(self, size_bytes: int, *, tenant: str = "") -> int:
        """What a slot of this size and tenant takes of the capacity. Raises InvalidArgument."""
        return size_bytes

    @abstractmethod
    def write_batch(self, records: Sequence[Record]) -> None:
        """Copy each record's data (exactly `slot.size_bytes` bytes) into its slot; durable when this returns, if the tier is.

        All or nothing for a durable tier. Raises StaleHandle, TierFull (the device is full: nothing was written), TierFailed.
        """

    @abstractmethod
    def read_batch_into(self, slots: Sequence[Slot], destinations: Sequence[memoryview]) -> list[Exception | None]:
        """Copy each slot's bytes into its destination (writable, exactly `size_bytes` long); one answer a slot. A tier that can hold
        encoded values (NVMe) decodes into a destination that is larger.

        None: the bytes are there (and verified, where the tier is durable). Else why not: StaleHandle, ChecksumMismatch, Corrupt (it does
        not decode), TierFailed; that destination's content is undefined. One bad slot does not fail its neighbours.
        """

    def flush(self) -> None:
        """Make every `free` before this call durable, if the tier is. Raises TierFull, TierFailed: not even that could be done."""

    @abstractmethod
    def free(self, slot: Slot) -> None:
        """Give the slot back for reuse at once. Raises StaleHandle if it was given back before."""

    def quarantine(self, slot: Slot) -> None:
        """Give the slot back, but do not reuse it before `release`: someone may still be reading it through a mapping."""
        self.free(slot)

    def release(self, slot: Slot) -> None:
        """The last reader of a quarantined slot is gone: it may be reused. Only after `quarantine` of the same slot."""

    def recover(self) -> Iterator[Recovered]:
        """What a durable tier held when it was opened. Call once, before any allocate."""
        return iter(())

    def adopt(self, slot: Slot, *, tenant: str) -> Slot:
        """The slot of a value that `recover` found is this tenant's, which the tier cannot know: as it is to be called from now on."""
        return slot

    def free_batch(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self.free(slot)

    @abstractmethod
    def check_integrity(self) -> None:
        """Assert the tier's invariants: bytes add up, no slot is both free and used. For tests; O(slots)."""

    @abstractmethod
    def close(self) -> None:
        """Release the device. Slots and views of it must not be used after; a second close is a no-op."""
