"""Slabs of a tier, the groups that they belong to, and the sizes of both and of their slots. They own no memory.

The first sizes of a tenant are taken as they are, not rounded to any alignment: block sizes of real models are multiples of 64 on
their own, a store sees few of them, and so N x B bytes hold N blocks of B bytes for every B. Later sizes round up to eight steps a
doubling, which wastes at most 12.5 % and bounds the number of classes. Source: the size classes of jemalloc, jemalloc(3).
"""

from array import array
from dataclasses import dataclass, field

from kvstore.protocol.errors import ConfigError

STEPS_BITS = 3
"""Rounded sizes have 2**3 = 8 steps a doubling."""

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


@dataclass(slots=True, eq=False)
class SlabGroup:
    """The slabs of one tenant and slot size: `open` ones have free slots and others, `vacant` ones free slots alone.

    Blocks go to open slabs first, so that vacant ones stay free for another group.
    """

    number: int
    tenant: str
    slot_bytes: int
    open: dict[int, "Slab"] = field(default_factory=dict)
    vacant: dict[int, "Slab"] = field(default_factory=dict)
    used: int = 0
    size_bytes: int = 0
    """Of all its slabs."""


@dataclass(slots=True, eq=False)
class Slab:
    """`count` slots of `group.slot_bytes`. Positions from `touched` on were never used; `returned` were, and are free again.

    `generations` and `sizes` say what the slot of each position below `touched` is, a generation of 0 that it is not allocated; `used` are:
    12 bytes a slot, where the slots themselves would be 120. Whoever has a slot keeps what it is called.
    """

    number: int
    group: SlabGroup
    count: int
    generations: "array[int]" = field(default_factory=lambda: array("Q"))
    sizes: "array[int]" = field(default_factory=lambda: array("I"))
    used: int = 0
    returned: list[int] = field(default_factory=list)
    quarantined: dict[int, int] = field(default_factory=dict)
    is_closed: bool = False
    """None of its slots is given out: it is being emptied. Never of a vacant one."""

    @property
    def touched(self) -> int:
        return len(self.generations)

    @property
    def size_bytes(self) -> int:
        return self.count * self.group.slot_bytes

    @property
    def is_vacant(self) -> bool:
        return not self.used and not self.quarantined


def rounded_size(size_bytes: int) -> int:
    """The smallest of the rounded sizes (eight a doubling) that is at least `size_bytes`."""
    step = 1 << max(0, (size_bytes - 1).bit_length() - 1 - STEPS_BITS)
    return -(-size_bytes // step) * step


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
