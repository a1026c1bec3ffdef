"""Prefetches of a node's own blocks into DRAM, in the background: a queue a tenant, a few batches at a time.

A prefetch is a promotion without a read: a batch of blocks is read from NVMe or HBM into DRAM slots by the reader
threads. It evicts as a put does, but waits behind its tenant's queued puts, for at most ROOM_WAIT_NS.
`PrefetchedBlocks` bounds what is queued, under way or unread.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from kvstore.rpc.reactor import Reactor
from kvstore.store.block_table.block import DRAM, Block
from kvstore.store.block_table.table import BlockTable
from kvstore.store.tiering.mover import SlowRead, TierMover
from kvstore.store.wait_queue import WaitQueue
from kvstore.tiers.dram import DramTier
from kvstore.tiers.tier import Slot

BATCH_BYTES: Final = 8 << 20
"""Bytes read at once, or one block: a client's read waits for some milliseconds behind a batch."""
BATCH_BLOCKS: Final = 256
MAX_BATCHES: Final = 2
"""Batches under way: one is read while the other is planned."""
ROOM_WAIT_NS: Final = 1_000_000_000
"""Time for which a tenant's queue waits for a free slot. Then it is dropped: its blocks were read from their tier by
then."""


class _Promotion(NamedTuple):
    """A block that is read into a DRAM slot, and its hit count as it was queued."""

    read: SlowRead
    slot: Slot
    hits: int


@dataclass(slots=True, eq=False)
class _TenantQueue:
    """A tenant's queued blocks, with their hit counts as they were queued. `stuck_ns`: since when the first lacks a
    slot; 0: it does not."""

    blocks: OrderedDict[Block, int] = field(default_factory=OrderedDict)
    stuck_ns: int = 0


