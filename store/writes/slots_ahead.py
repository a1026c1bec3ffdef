"""Puts into slots opened ahead: the value is in its slot when the put's only message arrives.

The node offers the slot in a page shared with a local writer (protocol/writer_page.py). The put is served from the
receive buffer, as in socket_puts.py. Other cases (another writer, a withdrawn slot) are answered RETRY_LATER, with
nothing done; the client then uses OpenSlots.
"""

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.protocol.batch_of_one import OnePut, OnePutForm
from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.frames import HEADER, HEADER_BYTES, MAGIC, VERSION, FrameHeader
from kvstore.protocol.node_messages import ACK_NODE, ALREADY_STORED, RETRY_LATER, STORED, MapSlabsReply, OpenSlotAhead, PutFromSlot
from kvstore.protocol.session_messages import Flags
from kvstore.protocol.writer_page import (
    AT_NUMBER,
    AT_OFFSET,
    AT_PAGE_MAGIC,
    AT_SIZE,
    AT_SLAB,
    AT_SLABS_AHEAD,
    AT_WRITING,
    PAGE_BYTES,
    PAGE_MAGIC,
    SLABS_AHEAD,
)
from kvstore.rpc.server.session import Session
from kvstore.store.block_table.block import Block
from kvstore.store.block_table.free_slots import Page
from kvstore.store.block_table.table import BlockTable
from kvstore.store.block_table.uncommitted import UNCOMMITTED
from kvstore.store.session_authenticator import Caller, peer_of
from kvstore.store.shared_memory import close_all, make_shared_memory
from kvstore.store.wait_queue import WaitQueue
from kvstore.store.writes.socket_puts import answer_of
from kvstore.tiers.dram import DramTier

_SLOT: Final = struct.Struct("<QQ")
"""Prefix of a PutFromSlot before the body of a Put: the slot's number, and the size of the next slot."""


