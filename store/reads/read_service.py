"""Read service of a node. Values in mappable DRAM are reported by location under a lease, all others are sent.

Blocks below DRAM are fetched first, into DRAM if the reader can reach it. Bytes are limited per answer, per connection
and for the node; values that do not fit are answered LATER. A read of which nothing fits waits behind others of its
connection and holds nothing.
"""

from collections.abc import Sequence
from typing import Final

from kvstore.protocol.errors import DeadlineExceeded, KVStoreError
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.message import TIER_BITS
from kvstore.protocol.node_messages import DEFERRED, INLINE, ReadBlocks, ReadBlocksReply, ReleaseLeases
from kvstore.protocol.retention import pack_hints
from kvstore.rpc.server.session import Session
from kvstore.store.block_table.block import DRAM, TIERS, Block
from kvstore.store.block_table.leases import Leases
from kvstore.store.block_table.table import BlockTable
from kvstore.store.config import NodeSettings
from kvstore.store.reads.prefetcher import Prefetcher
from kvstore.store.reads.read_limiter import ReadLimiter, charge_of, trim_heap
from kvstore.store.reads.read_request import ReadRequest, SlowEntry, stage
from kvstore.store.session_authenticator import Caller, peer_of
from kvstore.store.tiering.mover import SlowRead, TierMover
from kvstore.store.wait_queue import WaitingRequest, WaitQueue, begin_child_span, until_ns
from kvstore.tiers.dram import DramTier

_INLINE: Final = bytes([INLINE])
_IN_DRAM: Final = bytes([TIER_BITS[TIERS[DRAM]]])
_NOWHERE: Final = (0,)
"""Columns of a reply with one value."""