class Prefetcher:
    """Queues of blocks to be brought into DRAM. Not thread-safe: called from the node's loop."""

    def __init__(self, reactor: Reactor, table: BlockTable, dram: DramTier, mover: TierMover, waiting: WaitQueue) -> None:
        """`waiting` are the node's queued puts."""
        self._reactor = reactor
        self._table = table
        self._prefetched = table.prefetched
        self._dram = dram
        self._mover = mover
        self._waiting = waiting
        self._queues: OrderedDict[str, _TenantQueue] = OrderedDict()
        """By tenant; the next one first. None is empty."""
        self._batches = 0
        self.under_way: dict[Block, list[Callable[[], None]]] = {}
        """Blocks that are being read, each with the list of its batch: what is called at the batch's end."""

    def queue(self, tenant: str, keys: Iterable[bytes]) -> int:
        """Queue the tenant's blocks that are here and not in DRAM, in the order of `keys`; return their number. From the
        first that exceeds the limit on, all are refused: a prompt needs its beginning first."""
        self._prefetched.check(self._reactor.now_ns())
        line = self._queues.get(tenant) or _TenantQueue()
        queued = refused = 0
        for key in keys:
            block = self._table.find(tenant, key)
            if block is None or block.is_in(DRAM) or block.moving or block in line.blocks:
                continue
            if refused or not self._prefetched.reserve(block.size_bytes):
                refused += 1
                continue
            line.blocks[block] = block.hits
            queued += 1
        self._prefetched.refused += refused
        if line.blocks:
            self._queues[tenant] = line
            self._reactor.call_soon(self.step)  # not now: slots for a batch take longer than the answer
        return queued

    def join(self, tenant: str, keys: Iterable[bytes], then: Callable[[], None]) -> bool:
        """Call `then` once a batch with one of these blocks has ended. Return False if none is under way: a read that
        joins a prefetch does not read its blocks twice."""
        for key in keys:
            block = self._table.find(tenant, key)
            if block is not None and (waiters := self.under_way.get(block)) is not None:
                waiters.append(then)
                return True
        return False

    def step(self) -> None:
        """Begin the next batches, of the tenants in turn. Called when slots may be free, and periodically."""
        for tenant in list(self._queues):
            if self._batches >= MAX_BATCHES:
                return
            line = self._queues[tenant]
            if batch := self._next_batch(tenant, line):
                line.stuck_ns = 0
                self._batches += 1
                waiters: list[Callable[[], None]] = []
                self.under_way.update((one.read.block, waiters) for one in batch)
                self._mover.read([one.read for one in batch], partial(self._finish, batch, waiters))
                self._queues.move_to_end(tenant)
            elif line.blocks:
                self._wait(line)
            if not line.blocks:
                del self._queues[tenant]

    @property
    def is_wasteful(self) -> bool:
        """True if more blocks were prefetched in vain than used lately."""
        return self._prefetched.are_wasted

    def counters(self) -> dict[str, int]:
        """Counters for the node's status."""
        prefetched = self._prefetched
        return {
            "prefetched_blocks": prefetched.brought_blocks,
            "prefetched_bytes": prefetched.brought_bytes,
            "prefetches_useful": prefetched.useful,
            "prefetches_wasted": prefetched.wasted,
            "prefetches_late": prefetched.late,
            "prefetches_refused": prefetched.refused,
            "prefetches_waiting": sum(len(line.blocks) for line in self._queues.values()) + prefetched.awaited,
            "prefetched_unread_bytes": prefetched.unread_bytes,
        }

    def _next_batch(self, tenant: str, line: _TenantQueue) -> list[_Promotion]:
        """Return the first queued blocks with their slots; [] if the first has no free slot now, puts of the tenant wait,
        or nothing is left."""
        batch, left_bytes = list[_Promotion](), BATCH_BYTES
        while line.blocks and len(batch) < BATCH_BLOCKS and not self._waiting.has(tenant):
            block, hits = next(iter(line.blocks.items()))
            if block.is_dropped or block.is_in(DRAM) or block.moving or block.hits != hits:
                self._prefetched.late += block.hits != hits
                self._drop_first(line)  # it is gone, there, or has been read meanwhile
                continue
            if batch and block.size_bytes > left_bytes:
                break
            promotion = self._begin(block, hits)
            if promotion is None:
                break
            del line.blocks[block]
            left_bytes -= block.size_bytes
            batch.append(promotion)
        return batch

    def _begin(self, block: Block, hits: int) -> _Promotion | None:
        """Acquire the block and give it a DRAM slot; None: no slot is free now."""
        tier = block.fastest()
        assert tier is not None
        source = block.slot_in(tier)
        assert source is not None
        self._table.copies.acquire(block)  # making space in DRAM may make space in NVMe
        slot = None
        try:
            slot = self._table.begin_promotion(block, may_wait=True)
        finally:
            if slot is None:
                self._table.copies.release(block)
        if slot is None:
            return None
        return _Promotion(SlowRead(block, tier, source, self._dram.view(slot), block.loss_of_copy(tier)), slot, hits)

    def _finish(self, batch: Sequence[_Promotion], waiters: Sequence[Callable[[], None]], results: Sequence[Exception | None]) -> None:
        self._batches -= 1
        for promotion, result in zip(batch, results, strict=True):
            del self.under_way[promotion.read.block]
            self._reactor.guarded(self._end, promotion, result)
        for then in waiters:
            self._reactor.guarded(then)
        self.step()

    def _end(self, promotion: _Promotion, result: Exception | None) -> None:
        """Record a finished promotion."""
        read, block = promotion.read, promotion.read.block
        is_late = block.hits != promotion.hits  # finish_move resets the count
        self._table.finish_move(block, read.tier, DRAM, promotion.slot, is_done=result is None, loss=read.loss)
        self._mover.drop_damaged(read, result)
        is_there = result is None and not block.is_dropped
        if is_there and not is_late:
            self._prefetched.add(block, self._reactor.now_ns())
        else:
            self._prefetched.late += is_there
            self._prefetched.release(block.size_bytes)
        self._table.copies.release(block)

    def _wait(self, line: _TenantQueue) -> None:
        """No slot is free. Drop the queue if that has been so for too long."""
        now_ns = self._reactor.now_ns()
        line.stuck_ns = line.stuck_ns or now_ns
        if now_ns >= line.stuck_ns + ROOM_WAIT_NS:
            self._prefetched.refused += len(line.blocks)
            while line.blocks:
                self._drop_first(line)

    def _drop_first(self, line: _TenantQueue) -> None:
        block, _hits = line.blocks.popitem(last=False)
        self._prefetched.release(block.size_bytes)