class WriterPage:
    """Page shared with one local writer. It lives as long as either mapping. A client that writes nonsense keeps one
    slot of its own tenant. Not thread-safe: called from the node's loop."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("Q")
        self._words[AT_PAGE_MAGIC] = PAGE_MAGIC
        self._fence = threading.Lock()

    def offer(self, number: int, slab: int, offset: int, size_bytes: int, slabs_ahead: Sequence[int] = ()) -> None:
        words = self._words
        for at, ahead in enumerate(slabs_ahead[:SLABS_AHEAD], AT_SLABS_AHEAD):
            words[at] = ahead + 1
        words[AT_SLAB], words[AT_OFFSET], words[AT_SIZE] = slab, offset, size_bytes
        with self._fence:  # a reader of the number sees the words above
            pass
        words[AT_NUMBER] = number

    def clear(self) -> None:
        self._words[AT_NUMBER] = 0

    def withdraw(self, number: int) -> bool:
        words = self._words
        words[AT_NUMBER] = 0
        with self._fence:  # a full barrier between this store and the load
            pass
        if words[AT_WRITING] != number:
            return True
        words[AT_NUMBER] = number
        return False


def make_page() -> tuple[WriterPage, int]:
    """Return a new page and its descriptor, which the caller closes. Raises TierFailed: the system has no descriptor or
    memory left."""
    fd, memory = make_shared_memory("writer", PAGE_BYTES, mode=0o600)
    return WriterPage(memory), fd


class SlotsAheadService:
    """Opens slots ahead and serves puts into them. Not thread-safe: called from the node's loop."""

    def __init__(
        self, table: BlockTable, dram: DramTier, waiting: WaitQueue, slabs_ahead: Callable[[Caller, dict[int, int]], list[int]]
    ) -> None:
        """`slabs_ahead` returns slabs for a writer to map in advance, given its new slab with its group."""
        self._slabs_ahead = slabs_ahead
        self._table = table
        self._dram = dram
        self._waiting = waiting
        self._form = OnePutForm()
        self.puts = 0
        self.in_bytes = 0

    def open(self, session: Session, header: FrameHeader, message: OpenSlotAhead) -> None:
        """Open a slot for the connection's next put, if one is free, and answer with the page if it is new."""
        caller = peer_of(session)
        if not session.is_local:
            raise InvalidArgument("OpenSlotAhead needs shared memory: connect to the node's Unix socket, or use Put")
        fds: list[int] = []
        if caller.page is None:
            caller.page, fd = make_page()
            fds.append(fd)
        self._open_next(session, caller, caller.page, message.size_bytes)
        session.reply(header.request_id, MapSlabsReply([PAGE_BYTES if fds else 0]), fds=fds, on_sent=lambda: close_all(fds))

    def frame(self, session: Session, tenant: str, frame: memoryview) -> bool:
        """Serve the receive buffer if it is exactly one PutFromSlot. Return False if it must be parsed as usual."""
        at = HEADER_BYTES + _SLOT.size
        if len(frame) <= at:
            return False
        magic, version, kind, request_id, _, body_bytes, payload_bytes = HEADER.unpack_from(frame)
        is_alone = HEADER_BYTES + body_bytes == len(frame) and not payload_bytes and magic == MAGIC and version == VERSION
        put = self._form.unpack(frame[at:]) if is_alone and kind == PutFromSlot.TYPE and request_id else None
        caller = session.context
        if put is None or put.ack != ACK_NODE or not isinstance(caller, Caller):
            return False
        number, next_bytes = _SLOT.unpack_from(frame, HEADER_BYTES)
        flag, block = self._show(session, caller, put, number, next_bytes)
        try:
            unsent = session.send_now(answer_of(request_id, flag))
        finally:  # the block is visible even if sending failed
            if block is not None:
                self._enter(tenant, block)
        if unsent:
            session.send_whole(unsent)
        return True

    def put(self, session: Session, header: FrameHeader, message: PutFromSlot) -> None:
        """As `frame`, for a parsed message. Raises InvalidArgument: it is not about one unreserved block."""
        caller = peer_of(session)
        columns = (message.keys, message.sizes, message.generations, message.checksums, message.parents)
        if any(len(column) != 1 for column in columns) or message.generations[0] or message.ack != ACK_NODE:
            raise InvalidArgument("PutFromSlot takes one unreserved block with ack 1: use Put or OpenSlots")
        put = OnePut(message.ack, message.namespace, message.keys[0], message.sizes[0], message.checksums[0], message.parents[0])
        flag, block = self._show(session, caller, put, message.number, message.next_bytes)
        if block is not None:
            self._enter(caller.tenant, block)
            if session.traces is not None:
                self._table.uncommitted.note_cause(caller.tenant, put.namespace, session.traces.span(header.request_id))
        session.reply(header.request_id, Flags(bytes((flag,))))

    def _show(self, session: Session, caller: Caller, put: OnePut, number: int, next_bytes: int) -> tuple[int, Block | None]:
        """Return the answer's flag, and the block if it became visible; `_enter` must follow. The slot for the next put
        is offered before the answer, so that the writer finds it."""
        table, tenant = self._table, caller.tenant
        ahead = table.ahead.of(session, number)
        if ahead is None or ahead.slot.size_bytes != put.size_bytes:
            return RETRY_LATER, None
        if table.find(tenant, put.key) is not None:
            return ALREADY_STORED, None  # the slot stays the connection's
        block = table.rows.make(tenant, put.key, put.size_bytes, UNCOMMITTED, put.namespace, put.parent, put.checksum)
        if not table.place_at(block, ahead.slot):
            return RETRY_LATER, None
        table.ahead.used(session)
        table.copies.make_placed_visible(block)
        if next_bytes:
            self._open_next(session, caller, ahead.page, next_bytes)
        return STORED, block

    def _enter(self, tenant: str, block: Block) -> None:
        """Complete the bookkeeping of a visible block."""
        table = self._table
        table.enter_placed(block)
        if table.events.is_recording:
            table.events.stored(tenant, [block])
        self.puts += 1
        self.in_bytes += block.size_bytes

    def _open_next(self, session: Session, caller: Caller, page: Page, size_bytes: int) -> None:
        """Offer a slot in the page, unless requests of the tenant wait or none is free."""
        table, tenant = self._table, caller.tenant
        if self._waiting.has(tenant):
            table.ahead.close(session)
            return
        ahead = table.ahead.open(session, tenant, size_bytes, page, now_ns=session.reactor.now_ns())
        if ahead is not None:
            slab, offset = self._dram.locate(ahead.slot)
            slabs = [] if slab in caller.exported else self._slabs_ahead(caller, {slab: ahead.slot.group})
            page.offer(ahead.number, slab, offset, size_bytes, slabs)
