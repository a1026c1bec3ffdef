"""Client side of the protocol, sans-I/O: one request at a time and its response, as bytes.

channel.py and async_channel.py move the bytes; frame_reader.py cuts them into frames.
"""

import socket
import struct
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from kvstore.protocol.errors import DeadlineExceeded, KVStoreError, ProtocolError, Unavailable, from_code
from kvstore.protocol.frames import (
    ACCEPTS_TRACES,
    HEADER,
    MAGIC,
    MAKES_HOT_COPIES,
    MAX_DEADLINE_MS,
    VERSION,
    FrameHeader,
    pack_header,
)
from kvstore.protocol.message import Message, Packable
from kvstore.protocol.node_messages import MapSlabsReply
from kvstore.protocol.session_messages import Failure, Flags, Welcome
from kvstore.rpc.address import Address
from kvstore.rpc.deadline import Deadline
from kvstore.rpc.frame_reader import FrameReader
from kvstore.rpc.tracing import CALL

M = TypeVar("M", bound=Message)
MAX_REQUEST_ID = 0xFFFFFFFF
_ONE_FLAG: Final = struct.Struct(HEADER.format + "IB")
"""A whole Flags response with one flag: header, count, flag."""
_ONE_FLAG_BODY: Final = struct.calcsize("<IB")


