"""Copies of blocks in the tiers: how they become visible, how they are dropped, and when a slot can be reused.

A slot is quarantined while it is in use: a reader has acquired the block, a move has it `moving`, or a local client's
hazard pointer protects it (`SharedIndex`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvstore.protocol.catalog_messages import EVENT_MOVED, EVENT_REMOVED
from kvstore.store.block_table.block import DRAM, DROPPED, HELD, MOVING, NVME, Block
from kvstore.store.block_table.event_log import BlockEventLog
from kvstore.store.block_table.rows import clear_copies, mark_dropped, read, rows_of, slots_of
from kvstore.store.block_table.tier_view import TierView
from kvstore.store.block_table.uncommitted import UNCOMMITTED, UncommittedBlocks
from kvstore.store.block_table.visible_blocks import VisibleBlocks
from kvstore.tiers.tier import Slot

DramLocation = tuple[int, int]
"""Location of a DRAM copy: (slab id, offset in bytes)."""

IsProtected = Callable[[int], bool]
"""Predicate over slot indexes."""

Emit = Callable[[int, Block], None]
"""Called with (EVENT_..., block) for every event that the master must receive, in order."""


class SharedIndex(Protocol):
    """Interface of the shared-memory index, implemented by `SharedIndexWriter`."""

    def add(self, block: Block, location: DramLocation | None = None) -> None:
        """Add a block whose DRAM copy is complete. `location` is its location if known."""

    def add_all(self, blocks: Sequence[Block]) -> None:
        """Add blocks of one tenant."""

    def remove(self, block: Block) -> None:
        """Remove a block before its DRAM copy is freed. No-op if it is not indexed."""

    def remove_all(self, blocks: Sequence[Block]) -> None:
        """Remove blocks of one tenant."""

    def is_protected(self, tenant: str, index: int) -> bool:
        """Return True if a client protects the DRAM slot. False is final for a removed block."""

    def protection_of(self, tenant: str) -> IsProtected | None:
        """Return a predicate over the tenant's slots as of now; None if no slot is protected. Applies the clients'
        recorded holds first."""

    def take_holds(self, tenant: str) -> None:
        """Apply the holds that the tenant's clients have recorded."""

    def keep(self, tenant: str, slot: Slot) -> None:
        """Take over a quarantined DRAM slot and release it once it is not protected."""


