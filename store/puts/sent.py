"""Puts whose values come through the socket, each behind its message, straight into its slot: the message Put."""

from collections.abc import Iterable, Sequence

import xxhash

from kvstore.protocol.errors import ChecksumMismatch, ProtocolError
from kvstore.protocol.frames import Header
from kvstore.protocol.message import GRANTED, PRESENT
from kvstore.protocol.node_messages import ACK_NODE, ALREADY_THERE, ASK_AGAIN, STORED, Put
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.session import Session
from kvstore.store.blocks.block import Block
from kvstore.store.blocks.open_puts import OpenPut
from kvstore.store.blocks.table import BlockTable
from kvstore.store.blocks.undecided import UNDECIDED
from kvstore.store.caller import Caller, PutFrame, peer_of
from kvstore.store.publishers import Publishers
from kvstore.store.puts.answering import Answers
from kvstore.store.puts.checking import Checker
from kvstore.store.puts.claims import Claims
from kvstore.store.puts.slots import Opening, SlotRequest, Slots
from kvstore.tiers.dram import DramTier

DISCARD_BYTES = 1 << 20
_STORED = Flags(bytes([STORED])).pack()
_ALREADY_THERE = Flags(bytes([ALREADY_THERE])).pack()


class SentPuts:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(
        self, table: BlockTable, dram: DramTier, publishers: Publishers, slots: Slots, answers: Answers, claims: Claims, checker: Checker
    ) -> None:
        self._table = table
        self._dram = dram
        self._publishers = publishers
        self._slots = slots
        self._answers = answers
        self._claims = claims
        self._checker = checker
        self._discard = memoryview(bytearray(DISCARD_BYTES))
        self._in_bytes = 0
        """Of values that were stored without being claimed first."""

    @property
    def in_bytes(self) -> int:
        """Of values stored."""
        return self._in_bytes + self._claims.in_bytes

    def put_at_once(self, session: Session, header: Header, body: memoryview) -> bool:
        """Store a small value that has come along with its message and that nobody reserved, and answer if it is kept here whatever the
        master knows; else the master is asked. False, with nothing done, where there is more to it: another writer, no room, a wrong
        checksum."""
        value, caller = session.arrived_payload(), session.context
        if value is None or not isinstance(caller, Caller) or (row := Put.unpack_one(body)) is None:
            return False
        ack, namespace, key, size_bytes, generation, told, parent = row
        if generation:
            return False
        table, tenant = self._table, caller.tenant
        if table.find(tenant, key) is not None:
            if ack != ACK_NODE:
                return False
            session.take_payload()
            session.reply_packed(header.request_id, Flags.TYPE, _ALREADY_THERE)
            return True
        if size_bytes != len(value) or table.writer(tenant, key) is not None or self._slots.waiting.has(tenant):
            return False
        table.check_room(size_bytes, tenant)
        if xxhash.xxh3_64_intdigest(value) != told:
            return False
        block = table.rows.make(tenant, key, size_bytes, UNDECIDED, namespace, parent, told)
        if ack != ACK_NODE:
            return self._claim_at_once(session, header, block, value)
        slot = table.place(block)
        if slot is None:
            return False
        self._dram.fill(slot, value)
        table.keep(block)
        if session.traces is not None:
            table.undecided.put_by(tenant, namespace, session.traces.span(header.request_id))
        if table.events.is_recording:
            table.events.stored(tenant, [block])
        self._in_bytes += size_bytes
        session.take_payload()
        session.reply_packed(header.request_id, Flags.TYPE, _STORED)
        return True

    def _claim_at_once(self, session: Session, header: Header, block: Block, value: memoryview) -> bool:
        """Keep the value invisible, and have the master asked about its block, who answers the request. False, with nothing done, where
        there is no room, or a former block of the key is being decided about."""
        table = self._table
        if table.undecided.is_claimed(block.tenant, block.key):
            return False
        put = table.open(block, session, now_ns=session.reactor.now_ns())
        if put is None:
            return False
        self._dram.fill(put.slot, value)
        session.take_payload()
        frame = PutFrame(True, False, bytearray((GRANTED,)), [put], [], [block.checksum], [])
        try:
            self._claims.claim(session, header, frame)
        except Exception as error:
            table.abort(put)
            session.fail(header.request_id, error)
        return True

    def payload(self, session: Session, header: Header, message: Put) -> list[memoryview] | None:
        """Where the values go: straight into their slots; those not wanted into a buffer nobody reads. None: told later."""
        request = _PutRequest(self, self._slots, session, header, message)
        self._slots.check(message, request.caller.tenant)
        if sum(message.sizes) != header.payload_bytes:
            raise ProtocolError(f"a payload of {header.payload_bytes} bytes for values of {sum(message.sizes)} bytes")
        request.begin()
        return request.views

    def destinations(self, caller: Caller, message: Put, opening: Opening) -> list[memoryview]:
        """Remember the put until its values are there, and say where they go."""
        statuses, puts = opening.statuses, opening.puts
        waits: list[Block] = []
        is_kept = message.ack == ACK_NODE
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

    def arrived(self, session: Session, header: Header) -> None:
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
        self, session: Session, header: Header, caller: Caller, frame: PutFrame, found: Iterable[tuple[tuple[OpenPut, int], int]]
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

    def _commit(self, session: Session, header: Header, caller: Caller, frame: PutFrame) -> None:
        flags = bytearray()
        stored: list[Block] = []
        for status, put, checksum in zip(frame.statuses, frame.puts, frame.checksums, strict=True):
            if put is not None and self._table.is_open(put):
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
            flags.append(ALREADY_THERE if status == PRESENT else ASK_AGAIN)
        self._table.events.stored(caller.tenant, stored)
        if frame.is_kept and stored and session.traces is not None:
            self._table.undecided.put_by(caller.tenant, stored[0].namespace, session.traces.span(header.request_id))
        if frame.waits:
            answer = self._answers.begin(session, header, flags)
            self._publishers.when_published(frame.waits, answer.give, session.span(header.request_id))
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

    def __init__(self, puts: SentPuts, slots: Slots, session: Session, header: Header, message: Put) -> None:
        super().__init__(slots, session, header, message)
        self._puts = puts
        self.views: list[memoryview] | None = None

    def opened(self, opening: Opening) -> None:
        assert isinstance(self.message, Put)
        self.views = self._puts.destinations(self.caller, self.message, opening)
        if self.is_waiting:
            self.session.accept_payload(self.views)

    def fail(self, error: Exception) -> None:
        self.caller.frame = None
        self.session.refuse_payload(error)
