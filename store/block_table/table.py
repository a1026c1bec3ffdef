"""The block table: what a node holds and where. Pure bookkeeping over the tiers.

It owns every slot of every tier and all Block objects: the visible ones (visible_blocks.py) with their copies (copies.py), and those of
puts that are at work or ended otherwise (open_puts.py). It copies no bytes and waits for nothing: `room` chooses who leaves for
something new and plans what is to go from tier to tier (evictor.py), the mover does that in a worker thread, and it is recorded here
when it is done (`finish_move`). `now_ns` is passed in. The node's loop is the only caller.

A block is visible from `commit` until it is dropped. At most one block a key is visible, and at most one writer a key is at work.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.protocol.catalog_messages import EVENT_COMMIT, EVENT_MOVED, EVENT_REMOVED
from kvstore.protocol.errors import InvalidArgument, KVStoreError
from kvstore.protocol.settings import format_size
from kvstore.store.block_table.access_counts import NamespaceReads, TierCounts
from kvstore.store.block_table.block import DRAM, IN_USE, NVME, ON_HOLD, Block, Loss
from kvstore.store.block_table.copies import BlockCopies, Emit, IsLookedAt, SharedIndex
from kvstore.store.block_table.event_log import BlockEventLog
from kvstore.store.block_table.eviction_order import EvictionOrder
from kvstore.store.block_table.evictor import PROMOTE_AT_HITS, Evictor
from kvstore.store.block_table.free_slots import FreeSlots, SlotsAhead
from kvstore.store.block_table.holds import Holds
from kvstore.store.block_table.open_puts import EndedPuts, OpenBatch, OpenPut, OpenPuts
from kvstore.store.block_table.partitioning import Partitioning
from kvstore.store.block_table.quotas import BlockLimit, BlockQuotas, most_blocks, most_remembered, table_bytes
from kvstore.store.block_table.retired_blocks import RetiredBlocks
from kvstore.store.block_table.rows import BlockRows, rows_of, write
from kvstore.store.block_table.tier_view import EncodedTotals, MayLeave, TierView, evictable_in
from kvstore.store.block_table.uncommitted import UncommittedBlocks
from kvstore.store.block_table.visible_blocks import VisibleBlocks
from kvstore.tiers.policies.interface import EvictionPolicy
from kvstore.tiers.tier import Slot, Tier
from kvstore.tiers.value_codec import Encoding

_DRAM_IN_USE = IN_USE[DRAM]
STAGED_SHARE = 16
"""One part in so many of DRAM may hold values that were read from lower tiers for their readers alone, or that left under a reader: a scan
of cold blocks takes no more of the memory of those that are read often."""
READ_EVENT_BLOCKS = 256
"""What was read unasked is told to recorders in events of at most as many blocks, so that answers to them are about full."""


@dataclass(frozen=True, slots=True)
class TableRules:
    """What a table goes by. `max_table_bytes` bounds how many blocks are known at once, and remembered after they left; None: as many as
    the tiers hold.

    With `encoding_of` values go from DRAM to NVMe encoded: it returns what becomes of a block, or None for one that stays as it is.
    """

    make_policy: Callable[[], EvictionPolicy[bytes]]
    put_ttl_ns: int
    high_watermark: float = 1.0
    low_watermark: float = 1.0
    max_table_bytes: int | None = None
    encoding_of: Callable[[Block], Encoding | None] | None = None


class BlockTable:
    """See the module."""

    def __init__(
        self,
        tiers: dict[int, Tier],
        rules: TableRules,
        *,
        emit: Emit,
        events: BlockEventLog,
        showing: SharedIndex,
        partitioning: Partitioning,
        holds: Holds,
    ) -> None:
        """`tiers` by index (HBM, DRAM, NVME); DRAM is where puts land and must be there.

        `showing` is told what has a copy in DRAM, and keeps what clients look at there. `partitioning` says whom to ask about a
        block, `holds` are those of its blocks.
        """
        self.rows = BlockRows()
        """Makes all blocks that the table is given."""
        self._visible = VisibleBlocks()
        self.find = self._visible.find
        """The visible block of a tenant's key, or None."""
        max_blocks = max_remembered = None
        if rules.max_table_bytes is not None:
            max_blocks, max_remembered = most_blocks(rules.max_table_bytes), most_remembered(rules.max_table_bytes) // len(tiers)
        evictable = {index: evictable_in(index) for index in tiers}
        self._evictable_in_dram = evictable[DRAM]
        self._levels = {
            index: TierView(
                index,
                tier,
                EvictionOrder(rules.make_policy, self._visible.by_key, max_remembered=max_remembered, is_of_dram=index == DRAM),
                watermarks=(rules.high_watermark, rules.low_watermark),
                may_leave_now=self._may_leave_dram_now if index == DRAM else partial(_same, evictable[index]),
                may_leave_of=self._may_leave_dram_of if index == DRAM else None,
                goes_down=partial(self._goes_down, index) if index < max(tiers) else None,
            )
            for index, tier in sorted(tiers.items())
        }
        self._landing = self._levels[DRAM]
        self.lowest = self._levels[max(tiers)]
        """What leaves this tier leaves the node."""
        self._emit = emit
        self.events = events
        self.undecided = UncommittedBlocks(partitioning)
        self._showing = showing
        self._looks_of: str | None = None
        """The tenant of which the search under way for blocks that may leave DRAM asked last at what its clients look, and the answer."""
        self._is_looked_at: IsLookedAt | None = None
        self.copies = BlockCopies(self._visible, self._levels, undecided=self.undecided, showing=self._showing, events=events, emit=emit)
        self.holds = holds
        self.room = Evictor(self._levels, self.copies, rules.encoding_of, self.holds)
        self.puts = OpenPuts(ttl_ns=rules.put_ttl_ns)
        """Those at work."""
        self.quotas = BlockQuotas(self._visible, self.puts, self._levels, self.holds)
        self.reads = NamespaceReads()
        self.retired = RetiredBlocks(self._visible, self._levels)
        self._crowding = BlockLimit(self._visible, self.puts, self._levels, self.quotas, self.copies.drop, self.room, max_blocks=max_blocks)
        self._ended = EndedPuts(self.puts, self._landing.tier)
        self.slots = FreeSlots(self._landing, self._crowding, self.room, is_lowest=self._landing is self.lowest)
        self.ahead = SlotsAhead(self.slots, capacity_bytes=self._landing.tier.capacity_bytes)
        """Slots that are opened ahead for the next puts of connections."""
        self.misses = 0
        self.corrupt_reads = 0

    # --- puts ---

    def open(self, block: Block, owner: object, *, now_ns: int, may_drop: bool = False) -> OpenPut | None:
        """Give `block` a slot in DRAM and make it this key's put; the key must be neither visible nor being written.

        None when there is no room now: room is being made if it can be (see `Evictor.make`, as for `may_drop`), ask again when a move has
        finished, or in the next turn (`Evictor.next_turn`).
        Raises InvalidArgument for a size DRAM can never hold, TierFailed when the system refuses memory.
        """
        assert self.puts.of_key(block.tenant, block.key) is None
        return self.puts.add(block, owner, now_ns=now_ns) if self.place(block, may_drop=may_drop) is not None else None

    def place(self, block: Block, *, may_drop: bool = False) -> Slot | None:
        """Give `block` a slot in DRAM for a value that is here already: what `open` does, without a put that could be left open.
        `BlockCopies.show_placed` has to follow once the slot holds the value, and `enter_placed`, before the table
        is asked anything else. None
        and errors as of `open`; None, too, while somebody writes the key."""
        tenant = block.tenant
        if self.puts.of_key(tenant, block.key) is not None or not self._crowding.may_know_one_more(tenant):
            return None
        slot = self.room.make(self._landing, block.size_bytes, tenant, may_drop=may_drop)
        block.set_slot(DRAM, slot)
        return slot

    def place_at(self, block: Block, slot: Slot) -> bool:
        """As `place`, with a slot that was opened ahead. False: somebody writes the key, or no more blocks may be known."""
        if self.puts.of_key(block.tenant, block.key) is not None or not self._crowding.may_know_one_more(block.tenant):
            return False
        block.set_slot(DRAM, slot)
        return True

    def enter_placed(self, block: Block) -> None:
        """The rest of what makes the block visible, for the master to decide about."""
        self._landing.add(block)
        self.undecided.add(block)

    def open_at(self, block: Block, slot: Slot, owner: object, *, now_ns: int) -> OpenPut:
        """As `open`, with one of `FreeSlots.spare_slots`."""
        block.set_slot(DRAM, slot)
        return self.puts.add(block, owner, now_ns=now_ns)

    def are_new(self, tenant: str, keys: Iterable[bytes]) -> bool:
        """None of these keys has a visible block or a put at work."""
        return not self._visible.has_any(tenant, keys) and not self.puts.has_any(tenant, keys)

    def commit(self, put: OpenPut, checksum: int) -> Block:
        """The slot holds the value: make it visible. A put that has been closed (committed, aborted, expired) must not come here."""
        self.puts.close(put)
        block = put.block
        block.checksum = checksum
        self.copies.show(block, self._landing)
        self._emit(EVENT_COMMIT, block)
        return block

    def commit_undecided(self, put: OpenPut, checksum: int) -> Block:
        """As `commit`, for a block that the master is asked about afterwards: it hears of it by a claim, not by an event."""
        self.puts.close(put)
        put.block.checksum = checksum
        self.copies.show(put.block, self._landing)
        self.undecided.add(put.block)
        return put.block

    def commit_all_undecided(self, puts: Sequence[OpenPut], checksums: Sequence[int]) -> None:
        """As `commit_undecided`, of puts of one tenant."""
        if puts:
            self.puts.close_all(puts)
            self._keep_all([put.block for put in puts], checksums)

    def commit_batch_undecided(self, batch: OpenBatch, checksums: Sequence[int]) -> None:
        """As `commit_all_undecided`, of all puts of one that `batch_of` gave."""
        self.puts.close_batch(batch)
        self._keep_all(batch.blocks, checksums)

    def _keep_all(self, blocks: Sequence[Block], checksums: Sequence[int]) -> None:
        """Make blocks of one tenant, whose slots hold their values, visible, for the master to decide about."""
        write(blocks[0].columns.checksums, rows_of(blocks), checksums)
        self.copies.show_all(blocks)
        self.undecided.add_all(blocks)

    def decide(self, block: Block, generation: int) -> None:
        """The master knows the visible block, under `generation` from now on."""
        block.columns.generations[block] = generation
        self.undecided.remove(block)

    def decide_all(self, blocks: Sequence[Block], generations: Sequence[int]) -> None:
        """As `decide`, of blocks of one tenant and namespace."""
        write(blocks[0].columns.generations, rows_of(blocks), generations)
        self.undecided.remove_all(blocks)

    def commit_claimed(self, put: OpenPut, checksum: int, generation: int) -> None:
        """As `commit`, for a block that the master has made visible already, under `generation`: it needs no event. `enter_claimed` has to
        follow before the loop does anything else."""
        self.puts.close(put)
        put.block.checksum, put.block.generation = checksum, generation
        self.copies.show_placed(put.block)

    def enter_claimed(self, block: Block) -> None:
        """The rest of what makes the block visible."""
        self._landing.add(block)

    def disown(self, block: Block, generation: int) -> None:
        """The master has made a block visible under `generation` whose put is over, and which is not here any more: tell it."""
        assert self.find(block.tenant, block.key) is not block, "a visible block is dropped, not disowned"
        block.generation, block.is_gone = generation, True
        self._emit(EVENT_REMOVED, block)

    def abort(self, put: OpenPut) -> None:
        """See EndedPuts, as for the next four."""
        self._ended.abort(put)

    def expire(self, *, now_ns: int) -> int:
        self.reads.stamp(now_ns)
        self.room.look_again()
        self._crowding.look_again()
        self.holds.expire(now_ns=now_ns)
        self.ahead.expire(now_ns=now_ns)
        for level in self._levels.values():
            level.order.tell()
        return self._ended.expire(now_ns=now_ns)

    def awaited(self) -> list[object]:
        return self._ended.awaited()

    def settle(self, put_id: int, owner: object) -> None:
        self._ended.settle(put_id, owner)

    def may_write(self, owner: object) -> bool:
        """Whether the owner has slots that it may be writing: of puts, or one that was opened ahead, which is taken back if it is idle."""
        return self.puts.has_any_of(owner) or not self.ahead.withdraw(owner)

    def forget_owner(self, owner: object) -> None:
        self.holds.forget_owner(owner)
        self.ahead.close(owner)
        self._ended.forget_owner(owner)

    # --- reads ---

    def read_unasked(self, tenant: str, blocks: list[Block], others: int) -> None:
        """A client of this host has read copies in DRAM by itself: accesses, which may have earned them a place in HBM. And `others`, of
        which only the number is known."""
        for block in blocks:
            self.hit(block)
            self.room.warm(block)
        for begin in range(0, len(blocks), READ_EVENT_BLOCKS):
            self.events.read(tenant, blocks[begin : begin + READ_EVENT_BLOCKS], is_far=False)
        if others:
            self._landing.counts.hit(tenant, others)
            self.events.missed(tenant, others)

    def hit(self, block: Block) -> None:
        """A reader gets the visible block: an access."""
        index = block.fastest()
        assert index is not None
        self._levels[index].counts.hit(block.tenant)
        block.hits += 1
        self.reads.note(block)
        self._visible.access(block)
        for index in block.tiers():
            self._levels[index].order.touch(block, block.group_in(index))

    def wants_promotion(self, block: Block) -> bool:
        """Whether a block that is not in DRAM has been read often enough to be copied there."""
        return block.hits >= PROMOTE_AT_HITS and not block.moving and not block.is_in(DRAM)

    def begin_promotion(self, block: Block) -> Slot | None:
        """A DRAM slot to read the block into, or None if there is none to be had at once. `finish_move` ends it."""
        try:
            slot = self.room.make(self._landing, block.size_bytes, block.tenant, may_wait=False)
        except KVStoreError:  # larger than a DRAM that was larger before the restart, or the system refuses memory
            return None
        block.moving = slot is not None
        self.room.under_way += block.moving
        return slot

    def staging_slot(self, block: Block) -> Slot | None:
        """A DRAM slot to read the block into for one reader, for `BlockCopies.stage`. None: there is none at once,
        or more than STAGED_SHARE of
        DRAM would be in quarantine."""
        tier = self._landing.tier
        if tier.quarantined_bytes + block.size_bytes > tier.capacity_bytes // STAGED_SHARE:
            return None
        try:
            return self.room.make(self._landing, block.size_bytes, block.tenant, may_wait=False)
        except KVStoreError:  # as in `begin_promotion`
            return None

    # --- room ---

    def _may_leave_dram_now(self) -> MayLeave:
        self._looks_of = None
        return self._may_leave_dram

    def _may_leave_dram(self, block: Block) -> bool:
        columns = block.columns
        tenant = columns.tenant
        if tenant != self._looks_of:  # who begins to look meanwhile is seen when the block is hidden: its slot is kept then
            self._looks_of, self._is_looked_at = tenant, self._showing.who_looks(tenant)  # which takes the tenant's new holds first
        if columns.readers[block] or columns.states[block] & _DRAM_IN_USE:  # as evictable_in
            return False
        is_looked_at = self._is_looked_at
        return is_looked_at is None or not is_looked_at(columns.places[block])

    def _may_leave_dram_of(self, tenant: str) -> MayLeave:
        return self._may_leave_dram_now() if self._showing.who_looks(tenant) is not None else self._evictable_in_dram  # as a rule

    def _goes_down(self, index: int) -> bool:
        return self.room.goes_down(index)

    def relieve(self) -> None:
        """Demote to the low watermark (`Evictor.relieve`), and evict blocks of tenants over quota. Called once per loop iteration."""
        self._ended.go_on()
        self.room.relieve()
        self._crowding.take_surplus()

    # --- moves that have ended ---

    def finish_move(self, block: Block, source: int, target: int, slot: Slot, *, is_done: bool, loss: Loss | None = None) -> None:
        """A copy has been made, or could not be. A demoted block leaves its source unless it is being read again meanwhile.

        `loss`: the copy does not give what was put.
        """
        was_leaving = block.leaving is not None
        self.copies.stop_leaving(block)
        block.moving = False
        self.room.under_way -= 1
        if block.is_gone or not is_done:
            self._levels[target].tier.free(slot)
            if block.is_gone:
                self.copies.free_unused(block)
            return
        if loss is not None or block.lossy:
            block.set_loss(target, loss)
        block.hits = 0
        self.copies.add(block, target, slot)
        if not was_leaving:
            self._levels[target].counts.promotions += target != NVME
        else:
            self._levels[source].counts.demotions += 1
            if not block.readers and not block.pinned and not block.hold_bits & ON_HOLD[source]:
                self.copies.drop_copy(block, source)
                return
        self._emit(EVENT_MOVED, block)

    # --- the whole ---

    def recover(self, blocks: Iterable[Block]) -> int:
        """Take over blocks found in NVMe at start, oldest first; returns how many. Of two with one key the higher generation stays, and of
        more than may be known the newest."""
        level = self._levels[NVME]
        for block in blocks:
            old, slot = self.find(block.tenant, block.key), block.nvme
            assert slot is not None
            if old is not None and old.generation >= block.generation:
                level.tier.free(slot)
                continue
            if old is not None:
                self.copies.drop(old)
            self._crowding.may_know_one_more("")
            # The tier cannot know the tenant of what it found.
            block.set_slot(NVME, level.tier.adopt(slot, tenant=block.tenant))
            self.copies.show(block, level)
        return len(self._visible)

    def blocks(self) -> Iterator[Block]:
        """Every visible block; the table must not change meanwhile."""
        return iter(self._visible)

    def blocks_of(self, tenant: str) -> list[Block]:
        """Every visible block of a tenant."""
        return self._visible.of_tenant(tenant)

    def levels(self) -> Iterator[tuple[int, Tier, TierCounts, int]]:
        """(index, tier, counts, blocks) of each tier that is there."""
        for index, level in self._levels.items():
            yield index, level.tier, level.counts, len(level)

    def encoded(self, index: int) -> EncodedTotals:
        return self._levels[index].encoded

    @property
    def table_bytes(self) -> int:
        """Memory beside the tiers for what is known of blocks, also of those that left, estimated."""
        remembered = sum(level.order.remembered for level in self._levels.values())
        return table_bytes(len(self._visible) + len(self.puts), remembered)

    @property
    def accesses(self) -> int:
        """By which blocks' last ones are counted."""
        return self._visible.accesses

    @property
    def open_puts(self) -> int:
        return len(self.puts)

    def check_room(self, size_bytes: int, tenant: str) -> None:
        """Raises InvalidArgument for a value that DRAM can never hold, QuotaExceeded for one that the tenant's quota never can."""
        capacity = self._landing.tier.capacity_bytes
        if size_bytes > capacity:
            raise InvalidArgument(f"a value of {format_size(size_bytes)} is larger than this node's DRAM tier of {format_size(capacity)}")
        self.quotas.check(tenant, size_bytes)


def _same(may_leave: MayLeave) -> MayLeave:
    """What a tier without clients of this host says for each search."""
    return may_leave
