"""Puts whose values arrive over the socket (message Put) and are received into their slots.

`InlinePuts` serves a single small value from the receive buffer: it stores the value, makes it visible and answers, or
sends a commit request. The answer goes out as soon as readers can find the block; the remaining bookkeeping follows
while the writer's process wakes up. No other work of the loop runs in between. Any other case (another writer, no slot,
a quota, a wrong checksum) takes the general path, with nothing done.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import xxhash

from kvstore.protocol.batch_of_one import OnePut, OnePutForm
from kvstore.protocol.errors import ChecksumMismatch, KVStoreError, ProtocolError
from kvstore.protocol.frames import HEADER, HEADER_BYTES, MAGIC, MAX_DEADLINE_MS, VERSION, FrameHeader
from kvstore.protocol.message import GRANTED, PRESENT
from kvstore.protocol.node_messages import ALREADY_STORED, NODE_ACKS, RETRY_LATER, STORED, Put
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.server.session import Session
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.open_puts import OpenPut
from kvstore.store.block_table.table import BlockTable
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.store.replication.event_replicator import EventReplicators
from kvstore.store.session_authenticator import Caller, PutFrame, peer_of
from kvstore.store.wait_queue import WaitQueue
from kvstore.store.writes.checksums import ChecksumVerifier
from kvstore.store.writes.commit_requests import CommitRequests, CommitWaits
from kvstore.store.writes.slot_requests import OpenResult, SlotAllocator, SlotRequest
from kvstore.tiers.dram import DramTier

_ANSWER: Final = struct.Struct(HEADER.format + "IB")
"""Complete Flags answer of one flag: header, count, flag."""

_ANSWER_BODY: Final = struct.calcsize("<IB")

DISCARD_BYTES = 1 << 20


class InlinePuts:
    """Puts of one small value. Not thread-safe: called from the node's loop."""

    def __init__(self, table: BlockTable, dram: DramTier, waiting: WaitQueue, commit_requests: CommitRequests) -> None:
        self._table = table
        self._dram = dram
        self._waiting = waiting
        self._commit_requests = commit_requests
        self._form = OnePutForm()
        self.in_bytes = 0
        """Bytes of values stored uncommitted."""

    def frame(self, session: Session, tenant: str, frame: memoryview) -> bool:
        """Serve the receive buffer if it is exactly one such Put. Return False if it must be parsed as usual."""
        if len(frame) <= HEADER_BYTES:
            return False
        magic, version, kind, request_id, deadline_ms, body_bytes, payload_bytes = HEADER.unpack_from(frame)
        at = HEADER_BYTES + body_bytes
        is_alone = at + payload_bytes == len(frame) and magic == MAGIC and version == VERSION
        if kind != Put.TYPE or not is_alone or not request_id:
            return False
        put = self._form.unpack(frame[HEADER_BYTES:at])
        if put is None:
            return False
        value = frame[at:]
        if put.ack not in NODE_ACKS:
            header = FrameHeader(kind, request_id, min(deadline_ms, MAX_DEADLINE_MS), body_bytes, payload_bytes)
            return self._start_commit(session, header, tenant, put, value, partial(session.count, header))
        if self._table.find(tenant, put.key) is not None:
            session.send_whole(answer_of(request_id, ALREADY_STORED))
            return True
        block = self._make_visible(tenant, put, value)
        if block is None:
            return False
        try:
            unsent = session.send_now(answer_of(request_id, STORED))
        finally:  # the block is visible even if sending failed
            self._enter(tenant, block)
        if unsent:
            session.send_whole(unsent)
        return True

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> bool:
        """Serve a Put whose message was parsed and whose value may have arrived. Return False if it takes the general
        path."""
        value, caller = session.buffered_payload(), session.context
        if value is None or not isinstance(caller, Caller) or (put := self._form.unpack(body)) is None:
            return False
        tenant = caller.tenant
        if put.ack not in NODE_ACKS:
            return self._start_commit(session, header, tenant, put, value, session.take_payload)
        if self._table.find(tenant, put.key) is not None:
            session.take_payload()
            session.reply(header.request_id, Flags(bytes((ALREADY_STORED,))))
            return True
        block = self._make_visible(tenant, put, value)
        if block is None:
            return False
        self._enter(tenant, block)
        if session.traces is not None:
            self._table.uncommitted.note_cause(tenant, put.namespace, session.traces.span(header.request_id))
        session.take_payload()
        session.reply(header.request_id, Flags(bytes((STORED,))))
        return True

    def _make_visible(self, tenant: str, put: OnePut, value: memoryview) -> Block | None:
        """Return a new visible block with its value; `_enter` must follow. None: it takes the general path."""
        table = self._table
        if not self._is_plain(tenant, put, value):
            return None
        block = table.rows.make(tenant, put.key, put.size_bytes, UNCOMMITTED, put.namespace, put.parent, put.checksum)
        try:
            slot = table.place(block)
        except KVStoreError:  # reported by the general path
            return None
        if slot is None:
            return None
        table.copies.make_placed_visible(block, self._dram.fill(slot, value))
        return block

    def _is_plain(self, tenant: str, put: OnePut, value: memoryview) -> bool:
        """Return True if the value matches its size and checksum, could fit, and no request of the tenant waits."""
        size_bytes = put.size_bytes
        if size_bytes != len(value) or not size_bytes or self._waiting.has(tenant):
            return False
        try:
            self._table.check_size(size_bytes, tenant)
        except KVStoreError:
            return False
        return xxhash.xxh3_64_intdigest(value) == put.checksum

    def _enter(self, tenant: str, block: Block) -> None:
        """Complete the bookkeeping of a visible block."""
        table = self._table
        table.enter_placed(block)
        if table.events.is_recording:
            table.events.stored(tenant, [block])
        self.in_bytes += block.size_bytes

    def _start_commit(
        self, session: Session, header: FrameHeader, tenant: str, put: OnePut, value: memoryview, begin: Callable[[], None]
    ) -> bool:
        """Send a commit request and keep the value invisible until the master answers. The request is sent first, so
        that the master wakes up while the value is copied. `begin` is called once the put is served here. Return False
        for the general path, also while a former block of the key has a commit request in flight."""
        table = self._table
        is_known = table.find(tenant, put.key) is not None or table.puts.of_key(tenant, put.key) is not None
        if is_known or table.uncommitted.is_commit_in_flight(tenant, put.key) or not self._is_plain(tenant, put, value):
            return False
        block = table.rows.make(tenant, put.key, put.size_bytes, UNCOMMITTED, put.namespace, put.parent, put.checksum)
        try:
            opened = table.open(block, session, now_ns=session.reactor.now_ns())
        except KVStoreError:
            return False
        if opened is None:
            return False
        begin()
        frame = PutFrame(True, False, bytearray((GRANTED,)), [opened], [], [block.checksum], [])
        try:
            self._commit_requests.claim(session, header, frame)
            if table.puts.holds(opened):  # else there is no link to the master
                self._dram.fill(opened.slot, value)
        except Exception as error:
            table.abort(opened)  # a later grant is retracted
            session.fail(header.request_id, error)
        return True


