"""Unauthenticated connections: their handshakes and time limits. No I/O of its own; target.py accepts and closes.

A pending handshake holds no thread, even for a slow peer: received bytes are taken without
blocking. Handshakes have a timeout and a maximum number; a further one displaces the oldest, so that a flood does not
lock peers out.
"""

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

from kvstore.protocol.errors import ProtocolError, Unreachable
from kvstore.protocol.frames import HEADER_BYTES, FrameHeader, unpack_header
from kvstore.protocol.transfers import JoinEngine
from kvstore.transfer.streams.connection import Connection

MAX_JOIN_BYTES: Final = 2048
"""Size of the body: a name of 255 characters, its length, and a number."""
MAX_DISCARDED_BYTES: Final = 64 << 10
"""Bytes that a refused peer may still send. Closing at once would drop the error reply."""
C = TypeVar("C", bound=Hashable)


class HandshakeState:
    """Progress of one handshake."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(HEADER_BYTES + MAX_JOIN_BYTES))
        self._got_bytes = 0
        self._discarded_bytes = 0
        self.header: FrameHeader | None = None
        self.is_refused = False
        """An error reply was sent; the peer has some time to read it."""

    def receive(self, connection: Connection) -> JoinEngine | None:
        """Read what has arrived; returns the JoinEngine once complete. Raises ProtocolError for anything else, and what
        ends the connection.
        """
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
        """Id of the refused request, 0 if none could be read."""
        return self.header.request_id if self.header is not None else 0

    def _discard(self, connection: Connection) -> None:
        while (got_bytes := connection.recv_arrived(self._buffer)) > 0:
            self._discarded_bytes += got_bytes
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                raise Unreachable("a peer sent more than the limit after its handshake was refused")


def _join_header(data: memoryview) -> FrameHeader:
    header = unpack_header(data)
    if header.type != JoinEngine.TYPE or header.payload_bytes or header.body_bytes > MAX_JOIN_BYTES:
        raise ProtocolError(f"a message of type {header.type} instead of JoinEngine")
    return header


class PendingHandshakes(Generic[C]):
    """Pending handshakes and their time limits. Not thread-safe: the owner locks."""

    def __init__(self, *, max_pending: int, timeout_s: float) -> None:
        self._max_pending = max_pending
        self._timeout_ns = int(timeout_s * 1e9)
        self._until_ns: dict[C, int] = {}

    def add(self, connection: C, now_ns: int) -> C | None:
        """Add a connection; returns the oldest if it is displaced."""
        oldest = None
        if len(self._until_ns) >= self._max_pending:
            oldest = next(iter(self._until_ns))
            del self._until_ns[oldest]
        self._until_ns[connection] = now_ns + self._timeout_ns
        return oldest

    def shorten(self, connection: C, until_ns: int) -> None:
        """Bring a connection's time limit forward, if it is pending."""
        if connection in self._until_ns:
            self._until_ns[connection] = min(self._until_ns[connection], until_ns)

    def remove(self, connection: C) -> None:
        """Remove a connection that joined or closed. Others are ignored."""
        self._until_ns.pop(connection, None)

    def expire(self, now_ns: int) -> list[C]:
        """Remove and return the connections whose time is over."""
        expired = [connection for connection, until_ns in self._until_ns.items() if until_ns <= now_ns]
        for connection in expired:
            del self._until_ns[connection]
        return expired

    def next_ns(self) -> int | None:
        """Return the next time limit, or None if there is no handshake."""
        return min(self._until_ns.values(), default=None)
