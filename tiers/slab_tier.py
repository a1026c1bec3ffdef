"""What the tiers made of slabs (dram, hbm) share: the Tier operations that the SlabAllocator answers alone. It copies nothing."""

from collections.abc import Iterable, Mapping

from kvstore.protocol.errors import ConfigError
from kvstore.tiers.slabs import Backing, Numbers, SlabAllocator, Words
from kvstore.tiers.tier import Slot, Tier

PAGE_BYTES = 4096

SLAB_BYTES = 64 << 20

SLABS_A_TIER = 64
"""Slabs are smaller than SLAB_BYTES where the tier would have fewer than this many: memory goes from one tenant and size to another by
the slab, so few slabs would mean that values of many sizes evict one another from a tier with room."""

MAX_SLABS_A_TIER = 256
"""Slabs are larger than SLAB_BYTES beyond this many: in DRAM each costs a descriptor or two."""

FIRST_SLABS_A_TIER = 4096
"""The first slab of each tenant and size is this part of the tier: so many of them fit, of a few values each, before one evicts another.
No more, for in DRAM each costs a descriptor or two (see memfd.MAX_MEMFDS)."""


class SlabTier(Tier):
    """A Tier over `slabs`. Subclasses bring the memory and the copies."""

    def __init__(self, capacity_bytes: int, *, slab_bytes: int, first_bytes: int, backing: Backing, exact_classes: int) -> None:
        self._slabs = SlabAllocator(
            capacity_bytes, slab_bytes=slab_bytes, first_bytes=first_bytes, backing=backing, exact_classes=exact_classes
        )

    @property
    def capacity_bytes(self) -> int:
        return self._slabs.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._slabs.used_bytes

    @property
    def quarantined_bytes(self) -> int:
        return self._slabs.quarantined_bytes

    @property
    def tenant_bytes(self) -> Mapping[str, int]:
        return self._slabs.tenant_bytes

    @property
    def tenant_slabs(self) -> Mapping[str, int]:
        """Slabs of each tenant that has any in which it has slots, those in quarantine included. It changes with the tier."""
        return self._slabs.tenant_slabs

    def needs_slab(self, size_bytes: int, *, tenant: str) -> bool:
        """Whether the next slot of this size and tenant is in a slab in which the tenant has none yet. Raises InvalidArgument."""
        return self._slabs.needs_slab(size_bytes, tenant)

    def allocate(self, size_bytes: int, *, tenant: str = "") -> Slot:
        return self._slabs.allocate(size_bytes, tenant)

    def allocate_unused(self, size_bytes: int, *, tenant: str, count: int) -> list[Slot]:
        return self._slabs.allocate_unused(size_bytes, tenant, count)

    def group(self, size_bytes: int, *, tenant: str = "") -> int:
        return self._slabs.group(size_bytes, tenant)

    def slot_bytes(self, size_bytes: int, *, tenant: str = "") -> int:
        return self._slabs.slot_bytes(size_bytes, tenant)

    def reclaimable(self, group: int) -> int:
        """How many allocated slots the group has: freeing one makes room for another of the group at once."""
        return self._slabs.reclaimable(group)

    def slab_value_bytes(self, slot: Slot) -> int:
        """What the values in the slab of this slot come to, those in quarantine not among them. O(slots). Raises StaleHandle."""
        return self._slabs.slab_value_bytes(slot)

    def slab_used(self, slot: Slot) -> int:
        """How many allocated slots, this one among them, share its slab: with all of them free, another group may have its bytes. Raises
        StaleHandle."""
        return self._slabs.slab_used(slot)

    def close_slab(self, number: int) -> None:
        """Give out no slot of the slab, which is being emptied, before it is vacant or `open_slab` is called. Raises StaleHandle."""
        self._slabs.close_slab(number)

    def open_slab(self, number: int) -> None:
        """The slab is not being emptied any more. One that is gone, or not closed, is left alone."""
        self._slabs.open_slab(number)

    def reserve_slabs(self, group: int, count: int) -> list[int]:
        """Have the group own `count` vacant slabs, as far as there is room, so that clients can map them before they are needed: their ids,
        those to be used first in front."""
        return self._slabs.reserve_slabs(group, count)

    def free(self, slot: Slot) -> None:
        self._slabs.free(slot)

    def free_batch(self, slots: Iterable[Slot]) -> None:
        self._slabs.free_all(slots)

    def free_places(self, indexes: Numbers, generations: Words) -> None:
        """As `free_batch`, of slots by their indexes and generations."""
        self._slabs.free_places(indexes, generations)

    def quarantine(self, slot: Slot) -> None:
        self._slabs.quarantine(slot)

    def release(self, slot: Slot) -> None:
        self._slabs.release(slot)

    def check_integrity(self) -> None:
        self._slabs.check_integrity()


def chosen_first_bytes(slab_bytes: int | None, capacity_bytes: int) -> int:
    """The size of a group's first slab: that of every slab where `slab_bytes` says it, else whole pages by the capacity."""
    return slab_bytes if slab_bytes is not None else max(1, capacity_bytes // FIRST_SLABS_A_TIER // PAGE_BYTES) * PAGE_BYTES


def chosen_slab_bytes(slab_bytes: int | None, capacity_bytes: int) -> int:
    """`slab_bytes` where one is given, else whole pages by the capacity. Raises ConfigError when either is under 1."""
    if capacity_bytes < 1:
        raise ConfigError(f"a tier's capacity must be at least 1 byte, not {capacity_bytes}")
    if slab_bytes is None:
        small = max(1, capacity_bytes // SLABS_A_TIER // PAGE_BYTES) * PAGE_BYTES
        large = -(-capacity_bytes // MAX_SLABS_A_TIER // PAGE_BYTES) * PAGE_BYTES
        return max(min(small, SLAB_BYTES), large)
    if slab_bytes < 1:
        raise ConfigError(f"slab_bytes must be at least 1, not {slab_bytes}")
    return slab_bytes
