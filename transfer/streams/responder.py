"""Server side of the transfer protocol: replies to peers' requests for registered memory, one at a time, with blocking
calls.

target.py owns the connections and chooses the threads.
"""

import contextlib
import threading
from collections.abc import Sequence
from typing import Final

from kvstore.protocol.errors import KVStoreError, ProtocolError
from kvstore.protocol.frames import HEADER_BYTES, MAX_PAYLOAD_BYTES, FrameHeader, pack_header, unpack_header
from kvstore.protocol.message import Message
from kvstore.protocol.session_messages import Failure, Ok
from kvstore.protocol.transfers import MAX_PIECE_BYTES, MAX_PIECES, MAX_TRANSFER_BODY_BYTES, Notice, ReadRegions, WriteRegions
from kvstore.rpc.deadline import Deadline
from kvstore.transfer.agent import Notices
from kvstore.transfer.config import TransferSettings
from kvstore.transfer.memory.region import Exports, release
from kvstore.transfer.streams.connection import Connection

DISCARD_BYTES: Final = 256 << 10
"""Buffer for refused payloads of a stream, regardless of the announced size."""
MAX_DISCARDED_PIECE_BYTES: Final = 16 << 20
"""Longest refused message that is received: our agents cut slices no longer than that."""
IDLE_S: Final = 86_400.0
"""Idle timeout of a connection without a descriptor."""
FINAL_REPLY_TIMEOUT_S: Final = 0.5
"""Time for a peer to read the error reply before its connection is closed."""


class Responder:
    """Handles requests of all connections. Thread-safe: each connection has one thread at a time, the counters a lock."""

    def __init__(self, name: str, exports: Exports, settings: TransferSettings) -> None:
        self._name = name
        self._exports = exports
        self._settings = settings
        self._lock = threading.Lock()
        self._notices = Notices(name)
        self.served_bytes = 0

    def notices(self) -> list[tuple[str, bytes]]:
        """Remove and return the notifications, as (name of the agent, message)."""
        return self._notices.take()

    def receive(self, connection: Connection) -> tuple[FrameHeader, memoryview]:
        """Receive the next request's header and body; the payload follows. Raises what ends the connection."""
        head = memoryview(bytearray(HEADER_BYTES))
        if connection.fileno() >= 0:  # it is readable: a slow header must not block the thread
            connection.recv_into([head], Deadline(self._settings.stall_timeout_s))
        else:
            connection.stall_timeout_s = IDLE_S
            connection.recv_into([head], Deadline(IDLE_S))
            connection.stall_timeout_s = self._settings.stall_timeout_s
        try:
            header = unpack_header(head)
            if header.body_bytes > MAX_TRANSFER_BODY_BYTES:
                raise ProtocolError(f"a body of {header.body_bytes} bytes is over the limit of {MAX_TRANSFER_BODY_BYTES}")
        except ProtocolError as error:
            self.send_final(connection, 0, error)
            raise
        body = memoryview(bytearray(header.body_bytes))
        if header.body_bytes:
            connection.recv_into([body], self.deadline_of(header))
        return header, body

    def deadline_of(self, header: FrameHeader) -> Deadline:
        """Return the deadline that the peer's request carries."""
        return Deadline(header.deadline_ms / 1000 if header.deadline_ms else self._settings.deadline_s)

    def handle_read(self, connection: Connection, header: FrameHeader, message: ReadRegions) -> None:
        """Reply with the pieces, or with an error. Raises what ends the connection."""
        try:
            payload_bytes = _check_pieces(message)
            views, held = self._exports.hold(message)
        except ProtocolError:
            raise
        except KVStoreError as error:
            self.respond(connection, header.request_id, Failure(error.code, str(error)))
            return
        try:
            head = pack_header(Ok.TYPE, header.request_id, 0, payload_bytes)
            connection.send([head, *views], self.deadline_of(header))
            self._count(payload_bytes)
        finally:
            del views
            release(held)

    def handle_write(self, connection: Connection, header: FrameHeader, message: WriteRegions) -> None:
        """Receive the pieces and acknowledge, or reply with an error. Raises what ends the connection."""
        deadline = self.deadline_of(header)
        payload_bytes = _check_pieces(message)
        if header.payload_bytes != payload_bytes:
            raise ProtocolError(f"a payload of {header.payload_bytes} bytes for pieces of {payload_bytes} bytes")
        try:
            views, held = self._exports.hold(message)
        except KVStoreError as error:
            _discard(connection, message.sizes, deadline)
            self.respond(connection, header.request_id, Failure(error.code, str(error)))
            return
        try:
            connection.recv_into(views, deadline)
            self._count(payload_bytes)
        finally:
            del views
            release(held)
        self.respond(connection, header.request_id, Ok())

    def _count(self, payload_bytes: int) -> None:
        with self._lock:
            self.served_bytes += payload_bytes

    def handle_notice(self, connection: Connection, name: str, header: FrameHeader, message: Notice) -> None:
        """Queue a notification from the agent `name`."""
        reply: Message = Ok()
        try:
            self._notices.put(name, message.message)
        except KVStoreError as error:
            reply = Failure(error.code, str(error))
        self.respond(connection, header.request_id, reply)

    def respond(self, connection: Connection, request_id: int, message: Message) -> None:
        """Send a reply without payload."""
        body = message.pack()
        parts = [pack_header(message.TYPE, request_id, len(body)), body] if body else [pack_header(message.TYPE, request_id, 0)]
        connection.send(parts, Deadline(self._settings.stall_timeout_s))

    def send_final(self, connection: Connection, request_id: int, error: KVStoreError) -> None:
        """Send an error reply and give the peer time to read it: closing at once could drop it."""
        with contextlib.suppress(KVStoreError):
            self.respond(connection, request_id, Failure(error.code, str(error)))
            connection.recv_into([memoryview(bytearray(1))], Deadline(FINAL_REPLY_TIMEOUT_S))


def _discard(connection: Connection, sizes: Sequence[int], deadline: Deadline) -> None:
    """Receive and drop refused pieces. Raises ProtocolError for pieces that our agents never send, and what ends the
    connection.
    """
    if connection.fileno() < 0:  # messages: received with the sizes sent
        longest = max(sizes, default=0)
        if longest > MAX_DISCARDED_PIECE_BYTES:
            raise ProtocolError(f"a piece of {longest} bytes for a region that this peer cannot access")
        scratch = memoryview(bytearray(longest))
        connection.recv_into([scratch[:size] for size in sizes], deadline)
        return
    left_bytes = sum(sizes)
    scratch = memoryview(bytearray(min(left_bytes, DISCARD_BYTES)))
    while left_bytes:
        part = scratch[:left_bytes]
        connection.recv_into([part], deadline)
        left_bytes -= len(part)


def _check_pieces(message: ReadRegions | WriteRegions) -> int:
    """Return the total size. Raises ProtocolError for a request that our agents never send."""
    if len(message.sizes) > MAX_PIECES:
        raise ProtocolError(f"a request of {len(message.sizes)} pieces; the limit is {MAX_PIECES}")
    if message.sizes and max(message.sizes) > MAX_PIECE_BYTES:
        raise ProtocolError(f"a piece of {max(message.sizes)} bytes; the limit is {MAX_PIECE_BYTES}")
    payload_bytes = sum(message.sizes)
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(f"pieces of {payload_bytes} bytes; a frame has at most {MAX_PAYLOAD_BYTES}")
    return payload_bytes
