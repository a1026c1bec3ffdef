"""What the block table says to whoever shows its blocks to the clients of this host, and asks."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from kvstore.store.blocks.block import Block
from kvstore.tiers.tier import Slot

Place = tuple[int, int]
"""Of a copy in DRAM: (slab id, offset in bytes)."""

IsLookedAt = Callable[[int], bool]
"""Asked about the slot of an index."""


class Showing(Protocol):
    """See store/shown/showing.py, which is one."""

    def show(self, block: Block, place: Place | None = None) -> None:
        """The block has a copy in DRAM from now on, whose bytes are all there. `place`: where it lies, from who knows."""

    def show_all(self, blocks: Sequence[Block]) -> None:
        """As `show`, of blocks of one tenant."""

    def hide(self, block: Block) -> None:
        """The block's copy in DRAM is about to go. One that is not shown is left alone."""

    def hide_all(self, blocks: Sequence[Block]) -> None:
        """As `hide`, of blocks of one tenant."""

    def is_looked_at(self, tenant: str, index: int) -> bool:
        """Whether a client looks at what is in the DRAM slot of that index. For what is hidden no is final."""

    def looked_at(self, tenant: str, slots: Collection[Slot]) -> set[Slot]:
        """Those of which `is_looked_at` says yes."""

    def who_looks(self, tenant: str) -> IsLookedAt | None:
        """`is_looked_at` of many slots of the tenant, as of now; None: nobody looks at anything. What the tenant's clients hold in shared
        memory is known to Holds then, as after the next."""

    def looks_at_any(self, tenant: str) -> bool:
        """Whether `is_looked_at` may say yes of any slot of the tenant."""

    def take_holds(self, tenant: str) -> None:
        """Have Holds know what the tenant's clients hold in shared memory."""

    def keep(self, tenant: str, slot: Slot) -> None:
        """Release a quarantined DRAM slot when nobody looks at it any more."""


class ShowsNothing:
    """A Showing without clients."""

    def show(self, block: Block, place: Place | None = None) -> None: ...

    def show_all(self, blocks: Sequence[Block]) -> None: ...

    def hide(self, block: Block) -> None: ...

    def hide_all(self, blocks: Sequence[Block]) -> None: ...

    def is_looked_at(self, tenant: str, index: int) -> bool:
        return False

    def looked_at(self, tenant: str, slots: Collection[Slot]) -> set[Slot]:
        return set()

    def who_looks(self, tenant: str) -> IsLookedAt | None:
        return None

    def looks_at_any(self, tenant: str) -> bool:
        return False

    def take_holds(self, tenant: str) -> None: ...

    def keep(self, tenant: str, slot: Slot) -> None:
        raise AssertionError("nobody looks")