class BlockCopies:
    """Part of the block table, which owns the objects passed in."""

    def __init__(
        self,
        visible: VisibleBlocks,
        levels: Mapping[int, TierView],
        *,
        uncommitted: UncommittedBlocks,
        shared_index: SharedIndex,
        events: BlockEventLog,
        emit: Emit,
    ) -> None:
        self._visible = visible
        self._levels = levels
        self._uncommitted = uncommitted
        self._shared_index = shared_index
        self._events = events
        self._emit = emit

    # --- adding copies ---

    def make_visible(self, block: Block, level: TierView) -> None:
        """Make a block visible whose only copy is in `level`."""
        self._visible.add(block)
        level.add(block)
        if level.index == DRAM:
            self._shared_index.add(block)

    def make_placed_visible(self, block: Block, location: DramLocation | None = None) -> None:
        """Make a DRAM block visible; the caller adds it to its tier view afterwards."""
        self._visible.add(block)
        self._shared_index.add(block, location)

    def make_all_visible(self, blocks: Sequence[Block]) -> None:
        """Make DRAM blocks of one tenant visible."""
        if not blocks:
            return
        rows = rows_of(blocks)
        self._visible.add_all(blocks, rows)
        self._levels[DRAM].add_all(blocks, rows)
        self._shared_index.add_all(blocks)

    def add(self, block: Block, index: int, slot: Slot) -> None:
        """Add a copy of a visible block."""
        block.set_slot(index, slot)
        self._levels[index].add(block)
        if index == DRAM:
            self._shared_index.add(block)

    def stage(self, copy: Block, slot: Slot) -> None:
        """Give the invisible `copy` a DRAM slot for one reader. It is acquired; its slot is freed on release. It is in
        no eviction order or index."""
        copy.set_slot(DRAM, slot)
        copy.is_dropped, copy.readers = True, 1
        self._levels[DRAM].tier.quarantine(slot)

    # --- readers ---

    def acquire(self, block: Block) -> None:
        """Add a reader: the block's slots stay unchanged until `release`."""
        block.readers += 1

    def release(self, block: Block) -> None:
        """Remove a reader. The last reader of a dropped block frees its slots."""
        block.readers -= 1
        if block.is_dropped:
            self.free_unused(block)

    def is_protected(self, block: Block) -> bool:
        """Return True if a local client's hazard pointer is on the block's DRAM copy."""
        columns = block.columns
        return bool(columns.held[block] & HELD[DRAM]) and self._shared_index.is_protected(columns.tenant, columns.slot_indexes[block])

    # --- dropping copies ---

    def drop(self, block: Block) -> None:
        """Make the block invisible and free its slots, or quarantine them until readers and moves are done."""
        columns = block.columns
        columns.states[block] |= DROPPED
        self._shared_index.remove(block)
        if columns.others:
            self.end_demotion(block)
        is_used = _is_used(block)
        for index in block.tiers():
            level, slot = self._levels[index], block.slot_in(index)
            assert slot is not None
            level.remove(block)
            if is_used:
                level.tier.quarantine(slot)
            else:
                self._let_go(block, index, slot)
        self._visible.remove(block)  # last: policies find blocks by key
        if not is_used:
            columns.held[block] = 0
        if self._events.is_recording:
            self._events.removed(block)
        if columns.generations[block] == UNCOMMITTED:
            self._uncommitted.remove(block)
        else:
            self._emit(EVENT_REMOVED, block)

    def drop_each(self, blocks: Sequence[Block]) -> None:
        """Drop different blocks of one tenant. Unused ones that are only in DRAM are dropped together."""
        plain = [block for block in blocks if _is_plain(block)]
        order = self._levels[DRAM].order
        for block in plain:
            order.remove(block, block.columns.groups[block])
        self.drop_all(plain)
        if len(plain) < len(blocks):
            for block in set(blocks).difference(plain):
                self.drop(block)

    def drop_all(self, blocks: Sequence[Block]) -> None:
        """Drop unused blocks of one tenant that are only in DRAM and already out of its eviction order."""
        if not blocks:
            return
        level, columns, rows = self._levels[DRAM], blocks[0].columns, rows_of(blocks)
        self._visible.remove_all(blocks)
        mark_dropped(columns, rows)
        self._shared_index.remove_all(blocks)
        level.remove_all(blocks, rows)
        is_protected = self._shared_index.protection_of(columns.tenant)
        if is_protected is None:
            level.free_all(columns, rows)
        else:
            slots = slots_of(blocks)
            for slot in slots:
                if is_protected(slot.index):
                    level.tier.quarantine(slot)
                    self._shared_index.keep(columns.tenant, slot)
            level.tier.free_batch([slot for slot in slots if not is_protected(slot.index)])
        clear_copies(columns, rows, DRAM)
        generations: list[int] = read(columns.generations, rows).tolist()
        is_recording = self._events.is_recording
        for block, generation in zip(blocks, generations, strict=True):
            if is_recording:
                self._events.removed(block)
            if generation == UNCOMMITTED:
                self._uncommitted.remove(block)
            else:
                self._emit(EVENT_REMOVED, block)

    def drop_copy(self, block: Block, index: int) -> None:
        """Drop one tier's copy, such as a damaged one; the block goes with its last copy. The copy must have no
        readers, unless its tier never reuses slots (NVMe)."""
        slot = block.slot_in(index)
        if block.is_dropped or slot is None:
            return
        if not block.is_also_outside(index):
            self.drop(block)
            return
        if index == DRAM:
            self._shared_index.remove(block)
        self._levels[index].remove(block)
        if not block.is_secondary and block.tiers() == (index, NVME):
            self._levels[NVME].order.unmark_secondary(block, block.group_in(NVME))
        if block.lossy:
            block.set_loss(index, None)
        block.set_slot(index, None)
        self._let_go(block, index, slot)
        self._emit(EVENT_MOVED, block)

    def end_demotion(self, block: Block) -> None:
        """Clear the mark of a demotion that ended or no longer matters."""
        if block.demoted_from is not None:
            self._levels[block.demoted_from].count_demotion(block, -1)
            block.demoted_from = None

    def free_unused(self, block: Block) -> None:
        """Free the slots of a dropped block that is no longer used."""
        if block.readers or block.moving:
            return
        for index in block.tiers():
            slot = block.slot_in(index)
            assert slot is not None
            self._release(block, index, slot)
            block.set_slot(index, None)

    def _let_go(self, block: Block, index: int, slot: Slot) -> None:
        """Free the slot of a hidden, unused copy, or quarantine it while a client protects it."""
        tier = self._levels[index].tier
        if index == DRAM and self._shared_index.is_protected(block.tenant, slot.index):
            tier.quarantine(slot)
            self._shared_index.keep(block.tenant, slot)
        else:
            tier.free(slot)

    def _release(self, block: Block, index: int, slot: Slot) -> None:
        """Release a quarantined slot, or keep it while a client protects it."""
        if index == DRAM and self._shared_index.is_protected(block.tenant, slot.index):
            self._shared_index.keep(block.tenant, slot)
        else:
            self._levels[index].tier.release(slot)


def _is_used(block: Block) -> bool:
    """Return True if a reader or a move uses the block's memory."""
    columns = block.columns
    return bool(columns.readers[block] or columns.states[block] & MOVING)


def _is_plain(block: Block) -> bool:
    """Return True if the block is unused and only in DRAM."""
    return not _is_used(block) and block.columns.held[block] == HELD[DRAM] and block not in block.columns.others
