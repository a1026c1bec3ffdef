"""The copies of blocks in the tiers: how they come to be seen, how they leave, and when the slot of one that left may hold another value.

Not before nobody reads it: a reader that asked has the block acquired, a copy to another tier has it `moving`, and a client of this host
that looks at shared memory unasked is known to `Showing`. Until then the slot is quarantined.
"""

from collections.abc import Callable, Mapping, Sequence

from kvstore.protocol.catalog_messages import EVENT_GONE, EVENT_MOVED
from kvstore.store.blocks.block import DRAM, Block, slots_of
from kvstore.store.blocks.events import EventLog
from kvstore.store.blocks.level import Level
from kvstore.store.blocks.showing import Place, Showing
from kvstore.store.blocks.undecided import UNDECIDED, Undecided
from kvstore.store.blocks.visible import VisibleBlocks
from kvstore.tiers.tier import Slot

Emit = Callable[[int, Block], None]
"""Called with (EVENT_..., block) for everything the master must hear, in order."""


class Copies:
    """A part of the block table, which owns what this works on."""

    def __init__(
        self,
        visible: VisibleBlocks,
        levels: Mapping[int, Level],
        *,
        undecided: Undecided,
        showing: Showing,
        events: EventLog,
        emit: Emit,
    ) -> None:
        self._visible = visible
        self._levels = levels
        self._undecided = undecided
        self._showing = showing
        self._events = events
        self._emit = emit

    # --- coming ---

    def show(self, block: Block, level: Level) -> None:
        """Make a block visible whose only copy is at `level`."""
        self._visible.add(block)
        level.add(block)
        if level.index == DRAM:
            self._showing.show(block)

    def show_placed(self, block: Block, place: Place | None = None) -> None:
        """As `show`, of a block in DRAM, at that place if it is known, that is added to its level afterwards."""
        self._visible.add(block)
        self._showing.show(block, place)

    def show_all(self, blocks: Sequence[Block]) -> None:
        """As `show`, of blocks of one tenant in DRAM."""
        if not blocks:
            return
        self._visible.add_all(blocks)
        self._levels[DRAM].add_all(blocks)
        self._showing.show_all(blocks)

    def add(self, block: Block, index: int, slot: Slot) -> None:
        """A visible block has one more copy."""
        block.set_slot(index, slot)
        self._levels[index].add(block)
        if index == DRAM:
            self._showing.show(block)

    # --- being read ---

    def acquire(self, block: Block) -> None:
        """A reader starts: the block's slots stay as they are until `release`."""
        block.readers += 1

    def release(self, block: Block) -> None:
        """A reader is done. The last one of a block that is gone frees its slots."""
        block.readers -= 1
        if block.is_gone:
            self.free_unused(block)

    def is_looked_at(self, block: Block) -> bool:
        """Whether a client of this host looks at its copy in DRAM without having asked for it."""
        slot = block.dram
        return slot is not None and self._showing.is_looked_at(block.tenant, slot)

    # --- leaving ---

    def drop(self, block: Block) -> None:
        """Make the block invisible and free its slots, or quarantine them until its readers and the copy under way are done."""
        self._visible.remove(block)
        block.is_gone = True
        self._showing.hide(block)
        self.stop_leaving(block)
        is_used = block.readers or block.moving
        for index, slot in enumerate(block.slots):
            if slot is not None:
                self._levels[index].remove(block)
                if is_used:
                    self._levels[index].tier.quarantine(slot)
                else:
                    self._let_go(block, index, slot)
                    block.set_slot(index, None)
        if self._events.is_recording:
            self._events.removed(block)
        if block.generation == UNDECIDED:
            self._undecided.remove(block)
        else:
            self._emit(EVENT_GONE, block)

    def drop_all(self, blocks: Sequence[Block]) -> None:
        """As `drop`, of blocks of one tenant that have no copy but in DRAM, that nobody uses, and that have left the order there."""
        if not blocks:
            return
        level, tenant = self._levels[DRAM], blocks[0].tenant
        slots = slots_of(blocks)
        self._visible.remove_all(blocks)
        for block in blocks:
            block.is_gone = True
        self._showing.hide_all(blocks)
        level.remove_all(blocks)
        looked_at = self._showing.looked_at(tenant, slots)
        for slot in looked_at:
            level.tier.quarantine(slot)
            self._showing.keep(tenant, slot)
        level.tier.free_batch([slot for slot in slots if slot not in looked_at] if looked_at else slots)
        for block in blocks:
            block.dram = None
            if self._events.is_recording:
                self._events.removed(block)
            if block.generation == UNDECIDED:
                self._undecided.remove(block)
            else:
                self._emit(EVENT_GONE, block)

    def drop_copy(self, block: Block, index: int) -> None:
        """Give up one tier's copy of the block (a damaged one, say); the block goes with its last copy. Nobody may be reading the
        copy, unless its tier never gives a slot to another block (NVMe)."""
        slot = block.slots[index]
        if block.is_gone or slot is None:
            return
        if sum(other is not None for other in block.slots) == 1:
            self.drop(block)
            return
        if index == DRAM:
            self._showing.hide(block)
        self._levels[index].remove(block)
        if block.lossy:
            block.set_loss(index, None)
        block.set_slot(index, None)
        self._let_go(block, index, slot)
        self._emit(EVENT_MOVED, block)

    def stop_leaving(self, block: Block) -> None:
        """The copy that was to make room in a tier is over, or does not matter any more."""
        if block.leaving is not None:
            self._levels[block.leaving].count_leaving(block, -1)
            block.leaving = None

    def free_unused(self, block: Block) -> None:
        """Free the slots of a block that is gone, unless someone still uses them."""
        if block.readers or block.moving:
            return
        for index, slot in enumerate(block.slots):
            if slot is not None:
                self._release(block, index, slot)
                block.set_slot(index, None)

    def _let_go(self, block: Block, index: int, slot: Slot) -> None:
        """Free the slot of a copy that is hidden and that nobody here uses, once no client looks at it any more."""
        tier = self._levels[index].tier
        if index == DRAM and self._showing.is_looked_at(block.tenant, slot):
            tier.quarantine(slot)
            self._showing.keep(block.tenant, slot)
        else:
            tier.free(slot)

    def _release(self, block: Block, index: int, slot: Slot) -> None:
        """Free a quarantined slot of a copy that is hidden, once no client looks at it any more."""
        if index == DRAM and self._showing.is_looked_at(block.tenant, slot):
            self._showing.keep(block.tenant, slot)
        else:
            self._levels[index].tier.release(slot)

    def check_integrity(self) -> None:
        """Assert that slots, orders and blocks agree. For tests; O(blocks)."""
        for index, level in self._levels.items():
            level.check_integrity(block for block in self._visible if block.slots[index] is not None)
        for block in self._visible:
            block.check_integrity()
        assert set(self._undecided.blocks()) == {block for block in self._visible if block.generation == UNDECIDED}
