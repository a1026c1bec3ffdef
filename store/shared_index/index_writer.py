"""Shared-memory index of the node's DRAM blocks for clients of the same host: one index per tenant, reader slots per
client.

The block table adds a block when it gets a DRAM slot (`add`) and removes it before the slot is reused (`remove`).
Before it frees a slot it checks clients' hazard pointers (`is_protected`); a protected slot is handed over (`keep`) and
released later.

`SharedIndexWriter` owns the indexes, the reader slots, and the quarantined slots that clients protect.
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from typing import Final

import numpy as np

from kvstore.protocol.errors import TierFailed
from kvstore.protocol.node_messages import MapSlabsReply
from kvstore.protocol.shared_index import ACCESSES, KEY_WORDS, MAX_KEY_BYTES, READER_SLOTS_BYTES, WAYS, key_words_for
from kvstore.store.block_table.block import DRAM, DROPPED, HELD, NOT_INDEXED, Block
from kvstore.store.block_table.copies import DramLocation, IsProtected
from kvstore.store.block_table.holds import Holds
from kvstore.store.block_table.rows import keys_of, rows_of, slot_indexes_of
from kvstore.store.shared_index.index import FIRST_SETS, FULL_SHARE, MAX_SETS, SharedIndexTable
from kvstore.store.shared_index.index_growth import IndexGrowth
from kvstore.store.shared_index.reader_slots import ReaderSlots, slot_of
from kvstore.tiers.dram import DramTier
from kvstore.tiers.tier import Slot

MAX_ENTRIES_PER_STEP: Final = 1000
"""Blocks added to a new index per loop iteration."""
ENTRIES_PER_GROWTH_STEP: Final = 200
"""A growing index advances one step per this many added blocks, besides one per heartbeat, so that a burst of puts does
not fill it. Growth starts at a share of 0.5; the copy ends at 0.7."""
MIN_BATCH_LIMIT: Final = 512
MIN_BATCH: Final = 16
BATCH_SHARE_SHIFT: Final = 5
"""Limits of a batch added at once. Fewer blocks than MIN_BATCH are as fast one by one. A batch is at most 1/32 of the
entries, so that no index exceeds the share at which it grows by much."""
SAMPLE_BLOCKS: Final = 1000
"""Blocks sampled to choose the size of a new index."""
MAX_ACCESSES_PER_STEP: Final = 4096
"""Accesses that are counted per call, shared by the clients that have any: a node counts one in 2 to 4 us."""
STEPS_PER_RING: Final = ACCESSES // MAX_ACCESSES_PER_STEP + 1
"""Calls that drain the full ring of one client: each stops at the ring's end. With several clients a part is left."""


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant's index and clients. `left` are blocks not added to a new index yet. While `growth` is set, blocks are
    added and removed there."""

    index: SharedIndexTable
    """The index that clients are given."""
    growth: IndexGrowth | None = None
    added: int = 0
    """Blocks added while it grew."""
    readers: dict[object, ReaderSlots] = field(default_factory=dict)
    left: deque[Block] = field(default_factory=deque)


_Hazard = tuple[object, ReaderSlots, int]
"""Owner, reader slots and hazard word."""


class SharedIndexWriter:
    """Writer of all tenants' indexes. Not thread-safe: called from the node's loop."""

    def __init__(
        self, dram: DramTier, holds: Holds, *, max_hazard_ns: int, disconnect: Callable[[object], None] = lambda owner: None
    ) -> None:
        """`holds` receives the holds that clients record in their reader slots. `disconnect` is called with the owner
        of a connection whose hazard pointer has blocked a slot for longer than `max_hazard_ns`."""
        self._dram = dram
        self._holds = holds
        self._max_hazard_ns = max_hazard_ns
        self._disconnect = disconnect
        self._blocking: dict[_Hazard, int] = {}
        """Hazards that blocked a slot, and since when."""
        self._tenants: dict[str, _Tenant] = {}
        self._kept: list[tuple[str, Slot]] = []
        self._now_ns = 0

    # --- the block table ---

    def add(self, block: Block, location: DramLocation | None = None) -> None:
        """Add a block whose DRAM copy is complete. `location` is its (slab, offset) if known."""
        tenant = self._tenants.get(block.tenant)
        if tenant is None:
            return
        slot, index = block.dram, tenant.index
        if slot is None or tenant.growth is not None or index.is_full or len(block.key) > index.max_key_bytes:
            self._grow_if_due(tenant, len(block.key))
            self._add(tenant, block)
        else:  # fast path
            _, offset = location or self._dram.locate(slot)
            index.add(block, offset, block.checksum_in(DRAM), slot.index)

    def add_all(self, blocks: Sequence[Block]) -> None:
        """Add blocks of one tenant."""
        tenant = self._tenants.get(blocks[0].tenant) if blocks else None
        if tenant is None:
            return
        added = 0
        while added < len(blocks):
            self._grow_if_due(tenant, len(blocks[added].key))
            at_once = MIN_BATCH_LIMIT if tenant.growth is not None else max(MIN_BATCH_LIMIT, tenant.index.entries >> BATCH_SHARE_SHIFT)
            part = blocks[added : added + at_once]
            added += len(part)
            left = self._add_batch(tenant.growth or tenant.index, part)
            self._count_added(tenant, len(part) - len(left))
            for block in left:
                self.add(block)

    def _add_batch(self, index: SharedIndexTable | IndexGrowth, blocks: Sequence[Block]) -> Sequence[Block]:
        """Add a batch at once; return the blocks that have to be added one by one."""
        lengths = [len(block.key) for block in blocks] if len(blocks) >= MIN_BATCH else [0]
        if lengths.count(lengths[0]) < len(blocks) or lengths[0] > index.max_key_bytes:
            return blocks
        slot_indexes = slot_indexes_of(blocks)
        _, offsets = self._dram.locate_all(slot_indexes)
        left = index.add_all(blocks, offsets, slot_indexes)
        return [blocks[number] for number in left]

    def _add(self, tenant: _Tenant, block: Block) -> None:
        slot = block.dram
        assert slot is not None
        _, offset = self._dram.locate(slot)
        (tenant.growth or tenant.index).add(block, offset, block.checksum_in(DRAM), slot.index)
        self._count_added(tenant, 1)

    def _count_added(self, tenant: _Tenant, count: int) -> None:
        """Count added blocks, and advance a growing index accordingly."""
        if tenant.growth is None:
            return
        parts = tenant.added // ENTRIES_PER_GROWTH_STEP
        tenant.added += count
        for _ in range(tenant.added // ENTRIES_PER_GROWTH_STEP - parts):
            if tenant.growth is not None:
                self._grow(tenant, tenant.growth)

    def _grow_if_due(self, tenant: _Tenant, key_bytes: int) -> None:
        """Start growth if the index is full or its keys are too short for the next block. Keys longer than
        MAX_KEY_BYTES are never indexed."""
        if tenant.growth is not None:
            return
        is_too_long = tenant.index.max_key_bytes < key_bytes <= MAX_KEY_BYTES
        if is_too_long or tenant.index.is_full:
            with suppress(TierFailed):  # the index keeps what fits
                tenant.growth = IndexGrowth(tenant.index, key_words_for(key_bytes) if is_too_long else 0)

    def remove(self, block: Block) -> None:
        """Remove the block before its DRAM copy is freed."""
        if block.index_entry != NOT_INDEXED:
            tenant = self._tenants[block.tenant]
            (tenant.growth or tenant.index).remove(block)

    def remove_all(self, blocks: Sequence[Block]) -> None:
        """Remove blocks of one tenant."""
        tenant = self._tenants.get(blocks[0].tenant)
        if tenant is None:
            return
        is_indexed = np.frombuffer(blocks[0].columns.index_entries, np.int32)[rows_of(blocks)] != NOT_INDEXED
        added = blocks if is_indexed.all() else list(compress(blocks, is_indexed.tolist()))
        if not added:
            return
        if tenant.growth is None:
            tenant.index.remove_all(added)
        else:
            for block in added:
                tenant.growth.remove(block)

    def is_protected(self, tenant: str, index: int) -> bool:
        """Return True if a client's hazard pointer is on the slot. False is final for a removed block: no client can
        protect it any more."""
        of_tenant = self._tenants.get(tenant)
        if of_tenant is None or not of_tenant.readers:
            return False
        of_tenant.index.fence()
        is_protected = False
        for owner, reader in of_tenant.readers.items():
            for word in reader.hazards_on(index):
                self._blocking.setdefault((owner, reader, word), self._now_ns)
                is_protected = True
        return is_protected

    def protection_of(self, tenant: str) -> IsProtected | None:
        """Return a predicate that tells which of the tenant's slots are protected now, or None if none is. Also applies
        the holds that its clients have recorded."""
        of_tenant = self._tenants.get(tenant)
        if of_tenant is None or not of_tenant.readers:
            return None
        of_tenant.index.fence()
        hazards: list[_Hazard] = []
        for owner, reader in of_tenant.readers.items():
            if reader.has_holds:
                self._take_holds(tenant, of_tenant, owner, reader)
            if words := reader.hazards():
                hazards += [(owner, reader, word) for word in words]
        return self._among(hazards) if hazards else None

    def _among(self, hazards: Sequence[_Hazard]) -> IsProtected:
        """Return the predicate over these hazards. A hit is recorded as blocking."""
        by_slot: dict[int, list[_Hazard]] = {}
        for hazard in hazards:
            by_slot.setdefault(slot_of(hazard[2]), []).append(hazard)

        def is_protected(index: int) -> bool:
            if index not in by_slot:
                return False
            for hazard in by_slot[index]:
                self._blocking.setdefault(hazard, self._now_ns)
            return True

        return is_protected

    def keep(self, tenant: str, slot: Slot) -> None:
        """Take over a quarantined slot; it is released once no client protects it."""
        self._kept.append((tenant, slot))

    # --- clients ---

    def attach(self, owner: object, tenant: str, blocks: Callable[[], list[Block]]) -> tuple[MapSlabsReply, list[int]]:
        """Return sizes and descriptors of the tenant's index and of the client's reader slots. The caller closes the
        descriptors.

        `blocks` lists the tenant's blocks; it is called for the tenant's first client. Raises TierFailed: the system
        has no memory or descriptor left.
        """
        of_tenant = self._tenants.get(tenant)
        if of_tenant is None:
            known = blocks()
            of_tenant = _Tenant(SharedIndexTable(_sets_for(_count_indexable(known)), key_words=_key_words_of(known)), left=deque(known))
            of_tenant.index.set_heartbeat(self._now_ns)
            of_tenant.index.set_freed_slabs(self._dram.slabs_released)
            self._tenants[tenant] = of_tenant
            self._add_remaining(of_tenant)
        reader = of_tenant.readers.get(owner)
        if reader is None:
            reader = of_tenant.readers[owner] = ReaderSlots()
        fds = [of_tenant.index.export()]
        try:
            fds.append(reader.export())
        except OSError as refusal:
            os.close(fds[0])
            raise TierFailed(f"no file descriptor left for a client's reader slots: {refusal}") from refusal
        return MapSlabsReply([of_tenant.index.size_bytes, READER_SLOTS_BYTES]), fds

    def forget_owner(self, owner: object) -> None:
        """Drop the reader slots of a closed connection, and the index with the tenant's last client if it is empty."""
        for name, of_tenant in list(self._tenants.items()):
            reader = of_tenant.readers.pop(owner, None)
            if reader is not None:
                reader.close()
                self.release_unprotected()
            index = of_tenant.growth or of_tenant.index
            is_there = self._tenants.get(name) is of_tenant  # release_unprotected may disconnect another client
            if is_there and not of_tenant.readers and not index.count and not of_tenant.left:
                index.close()
                del self._tenants[name]

    # --- periodic work ---

    def take_accesses(self, note: Callable[[str, list[Block], int], None], tenant: str | None = None) -> bool:
        """Call `note(tenant, blocks, uncounted)` for each client with new accesses. Return True if accesses are left.

        `blocks` are in the order of reading. `uncounted` is the number of further accesses that the ring had no space
        for. `tenant` limits the call to one tenant.
        """
        of_tenants = list(self._tenants.items()) if tenant is None else [(tenant, one)] if (one := self._tenants.get(tenant)) else []
        found = [(name, reader) for name, one in of_tenants for reader in one.readers.values() if reader.has_accesses]
        is_more = False
        for name, reader in found:
            self._take(name, reader, note, max(1, MAX_ACCESSES_PER_STEP // len(found)))
            is_more |= reader.has_accesses
        return is_more

    def take_holds(self, tenant: str) -> None:
        """Apply the holds and releases that the tenant's clients have recorded."""
        of_tenant = self._tenants.get(tenant)
        if of_tenant is not None:
            for owner, reader in of_tenant.readers.items():
                if reader.has_holds:
                    self._take_holds(tenant, of_tenant, owner, reader)

    def _take_holds(self, tenant: str, of_tenant: _Tenant, owner: object, reader: ReaderSlots) -> None:
        index = of_tenant.growth or of_tenant.index
        for number, until_ns, words in reader.hold_records():
            if not until_ns:
                self._holds.release(tenant, number)
                continue
            blocks = index.all_accessed(words)
            self._holds.refused += len(words) - len(blocks)  # evicted meanwhile
            flags = self._holds.add(owner, tenant, number, blocks, until_ns=until_ns, now_ns=self._now_ns)
            if (not_held := len(words) - sum(flags)) > 0:
                reader.not_held(not_held)

    def take_last_accesses(self, note: Callable[[str, list[Block], int], None], owner: object) -> None:
        """Drain the accesses of a closed connection."""
        of_owner = [(name, reader) for name, of_tenant in self._tenants.items() if (reader := of_tenant.readers.get(owner)) is not None]
        for name, reader in of_owner:
            for _ in range(STEPS_PER_RING):  # bounded: the client may still be writing
                self._take(name, reader, note, MAX_ACCESSES_PER_STEP)

    def _take(self, tenant: str, reader: ReaderSlots, note: Callable[[str, list[Block], int], None], most: int) -> None:
        index = self._tenants[tenant].growth or self._tenants[tenant].index
        found = [index.accessed(word) for word in reader.accesses(most)]
        note(tenant, [block for block in found if block is not None], reader.newly_lost())

    def heartbeat(self, now_ns: int) -> bool:
        """Write the heartbeat, apply holds and advance unfinished work. Return True if work is left."""
        self._now_ns = now_ns
        gone = self._dram.slabs_released
        is_more = False
        for tenant, of_tenant in self._tenants.items():
            self.take_holds(tenant)
            of_tenant.index.set_heartbeat(now_ns)
            of_tenant.index.set_freed_slabs(gone)
            if of_tenant.growth is not None:
                self._grow(of_tenant, of_tenant.growth)
            elif of_tenant.left:
                self._add_remaining(of_tenant)
            is_more |= of_tenant.growth is not None or bool(of_tenant.left)
        return is_more

    def release_unprotected(self) -> None:
        """Release kept slots that no client protects any more. Disconnect clients that have blocked a slot for too
        long, such as a stopped process."""
        self._blocking = {
            seen: since_ns for seen, since_ns in self._blocking.items() if not seen[1].is_closed and seen[1].has_hazard(seen[2])
        }
        for owner in {owner for (owner, _, _), since_ns in self._blocking.items() if self._now_ns - since_ns > self._max_hazard_ns}:
            self._disconnect(owner)
        kept, self._kept = self._kept, []
        hazards = {tenant: self.protection_of(tenant) for tenant in {tenant for tenant, _ in kept}}
        for tenant, slot in kept:
            is_protected = hazards[tenant]
            if is_protected is not None and is_protected(slot.index):
                self._kept.append((tenant, slot))
            else:
                self._dram.release(slot)

    def _add_remaining(self, of_tenant: _Tenant) -> None:
        left = of_tenant.left
        wanted = _indexable([left.popleft() for _ in range(min(MAX_ENTRIES_PER_STEP, len(left)))])
        lossy = [block for block in wanted if block.checksum_in(DRAM) != block.checksum] if wanted and wanted[0].columns.others else []
        for block in lossy:
            self._add(of_tenant, block)
        self.add_all([block for block in wanted if block.index_entry == NOT_INDEXED] if lossy else wanted)

    def _grow(self, of_tenant: _Tenant, growth: IndexGrowth) -> None:
        """Do one step of growth."""
        if not growth.step():
            of_tenant.growth = None
        if growth.index is not of_tenant.index:
            of_tenant.index = growth.index
            of_tenant.index.set_heartbeat(self._now_ns)
            of_tenant.index.set_freed_slabs(self._dram.slabs_released)
            of_tenant.left.extend(growth.old.pushed_out)

    @property
    def memory_bytes(self) -> int:
        """Memory of all indexes and reader slots."""
        return sum((one.growth or one.index).memory_bytes + READER_SLOTS_BYTES * len(one.readers) for one in self._tenants.values())

    @property
    def clients(self) -> int:
        """Number of attached connections."""
        return sum(len(one.readers) for one in self._tenants.values())

    def close(self) -> None:
        """Close all indexes and reader slots; clients see them as over."""
        for of_tenant in self._tenants.values():
            (of_tenant.growth or of_tenant.index).close()
            for reader in of_tenant.readers.values():
                reader.close()
        self._tenants.clear()


def _indexable(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks in DRAM that are not indexed and can be."""
    if not blocks:
        return []
    columns, rows = blocks[0].columns, rows_of(blocks)
    is_wanted = np.frombuffer(columns.states, np.uint8)[rows] & DROPPED == 0
    is_wanted &= np.frombuffer(columns.held, np.uint8)[rows] & HELD[DRAM] != 0
    is_wanted &= np.frombuffer(columns.index_entries, np.int32)[rows] == NOT_INDEXED
    is_wanted &= np.fromiter(map(len, keys_of(blocks)), np.intp, len(blocks)) <= MAX_KEY_BYTES
    return list(compress(blocks, is_wanted.tolist()))


def _count_indexable(blocks: Sequence[Block]) -> int:
    """Estimate from a sample how many of the blocks can be indexed. Checking ten million would stop the loop for 2.5 s."""
    sample = _sample_of(blocks)
    return len(_indexable(sample)) * len(blocks) // max(len(sample), 1)


def _key_words_of(blocks: Sequence[Block]) -> int:
    """Return the key length, in words, for an index of these blocks, from a sample."""
    lengths = [len(key) for key in keys_of(_sample_of(blocks)) if len(key) <= MAX_KEY_BYTES]
    return key_words_for(max(lengths)) if lengths else KEY_WORDS[0]


def _sample_of(blocks: Sequence[Block]) -> Sequence[Block]:
    return blocks[:: len(blocks) // SAMPLE_BLOCKS + 1]


def _sets_for(blocks: int) -> int:
    """Return the number of sets of an index that starts with this many blocks and need not grow at once."""
    sets = FIRST_SETS
    while sets < MAX_SETS and blocks > FULL_SHARE / 2 * sets * WAYS:
        sets *= 2
    return sets
