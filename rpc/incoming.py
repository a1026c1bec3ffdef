"""What has arrived on one connection and is not used yet: whole frames are cut from it, values are moved out of it.

It knows no socket and no message: its owner reads into `room()` and tells how much came.
"""

import contextlib
from collections import deque
from mmap import MADV_NOHUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Final

from kvstore.protocol.errors import ProtocolError
from kvstore.protocol.frames import HEADER_BYTES, MAX_BODY_BYTES, Header, unpack_header

BUFFER_BYTES: Final = 64 << 10
"""Small frames, values included, come many with one recv; a larger body gets a buffer of its own for as long as it is parsed."""
_NOTHING: Final = memoryview(b"")


class Incoming:
    """See the module. Not thread-safe."""

    __slots__ = ("_base", "_buffer", "_end", "_start", "max_body_bytes")

    def __init__(self) -> None:
        self.max_body_bytes = MAX_BODY_BYTES
        """A frame whose body is to be longer is none of ours."""
        self._base = self._buffer = _new_buffer()
        self._start = self._end = 0

    @property
    def unread_bytes(self) -> int:
        return self._end - self._start

    def room(self) -> memoryview:
        """Where the next bytes go. Not empty when `next_frame` has just found none."""
        return self._buffer[self._end :] if self._end else self._buffer

    def received(self, size: int) -> None:
        """The first `size` bytes of `room()` have arrived."""
        self._end += size

    def next_frame(self) -> tuple[Header, memoryview] | None:
        """The next frame's header and body, taken out; its payload lies behind. None: it is not whole yet.

        The body is valid until `room()` is written to or this is called again. Raises ProtocolError when the bytes are no frame of
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


def _new_buffer() -> memoryview:
    """BUFFER_BYTES of zeros, of which memory is taken page by page as it is written: a connection of small frames takes 8 KiB. malloc gives
    memory that was used before, so that calloc has to write all of it."""
    buffer = mmap(-1, BUFFER_BYTES, MAP_PRIVATE | MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages refuses; else one would make all buffers of 32 connections resident
        buffer.madvise(MADV_NOHUGEPAGE)
    return memoryview(buffer)