class ReadService:
    """Serves ReadBlocks and ReleaseLeases. Not thread-safe: called from the node's loop."""

    def __init__(
        self,
        table: BlockTable,
        dram: DramTier,
        mover: TierMover,
        leases: Leases,
        prefetcher: Prefetcher,
        *,
        settings: NodeSettings,
        has_engine: bool,
    ) -> None:
        self._table = table
        self._dram = dram
        self._mover = mover
        self._leases = leases
        self._prefetcher = prefetcher
        self._limiter = ReadLimiter(node_bytes=settings.read_bytes, peer_bytes=settings.peer_bytes)
        self._waiting = WaitQueue(max_of_owner=settings.peer_requests)
        """Reads that wait for the read limiter."""
        self._max_lease_ns = int(settings.max_lease_s * 1e9)
        self._answer_bytes = settings.peer_bytes
        """Bytes sent in one answer, except for a single larger value."""
        self._has_engine = has_engine
        self.out_bytes = 0

    def read(self, session: Session, header: FrameHeader, message: ReadBlocks) -> None:
        """Answer with the blocks that are here, once they can be reported or sent."""
        caller = peer_of(session)
        if caller.blocks is not None:
            caller.check_blocks(message.keys, message.generations)
        is_behind = self._waiting.has(session)
        if not is_behind and len(message.keys) == 1 and self._send_one(session, header, caller, message):
            return
        if self._prefetcher.under_way and self._prefetcher.join(
            caller.tenant, message.keys, lambda: self._read_again(session, header, message)
        ):
            return
        if is_behind or not self.attempt(session, header, caller, message):
            self._waiting.add(_WaitingRead(self, session, header, caller, message))

    def _read_again(self, session: Session, header: FrameHeader, message: ReadBlocks) -> None:
        """Answer a read that has waited for a prefetch."""
        if session.is_open:
            try:
                self.read(session, header, message)
            except KVStoreError as error:
                session.fail(header.request_id, error)

    def _send_one(self, session: Session, header: FrameHeader, caller: Caller, message: ReadBlocks) -> bool:
        """Send a single value from DRAM, in a third of the time of `attempt`. Return False if the read is of another
        kind.

        The access is counted after the answer is sent. The event is recorded before, so that its time precedes a later
        read of the same client at another node.
        """
        table = self._table
        block, generation = table.find(caller.tenant, message.keys[0]), message.generations[0]
        slot = block.dram if block is not None and generation in (0, block.generation) else None
        if block is None or slot is None:
            return False
        size_bytes = block.size_bytes
        if size_bytes > message.inline_bytes and (session.is_local or (message.engine and self._has_engine)):
            return False
        value = self._dram.view(slot)
        blocks = ReadBlocksReply(0, 0, 0, _INLINE, (size_bytes,), (block.checksum_in(DRAM),), _IN_DRAM, _NOWHERE, _NOWHERE)
        if caller.is_node:
            blocks.hints = self._hints_of(session, caller, message)
        table.copies.acquire(block)  # for the answer
        table.copies.acquire(block)  # for this call, which outlasts the answer
        try:
            if table.events.is_recording and not caller.is_node:
                table.events.read(caller.tenant, [block], is_far=not session.is_local)
            session.reply(header.request_id, blocks, (value,), on_sent=lambda: table.copies.release(block))
            self.out_bytes += size_bytes
            if not caller.is_node:
                table.hit(block)
                table.evictor.promote_to_hbm(block)
        finally:
            table.copies.release(block)
        return True

    def attempt(self, session: Session, header: FrameHeader, caller: Caller, message: ReadBlocks) -> bool:
        """Try to serve the read. Return False if nothing fits until other values are sent. If it raises, no block is
        held."""
        is_reachable = session.is_local or (bool(message.engine) and self._has_engine)
        request = ReadRequest(session, header, caller, message, is_reachable=is_reachable)
        try:
            misses = self._gather(request)
            if request.gives_nothing:
                return False
            if not caller.is_node:
                self._table.misses += misses
            if self._table.events.is_recording and not caller.is_node:
                self._table.events.read(caller.tenant, self._hits(request), is_far=not session.is_local)
            if request.slow:
                request.begin_fetching()
                self._mover.read([entry.read for entry in request.slow], lambda results: self._fetched(request, results))
            else:
                self._reply(request)
        except BaseException:
            self._let_go(request)
            raise
        return True

    def _gather(self, request: ReadRequest) -> int:
        """Acquire what can be served now; return the number of misses."""
        table, tenant, misses = self._table, request.caller.tenant, 0
        for index, (key, generation) in enumerate(zip(request.message.keys, request.message.generations, strict=True)):
            block = table.find(tenant, key)
            if block is None or (generation and generation != block.generation):
                misses += 1
                continue
            slot = block.dram
            is_pointed_at = slot is not None and request.is_pointed_at(block)
            if not is_pointed_at and not self._fits(request, block):
                request.cut(index)
                continue
            if not request.caller.is_node:
                table.hit(block)
            if slot is None:
                self._fetch(request, index, block, is_pointed_at=request.is_pointed_at(block))
                continue
            table.copies.acquire(block)
            if is_pointed_at:
                request.point_at(index, block, self._dram.locate(slot))
            else:
                request.send(index, block, DRAM, self._dram.view(slot))
            table.evictor.promote_to_hbm(block)
        return misses

    def _fits(self, request: ReadRequest, block: Block) -> bool:
        """Return True if a value fits into this answer. A value to be fetched is charged."""
        if request.is_cut or (request.sent_bytes and request.sent_bytes + block.size_bytes > self._answer_bytes):
            return False
        if block.dram is not None:
            return True
        return self._limiter.take(request.session, block.size_bytes)

    def _hits(self, request: ReadRequest) -> list[Block]:
        """Return the blocks read, in the order of their keys. All are acquired, so none was evicted."""
        columns = zip(request.message.keys, request.message.generations, request.statuses, strict=True)
        wanted = ((self._table.find(request.caller.tenant, key), generation) for key, generation, status in columns if status != DEFERRED)
        return [block for block, generation in wanted if block is not None and generation in (0, block.generation)]

    def _fetch(self, request: ReadRequest, index: int, block: Block, *, is_pointed_at: bool) -> None:
        """Plan the fetch of a block that is not in DRAM: as a promotion if it is due, else staged for this reader if it
        `is_pointed_at`, else into memory for this answer."""
        tier = block.fastest()
        assert tier is not None
        source = block.slot_in(tier)
        assert source is not None
        request.charge += charge_of(block.size_bytes)
        self._table.copies.acquire(block)
        try:
            slot = self._table.begin_promotion(block) if self._table.wants_promotion(block) else None
            staged = stage(self._table, self._dram, block) if slot is None and is_pointed_at else None
        except BaseException:
            self._table.copies.release(block)
            raise
        destination = self._dram.view(slot) if slot is not None else staged.memory if staged is not None else None
        if destination is not None:  # its memory is DRAM's
            request.charge -= charge_of(block.size_bytes)
            self._limiter.release(request.session, charge_of(block.size_bytes))
        request.fetch(index, SlowRead(block, tier, source, destination, block.loss_of_copy(tier)), slot, staged)

    def _fetched(self, request: ReadRequest, results: Sequence[Exception | None]) -> None:
        """Handle finished fetches: record promotions, drop damaged copies, answer."""
        if request.fetching is not None:
            request.fetching.end()
        try:
            for result in results:
                self._arrived(request, request.slow.popleft(), result)
            self._reply(request)
        except Exception as error:
            try:
                self._let_go(request)
            finally:
                request.fail(error)

    def _arrived(self, request: ReadRequest, entry: SlowEntry, result: Exception | None) -> None:
        index, read, slot, staged = entry
        block = read.block
        if slot is not None:
            self._table.finish_move(block, read.tier, DRAM, slot, is_done=result is None, loss=read.loss)
        self._mover.drop_damaged(read, result)
        # A block removed meanwhile has its bytes in a freed slot: a miss, like a failed read.
        if result is not None or (slot is not None and block.is_dropped):
            self._table.misses += not request.caller.is_node
            self._table.copies.release(block)
            if staged is not None:
                self._table.copies.release(staged.copy)
        elif slot is None:
            if staged is None:
                request.send(index, block, read.tier, read.buffer())
            else:
                request.point_at(index, block, staged.location, held=staged.copy)
                request.tiers[index] = TIER_BITS[TIERS[read.tier]]
                self._table.copies.release(block)
            request.checksums[index] = block.checksum if read.loss is None else read.loss.checksum
        else:
            if request.is_pointed_at(block):
                request.point_at(index, block, self._dram.locate(slot))
            else:
                request.send(index, block, DRAM, self._dram.view(slot))
            request.tiers[index] = TIER_BITS[TIERS[read.tier]]

    def _reply(self, request: ReadRequest) -> None:
        session = request.session
        if not session.is_open:
            self._let_go(request)
            return
        if request.mapped:
            lease_ms = min(request.message.lease_ms, self._max_lease_ns // 1_000_000)
            until_ns = session.reactor.now_ns() + lease_ms * 1_000_000
            lease = self._leases.grant(session, request.mapped, until_ns)
            request.mapped = []  # they are the lease's
            blocks, values = request.answer(lease=lease, until_ns=until_ns, lease_ms=lease_ms)
        else:
            blocks, values = request.answer()
        if request.caller.is_node:
            blocks.hints = self._hints_of(session, request.caller, request.message)
        self.out_bytes += sum(request.sizes)
        session.reply(request.header.request_id, blocks, values, on_sent=(lambda: self._let_go(request)) if values else None)
        if not values:
            self._let_go(request)  # no value was fetched: nothing is held

    def _hints_of(self, session: Session, caller: Caller, message: ReadBlocks) -> bytes:
        """Return the retention hints of the blocks, for the node that copies them."""
        if not self._table.retention.is_used:
            return b""
        blocks = [self._table.find(caller.tenant, key) for key in message.keys]
        return pack_hints(self._table.retention.export(blocks, session.reactor.now_ns()))

    def _let_go(self, request: ReadRequest) -> None:
        """Release what the request holds: its values are sent, or it ended otherwise."""
        held, request.mapped, request.sent = request.mapped + request.sent, [], []
        for block in held:
            self._table.copies.release(block)
        while request.slow:
            _, read, slot, staged = request.slow.popleft()
            if slot is not None:
                self._table.finish_move(read.block, read.tier, DRAM, slot, is_done=False)
            if staged is not None:
                self._table.copies.release(staged.copy)
            self._table.copies.release(read.block)
        if request.charge:
            self._limiter.release(request.session, request.charge)
            request.charge = 0
            if len(self._waiting):
                request.session.reactor.call_soon(self._waiting.retry)

    @property
    def is_full(self) -> bool:
        """True if no queued read need be tried until a value is sent: one was refused for the node's limit. Otherwise each
        value that is sent would have all queued reads examined."""
        return self._limiter.is_full

    def forget_owner(self, owner: object) -> None:
        """Drop queued reads of a closed connection."""
        self._waiting.forget_owner(owner)

    def expire(self, *, now_ns: int) -> None:
        """Fail queued reads whose deadline is over."""
        self._waiting.expire(now_ns=now_ns)

    def trim_memory(self) -> None:
        """Return heap memory to the system after a peak of reads. Called once a second."""
        if self._limiter.is_over():
            self._mover.run_in_reader(trim_heap)

    def release(self, session: Session, message: ReleaseLeases) -> None:
        """End these leases. Unknown ones and those of other connections are ignored."""
        for lease in message.leases:
            self._leases.release(session, lease)


class _WaitingRead(WaitingRequest):
    """Queued read."""

    __slots__ = ("_caller", "_header", "_message", "_reads", "_session", "_wait")

    def __init__(self, reads: ReadService, session: Session, header: FrameHeader, caller: Caller, message: ReadBlocks) -> None:
        super().__init__(session, session, until_ns(session, header))
        self._reads = reads
        self._session = session
        self._header = header
        self._caller = caller
        self._message = message
        self._wait = begin_child_span(session, header, "wait_for_turn")

    def attempt(self) -> bool:
        if self._reads.is_full:
            return False
        is_served = self._reads.attempt(self._session, self._header, self._caller, self._message)
        if is_served and self._wait is not None:
            self._wait.end()
        return is_served

    def fail(self, error: Exception) -> None:
        self._session.fail(self._header.request_id, error)

    def give_up(self) -> None:
        self.fail(DeadlineExceeded("the read waited for others until its deadline (read_bytes, peer_bytes): try again"))
