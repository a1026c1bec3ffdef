"""Block table: the directory of a node's blocks and their slots. Bookkeeping over the tiers; it copies no bytes and
never blocks.

It owns every slot of every tier and all Block objects:
- visible blocks (visible_blocks.py) and their copies (copies.py);
- open and ended puts (open_puts.py);
- eviction and planned moves (evictor.py).

The mover executes planned moves in a thread and reports them (`finish_move`). `now_ns` is passed in. Called from the
node's loop.

A block is visible from `commit` until it is dropped. A key has at most one visible block and at most one open put.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from kvstore.protocol.catalog_messages import EVENT_COMMIT, EVENT_MOVED, EVENT_REMOVED
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.protocol.settings import format_size
from kvstore.store.block_table.access_counts import NamespaceReads, TierCounts
from kvstore.store.block_table.block import DRAM, IN_USE, NVME, ON_HOLD, Block, Loss
from kvstore.store.block_table.copies import BlockCopies, Emit, IsProtected, SharedIndex
from kvstore.store.block_table.event_log import BlockEventLog
from kvstore.store.block_table.eviction_order import EvictionOrder, NextVictim
from kvstore.store.block_table.evictor import PROMOTE_AT_HITS, Evictor
from kvstore.store.block_table.free_slots import FreeSlots, SlotsAhead
from kvstore.store.block_table.holds import Holds
from kvstore.store.block_table.open_puts import EndedPuts, OpenBatch, OpenPut, OpenPuts
from kvstore.store.block_table.partition_map import PartitionMap
from kvstore.store.block_table.policy_families import PolicyFamilies
from kvstore.store.block_table.prefetched_blocks import PrefetchedBlocks
from kvstore.store.block_table.prompt_groups import PromptGroups
from kvstore.store.block_table.quotas import BlockLimit, BlockQuotas, most_blocks, most_remembered, table_bytes
from kvstore.store.block_table.retention import Hint, RetentionHints
from kvstore.store.block_table.retired_blocks import RetiredBlocks
from kvstore.store.block_table.rows import BlockRows, rows_of, write
from kvstore.store.block_table.shared_reuse import SharedReuse
from kvstore.store.block_table.tier_view import EncodedTotals, IsEvictable, TierView, evictable_in
from kvstore.store.block_table.uncommitted import UNCOMMITTED, UncommittedBlocks
from kvstore.store.block_table.visible_blocks import VisibleBlocks
from kvstore.tiers.policies.interface import PolicyFamily
from kvstore.tiers.tier import Slot, Tier
from kvstore.tiers.value_codec import Encoding

_DRAM_IN_USE = IN_USE[DRAM]
STAGED_SHARE = 16
"""At most 1/16 of DRAM holds values staged for single readers, or dropped while read. So a scan of cold blocks
displaces few hot ones."""
FORGOTTEN_AT_ONCE = 2048
"""Secondary copies whose marks one `expire` undoes: about 3 ms."""
READ_EVENT_BLOCKS = 256
"""Blocks per read event of local reads, so that answers to recorders are about full."""


@dataclass(frozen=True, slots=True)
class TableRules:
    """Configuration of a block table.

    A block is demoted to a full lowest tier only if it is worth `write_worth` times the block that leaves there.
    `max_table_bytes` bounds the blocks known at once and remembered after eviction; None: no bound. `encoding_of`
    returns the encoding of a block on its way from DRAM to NVMe, or None to store it raw.
    """

    make_family: Callable[[], PolicyFamily[bytes]]
    put_ttl_ns: int
    high_watermark: float = 1.0
    low_watermark: float = 1.0
    write_worth: float = 0.0
    max_table_bytes: int | None = None
    encoding_of: Callable[[Block], Encoding | None] | None = None


class BlockTable:
    """Node's block table. Not thread-safe."""

    def __init__(
        self,
        tiers: dict[int, Tier],
        rules: TableRules,
        *,
        emit: Emit,
        events: BlockEventLog,
        shared_index: SharedIndex,
        partition_map: PartitionMap,
        holds: Holds,
    ) -> None:
        """`tiers` by index (HBM, DRAM, NVME); DRAM is required and takes new blocks.

        `shared_index` receives blocks in DRAM and keeps slots that clients protect. `partition_map` maps keys to
        partitions. `holds` are the holds on its blocks.
        """
        self.rows = BlockRows()
        """Makes all blocks of the table."""
        self._visible = VisibleBlocks()
        self.find = self._visible.find
        """Return the visible block of a tenant's key, or None."""
        max_blocks = max_remembered = None
        if rules.max_table_bytes is not None:
            max_blocks, max_remembered = most_blocks(rules.max_table_bytes), most_remembered(rules.max_table_bytes)
        self._families = PolicyFamilies(rules.make_family, self._visible.by_key, max_remembered=max_remembered)
        evictable = {index: evictable_in(index) for index in tiers}
        self._evictable_in_dram = evictable[DRAM]
        self._levels = {
            index: TierView(
                index,
                tier,
                EvictionOrder(self._families, index),
                watermarks=(rules.high_watermark, rules.low_watermark),
                evictable_now=self._evictable_in_dram_now if index == DRAM else partial(_same, evictable[index]),
                evictable_of=self._evictable_in_dram_of if index == DRAM else None,
                has_lower_tier=partial(self._has_lower_tier, index) if index < max(tiers) else None,
            )
            for index, tier in sorted(tiers.items())
        }
        self.shared_reuse = SharedReuse(self._families)
        self._ingest_tier = self._levels[DRAM]
        self.lowest = self._levels[max(tiers)]
        """Tier view whose evictions drop blocks from the node."""
        self._emit = emit
        self.events = events
        self.uncommitted = UncommittedBlocks(partition_map)
        self._shared_index = shared_index
        self._protection_tenant: str | None = None
        """Tenant of the last protection check in the current victim search, with the result."""
        self._is_protected: IsProtected | None = None
        self.copies = BlockCopies(
            self._visible, self._levels, uncommitted=self.uncommitted, shared_index=self._shared_index, events=events, emit=emit
        )
        self.holds = holds
        self.evictor = Evictor(self._levels, self.copies, rules.encoding_of, self.holds, write_worth=rules.write_worth)
        self.puts = OpenPuts(ttl_ns=rules.put_ttl_ns)
        """Open puts."""
        self.quotas = BlockQuotas(self._visible, self.puts, self._levels, self.holds)
        self.reads = NamespaceReads()
        self.prompts = PromptGroups(self._visible.find, partition_map)
        self.secondary_blocks = 0
        """Blocks that became secondary copies since the start, because their home fetched one; `secondary_bytes` are
        their bytes."""
        self.secondary_bytes = 0
        self.primary_again = 0
        """Of these, blocks that are no longer marked: the copy at the home left first, or a link to a master was lost."""
        self._forgetting: deque[tuple[Callable[[bytes], bool], Iterator[tuple[str, bytes]]]] = deque()
        """Secondary copies whose marks are to end: a filter of keys, and (tenant, key) of those left."""
        self.retired = RetiredBlocks(self._visible, self._levels)
        self._block_limit = BlockLimit(
            self._visible, self.puts, self._levels, self.quotas, self.copies.drop, self.evictor, max_blocks=max_blocks
        )
        self._ended = EndedPuts(self.puts, self._ingest_tier.tier)
        self.slots = FreeSlots(self._ingest_tier, self._block_limit, self.evictor)
        self.ahead = SlotsAhead(self.slots, capacity_bytes=self._ingest_tier.tier.capacity_bytes)
        """Slots opened ahead for connections."""
        self.prefetched = PrefetchedBlocks(self._ingest_tier.tier.capacity_bytes)
        """Prefetches under way, and prefetched blocks that were not read yet."""
        self.retention = RetentionHints(self.rows.columns, self.find, self._set_priority)
        """Retention hints of the blocks."""
        self.misses = 0
        self.corrupt_reads = 0

    # --- puts ---

    def open(self, block: Block, owner: object, *, now_ns: int, may_drop: bool = False) -> OpenPut | None:
        """Give `block` a DRAM slot and open a put; the key must be neither visible nor open.

        Returns None if no slot is free now. Evictions may have been planned (see `Evictor.make`, also for `may_drop`):
        retry after a move, or in the next loop iteration (`Evictor.begin_iteration`). Raises InvalidArgument for a size
        that DRAM can never hold, TierFailed when the system refuses memory.
        """
        assert self.puts.of_key(block.tenant, block.key) is None
        return self.puts.add(block, owner, now_ns=now_ns) if self.place(block, may_drop=may_drop) is not None else None

    def place(self, block: Block, *, may_drop: bool = False) -> Slot | None:
        """Give `block` a DRAM slot for a value that has arrived, without an open put.

        `BlockCopies.make_placed_visible` must follow once the slot holds the value, then `enter_placed`, before any
        other call. Returns None and raises as `open`; None also while the key has an open put.
        """
        tenant = block.tenant
        if self.puts.of_key(tenant, block.key) is not None or not self._block_limit.make_space_for_one(tenant):
            return None
        slot = self.evictor.make(self._ingest_tier, block.size_bytes, tenant, may_drop=may_drop)
        block.set_slot(DRAM, slot)
        return slot

    def place_at(self, block: Block, slot: Slot) -> bool:
        """As `place`, with a slot opened ahead. Return False if the key has an open put or the block limit is reached."""
        if self.puts.of_key(block.tenant, block.key) is not None or not self._block_limit.make_space_for_one(block.tenant):
            return False
        block.set_slot(DRAM, slot)
        return True

    def enter_placed(self, block: Block) -> None:
        """Complete the bookkeeping of a placed block, which is uncommitted."""
        self._ingest_tier.add(block)
        self.uncommitted.add(block)

    def open_at(self, block: Block, slot: Slot, owner: object, *, now_ns: int) -> OpenPut:
        """Open a put in a slot of `FreeSlots.spare_slots`."""
        block.set_slot(DRAM, slot)
        return self.puts.add(block, owner, now_ns=now_ns)

    def are_new(self, tenant: str, keys: Iterable[bytes]) -> bool:
        """Return True if none of the keys has a visible block or an open put."""
        return not self._visible.has_any(tenant, keys) and not self.puts.has_any(tenant, keys)

    def commit(self, put: OpenPut, checksum: int) -> Block:
        """Make an open put's block visible; its slot holds the value. The master has reserved it and is notified by an
        event."""
        self.puts.close(put)
        block = put.block
        block.checksum = checksum
        self.copies.make_visible(block, self._ingest_tier)
        self._emit(EVENT_COMMIT, block)
        return block

    def store_uncommitted(self, put: OpenPut, checksum: int) -> Block:
        """Make an open put's block visible, uncommitted: a commit request follows instead of an event."""
        self.puts.close(put)
        put.block.checksum = checksum
        self.copies.make_visible(put.block, self._ingest_tier)
        self.uncommitted.add(put.block)
        return put.block

    def store_all_uncommitted(self, puts: Sequence[OpenPut], checksums: Sequence[int]) -> None:
        """Store puts of one tenant uncommitted."""
        if puts:
            self.puts.close_all(puts)
            self._keep_all([put.block for put in puts], checksums)

    def store_batch_uncommitted(self, batch: OpenBatch, checksums: Sequence[int]) -> None:
        """Store all puts of an unsplit batch uncommitted."""
        self.puts.close_batch(batch)
        self._keep_all(batch.blocks, checksums)

    def _keep_all(self, blocks: Sequence[Block], checksums: Sequence[int]) -> None:
        """Make blocks of one tenant visible, uncommitted. Their slots hold the values."""
        write(blocks[0].columns.checksums, rows_of(blocks), checksums)
        self.copies.make_all_visible(blocks)
        self.uncommitted.add_all(blocks)

    def mark_committed(self, block: Block, generation: int) -> None:
        """The directory has the visible block, under `generation`."""
        block.columns.generations[block] = generation
        self.uncommitted.remove(block)

    def mark_all_committed(self, blocks: Sequence[Block], generations: Sequence[int]) -> None:
        """Mark blocks of one tenant and namespace as committed."""
        write(blocks[0].columns.generations, rows_of(blocks), generations)
        self.uncommitted.remove_all(blocks)

    def commit_granted(self, put: OpenPut, checksum: int, generation: int) -> None:
        """Make a put's block visible that the master has committed already, under `generation`; no event is needed.
        `enter_granted` must follow before other work of the loop."""
        self.puts.close(put)
        put.block.checksum, put.block.generation = checksum, generation
        self.copies.make_placed_visible(put.block)

    def enter_granted(self, block: Block) -> None:
        """Complete the bookkeeping of a granted block."""
        self._ingest_tier.add(block)

    def retract(self, block: Block, generation: int) -> None:
        """Report as evicted a block that the master committed under `generation` and that no longer exists here."""
        assert self.find(block.tenant, block.key) is not block, "a visible block is dropped, not disowned"
        block.generation, block.is_dropped = generation, True
        self._emit(EVENT_REMOVED, block)

    def abort(self, put: OpenPut) -> None:
        """See EndedPuts, also for the next four."""
        self._ended.abort(put)

    def expire(self, *, now_ns: int) -> int:
        self.reads.stamp(now_ns)
        self.evictor.retry_failed_searches()
        self._block_limit.retry_failed_searches()
        self.holds.expire(now_ns=now_ns)
        self.ahead.expire(now_ns=now_ns)
        self.prefetched.check(now_ns)
        self.retention.step(now_ns)
        self._forget_secondary()
        self._families.flush_touches()
        return self._ended.expire(now_ns=now_ns)

    def awaited(self) -> list[object]:
        return self._ended.awaited()

    def settle(self, put_id: int, owner: object) -> None:
        self._ended.settle(put_id, owner)

    def may_write(self, owner: object) -> bool:
        """Return True if the owner may be writing slots: of puts, or a slot ahead, which is withdrawn if it is idle."""
        return self.puts.has_any_of(owner) or not self.ahead.withdraw(owner)

    def forget_owner(self, owner: object) -> None:
        self.holds.forget_owner(owner)
        self.ahead.close(owner)
        self._ended.forget_owner(owner)

    # --- reads ---

    def record_local_reads(self, tenant: str, blocks: list[Block], others: int) -> None:
        """Record reads through shared memory as accesses, which may promote blocks to HBM. `others` is the number of
        reads whose blocks are unknown."""
        for block in blocks:
            self.hit(block)
            self.evictor.promote_to_hbm(block)
        for begin in range(0, len(blocks), READ_EVENT_BLOCKS):
            self.events.read(tenant, blocks[begin : begin + READ_EVENT_BLOCKS], is_far=False)
        if others:
            self._ingest_tier.counts.hit(tenant, others)
            self.events.missed(tenant, others)

    def hit(self, block: Block) -> None:
        """Record an access of a visible block."""
        index = block.fastest()
        assert index is not None
        self._levels[index].counts.hit(block.tenant)
        block.hits += 1
        self.reads.note(block)
        self._visible.access(block)
        for index in block.tiers():
            self._levels[index].order.touch(block, block.group_in(index))

    def mark_secondary(self, tenant: str, keys: Sequence[bytes]) -> None:
        """Mark blocks whose home is another node, which holds a copy. Absent and uncommitted ones are skipped."""
        for key in keys:
            block = self._visible.find(tenant, key)
            if block is None or block.generation == UNCOMMITTED:
                continue
            if not block.is_secondary:
                self.secondary_blocks += 1
                self.secondary_bytes += block.size_bytes
                block.is_secondary = True
            for index in block.tiers():
                self._levels[index].order.mark_secondary(block, block.group_in(index))

    def mark_primary(self, tenant: str, keys: Sequence[bytes]) -> None:
        """Undo `mark_secondary`: the home holds no copy any more. Blocks that are not secondary are skipped."""
        for key in keys:
            block = self._visible.find(tenant, key)
            if block is None or not block.is_secondary:
                continue
            self.primary_again += 1
            block.is_secondary = False
            for index in block.tiers():
                if index != NVME or not block.is_also_outside(NVME):  # below a promoted copy it stays secondary
                    self._levels[index].order.unmark_secondary(block, block.group_in(index))

    def forget_secondary(self, is_of: Callable[[bytes], bool]) -> None:
        """Undo `mark_secondary` of all blocks with such keys, some in each `expire`: their master may have lost their homes,
        or a message about them."""
        found = [of for level in self._levels.values() for of in level.order.secondary_copies()]
        if found:
            self._forgetting.append((is_of, ((tenant, key) for tenant, keys in found for key in keys)))

    def _forget_secondary(self) -> None:
        if self._forgetting:
            is_of, marks = self._forgetting[0]
            part = list(islice(marks, FORGOTTEN_AT_ONCE))
            for tenant, key in part:
                if is_of(key):
                    self.mark_primary(tenant, [key])
            if not part:
                self._forgetting.popleft()

    def retain(self, tenant: str, blocks: Sequence[Block], hint: Hint, reuse_ms: int, now_ns: int) -> None:
        """Apply a retention hint to visible blocks of the tenant. `reuse_ms`: time until they are expected to be read,
        0 if unknown."""
        self.retention.apply(tenant, blocks, hint, now_ns)
        for block in blocks if reuse_ms else ():
            for index in block.tiers():
                self._levels[index].order.expect_reuse(block, block.group_in(index), reuse_ms / 1000)

    def _set_priority(self, block: Block, priority: int) -> None:
        for index in block.tiers():
            self._levels[index].order.set_priority(block, block.group_in(index), priority)

    def wants_promotion(self, block: Block) -> bool:
        """Return True if a block outside DRAM was read often enough to be copied there."""
        return block.hits >= PROMOTE_AT_HITS and not block.moving and not block.is_in(DRAM)

    def begin_promotion(self, block: Block, *, may_wait: bool = False) -> Slot | None:
        """Return a DRAM slot to read the block into, or None if none is free at once. `finish_move` ends it. With
        `may_wait` demotions may have been planned: retry after a move."""
        try:
            slot = self.evictor.make(self._ingest_tier, block.size_bytes, block.tenant, may_wait=may_wait)
        except KVStoreError:  # larger than a DRAM that was larger before the restart, or the system refuses memory
            return None
        block.moving = slot is not None
        self.evictor.under_way += block.moving
        return slot

    def staging_slot(self, block: Block) -> Slot | None:
        """Return a DRAM slot for `BlockCopies.stage`. None if none is free at once, or more than 1/STAGED_SHARE of DRAM
        would be quarantined."""
        tier = self._ingest_tier.tier
        if tier.quarantined_bytes + block.size_bytes > tier.capacity_bytes // STAGED_SHARE:
            return None
        try:
            return self.evictor.make(self._ingest_tier, block.size_bytes, block.tenant, may_wait=False)
        except KVStoreError:  # as in `begin_promotion`
            return None

    # --- evictions ---

    def _evictable_in_dram_now(self) -> IsEvictable:
        self._protection_tenant = None
        return self._is_evictable_in_dram

    def _is_evictable_in_dram(self, block: Block) -> bool:
        columns = block.columns
        tenant = columns.tenant
        if tenant != self._protection_tenant:  # who begins to look meanwhile is seen when the block is hidden: its slot is kept then
            self._protection_tenant, self._is_protected = (
                tenant,
                self._shared_index.protection_of(tenant),
            )  # which takes the tenant's new holds first
        if columns.readers[block] or columns.states[block] & _DRAM_IN_USE:  # as evictable_in
            return False
        is_protected = self._is_protected
        return is_protected is None or not is_protected(columns.slot_indexes[block])

    def _evictable_in_dram_of(self, tenant: str) -> IsEvictable:
        return (
            self._evictable_in_dram_now() if self._shared_index.protection_of(tenant) is not None else self._evictable_in_dram
        )  # usual case

    def _has_lower_tier(self, index: int) -> bool:
        return self.evictor.has_lower_tier(index)

    def demote_to_low_watermark(self) -> None:
        """Demote to the low watermark and evict blocks of tenants over quota. Called once per loop iteration."""
        self._ended.run_due()
        self.evictor.demote_to_low_watermark()
        self._block_limit.evict_over_quota()

    # --- finished moves ---

    def finish_move(self, block: Block, source: int, target: int, slot: Slot, *, is_done: bool, loss: Loss | None = None) -> None:
        """Record a move that succeeded or failed. A demoted block is dropped from its source unless it is in use.

        `loss`: the copy differs from the value that was put.
        """
        was_demotion = block.demoted_from is not None
        self.copies.end_demotion(block)
        block.moving = False
        self.evictor.under_way -= 1
        if block.is_dropped or not is_done:
            self._levels[target].tier.free(slot)
            if block.is_dropped:
                self.copies.free_unused(block)
            return
        if loss is not None or block.lossy:
            block.set_loss(target, loss)
        block.hits = 0
        self.copies.add(block, target, slot)
        if block.is_secondary:
            self._levels[target].order.mark_secondary(block, block.group_in(target))
        if not was_demotion:
            self._levels[target].counts.promotions += target != NVME
            if source == NVME:
                self._levels[NVME].order.mark_secondary(block, block.group_in(NVME))
        else:
            self._levels[source].counts.demotions += 1
            if not block.readers and not block.pinned and not block.hold_bits & ON_HOLD[source]:
                self.copies.drop_copy(block, source)
                return
        self._emit(EVENT_MOVED, block)

    # --- whole table ---

    def recover(self, blocks: Iterable[Block]) -> int:
        """Add blocks found in NVMe at start, oldest first; return their number. The higher generation of a key wins;
        above the block limit the newest stay."""
        level = self._levels[NVME]
        for block in blocks:
            old, slot = self.find(block.tenant, block.key), block.nvme
            assert slot is not None
            if old is not None and old.generation >= block.generation:
                level.tier.free(slot)
                continue
            if old is not None:
                self.copies.drop(old)
            self._block_limit.make_space_for_one("")
            # The tier cannot know the tenant of what it found.
            block.set_slot(NVME, level.tier.adopt(slot, tenant=block.tenant))
            self.copies.make_visible(block, level)
        return len(self._visible)

    def blocks(self) -> Iterator[Block]:
        """Iterate over visible blocks. The table must not change meanwhile."""
        return iter(self._visible)

    def blocks_of(self, tenant: str) -> list[Block]:
        """Return a tenant's visible blocks."""
        return self._visible.of_tenant(tenant)

    def levels(self) -> Iterator[tuple[int, Tier, TierCounts, int]]:
        """Iterate over (index, tier, counts, number of blocks) of each tier."""
        for index, level in self._levels.items():
            yield index, level.tier, level.counts, len(level)

    def encoded(self, index: int) -> EncodedTotals:
        return self._levels[index].encoded

    def health(self, index: int) -> str:
        """See TierView.health."""
        return self._levels[index].health

    def next_victim(self, index: int) -> NextVictim | None:
        """See TierView.next_victim."""
        return self._levels[index].next_victim()

    @property
    def table_bytes(self) -> int:
        """Estimated memory of the table, including remembered blocks."""
        return table_bytes(len(self._visible) + len(self.puts), self._families.remembered)

    @property
    def accesses(self) -> int:
        """Access counter: `last_access` of blocks refers to it."""
        return self._visible.accesses

    @property
    def open_puts(self) -> int:
        return len(self.puts)

    def check_size(self, size_bytes: int, tenant: str) -> None:
        """Raises InvalidArgument for a value that DRAM can never hold, QuotaExceeded if the tenant's quota never can."""
        capacity = self._ingest_tier.tier.capacity_bytes
        if size_bytes > capacity:
            raise InvalidArgument(f"value of {format_size(size_bytes)} exceeds this node's DRAM tier of {format_size(capacity)}")
        self.quotas.check(tenant, size_bytes)


def _same(may_leave: IsEvictable) -> IsEvictable:
    """Protection check of a tier without local clients."""
    return may_leave
