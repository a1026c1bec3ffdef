"""Puts into slots that writers fill themselves (OpenSlots, CommitPuts, AbortPuts), through shared memory or the
transfer engine.

slots_ahead.py serves puts into slots opened ahead.
"""

import contextlib
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from kvstore.protocol.errors import InvalidArgument, TierFailed
from kvstore.protocol.frames import FrameHeader
from kvstore.protocol.message import GRANTED
from kvstore.protocol.node_messages import RETRY_LATER, STORED, AbortPuts, CommitPuts, OpenSlots, OpenSlotsReply
from kvstore.protocol.session_messages import Flags, Ok
from kvstore.rpc.server.session import Session
from kvstore.store.block_table.block import DRAM, Block
from kvstore.store.block_table.open_puts import OpenBatch, OpenPut
from kvstore.store.block_table.rows import read, rows_of, slot_indexes_of
from kvstore.store.block_table.table import BlockTable
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.store.replication.event_replicator import EventReplicators
from kvstore.store.session_authenticator import MAX_SLABS, Caller, peer_of
from kvstore.store.shared_regions import SharedRegions
from kvstore.store.writes.checksums import ChecksumVerifier
from kvstore.store.writes.commit_requests import CommitWaits
from kvstore.store.writes.slot_requests import OpenResult, SlotAllocator, SlotRequest
from kvstore.store.writes.slots_ahead import SlotsAheadService
from kvstore.tiers.dram import DramTier


