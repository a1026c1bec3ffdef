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
"""A whole answer Flags of one flag: header, count, flag."""
_ONE_FLAG_BODY: Final = struct.calcsize("<IB")


class ClientProtocol:
    """See the module. Not thread-safe. After any error that it raises, but DeadlineExceeded of `request`, the stream may be anywhere."""

    __slots__ = ("_address", "_request_id", "accepts_traces", "makes_hot_copies", "payload_left")

    def __init__(self, address: Address) -> None:
        self._address = address
        self.accepts_traces = self.makes_hot_copies = False
        """The peer has said so in its Welcome."""
        self._request_id = 0
        self.payload_left = 0
        """Bytes of the last answer's payload that have not been read; whoever reads some counts them off."""

    def request(self, message: Packable, deadline: Deadline, payload: Sequence[memoryview | bytes] = ()) -> deque[memoryview]:
        """The next request, as the buffers to send in order.

        Raises ProtocolError: values of the previous answer lie in the way. DeadlineExceeded: it is over, and nothing needs to be sent.
        """
        if self.payload_left:
            raise ProtocolError("the previous answer's payload was not read")
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
        """The next request's header and body, of a message that is packed already. Raises as `request`; what deadline is left is not
        looked at: what is packed at once has all of it."""
        if self.payload_left:
            raise ProtocolError("the previous answer's payload was not read")
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
        """The flag, if the first bytes of `data` are an answer Flags to the request that has one and nothing else. None: `answer` tells."""
        if size_bytes != _ONE_FLAG.size:
            return None
        magic, version, kind, request_id, _, body_bytes, payload_bytes, count, flag = _ONE_FLAG.unpack_from(data)
        is_plain = kind == Flags.TYPE and request_id == self._request_id and count == 1 and body_bytes == _ONE_FLAG_BODY
        found: int = flag
        return found if is_plain and not payload_bytes and magic == MAGIC and version == VERSION else None

    def answer(self, header: FrameHeader, body: memoryview, kind: type[M]) -> M | KVStoreError:
        """What this frame answers to the request: the message, or the peer's typed error.

        Raises ProtocolError for any other frame, and the error of a peer that could not read us and hangs up.
        """
        if header.type == kind.TYPE and header.request_id == self._request_id:
            reply = kind.unpack(body)
            self.payload_left = header.payload_bytes
            if header.deadline_ms:  # of a Welcome; of other answers it is 0
                self.accepts_traces = bool(header.deadline_ms & ACCEPTS_TRACES)
                self.makes_hot_copies = bool(header.deadline_ms & MAKES_HOT_COPIES)
            return reply
        if header.type != Failure.TYPE or header.request_id not in (0, self._request_id) or header.payload_bytes:
            raise ProtocolError(f"{self._address} answered with a message of type {header.type} where {kind.__name__} belongs")
        failure = Failure.unpack(body)
        error = from_code(failure.code, failure.text)
        if not header.request_id:
            raise error
        return error

    def destinations(self, views: Sequence[memoryview]) -> deque[memoryview]:
        """The views to be filled with the answer's payload, or its next part. Raises ProtocolError: the payload has fewer bytes."""
        if sum(map(len, views)) > self.payload_left:
            raise ProtocolError(f"{self._address} sent {self.payload_left} bytes of values where more belong")
        return deque(filter(len, views))

    def peer_closed(self) -> ConnectionResetError:
        """The error of a stream that ends here."""
        return ConnectionResetError(0, "the peer closed the connection" + (" within a payload" if self.payload_left else ""))

    def wrong_descriptors(self, slabs: MapSlabsReply, count: int) -> ProtocolError | None:
        """The error of an answer with which `count` descriptors came, unless that is one for each slab that is there."""
        if count == sum(map(bool, slabs.sizes)):
            return None
        return ProtocolError(f"{self._address} sent {count} descriptors for slabs of {list(slabs.sizes)} bytes")


class BaseChannel(ABC):
    """A client's connection to one daemon, whichever way it waits for its socket: one request in flight."""

    welcome: Welcome
    """Who answered."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.is_open = True
        self._reader = FrameReader()
        self._protocol = ClientProtocol(address)
        self._is_midway = False
        """A request was begun and its answer has not come, or a message without an answer is being sent."""

    @abstractmethod
    def close(self) -> None:
        """Hang up. A second close is a no-op."""

    @property
    def is_settled(self) -> bool:
        """Between calls, with nothing of the last one left to read. Otherwise, after an interrupt, its stream may be anywhere."""
        return not self._is_midway and not self._protocol.payload_left

    @property
    def accepts_traces(self) -> bool:
        """The peer has said so in its Welcome."""
        return self._protocol.accepts_traces

    @property
    def makes_hot_copies(self) -> bool:
        """A master that has what is read much copied to further nodes answered."""
        return self._protocol.makes_hot_copies

    def _answered(self, frame: tuple[FrameHeader, memoryview], answer: type[M]) -> M:
        """What a whole frame says. Raises the peer's typed error, ProtocolError."""
        try:
            reply = self._protocol.answer(frame[0], frame[1], answer)
        except KVStoreError as error:
            raise self._broken(error) from None
        self._is_midway = False
        if isinstance(reply, KVStoreError):
            try:
                raise reply
            finally:
                del reply  # the error refers to this call, which is not to refer to it
        return reply

    def _broken(self, error: BaseException) -> BaseException:
        """Close, and say what the caller is told: interrupts and typed errors as they are. An OSError without a number is not the socket's:
        a signal handler raised it."""
        self.close()
        if isinstance(error, DeadlineExceeded):
            return DeadlineExceeded(f"{self.address}: {error}")
        if isinstance(error, KVStoreError) or not isinstance(error, OSError) or error.errno is None:
            return error
        return Unavailable(f"the connection to {self.address} broke: {error.strerror or error}")


def has_hung_up(sock: socket.socket) -> bool:
    """Whether the peer has closed its end. Reads nothing, so a call of another thread may be under way."""
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def refusal(sock: socket.socket, reader: FrameReader) -> KVStoreError | None:
    """The error by which a peer refused this connection before it closed it: where a send fails, its Failure can still be read. None: it
    sent none."""
    try:
        reader.received(sock.recv_into(reader.recv_buffer(), 0, socket.MSG_DONTWAIT))
        frame = reader.next_frame()
        if frame is None or frame[0].type != Failure.TYPE or frame[0].request_id:
            return None
        failure = Failure.unpack(frame[1])
    except (OSError, ProtocolError):
        return None
    return from_code(failure.code, failure.text)


def notice(message: Message) -> deque[memoryview]:
    """A message that has no answer, as the buffers to send."""
    body = message.pack()
    return deque((memoryview(pack_header(message.TYPE, 0, len(body)) + body),))


def take_descriptors(ancillary: Iterable[tuple[int, int, bytes]], fds: "array[int]") -> None:
    """Append what came by SCM_RIGHTS, whole or cut: the kernel gives no other kind unasked."""
    for _, _, content in ancillary:
        fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
