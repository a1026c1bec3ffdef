"""A slab of a tier, and the group that it belongs to: what the allocator (slabs.py) knows of them. They own no memory."""

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Group:
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
    group: Group
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
