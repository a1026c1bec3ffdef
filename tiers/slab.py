"""Slabs, their groups, and the rules for slab and slot sizes.

The first EXACT_CLASSES value sizes of a tenant get slots of exactly that size: N x B bytes then hold N blocks of B
bytes. Later sizes are rounded up to eight steps per power of two, which wastes at most 12.5 % and bounds the number of
size classes. Source: the size classes of jemalloc, jemalloc(3).
"""

from array import array
from dataclasses import dataclass, field

from kvstore.protocol.errors import ConfigError

STEPS_BITS = 3
"""Rounded sizes have 2**3 = 8 steps per power of two."""

PAGE_BYTES = 4096

SLAB_BYTES = 64 << 20

SLABS_A_TIER = 64
"""Small tiers get slabs below SLAB_BYTES, so that they have this many. Memory moves between tenants and size classes by
the slab: with few slabs, values of many sizes would evict one another from a tier with free space.
"""

MAX_SLABS_A_TIER = 256
"""Large tiers get slabs above SLAB_BYTES, so that they have no more than this: in DRAM a slab costs one or two
descriptors.
"""

FIRST_SLABS_A_TIER = 4096
"""The first slab of each group is this fraction of the tier. So many groups of a few values each fit before one evicts
another. Bounded, because in DRAM a slab costs one or two descriptors (memfd.MAX_MEMFDS).
"""


@dataclass(slots=True, eq=False)
class SlabGroup:
    """The slabs of one tenant and slot size. `open` slabs have free and used slots, `vacant` slabs only free ones.

    Blocks are allocated in open slabs first, so that vacant slabs stay available to other groups.
    """

    number: int
    tenant: str
    slot_bytes: int
    open: dict[int, "Slab"] = field(default_factory=dict)
    vacant: dict[int, "Slab"] = field(default_factory=dict)
    used: int = 0
    size_bytes: int = 0
    """Sum over all slabs of the group."""


@dataclass(slots=True, eq=False)
class Slab:
    """A slab of `count` slots of `group.slot_bytes`. Positions from `touched` on were never used; `returned` ones are
    free again.

    `generations` and `sizes` describe the slot at each position below `touched`; generation 0 means free. They take 12
    bytes per slot, a Slot object 120, so callers keep the handles.
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
    """No slot is allocated from it: the slab is being emptied. Never set on a vacant slab."""

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
    """Return the smallest rounded size (eight per power of two) that is at least `size_bytes`."""
    step = 1 << max(0, (size_bytes - 1).bit_length() - 1 - STEPS_BITS)
    return -(-size_bytes // step) * step


def chosen_first_bytes(slab_bytes: int | None, capacity_bytes: int) -> int:
    """Return the size of a group's first slab: `slab_bytes` if given, else whole pages in proportion to the capacity."""
    return slab_bytes if slab_bytes is not None else max(1, capacity_bytes // FIRST_SLABS_A_TIER // PAGE_BYTES) * PAGE_BYTES


def chosen_slab_bytes(slab_bytes: int | None, capacity_bytes: int) -> int:
    """Return `slab_bytes` if given, else whole pages in proportion to the capacity. Raises ConfigError if either is
    below 1.
    """
    if capacity_bytes < 1:
        raise ConfigError(f"a tier's capacity must be at least 1 byte, not {capacity_bytes}")
    if slab_bytes is None:
        small = max(1, capacity_bytes // SLABS_A_TIER // PAGE_BYTES) * PAGE_BYTES
        large = -(-capacity_bytes // MAX_SLABS_A_TIER // PAGE_BYTES) * PAGE_BYTES
        return max(min(small, SLAB_BYTES), large)
    if slab_bytes < 1:
        raise ConfigError(f"slab_bytes must be at least 1, not {slab_bytes}")
    return slab_bytes
