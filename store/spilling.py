"""What a node would spill: the coldest blocks of its lowest tier, named to the master ahead of their eviction while it is nearly full.

They go with the question which of them others keep (last_copies.py), and leave first once the answer says that another node has them. It
sends nothing and copies nothing: the master chooses who takes what, and that node fetches it.
"""

from collections.abc import Callable, Sequence
from typing import Final

from kvstore.store.blocks.block import Block
from kvstore.store.blocks.level import Level

AHEAD_BLOCKS: Final = 1024
"""So many of the coldest are to be at others at once: what leaves while copies are made, at thousands of puts a second."""
AHEAD_SHARE: Final = 0.25
"""Of a tier's blocks at most: the rest is too warm to be copied on suspicion."""
MIN_PAUSE_NS: Final = 100_000_000
"""Between two questions as long as answers say that there is something new at others."""
MAX_PAUSE_NS: Final = 10_000_000_000
"""The same at most: doubled with each answer that says nothing new. With a full cluster of 1,000 nodes the master is asked about 100,000
keys a second."""


class Spilling:
    """Of one tier. Not thread-safe: the node's loop is the only caller."""

    def __init__(self, lowest: Level, *, clock_ns: Callable[[], int]) -> None:
        self._lowest = lowest
        self._clock_ns = clock_ns
        self._at_share = 0.0
        self._pause_ns = MIN_PAUSE_NS
        self._next_ns = 0
        self._elsewhere = 0
        """Of the blocks asked about last, those that others keep."""

    def begin(self, at_share: float) -> None:
        """With less than this share of the tier free blocks are to be spilled; 0: never."""
        self._at_share, self._pause_ns, self._next_ns, self._elsewhere = at_share, MIN_PAUSE_NS, 0, 0

    @property
    def is_short(self) -> bool:
        """Whether the tier is nearly full, and the operator wants blocks spilled."""
        tier = self._lowest.tier
        free_bytes = tier.capacity_bytes - tier.used_bytes - tier.quarantined_bytes
        return free_bytes < self._at_share * tier.capacity_bytes

    @property
    def ahead(self) -> int:
        """How many of the coldest blocks are to be at others."""
        return min(AHEAD_BLOCKS, max(1, int(AHEAD_SHARE * len(self._lowest))))

    def due_group(self) -> int | None:
        """The group whose coldest blocks the master is to be asked about now, ahead of their eviction."""
        now_ns = self._clock_ns()
        if not self._at_share or now_ns < self._next_ns or not self.is_short:
            return None
        self._next_ns = now_ns + self._pause_ns
        return self._lowest.coldest_group()

    def offered(self, blocks: Sequence[Block]) -> bytes:
        """A flag for each of a group's coldest blocks, 1: it is to be spilled unless others keep it; none where the tier has room."""
        if not self.is_short:
            return b""
        ahead = self.ahead
        return bytes(at < ahead and not block.is_guest for at, block in enumerate(blocks))

    def answered(self, flags: bytes) -> None:
        """What the master said of blocks asked about ahead of their eviction."""
        elsewhere = sum(flags)
        self._pause_ns = MIN_PAUSE_NS if elsewhere != self._elsewhere else min(2 * self._pause_ns, MAX_PAUSE_NS)
        self._elsewhere = elsewhere
