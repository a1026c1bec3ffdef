"""Receive side of a connection: received bytes cut into frames, and the payload of the request that is being received.

Neither class owns the socket.
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
"""Read at once of a payload that was refused."""
BUFFER_BYTES: Final = 64 << 10
"""Small frames, values included, come many with one recv; a larger body gets a buffer of its own for as long as it is parsed."""
_NOTHING: Final = memoryview(b"")


class FrameReader:
    """Received bytes that are not used yet: frames are cut from them, values are moved out. The owner reads from the socket into
    `recv_buffer()`. Not thread-safe."""

    __slots__ = ("_base", "_buffer", "_end", "_start", "max_body_bytes")

    def __init__(self) -> None:
        self.max_body_bytes = MAX_BODY_BYTES
        """A frame whose body is to be longer is none of ours."""
        self._base = self._buffer = _new_buffer()
        self._start = self._end = 0

    @property
    def unread_bytes(self) -> int:
        return self._end - self._start

    def recv_buffer(self) -> memoryview:
        """Where the next bytes go. Not empty when `next_frame` has just found none."""
        return self._buffer[self._end :] if self._end else self._buffer

    def received(self, size: int) -> None:
        """The first `size` bytes of `recv_buffer()` have arrived."""
        self._end += size

    def next_frame(self) -> tuple[FrameHeader, memoryview] | None:
        """The next frame's header and body, taken out; its payload lies behind. None: it is not whole yet.

        The body is valid until `recv_buffer()` is written to or this is called again. Raises ProtocolError when the bytes are no frame of
        ours; the connection cannot be used further then.
        """
        start = self._start
        have = self._end - start
        if have < HEADER_BYTES:
            if start or len(self._buffer) > BUFFER_BYTES:
                self._make_room(HEADER_BYTES)
            return None
        header = unpack_header(self._buffer, start)
        if header.body_bytes > self.max_body_bytes:
            raise ProtocolError(f"say Hello first: until then a message has at most {self.max_body_bytes} bytes, not {header.body_bytes}")
        body_start = start + HEADER_BYTES
        end = body_start + header.body_bytes
        if end > self._end:
            self._make_room(end - start)
            return None
        body = self._buffer[body_start:end]
        if end == self._end:
            self._start = self._end = 0  # the usual case: nothing to keep
        else:
            self._start = end
        return header, body

    def move_into(self, views: deque[memoryview]) -> int:
        """Move bytes to the front of `views`, which loses those that are full, until either is used up. Returns how many."""
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
        """The next `size` bytes, if they are all there: valid until anything else is called."""
        start = self._start
        return self._buffer[start : start + size] if size <= self._end - start else None

    def discard(self, limit: int) -> int:
        """Throw away at most `limit` bytes. Returns how many."""
        size = min(self._end - self._start, limit)
        self._take(size)
        return size

    def let_go(self) -> None:
        """The connection is gone: nothing has arrived, and nothing will."""
        self._base = self._buffer = _NOTHING
        self._start = self._end = 0

    def _take(self, size: int) -> None:
        self._start += size
        if self._start == self._end:
            self._start = self._end = 0

    def _make_room(self, size: int) -> None:
        """Have room for more of a frame of `size` bytes, which has begun at `_start`.

        A large frame's room doubles whenever it is full: a header alone, which costs the peer 24 bytes, does not take 40 MiB of ours.
        """
        have, room = self._end - self._start, len(self._buffer)
        if room > BUFFER_BYTES >= size:
            buffer = self._base
        elif self._start + size <= room:
            return
        elif size <= room:
            buffer = self._buffer
        elif not self._start and self._end < room:
            return
        else:
            buffer = memoryview(bytearray(min(size, max(2 * have, BUFFER_BYTES))))
        buffer[:have] = self._buffer[self._start : self._end]  # right for overlapping ones too
        self._buffer, self._start, self._end = buffer, 0, have


class PayloadReader:
    """The request whose payload is being received: its message, and where the remaining bytes go. One request at a time: `begin`, then
    `accept` or `refuse`, then bytes until `is_whole`, then `over`.

    Nothing is read until the handler names the destination. A refused payload is read and thrown away, so that the connection stays usable.
    The buffers belong to the handler.
    """

    __slots__ = ("_destinations", "body", "header", "is_waiting", "left_bytes", "refusal")

    def __init__(self) -> None:
        self.header: FrameHeader | None = None
        """Of the request; None without one."""
        self.body = b""
        self.left_bytes = 0
        self.is_waiting = False
        """Nobody has told yet where the bytes go."""
        self.refusal: Exception | None = None
        self._destinations: deque[memoryview] | None = None
        """Where the bytes go that are still to come; empty: nowhere. None: they are not read."""

    @property
    def is_coming(self) -> bool:
        """Bytes are read into their places, or thrown away."""
        return self._destinations is not None

    @property
    def is_whole(self) -> bool:
        return not self.left_bytes

    def begin(self, header: FrameHeader, body: bytes) -> None:
        """The message is here; `accept` or `refuse` has to follow, or `over` where nothing is to be read any more."""
        self.header, self.body, self.left_bytes, self.is_waiting = header, body, header.payload_bytes, True

    def accept(self, views: Sequence[memoryview]) -> None:
        """The bytes go there."""
        assert self.is_waiting, "no request waits for room"
        assert sum(map(len, views)) == self.left_bytes, "the views do not add up to the payload"
        self.is_waiting = False
        self._destinations = deque(filter(len, views))

    def refuse(self, error: Exception) -> None:
        """The bytes go nowhere."""
        assert self.is_waiting, "no request waits for room"
        self.is_waiting, self.refusal, self._destinations = False, error, deque()

    def divert(self) -> None:
        """What is still to come goes nowhere, and nothing is written any more where it was to go; the request goes on."""
        assert self.is_coming, "nothing is on its way"
        self._destinations = deque()

    def take_from(self, reader: FrameReader) -> None:
        """What has come along with the message."""
        assert self._destinations is not None
        self.left_bytes -= reader.move_into(self._destinations) if self._destinations else reader.discard(self.left_bytes)

    def read_from(self, sock: socket.socket) -> int:
        """Read no more than TURN_BYTES; 0 at the stream's end. Raises OSError."""
        assert self._destinations is not None
        if not self._destinations:
            got = sock.recv_into(bytearray(min(self.left_bytes, DISCARD_BYTES)))
        else:
            got = sock.recvmsg_into(first(self._destinations, TURN_BYTES))[0]
            advance(self._destinations, got)
        self.left_bytes -= got
        return got

    def over(self) -> None:
        """Forget the request, and whose memory its bytes went to."""
        self.header, self.body, self.left_bytes, self.is_waiting = None, b"", 0, False
        self.refusal = self._destinations = None

    def let_go(self) -> None:
        """The connection is gone: nothing is written any more, and nobody is told of a refusal, which refers to the call it came from."""
        self.refusal = self._destinations = None


def _new_buffer() -> memoryview:
    """BUFFER_BYTES of zeros, of which memory is taken page by page as it is written: a connection of small frames takes 8 KiB. malloc gives
    memory that was used before, so that calloc has to write all of it."""
    buffer = mmap(-1, BUFFER_BYTES, MAP_PRIVATE | MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages refuses; else one would make all buffers of 32 connections resident
        buffer.madvise(MADV_NOHUGEPAGE)
    return memoryview(buffer)
