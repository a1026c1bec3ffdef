"""The copies of blocks in the tiers: how they come to be seen, how they leave, and when the slot of one that left may hold another value.

Not before nobody reads it: a reader that asked has the block acquired, a copy to another tier has it `moving`, and a client of this host
that looks at shared memory unasked is known to `SharedIndex`. Until then the slot is quarantined.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvstore.protocol.catalog_messages import EVENT_MOVED, EVENT_REMOVED
from kvstore.store.block_table.block import DRAM, GONE, HELD, MOVING, Block
from kvstore.store.block_table.event_log import BlockEventLog
from kvstore.store.block_table.rows import have_gone, have_left, read, rows_of, slots_of
from kvstore.store.block_table.tier_view import TierView
from kvstore.store.block_table.uncommitted import UNDECIDED, UncommittedBlocks
from kvstore.store.block_table.visible_blocks import VisibleBlocks
from kvstore.tiers.tier import Slot

Place = tuple[int, int]
"""Of a copy in DRAM: (slab id, offset in bytes)."""

IsLookedAt = Callable[[int], bool]
"""Asked about the slot of an index."""

Emit = Callable[[int, Block], None]
"""Called with (EVENT_..., block) for everything the master must hear, in order."""


class SharedIndex(Protocol):
    """See store/shared_index/index_writer.py, which is one."""

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

    def who_looks(self, tenant: str) -> IsLookedAt | None:
        """`is_looked_at` of many slots of the tenant, as of now; None: nobody looks at anything. What the tenant's clients hold in shared
        memory is known to Holds then, as after the next."""

    def take_holds(self, tenant: str) -> None:
        """Have Holds know what the tenant's clients hold in shared memory."""

    def keep(self, tenant: str, slot: Slot) -> None:
        """Release a quarantined DRAM slot when nobody looks at it any more."""


class BlockCopies:
    """A part of the block table, which owns what this works on."""

    def __init__(
        self,
        visible: VisibleBlocks,
        levels: Mapping[int, TierView],
        *,
        undecided: UncommittedBlocks,
        showing: SharedIndex,
        events: BlockEventLog,
        emit: Emit,
    ) -> None:
        self._visible = visible
        self._levels = levels
        self._undecided = undecided
        self._showing = showing
        self._events = events
        self._emit = emit

    # --- coming ---

    def show(self, block: Block, level: TierView) -> None:
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
        rows = rows_of(blocks)
        self._visible.add_all(blocks, rows)
        self._levels[DRAM].add_all(blocks, rows)
        self._showing.show_all(blocks)

    def add(self, block: Block, index: int, slot: Slot) -> None:
        """A visible block has one more copy."""
        block.set_slot(index, slot)
        self._levels[index].add(block)
        if index == DRAM:
            self._showing.show(block)

    def stage(self, copy: Block, slot: Slot) -> None:
        """Give `copy`, which is never visible, this slot in DRAM for one reader: it has been acquired, and its slot is free once it is
        released. No order and no index knows it."""
        copy.set_slot(DRAM, slot)
        copy.is_gone, copy.readers = True, 1
        self._levels[DRAM].tier.quarantine(slot)

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
        columns = block.columns
        return bool(columns.held[block] & HELD[DRAM]) and self._showing.is_looked_at(columns.tenant, columns.places[block])

    # --- leaving ---

    def drop(self, block: Block) -> None:
        """Make the block invisible and free its slots, or quarantine them until its readers and the copy under way are done."""
        columns = block.columns
        columns.states[block] |= GONE
        self._showing.hide(block)
        if columns.others:
            self.stop_leaving(block)
        is_used = _is_used(block)
        for index in block.tiers():
            level, slot = self._levels[index], block.slot_in(index)
            assert slot is not None
            level.remove(block)
            if is_used:
                level.tier.quarantine(slot)
            else:
                self._let_go(block, index, slot)
        self._visible.remove(block)  # policies have found it by its key until now
        if not is_used:
            columns.held[block] = 0
        if self._events.is_recording:
            self._events.removed(block)
        if columns.generations[block] == UNDECIDED:
            self._undecided.remove(block)
        else:
            self._emit(EVENT_REMOVED, block)

    def drop_each(self, blocks: Sequence[Block]) -> None:
        """As `drop`, of different blocks of one tenant. Those in DRAM alone that nobody uses go together."""
        plain = [block for block in blocks if _is_plain(block)]
        order = self._levels[DRAM].order
        for block in plain:
            order.remove(block, block.columns.groups[block])
        self.drop_all(plain)
        if len(plain) < len(blocks):
            for block in set(blocks).difference(plain):
                self.drop(block)

    def drop_all(self, blocks: Sequence[Block]) -> None:
        """As `drop`, of blocks of one tenant that have no copy but in DRAM, that nobody uses, and that have left the order there."""
        if not blocks:
            return
        level, columns, rows = self._levels[DRAM], blocks[0].columns, rows_of(blocks)
        self._visible.remove_all(blocks)
        have_gone(columns, rows)
        self._showing.hide_all(blocks)
        level.remove_all(blocks, rows)
        is_looked_at = self._showing.who_looks(columns.tenant)
        if is_looked_at is None:
            level.free_all(columns, rows)
        else:
            slots = slots_of(blocks)
            for slot in slots:
                if is_looked_at(slot.index):
                    level.tier.quarantine(slot)
                    self._showing.keep(columns.tenant, slot)
            level.tier.free_batch([slot for slot in slots if not is_looked_at(slot.index)])
        have_left(columns, rows, DRAM)
        generations: list[int] = read(columns.generations, rows).tolist()
        is_recording = self._events.is_recording
        for block, generation in zip(blocks, generations, strict=True):
            if is_recording:
                self._events.removed(block)
            if generation == UNDECIDED:
                self._undecided.remove(block)
            else:
                self._emit(EVENT_REMOVED, block)

    def drop_copy(self, block: Block, index: int) -> None:
        """Give up one tier's copy of the block (a damaged one, say); the block goes with its last copy. Nobody may be reading the
        copy, unless its tier never gives a slot to another block (NVMe)."""
        slot = block.slot_in(index)
        if block.is_gone or slot is None:
            return
        if not block.is_also_outside(index):
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
        for index in block.tiers():
            slot = block.slot_in(index)
            assert slot is not None
            self._release(block, index, slot)
            block.set_slot(index, None)

    def _let_go(self, block: Block, index: int, slot: Slot) -> None:
        """Free the slot of a copy that is hidden and that nobody here uses, once no client looks at it any more."""
        tier = self._levels[index].tier
        if index == DRAM and self._showing.is_looked_at(block.tenant, slot.index):
            tier.quarantine(slot)
            self._showing.keep(block.tenant, slot)
        else:
            tier.free(slot)

    def _release(self, block: Block, index: int, slot: Slot) -> None:
        """Free a quarantined slot of a copy that is hidden, once no client looks at it any more."""
        if index == DRAM and self._showing.is_looked_at(block.tenant, slot.index):
            self._showing.keep(block.tenant, slot)
        else:
            self._levels[index].tier.release(slot)


def _is_used(block: Block) -> bool:
    """Whether a reader or a copy under way has the block's memory."""
    columns = block.columns
    return bool(columns.readers[block] or columns.states[block] & MOVING)


def _is_plain(block: Block) -> bool:
    """Whether the block is in DRAM alone and not used."""
    return not _is_used(block) and block.columns.held[block] == HELD[DRAM] and block not in block.columns.others