class InPlacePuts:
    """Serves in-place puts. Not thread-safe: called from the node's loop."""

    def __init__(
        self,
        table: BlockTable,
        dram: DramTier,
        replicators: EventReplicators,
        slots: SlotAllocator,
        answers: CommitWaits,
        verifier: ChecksumVerifier,
        regions: SharedRegions | None,
    ) -> None:
        """`regions` exports slots to writers of other hosts; None: no transfer engine."""
        self._table = table
        self._dram = dram
        self._replicators = replicators
        self._slots = slots
        self._answers = answers
        self._verifier = verifier
        self._regions = regions
        self.ahead = SlotsAheadService(table, dram, slots.waiting, self._slabs_ahead)
        """Serves puts into slots opened ahead."""
        self._in_bytes = 0

    @property
    def in_bytes(self) -> int:
        """Bytes of values stored."""
        return self._in_bytes + self.ahead.in_bytes

    def open(self, session: Session, header: FrameHeader, message: OpenSlots) -> None:
        """Answer with slots for as many keys as fit, or queue the request."""
        request = _OpenRequest(self, self._slots, session, header, message)
        if message.engine and self._regions is None:
            raise InvalidArgument("this node has no transfer engine: use Put instead of OpenSlots")
        if not message.engine and not session.is_local:
            raise InvalidArgument("OpenSlots needs shared memory or the transfer engine: connect to the node's Unix socket, or use Put")
        self._slots.check(message, request.caller.tenant)
        request.begin()

    def local_reply(self, caller: Caller, opening: OpenResult) -> OpenSlotsReply:
        """Reply to a local writer: locations of its slots, and slabs to map in advance."""
        if opening.batch is not None:
            return self._local_batch_reply(caller, opening.batch)
        statuses, puts = opening.statuses, opening.puts
        opened = [put for put in puts if put is not None]
        slots = [put.slot for put in opened]
        located = self._dram.locate_all(np.array([slot.index for slot in slots], np.int64))
        slabs, offsets = located[0].tolist(), located[1].tolist()
        ids = [put.put_id for put in opened]
        for put in opened:
            put.is_named = True
        group_of_slab = {slab: slot.group for slab, slot in zip(slabs, slots, strict=True)}
        if len(opened) < len(puts):
            ids, slabs, offsets = (_spread(column, puts) for column in (ids, slabs, offsets))
        return OpenSlotsReply(bytes(statuses), ids, slabs, offsets, [b""] * len(puts), self._slabs_ahead(caller, group_of_slab))

    def _local_batch_reply(self, caller: Caller, batch: OpenBatch) -> OpenSlotsReply:
        """As `local_reply`, for a batch in one slot group."""
        batch.is_named = True
        slabs, offsets = self._dram.locate_all(slot_indexes_of(batch.blocks))
        ahead = self._slabs_ahead(caller, dict.fromkeys(slabs.tolist(), batch.blocks[0].group_in(DRAM)))
        columns = array("I", slabs.astype(np.uint32).tobytes()), array("Q", offsets.astype(np.uint64).tobytes())
        return OpenSlotsReply(bytes((GRANTED,)) * len(slabs), batch.ids, *columns, [b""] * len(slabs), ahead)

    def remote_reply(self, opening: OpenResult) -> OpenSlotsReply:
        """Reply to a remote writer: each slot is a region, closed when the put ends. Raises the engine's errors."""
        assert self._regions is not None
        statuses, puts = opening.statuses, opening.puts
        nowhere = [0] * len(puts)
        regions = [b""] * len(puts)
        for index, put in enumerate(puts):
            if put is not None:
                put.is_named = True
                put.grant, regions[index] = self._regions.export_slot(put.slot)
        return OpenSlotsReply(bytes(statuses), [put.put_id if put is not None else 0 for put in puts], nowhere, nowhere, regions, [])

    def _slabs_ahead(self, caller: Caller, group_of_slab: dict[int, int]) -> list[int]:
        """Return slabs for the writer to map in advance: for each group as many as it reached newly, and one more.
        Untouched slabs are excluded, because memory is charged to the process that touches it first (memory.max of its
        cgroup)."""
        fresh = group_of_slab.keys() - caller.exported
        caller.exported |= fresh
        ahead: list[int] = []
        for group, count in Counter(group_of_slab[slab] for slab in fresh).items():
            with contextlib.suppress(TierFailed):  # advance slabs are optional
                ahead += self._dram.reserve_slabs(group, count + 1)
        return [slab for slab in ahead if self._dram.is_warm(slab)][:MAX_SLABS]

    def commit(self, session: Session, header: FrameHeader, message: CommitPuts) -> None:
        """Make written puts visible, and answer once reserved ones are durable at the master. Values written by the
        transfer engine are verified first, once no transfer writes them."""
        caller = peer_of(session)
        if self._commit_whole(session, header, caller, message):
            return
        puts = (self._table.puts.get(put_id, session) for put_id in message.put_ids)
        ended = [put for put in puts if put is not None and put.grant is not None and put.grant.revoke()]
        if not ended:
            self._commit(session, header, caller, message, {})
            return

        def checked(sums: Sequence[int]) -> None:
            try:
                self._commit(session, header, caller, message, {put.put_id: found for put, found in zip(ended, sums, strict=True)})
            except Exception as error:
                session.fail(header.request_id, error)

        self._verifier.check(ended, [self._dram.view(put.slot) for put in ended], checked)

    def _commit_whole(self, session: Session, header: FrameHeader, caller: Caller, message: CommitPuts) -> bool:
        """Commit an unsplit batch that the message names whole; return False otherwise, with nothing done."""
        batch = self._table.puts.get_batch(message.put_ids, session)
        if batch is None:
            return False
        blocks = batch.blocks
        self._table.store_batch_uncommitted(batch, message.checksums)
        self._in_bytes += int(read(blocks[0].columns.sizes, rows_of(blocks)).sum())
        if session.traces is not None:
            self._table.uncommitted.note_cause(caller.tenant, blocks[0].namespace, session.traces.span(header.request_id))
        if self._table.events.is_recording:
            self._table.events.stored(caller.tenant, blocks)
        session.reply(header.request_id, Flags(bytes((STORED,)) * len(blocks)))
        return True

    def _commit(self, session: Session, header: FrameHeader, caller: Caller, message: CommitPuts, found: Mapping[int, int]) -> None:
        """`found` has the checksums of engine-written puts, by id."""
        flags = bytearray()
        stored: list[Block] = []
        kept: dict[int, tuple[OpenPut, int]] = {}
        """By id, because an id may be repeated. They become visible after the loop."""
        table = self._table
        for put_id, checksum in zip(message.put_ids, message.checksums, strict=True):
            put = table.puts.get(put_id, session) if put_id not in kept else None
            if put is None:
                table.settle(put_id, session)
                flags.append(RETRY_LATER)
                continue
            if put.grant is not None and found.get(put_id) != checksum:
                table.abort(put)
                flags.append(RETRY_LATER)
                continue
            if put.block.generation != UNCOMMITTED:
                table.commit(put, checksum)
            else:
                kept[put_id] = put, checksum
            stored.append(put.block)
            flags.append(STORED)
        table.store_all_uncommitted([put for put, _ in kept.values()], [checksum for _, checksum in kept.values()])
        if kept and session.traces is not None:
            table.uncommitted.note_cause(caller.tenant, stored[0].namespace, session.traces.span(header.request_id))
        self._in_bytes += sum(block.size_bytes for block in stored)
        table.events.stored(caller.tenant, stored)
        waits = [block for block in stored if block.event_seq]
        if waits:
            answer = self._answers.begin(session, header, flags)
            self._replicators.when_published(waits, answer.give, session.span(header.request_id), is_over=answer.is_over)
        else:
            session.reply(header.request_id, Flags(bytes(flags)))

    def abort(self, session: Session, header: FrameHeader, message: AbortPuts) -> None:
        """Abort these puts and free their slots."""
        peer_of(session)
        for put_id in message.put_ids:
            put = self._table.puts.get(put_id, session)
            if put is not None:
                self._table.abort(put)
            else:
                self._table.settle(put_id, session)
        session.reply(header.request_id, Ok())
        self._slots.waiting.retry()


def _spread(column: Sequence[int], puts: Sequence[OpenPut | None]) -> list[int]:
    """Expand a column of the open puts to all keys, with 0 for the others."""
    left = iter(column)
    return [next(left) if put is not None else 0 for put in puts]


class _OpenRequest(SlotRequest):
    """OpenSlots request until it is answered."""

    __slots__ = ("_puts",)

    def __init__(self, puts: InPlacePuts, slots: SlotAllocator, session: Session, header: FrameHeader, message: OpenSlots) -> None:
        super().__init__(slots, session, header, message)
        self._puts = puts

    def opened(self, opening: OpenResult) -> None:
        by_engine = isinstance(self.message, OpenSlots) and self.message.engine
        self.session.reply(
            self.header.request_id, self._puts.remote_reply(opening) if by_engine else self._puts.local_reply(self.caller, opening)
        )

    def fail(self, error: Exception) -> None:
        self.session.fail(self.header.request_id, error)
