"""Reads at a node: values in mappable memory are pointed at under a lease, all others sent; what is below DRAM is fetched first."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.protocol.errors import Corrupt, InvalidArgument
from kvstore.protocol.frames import MAX_PAYLOAD_BYTES, Header
from kvstore.protocol.message import TIER_BITS
from kvstore.protocol.node_messages import INLINE, MAPPED, Blocks, Read, Release
from kvstore.protocol.session_messages import ROLE_CLIENT
from kvstore.rpc.session import Session
from kvstore.store.blocks.block import DRAM, TIERS, Block
from kvstore.store.blocks.leases import Leases
from kvstore.store.blocks.table import BlockTable
from kvstore.store.caller import Caller, peer_of
from kvstore.store.moves.mover import SlowRead, TierMover
from kvstore.tiers.dram import DramTier
from kvstore.tiers.tier import Slot

log = logging.getLogger("kvstore.store")


class _Answer:
    """The columns of one Blocks message, filled key by key."""

    __slots__ = ("checksums", "mapped", "offsets", "payload", "sent", "sizes", "slabs", "statuses", "tiers")

    def __init__(self, count: int) -> None:
        self.statuses = bytearray(count)  # MISS
        self.tiers = bytearray(count)
        self.sizes = [0] * count
        self.checksums = [0] * count
        self.slabs = [0] * count
        self.offsets = [0] * count
        self.payload: list[memoryview | None] = [None] * count
        self.mapped: list[Block] = []
        self.sent: list[Block] = []

    def fill(self, index: int, status: int, block: Block, tier: int) -> None:
        self.statuses[index] = status
        self.tiers[index] = TIER_BITS[TIERS[tier]]
        self.sizes[index] = block.size_bytes
        self.checksums[index] = block.checksum_in(tier) if block.lossy else block.checksum


class _Slow(NamedTuple):
    """A block to be fetched for the answer's entry `position`, into DRAM's `slot` if it is to stay there."""

    position: int
    read: SlowRead
    slot: Slot | None


class ReadService:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(self, table: BlockTable, dram: DramTier, mover: TierMover, leases: Leases, *, max_lease_ns: int, has_engine: bool) -> None:
        self._table = table
        self._dram = dram
        self._mover = mover
        self._leases = leases
        self._max_lease_ns = max_lease_ns
        self._has_engine = has_engine
        self.out_bytes = 0

    def read(self, session: Session, header: Header, message: Read) -> None:
        """Answer with what is here, once all of it can be pointed at or sent.

        Raises InvalidArgument when more than one answer's payload would have to be sent; no block is held then.
        """
        peer = peer_of(session)
        answer = _Answer(len(message.keys))
        slow: list[_Slow] = []
        sent_bytes = 0
        table, tenant = self._table, peer.tenant
        is_reachable = self._is_reachable(session, message)
        for index, (key, generation) in enumerate(zip(message.keys, message.generations, strict=True)):
            block = table.read(tenant, key, generation)
            if block is None:
                continue
            is_here = block.slots[DRAM] is not None
            if not (is_here and is_reachable and block.size_bytes > message.inline_bytes):
                sent_bytes += block.size_bytes
                if sent_bytes > MAX_PAYLOAD_BYTES:
                    self._release_all(answer, slow)
                    raise InvalidArgument(f"these blocks are over the limit of {MAX_PAYLOAD_BYTES} bytes in one answer: ask for fewer")
            table.acquire(block)
            if is_here:
                self._point_at(session, message, answer, index, block)
                table.warm(block)
            else:
                slow.append(self._plan(index, block))
        if table.events.is_recording and peer.role == ROLE_CLIENT:
            table.events.read(tenant, self._hits(peer, message))
        if slow:
            reads = [one.read for one in slow]
            self._mover.read(reads, lambda results: self._fetched(session, header, message, answer, slow, results))
        else:
            self._reply(session, header, message, answer)

    def _hits(self, peer: Caller, message: Read) -> list[Block]:
        """The blocks that are read, in the order of their keys; none of them has left since, for each has a reader."""
        wanted = zip(message.keys, message.generations, strict=True)
        found = ((self._table.find(peer.tenant, key), generation) for key, generation in wanted)
        return [block for block, generation in found if block is not None and generation in (0, block.generation)]

    def _is_reachable(self, session: Session, message: Read) -> bool:
        """Whether this reader reaches the node's memory itself: over its mapping, or with the transfer engine."""
        return session.is_local or (bool(message.engine) and self._has_engine)

    def _plan(self, index: int, block: Block) -> _Slow:
        """How to fetch a block that is not in DRAM: into a DRAM slot if it earned one, else into memory for this answer only."""
        tier = block.fastest()
        assert tier is not None
        source = block.slots[tier]
        assert source is not None
        slot = self._table.begin_promotion(block) if self._table.wants_promotion(block) else None
        destination = self._dram.view(slot) if slot is not None else memoryview(bytearray(block.size_bytes))
        return _Slow(index, SlowRead(block, tier, source, destination, block.loss_of_copy(tier)), slot)

    def _point_at(self, session: Session, message: Read, answer: _Answer, index: int, block: Block) -> None:
        slot = block.slots[DRAM]
        assert slot is not None
        if self._is_reachable(session, message) and block.size_bytes > message.inline_bytes:
            answer.fill(index, MAPPED, block, DRAM)
            answer.slabs[index], answer.offsets[index] = self._dram.locate(slot)
            answer.mapped.append(block)
        else:
            answer.fill(index, INLINE, block, DRAM)
            answer.payload[index] = self._dram.view(slot)
            answer.sent.append(block)

    def _fetched(
        self, session: Session, header: Header, message: Read, answer: _Answer, slow: list[_Slow], results: Sequence[Exception | None]
    ) -> None:
        """The slow reads are done: record promotions, drop damaged copies, answer."""
        for (index, read, slot), result in zip(slow, results, strict=True):
            block = read.block
            if slot is not None:
                self._table.finish_move(block, read.tier, DRAM, slot, is_done=result is None, loss=read.loss)
            if isinstance(result, Corrupt):
                log.warning("a block in %s is given up: %s", TIERS[read.tier], result)
                self._table.corrupt_reads += 1
                self._table.drop_copy(block, read.tier)
            # Overtaken by a removal, a promotion left the bytes in a slot that is free again: a miss, like a failed read.
            if result is not None or (slot is not None and block.is_gone):
                self._table.misses += 1
                self._table.release(block)
            elif slot is not None:
                self._point_at(session, message, answer, index, block)
                answer.tiers[index] = TIER_BITS[TIERS[read.tier]]
            else:
                answer.fill(index, INLINE, block, read.tier)
                answer.checksums[index] = block.checksum if read.loss is None else read.loss.checksum
                answer.payload[index] = read.destination
                answer.sent.append(block)
        self._reply(session, header, message, answer)

    def _reply(self, session: Session, header: Header, message: Read, answer: _Answer) -> None:
        peer = session.context
        if not session.is_open or not isinstance(peer, Caller):
            self._release_all(answer, [])
            return
        lease, until_ns, lease_ms = 0, 0, 0
        if answer.mapped:
            lease_ms = min(message.lease_ms, self._max_lease_ns // 1_000_000)
            until_ns = session.reactor.now_ns() + lease_ms * 1_000_000
            lease = self._leases.grant(session, answer.mapped, until_ns)
        payload = [part for part in answer.payload if part is not None]
        self.out_bytes += sum(answer.sizes)
        blocks = Blocks(
            lease,
            until_ns,
            lease_ms,
            bytes(answer.statuses),
            answer.sizes,
            answer.checksums,
            bytes(answer.tiers),
            answer.slabs,
            answer.offsets,
        )
        session.reply(header.request_id, blocks, payload, on_sent=(lambda: self._release_sent(answer)) if answer.sent else None)

    def _release_sent(self, answer: _Answer) -> None:
        for block in answer.sent:
            self._table.release(block)

    def _release_all(self, answer: _Answer, slow: list[_Slow]) -> None:
        for block in answer.mapped + answer.sent:
            self._table.release(block)
        for _, read, slot in slow:
            if slot is not None:
                self._table.finish_move(read.block, read.tier, DRAM, slot, is_done=False)
            self._table.release(read.block)

    def release(self, session: Session, message: Release) -> None:
        """The reader is done with these leases; those that are over or not its own are ignored."""
        for lease in message.leases:
            self._leases.release(session, lease)
