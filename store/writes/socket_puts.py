"""Puts whose values come through the socket, each behind its message, straight into its slot: the message Put.

A single small value is served where it arrives, in one go: stored, shown and answered, or handed to the master's decision. The answer goes
out as soon as the value can be found here; the rest of what the node keeps it enters afterwards, while the writer's process is being woken
up. Nothing else of the node runs in between. Whatever there is more to, such as another writer, no room, a quota or a wrong checksum, takes
the general way, with nothing done.
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
from kvstore.store.block_table.uncommitted import UNDECIDED
from kvstore.store.replication.event_replicator import EventReplicators
from kvstore.store.session_authenticator import Caller, PutFrame, peer_of
from kvstore.store.wait_queue import WaitQueue
from kvstore.store.writes.checksums import ChecksumVerifier
from kvstore.store.writes.commit_requests import CommitRequests, CommitWaits
from kvstore.store.writes.slot_requests import OpenResult, SlotAllocator, SlotRequest
from kvstore.tiers.dram import DramTier

_ANSWER: Final = struct.Struct(HEADER.format + "IB")
"""A whole answer Flags of one flag: header, count, flag."""

_ANSWER_BODY: Final = struct.calcsize("<IB")

DISCARD_BYTES = 1 << 20


class InlinePuts:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(self, table: BlockTable, dram: DramTier, waiting: WaitQueue, claims: CommitRequests) -> None:
        self._table = table
        self._dram = dram
        self._waiting = waiting
        self._claims = claims
        self._form = OnePutForm()
        self.in_bytes = 0
        """Of values that were stored without being claimed first."""

    def frame(self, session: Session, tenant: str, frame: memoryview) -> bool:
        """Serve these bytes, all that has arrived on the connection, if they are one such Put. False: they are to be read as ever."""
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
            return self._claim(session, header, tenant, put, value, partial(session.count, header))
        if self._table.find(tenant, put.key) is not None:
            session.send_whole(answer_of(request_id, ALREADY_STORED))
            return True
        block = self._shown(tenant, put, value)
        if block is None:
            return False
        try:
            unsent = session.send_now(answer_of(request_id, STORED))
        finally:  # whatever has failed: the block is shown
            self._enter(tenant, block)
        if unsent:
            session.send_whole(unsent)
        return True

    def payload(self, session: Session, header: FrameHeader, body: memoryview) -> bool:
        """As `frame`, of a request whose message has been read, its value being there or not."""
        value, caller = session.buffered_payload(), session.context
        if value is None or not isinstance(caller, Caller) or (put := self._form.unpack(body)) is None:
            return False
        tenant = caller.tenant
        if put.ack not in NODE_ACKS:
            return self._claim(session, header, tenant, put, value, session.take_payload)
        if self._table.find(tenant, put.key) is not None:
            session.take_payload()
            session.reply(header.request_id, Flags(bytes((ALREADY_STORED,))))
            return True
        block = self._shown(tenant, put, value)
        if block is None:
            return False
        self._enter(tenant, block)
        if session.traces is not None:
            self._table.undecided.put_by(tenant, put.namespace, session.traces.span(header.request_id))
        session.take_payload()
        session.reply(header.request_id, Flags(bytes((STORED,))))
        return True

    def _shown(self, tenant: str, put: OnePut, value: memoryview) -> Block | None:
        """A new block that everybody can find, with its value; `_enter` has to follow. None: there is more to it."""
        table = self._table
        if not self._is_plain(tenant, put, value):
            return None
        block = table.rows.make(tenant, put.key, put.size_bytes, UNDECIDED, put.namespace, put.parent, put.checksum)
        try:
            slot = table.place(block)
        except KVStoreError:  # which the usual way says
            return None
        if slot is None:
            return None
        table.copies.show_placed(block, self._dram.fill(slot, value))
        return block

    def _is_plain(self, tenant: str, put: OnePut, value: memoryview) -> bool:
        """A value as it was told, which might have room, and for which nobody has to wait."""
        size_bytes = put.size_bytes
        if size_bytes != len(value) or not size_bytes or self._waiting.has(tenant):
            return False
        try:
            self._table.check_room(size_bytes, tenant)
        except KVStoreError:
            return False
        return xxhash.xxh3_64_intdigest(value) == put.checksum

    def _enter(self, tenant: str, block: Block) -> None:
        """The rest of what the node keeps of a block that is shown."""
        table = self._table
        table.enter_placed(block)
        if table.events.is_recording:
            table.events.stored(tenant, [block])
        self.in_bytes += block.size_bytes

    def _claim(self, session: Session, header: FrameHeader, tenant: str, put: OnePut, value: memoryview, begin: Callable[[], None]) -> bool:
        """Keep the value invisible, and have the master asked about its block, who answers the request: asked first, for its processor to
        be woken up while the value is copied. `begin` is called once the request is served here. False, too, where a former block of the
        key is being decided about."""
        table = self._table
        is_known = table.find(tenant, put.key) is not None or table.puts.of_key(tenant, put.key) is not None
        if is_known or table.undecided.is_claimed(tenant, put.key) or not self._is_plain(tenant, put, value):
            return False
        block = table.rows.make(tenant, put.key, put.size_bytes, UNDECIDED, put.namespace, put.parent, put.checksum)
        try:
            opened = table.open(block, session, now_ns=session.reactor.now_ns())
        except KVStoreError:
            return False
        if opened is None:
            return False
        begin()
        frame = PutFrame(True, False, bytearray((GRANTED,)), [opened], [], [block.checksum], [])
        try:
            self._claims.claim(session, header, frame)
            if table.puts.holds(opened):  # else there is no master to ask
                self._dram.fill(opened.slot, value)
        except Exception as error:
            table.abort(opened)  # what the master grants is told to be gone then
            session.fail(header.request_id, error)
        return True


def answer_of(request_id: int, flag: int) -> bytes:
    """A whole answer Flags of one flag."""
    return _ANSWER.pack(MAGIC, VERSION, Flags.TYPE, request_id, 0, _ANSWER_BODY, 0, 1, flag)


class SocketPuts:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(
        self,
        table: BlockTable,
        dram: DramTier,
        publishers: EventReplicators,
        slots: SlotAllocator,
        answers: CommitWaits,
        claims: CommitRequests,
        checker: ChecksumVerifier,
    ) -> None:
        self._table = table
        self._dram = dram
        self._publishers = publishers
        self._slots = slots
        self._answers = answers
        self._claims = claims
        self._checker = checker
        self.at_once = InlinePuts(table, dram, slots.waiting, claims)
        """Those that are served where they arrive."""
        self._discard = memoryview(bytearray(DISCARD_BYTES))
        self._in_bytes = 0
        """Of values that were stored without being claimed first."""

    @property
    def in_bytes(self) -> int:
        """Of values stored."""
        return self._in_bytes + self.at_once.in_bytes + self._claims.in_bytes

    def payload(self, session: Session, header: FrameHeader, message: Put) -> list[memoryview] | None:
        """Where the values go: straight into their slots; those not wanted into a buffer nobody reads. None: told later."""
        request = _PutRequest(self, self._slots, session, header, message)
        self._slots.check(message, request.caller.tenant)
        if sum(message.sizes) != header.payload_bytes:
            raise ProtocolError(f"a payload of {header.payload_bytes} bytes for values of {sum(message.sizes)} bytes")
        request.begin()
        return request.views

    def destinations(self, caller: Caller, message: Put, opening: OpenResult) -> list[memoryview]:
        """Remember the put until its values are there, and say where they go."""
        statuses, puts = opening.statuses, opening.puts
        waits: list[Block] = []
        is_kept = message.ack in NODE_ACKS
        if PRESENT in statuses and not is_kept:
            present = (self._table.find(caller.tenant, key) for key in message.keys)
            waits = [block for block in present if block is not None and block.event_seq]
        values = [self._dram.view(put.slot) if put is not None else None for put in puts]
        is_claim = not (is_kept or any(message.generations))
        caller.frame = PutFrame(is_claim, is_kept, statuses, puts, values, message.checksums, waits)
        views: list[memoryview] = []
        for value, size in zip(values, message.sizes, strict=True):
            if value is not None:
                views.append(value)
            else:
                views += [self._discard[: min(DISCARD_BYTES, size - start)] for start in range(0, size, DISCARD_BYTES)]
        return views

    def expire(self) -> None:
        """Free the slots of expired puts whose values are still on their way: what comes yet is thrown away, and its writer is told to ask
        again then. Nobody but this process writes into them, and a peer that stalls within a value would keep them for as long as it
        stays."""
        for owner in self._table.awaited():
            if isinstance(owner, Session) and isinstance(owner.context, Caller) and owner.context.frame is not None:
                self._give_up(owner, owner.context.frame)

    def _give_up(self, session: Session, frame: PutFrame) -> None:
        puts = [put for put in frame.puts if put is not None]
        if not any(map(self._table.puts.holds, puts)):  # they expire together, and others of this writer came another way
            session.discard_payload()
            frame.give_up()
            self._slots.abort(puts)

    def arrived(self, session: Session, header: FrameHeader) -> None:
        """The payload is whole: verify, make visible, answer at once or when published. Nothing stays open of a put that fails."""
        caller = peer_of(session)
        frame, caller.frame = caller.frame, None
        if frame is None:
            raise ProtocolError("a Put without values")
        arrived = [(put, checksum) for put, checksum in zip(frame.puts, frame.checksums, strict=True) if put is not None]

        def checked(sums: Sequence[int]) -> None:
            if session.is_open:  # else its puts have ended with it
                self._checked(session, header, caller, frame, zip(arrived, sums, strict=True))

        self._checker.check([put for put, _ in arrived], [value for value in frame.values if value is not None], checked)

    def _checked(
        self, session: Session, header: FrameHeader, caller: Caller, frame: PutFrame, found: Iterable[tuple[tuple[OpenPut, int], int]]
    ) -> None:
        """`found` has each put, the checksum that its writer told, and that of what has arrived."""
        try:
            _verify(found)
            if frame.is_claim and GRANTED in frame.statuses:
                self._claims.claim(session, header, frame)
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
                    stored.append(self._table.commit_undecided(put, checksum))
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
            self._table.undecided.put_by(caller.tenant, stored[0].namespace, session.traces.span(header.request_id))
        if frame.waits:
            answer = self._answers.begin(session, header, flags)
            self._publishers.when_published(frame.waits, answer.give, session.span(header.request_id), is_over=answer.is_over)
        else:
            session.reply(header.request_id, Flags(bytes(flags)))


def _verify(found: Iterable[tuple[tuple[OpenPut, int], int]]) -> None:
    """What crossed a socket is checked before anyone can read it. A bad value fails the request; none of it becomes visible."""
    for (put, told), checksum in found:
        if checksum != told:
            raise ChecksumMismatch(f"the value of key {put.block.key.hex()} arrived damaged: send it again")


class _PutRequest(SlotRequest):
    """A Put whose values wait in the socket until there are slots for them."""

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
