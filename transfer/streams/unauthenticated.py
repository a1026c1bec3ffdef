"""Connections that have not said yet who they are, and what each has said so far. Bookkeeping only: target.py accepts and hangs up.

A stranger holds no thread, whatever it sends and however slowly: what has arrived is taken without waiting. It has a time limit, and
there are only so many: a further one takes the place of the oldest, so that no crowd of them keeps peers out.
"""

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from kvstore.protocol.errors import ProtocolError, Unreachable
from kvstore.protocol.frames import HEADER_BYTES, FrameHeader, unpack_header
from kvstore.protocol.transfers import JoinEngine
from kvstore.transfer.streams.connection import Connection

MAX_JOIN_BYTES: Final = 2048
"""Of the body: a name of 255 characters, its length, and a number."""
MAX_DISCARDED_BYTES: Final = 64 << 10
"""What a stranger that was refused may still send; closing at once would throw away the answer that it has not read."""
C = TypeVar("C", bound=Hashable)


class HandshakeState:
    """What one stranger has said."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(HEADER_BYTES + MAX_JOIN_BYTES))
        self._got_bytes = 0
        self._discarded_bytes = 0
        self.header: FrameHeader | None = None
        self.is_refused = False
        """It was told why, and has some time to read that."""

    def receive(self, connection: Connection) -> JoinEngine | None:
        """Take what has arrived; the Join once it is whole. Raises ProtocolError for anything else, and what ends the connection."""
        if self.is_refused:
            self._discard(connection)
            return None
        while True:
            body_bytes = self.header.body_bytes if self.header is not None else 0
            target = self._buffer[self._got_bytes : HEADER_BYTES + body_bytes]
            if not len(target):
                assert self.header is not None
                return JoinEngine.unpack(self._buffer[HEADER_BYTES : HEADER_BYTES + body_bytes])
            got_bytes = connection.recv_arrived(target)
            if not got_bytes:
                return None
            self._got_bytes += got_bytes
            if self._got_bytes == HEADER_BYTES:
                self.header = _join_header(self._buffer[:HEADER_BYTES])

    @property
    def request_id(self) -> int:
        """Of the request that is refused; 0 where none could be read."""
        return self.header.request_id if self.header is not None else 0

    def _discard(self, connection: Connection) -> None:
        while (got_bytes := connection.recv_arrived(self._buffer)) > 0:
            self._discarded_bytes += got_bytes
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                raise Unreachable("a stranger goes on after it was refused")


def _join_header(data: memoryview) -> FrameHeader:
    header = unpack_header(data)
    if header.type != JoinEngine.TYPE or header.payload_bytes or header.body_bytes > MAX_JOIN_BYTES:
        raise ProtocolError(f"a message of type {header.type} where Join belongs")
    return header


class PendingHandshakes(Generic[C]):
    """Those that are here, and until when. Not thread-safe: its owner locks."""

    def __init__(self, *, max_pending: int, timeout_s: float) -> None:
        self._max_pending = max_pending
        self._timeout_ns = int(timeout_s * 1e9)
        self._until_ns: dict[C, int] = {}

    def add(self, connection: C, now_ns: int) -> C | None:
        """One more; returns the oldest if it has to leave for it."""
        oldest = None
        if len(self._until_ns) >= self._max_pending:
            oldest = next(iter(self._until_ns))
            del self._until_ns[oldest]
        self._until_ns[connection] = now_ns + self._timeout_ns
        return oldest

    def shorten(self, connection: C, until_ns: int) -> None:
        """It has to leave by then, if it is still here."""
        if connection in self._until_ns:
            self._until_ns[connection] = min(self._until_ns[connection], until_ns)

    def remove(self, connection: C) -> None:
        """It has said who it is, or left. Others are ignored."""
        self._until_ns.pop(connection, None)

    def expire(self, now_ns: int) -> list[C]:
        """Those whose time is over, removed."""
        expired = [connection for connection, until_ns in self._until_ns.items() if until_ns <= now_ns]
        for connection in expired:
            del self._until_ns[connection]
        return expired

    def next_ns(self) -> int | None:
        """When the next one's time is over; None when there is nobody."""
        return min(self._until_ns.values(), default=None)