def answer_of(request_id: int, flag: int) -> bytes:
    """Return a complete Flags answer of one flag."""
    return _ANSWER.pack(MAGIC, VERSION, Flags.TYPE, request_id, 0, _ANSWER_BODY, 0, 1, flag)


class SocketPuts:
    """Puts of any size over sockets. Not thread-safe: called from the node's loop."""

    def __init__(
        self,
        table: BlockTable,
        dram: DramTier,
        replicators: EventReplicators,
        slots: SlotAllocator,
        answers: CommitWaits,
        commit_requests: CommitRequests,
        verifier: ChecksumVerifier,
    ) -> None:
        self._table = table
        self._dram = dram
        self._replicators = replicators
        self._slots = slots
        self._answers = answers
        self._commit_requests = commit_requests
        self._verifier = verifier
        self.inline = InlinePuts(table, dram, slots.waiting, commit_requests)
        """Served from the receive buffer."""
        self._discard = memoryview(bytearray(DISCARD_BYTES))
        self._in_bytes = 0
        """Bytes of values stored without a commit request before."""

    @property
    def in_bytes(self) -> int:
        """Bytes of values stored."""
        return self._in_bytes + self.inline.in_bytes + self._commit_requests.in_bytes

    def payload(self, session: Session, header: FrameHeader, message: Put) -> list[memoryview] | None:
        """Return the buffers for the values: their slots, or a discard buffer. None: the request waits for slots."""
        request = _PutRequest(self, self._slots, session, header, message)
        self._slots.check(message, request.caller.tenant)
        if sum(message.sizes) != header.payload_bytes:
            raise ProtocolError(f"payload of {header.payload_bytes} bytes does not match value sizes of {sum(message.sizes)} bytes")
        request.begin()
        return request.views

    def destinations(self, caller: Caller, message: Put, opening: OpenResult) -> list[memoryview]:
        """Record the put until its payload has arrived, and return the buffers for its values."""
        statuses, puts = opening.statuses, opening.puts
        waits: list[Block] = []
        is_kept = message.ack in NODE_ACKS
        if PRESENT in statuses and not is_kept:
            present = (self._table.find(caller.tenant, key) for key in message.keys)
            waits = [block for block in present if block is not None and block.event_seq]
        values = [self._dram.view(put.slot) if put is not None else None for put in puts]
        needs_commit = not (is_kept or any(message.generations))
        caller.frame = PutFrame(needs_commit, is_kept, statuses, puts, values, message.checksums, waits)
        views: list[memoryview] = []
        for value, size in zip(values, message.sizes, strict=True):
            if value is not None:
                views.append(value)
            else:
                views += [self._discard[: min(DISCARD_BYTES, size - start)] for start in range(0, size, DISCARD_BYTES)]
        return views

    def expire(self) -> None:
        """Free the slots of expired puts whose payload is still arriving. The rest of the payload is discarded and the
        writer is answered RETRY_LATER. Only this process writes these slots; a stalled peer would otherwise keep them."""
        for owner in self._table.awaited():
            if isinstance(owner, Session) and isinstance(owner.context, Caller) and owner.context.frame is not None:
                self._give_up(owner, owner.context.frame)

    def _give_up(self, session: Session, frame: PutFrame) -> None:
        puts = [put for put in frame.puts if put is not None]
        if not any(map(self._table.puts.holds, puts)):  # they expire together
            session.discard_payload()
            frame.give_up()
            self._slots.abort(puts)

    def arrived(self, session: Session, header: FrameHeader) -> None:
        """Verify a complete payload, make its blocks visible, and answer at once or when published. A put that fails
        leaves nothing open."""
        caller = peer_of(session)
        frame, caller.frame = caller.frame, None
        if frame is None:
            raise ProtocolError("Put without a payload")
        arrived = [(put, checksum) for put, checksum in zip(frame.puts, frame.checksums, strict=True) if put is not None]

        def checked(sums: Sequence[int]) -> None:
            if session.is_open:  # else its puts have ended with it
                self._checked(session, header, caller, frame, zip(arrived, sums, strict=True))

        self._verifier.check([put for put, _ in arrived], [value for value in frame.values if value is not None], checked)

    def _checked(
        self, session: Session, header: FrameHeader, caller: Caller, frame: PutFrame, found: Iterable[tuple[tuple[OpenPut, int], int]]
    ) -> None:
        """`found` has each put, its expected checksum, and the computed one."""
        try:
            _verify(found)
            if frame.needs_commit and GRANTED in frame.statuses:
                self._commit_requests.claim(session, header, frame)
            else:
                self._commit(session, header, caller, frame)
        except Exception as error:
            self._slots.abort(frame.puts)
            session.fail(header.request_id, error)

    def _commit(self, session: Session, header: FrameHeader, caller: Caller, frame: PutFrame) -> None:
        flags = bytearray()
        stored: list[Block] = []
        for status, put, checksum in zip(frame.statuses, frame.puts, frame.checksums, strict=True):
            if put is not None and self._table.puts.holds(put):
                if frame.is_kept:
                    stored.append(self._table.store_uncommitted(put, checksum))
                else:
                    stored.append(self._table.commit(put, checksum))
                    frame.waits.append(put.block)
                self._in_bytes += put.block.size_bytes
                flags.append(STORED)
                continue
            if put is not None:
                self._table.abort(put)
            flags.append(ALREADY_STORED if status == PRESENT else RETRY_LATER)
        self._table.events.stored(caller.tenant, stored)
        if frame.is_kept and stored and session.traces is not None:
            self._table.uncommitted.note_cause(caller.tenant, stored[0].namespace, session.traces.span(header.request_id))
        if frame.waits:
            answer = self._answers.begin(session, header, flags)
            self._replicators.when_published(frame.waits, answer.give, session.span(header.request_id), is_over=answer.is_over)
        else:
            session.reply(header.request_id, Flags(bytes(flags)))


def _verify(found: Iterable[tuple[tuple[OpenPut, int], int]]) -> None:
    """Raises ChecksumMismatch for the first bad value, before any value of the request becomes visible."""
    for (put, told), checksum in found:
        if checksum != told:
            raise ChecksumMismatch(f"the value of key {put.block.key.hex()} does not match its checksum: send it again")


class _PutRequest(SlotRequest):
    """Put whose payload stays in the socket until slots are available."""

    __slots__ = ("_puts", "views")

    def __init__(self, puts: SocketPuts, slots: SlotAllocator, session: Session, header: FrameHeader, message: Put) -> None:
        super().__init__(slots, session, header, message)
        self._puts = puts
        self.views: list[memoryview] | None = None

    def opened(self, opening: OpenResult) -> None:
        assert isinstance(self.message, Put)
        self.views = self._puts.destinations(self.caller, self.message, opening)
        if self.is_waiting:
            self.session.accept_payload(self.views)

    def fail(self, error: Exception) -> None:
        self.caller.frame = None
        self.session.refuse_payload(error)
