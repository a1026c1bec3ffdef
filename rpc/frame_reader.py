"""Receive side of a connection: parser of frames, and reader of the current request's payload.

Neither owns the socket.
"""

import contextlib
import socket
from collections import deque
from collections.abc import Sequence
from mmap import MADV_NOHUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Final

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.frames import HEADER_BYTES, MAX_BODY_BYTES, FrameHeader, unpack_header
from kvstore.rpc.frame_writer import TURN_BYTES, advance, first

DISCARD_BYTES: Final = 256 << 10
"""Bytes read at a time of a refused payload."""
BUFFER_BYTES: Final = 64 << 10
"""One recv takes many small frames with their values; a larger body gets its own buffer until it is parsed."""
_NOTHING: Final = memoryview(b"")


class FrameReader:
    """Buffer of received bytes, from which frames and values are taken.

    The owner reads from its socket into `recv_buffer()`.

    Not thread-safe.
    """

    __slots__ = ("_base", "_buffer", "_end", "_start", "max_body_bytes")

    def __init__(self) -> None:
        self.max_body_bytes = MAX_BODY_BYTES
        """Longer bodies raise ProtocolError."""
        self._base = self._buffer = _new_buffer()
        self._start = self._end = 0

    @property
    def unread_bytes(self) -> int:
        return self._end - self._start

    def recv_buffer(self) -> memoryview:
        """Return the buffer for the next bytes; not empty after `next_frame` has returned None."""
        return self._buffer[self._end :] if self._end else self._buffer

    def received(self, size: int) -> None:
        """Record that the first `size` bytes of `recv_buffer()` were received."""
        self._end += size

    def next_frame(self) -> tuple[FrameHeader, memoryview] | None:
        """Take the next frame's header and body; its payload follows. None: it is incomplete.

        The body is valid until `recv_buffer()` is written or this is called again. Raises ProtocolError for anything
        but a frame; the connection is unusable then.
        """
        start = self._start
        have = self._end - start
        if have < HEADER_BYTES:
            if start or len(self._buffer) > BUFFER_BYTES:
                self._reserve(HEADER_BYTES)
            return None
        header = unpack_header(self._buffer, start)
        if header.body_bytes > self.max_body_bytes:
            raise ProtocolError(
                f"a body of {header.body_bytes} bytes is over the limit of {self.max_body_bytes} before Hello: send it first"
            )
        body_start = start + HEADER_BYTES
        end = body_start + header.body_bytes
        if end > self._end:
            self._reserve(end - start)
            return None
        body = self._buffer[body_start:end]
        if end == self._end:
            self._start = self._end = 0  # the usual case: nothing to keep
        else:
            self._start = end
        return header, body

    def move_into(self, views: deque[memoryview]) -> int:
        """Move bytes into `views`, which loses full ones, until either is used up. Return how many."""
        start, end = self._start, self._end
        at = start
        while views and at < end:
            view = views[0]
            size = len(view)
            if size > end - at:
                size = end - at
                view[:size] = self._buffer[at:end]
                views[0] = view[size:]
            else:
                view[:] = self._buffer[at : at + size]
                views.popleft()
            at += size
        self._take(at - start)
        return at - start

    def peek(self, size: int) -> memoryview | None:
        """Return the next `size` bytes, or None if not all are there; valid until any other call."""
        start = self._start
        return self._buffer[start : start + size] if size <= self._end - start else None

    def discard(self, limit: int) -> int:
        """Discard at most `limit` bytes. Return how many."""
        size = min(self._end - self._start, limit)
        self._take(size)
        return size

    def close(self) -> None:
        """Release the buffer; nothing is received any more."""
        self._base = self._buffer = _NOTHING
        self._start = self._end = 0

    def _take(self, size: int) -> None:
        self._start += size
        if self._start == self._end:
            self._start = self._end = 0

    def _reserve(self, size: int) -> None:
        """Make space for more of a frame of `size` bytes that begins at `_start`.

        A large frame's buffer doubles whenever it is full, so that a header alone, 24 bytes for the peer, does not
        allocate 40 MiB.
        """
        have, capacity = self._end - self._start, len(self._buffer)
        if capacity > BUFFER_BYTES >= size:
            buffer = self._base
        elif self._start + size <= capacity:
            return
        elif size <= capacity:
            buffer = self._buffer
        elif not self._start and self._end < capacity:
            return
        else:
            buffer = memoryview(bytearray(min(size, max(2 * have, BUFFER_BYTES))))
        buffer[:have] = self._buffer[self._start : self._end]  # right for overlapping ones too
        self._buffer, self._start, self._end = buffer, 0, have


