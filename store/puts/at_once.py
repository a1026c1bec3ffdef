"""Puts of one small value that are served where they arrive, in one go: stored, shown and answered, or handed to the master's decision.

The answer goes out as soon as the value can be found here; what the node keeps besides (who leaves when, what is to be claimed) it
enters afterwards, while the writer's process is being woken up. Nothing else of the node runs in between. Whatever there is more to, such
as another writer, no room, a quota or a wrong checksum, is left to sent.py, with nothing done.
"""

import struct
from collections.abc import Callable
from functools import partial
from typing import Final

import xxhash

from kvstore.protocol.batch_of_one import OnePut, OnePutForm
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.frames import HEADER, HEADER_BYTES, MAGIC, MAX_DEADLINE_MS, VERSION, Header
from kvstore.protocol.message import GRANTED
from kvstore.protocol.node_messages import ALREADY_THERE, KEPT_ACKS, STORED, Put
from kvstore.protocol.session_messages import Flags
from kvstore.rpc.session import Session
from kvstore.store.blocks.block import Block
from kvstore.store.blocks.table import BlockTable
from kvstore.store.blocks.undecided import UNDECIDED
from kvstore.store.caller import Caller, PutFrame
from kvstore.store.puts.claims import Claims
from kvstore.store.waiting import WaitingRoom
from kvstore.tiers.dram import DramTier

_ANSWER: Final = struct.Struct(HEADER.format + "IB")
"""A whole answer Flags of one flag: header, count, flag."""
_ANSWER_BODY: Final = struct.calcsize("<IB")


class PutsAtOnce:
    """Not thread-safe: the node's loop is the only caller."""

    def __init__(self, table: BlockTable, dram: DramTier, waiting: WaitingRoom, claims: Claims) -> None:
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
        if put.ack not in KEPT_ACKS:
            header = Header(kind, request_id, min(deadline_ms, MAX_DEADLINE_MS), body_bytes, payload_bytes)
            return self._claim(session, header, tenant, put, value, partial(session.count, header))
        if self._table.find(tenant, put.key) is not None:
            session.send_whole(answer_of(request_id, ALREADY_THERE))
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

    def payload(self, session: Session, header: Header, body: memoryview) -> bool:
        """As `frame`, of a request whose message has been read, its value being there or not."""
        value, caller = session.arrived_payload(), session.context
        if value is None or not isinstance(caller, Caller) or (put := self._form.unpack(body)) is None:
            return False
        tenant = caller.tenant
        if put.ack not in KEPT_ACKS:
            return self._claim(session, header, tenant, put, value, session.take_payload)
        if self._table.find(tenant, put.key) is not None:
            session.take_payload()
            session.reply(header.request_id, Flags(bytes((ALREADY_THERE,))))
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

    def _claim(self, session: Session, header: Header, tenant: str, put: OnePut, value: memoryview, begin: Callable[[], None]) -> bool:
        """Keep the value invisible, and have the master asked about its block, who answers the request: asked first, for its processor to
        be woken up while the value is copied. `begin` is called once the request is served here. False, too, where a former block of the
        key is being decided about."""
        table = self._table
        is_known = table.find(tenant, put.key) is not None or table.writer(tenant, put.key) is not None
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
            if table.is_open(opened):  # else there is no master to ask
                self._dram.fill(opened.slot, value)
        except Exception as error:
            table.abort(opened)  # what the master grants is told to be gone then
            session.fail(header.request_id, error)
        return True


def answer_of(request_id: int, flag: int) -> bytes:
    """A whole answer Flags of one flag."""
    return _ANSWER.pack(MAGIC, VERSION, Flags.TYPE, request_id, 0, _ANSWER_BODY, 0, 1, flag)