class ClientProtocol:
    """State of one connection: request ids, unread payload, features of the peer. Not thread-safe.

    After any error but DeadlineExceeded of `request`, the position in the stream is unknown: close the connection.
    """

    __slots__ = ("_address", "_request_id", "accepts_traces", "makes_hot_copies", "payload_left")

    def __init__(self, address: Address) -> None:
        self._address = address
        self.accepts_traces = self.makes_hot_copies = False
        """Features in the peer's Welcome."""
        self._request_id = 0
        self.payload_left = 0
        """Unread bytes of the last response's payload; the reader of the payload decreases it."""

    def request(self, message: Packable, deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> deque[memoryview]:
        """Return the buffers of the next request, to be sent in order.

        Raises ProtocolError: the previous response's payload is unread. DeadlineExceeded: nothing was sent.
        """
        if self.payload_left:
            raise ProtocolError("the previous response's payload was not read")
        self._request_id = self._request_id % MAX_REQUEST_ID + 1
        body = message.pack()
        payload_bytes = sum(map(len, payload)) if payload else 0
        deadline_ms = min(int(deadline.left_s() * 1000) + 1, MAX_DEADLINE_MS)
        frame = pack_header(message.TYPE, self._request_id, len(body), payload_bytes, deadline_ms) + body
        call = CALL.get()
        if call is not None:
            call.requests += 1
            if self.accepts_traces:
                frame = call.frame + frame
        head = memoryview(frame)
        return deque([head, *[memoryview(part) for part in payload]]) if payload else deque((head,))

    def packed_request(self, kind: int, body: bytes, payload_bytes: int, deadline: Deadline) -> bytes:
        """Return header and body of the next request, with a packed body. Raises as `request`.

        The header has the whole deadline, without a clock read: the caller has just begun.
        """
        if self.payload_left:
            raise ProtocolError("the previous response's payload was not read")
        self._request_id = request_id = self._request_id % MAX_REQUEST_ID + 1
        deadline_ms = min(int(deadline.timeout_s * 1000) + 1, MAX_DEADLINE_MS)
        frame = HEADER.pack(MAGIC, VERSION, kind, request_id, deadline_ms, len(body), payload_bytes) + body
        call = CALL.get()
        if call is not None:
            call.requests += 1
            if self.accepts_traces:
                return call.frame + frame
        return frame

    def flag(self, data: memoryview, size_bytes: int) -> int | None:
        """Return the flag if `data` is exactly the Flags response, with one flag, to the current request.

        None: use `answer`.
        """
        if size_bytes != _ONE_FLAG.size:
            return None
        magic, version, kind, request_id, _, body_bytes, payload_bytes, count, flag = _ONE_FLAG.unpack_from(data)
        is_plain = kind == Flags.TYPE and request_id == self._request_id and count == 1 and body_bytes == _ONE_FLAG_BODY
        found: int = flag
        return found if is_plain and not payload_bytes and magic == MAGIC and version == VERSION else None

    def answer(self, header: FrameHeader, body: memoryview, kind: type[M]) -> M | KVStoreError:
        """Return the response in this frame: the message, or the peer's typed error.

        Raises ProtocolError for any other frame, and the error of a peer that rejects the connection (request id 0).
        """
        if header.type == kind.TYPE and header.request_id == self._request_id:
            reply = kind.unpack(body)
            self.payload_left = header.payload_bytes
            if header.deadline_ms:  # feature bits of a Welcome; 0 in other responses
                self.accepts_traces = bool(header.deadline_ms & ACCEPTS_TRACES)
                self.makes_hot_copies = bool(header.deadline_ms & MAKES_HOT_COPIES)
            return reply
        if header.type != Failure.TYPE or header.request_id not in (0, self._request_id) or header.payload_bytes:
            raise ProtocolError(f"{self._address} sent a message of type {header.type} instead of {kind.__name__}")
        failure = Failure.unpack(body)
        error = from_code(failure.code, failure.text)
        if not header.request_id:
            raise error
        return error

    def destinations(self, views: Sequence[memoryview]) -> deque[memoryview]:
        """Return the non-empty views, to be filled with payload. Raises ProtocolError: the payload has fewer bytes."""
        if (expected := sum(map(len, views))) > self.payload_left:
            raise ProtocolError(f"{self._address} sent {self.payload_left} bytes of values instead of {expected}")
        return deque(filter(len, views))

    def peer_closed(self) -> ConnectionResetError:
        """Return the error for the end of the stream."""
        return ConnectionResetError(0, "the peer closed the connection" + (" within a payload" if self.payload_left else ""))

    def wrong_descriptors(self, slabs: MapSlabsReply, count: int) -> ProtocolError | None:
        """Return an error unless the response came with one descriptor for each existing slab."""
        if count == sum(map(bool, slabs.sizes)):
            return None
        return ProtocolError(f"{self._address} sent {count} descriptors for slabs of {list(slabs.sizes)} bytes")


class BaseChannel(ABC):
    """Base of blocking and asyncio channels: a client's connection to one daemon, with one request in flight."""

    welcome: Welcome
    """The daemon's response to Hello."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.is_open = True
        self._reader = FrameReader()
        self._protocol = ClientProtocol(address)
        self._is_midway = False
        """True while a request has no response yet, or a one-way message is being sent."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection. A second close is a no-op."""

    @property
    def is_settled(self) -> bool:
        """True if no call is in progress and no payload is unread.

        If False after an interrupt, the stream's position is unknown.
        """
        return not self._is_midway and not self._protocol.payload_left

    @property
    def accepts_traces(self) -> bool:
        """True if the peer accepts Trace messages."""
        return self._protocol.accepts_traces

    @property
    def makes_hot_copies(self) -> bool:
        """True if the peer is a master that makes hot copies."""
        return self._protocol.makes_hot_copies

    def _answered(self, frame: tuple[FrameHeader, memoryview], answer: type[M]) -> M:
        """Return the response in a frame. Raises the peer's typed error, ProtocolError."""
        try:
            reply = self._protocol.answer(frame[0], frame[1], answer)
        except KVStoreError as error:
            raise self._broken(error) from None
        self._is_midway = False
        if isinstance(reply, KVStoreError):
            try:
                raise reply
            finally:
                del reply  # breaks the reference cycle of error and frame
        return reply

    def _broken(self, error: BaseException) -> BaseException:
        """Close the channel and return the error to raise: Unavailable for an OSError of the socket, others unchanged.

        An OSError without errno comes from a signal handler.
        """
        self.close()
        if isinstance(error, DeadlineExceeded):
            return DeadlineExceeded(f"{self.address}: {error}")
        if isinstance(error, KVStoreError) or not isinstance(error, OSError) or error.errno is None:
            return error
        return Unavailable(f"the connection to {self.address} broke: {error.strerror or error}")


def is_closed_by_peer(sock: socket.socket) -> bool:
    """Return True if the peer has closed its end. Reads nothing, so another thread's call may be in progress."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def read_refusal(sock: socket.socket, reader: FrameReader) -> KVStoreError | None:
    """Return the error with which the peer refused this connection, or None.

    After a failed send its Failure can still be read.
    """
    try:
        reader.received(sock.recv_into(reader.recv_buffer(), 0, socket.MSG_DONTWAIT))
        frame = reader.next_frame()
        if frame is None or frame[0].type != Failure.TYPE or frame[0].request_id:
            return None
        failure = Failure.unpack(frame[1])
    except (OSError, ProtocolError):
        return None
    return from_code(failure.code, failure.text)


def one_way_frame(message: Message) -> deque[memoryview]:
    """Return the buffers of a one-way message."""
    body = message.pack()
    return deque((memoryview(pack_header(message.TYPE, 0, len(body)) + body),))


def take_descriptors(ancillary: Iterable[tuple[int, int, bytes]], fds: "array[int]") -> None:
    """Append the descriptors received by SCM_RIGHTS, the only kind of ancillary data that is received, possibly
    truncated.
    """
    for _, _, content in ancillary:
        fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