class PayloadReader:
    """Payload of the request that is being received, and its destination. One request at a time.

    Calls: `begin`, then `accept` or `refuse`, then reads until `is_whole`, then `over`. Nothing is read before `accept`
    or `refuse`. A refused payload is read and discarded, so that the connection stays usable. The destination belongs
    to the handler.
    """

    __slots__ = ("_destinations", "body", "header", "is_waiting", "left_bytes", "refusal")

    def __init__(self) -> None:
        self.header: FrameHeader | None = None
        """Header of the request; None without one."""
        self.body = b""
        self.left_bytes = 0
        self.is_waiting = False
        """True until `accept` or `refuse` is called."""
        self.refusal: Exception | None = None
        self._destinations: deque[memoryview] | None = None
        """Views for the remaining bytes; empty: they are discarded. None: they are not read."""

    @property
    def is_receiving(self) -> bool:
        """True while bytes are being read, into their destination or to be discarded."""
        return self._destinations is not None

    @property
    def is_whole(self) -> bool:
        return not self.left_bytes

    def begin(self, header: FrameHeader, body: bytes) -> None:
        """Start a request; `accept` or `refuse` must follow, or `over` if no payload is left to read."""
        self.header, self.body, self.left_bytes, self.is_waiting = header, body, header.payload_bytes, True

    def accept(self, views: Sequence[memoryview]) -> None:
        """Read the payload into `views`."""
        assert self.is_waiting, "no request waits for a destination"
        assert sum(map(len, views)) == self.left_bytes, "the views do not add up to the payload"
        self.is_waiting = False
        self._destinations = deque(filter(len, views))

    def refuse(self, error: Exception) -> None:
        """Discard the payload; the request fails with `error`."""
        assert self.is_waiting, "no request waits for a destination"
        self.is_waiting, self.refusal, self._destinations = False, error, deque()

    def divert(self) -> None:
        """Discard the rest of the payload and stop writing to its destination; the request is still served."""
        assert self.is_receiving, "no payload is being received"
        self._destinations = deque()

    def take_from(self, reader: FrameReader) -> None:
        """Take the part of the payload that was received with the message."""
        assert self._destinations is not None
        self.left_bytes -= reader.move_into(self._destinations) if self._destinations else reader.discard(self.left_bytes)

    def read_from(self, sock: socket.socket) -> int:
        """Read at most TURN_BYTES; return how many, 0 at the end of the stream. Raises OSError."""
        assert self._destinations is not None
        if not self._destinations:
            got = sock.recv_into(bytearray(min(self.left_bytes, DISCARD_BYTES)))
        else:
            got = sock.recvmsg_into(first(self._destinations, TURN_BYTES))[0]
            advance(self._destinations, got)
        self.left_bytes -= got
        return got

    def over(self) -> None:
        """End the request and drop the references to its destination."""
        self.header, self.body, self.left_bytes, self.is_waiting = None, b"", 0, False
        self.refusal = self._destinations = None

    def close(self) -> None:
        """Drop destination and refusal after the connection ended: an error refers to its frames, and through them to
        the session.
        """
        self.refusal = self._destinations = None


def _new_buffer() -> memoryview:
    """Map BUFFER_BYTES, of which pages are allocated as they are written: a connection of small frames takes 8 KiB.

    With malloc, reused memory would be zeroed and so allocated in full.
    """
    buffer = mmap(-1, BUFFER_BYTES, MAP_PRIVATE | MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # fails on kernels without huge pages, one of which would hold the buffers of 32 connections
        buffer.madvise(MADV_NOHUGEPAGE)
    return memoryview(buffer)
