"""The request of one connection whose payload is on its way: its message, and where the bytes that are still to come go.

Its owner asks the handler for room and tells what came of it; while nobody knows where the bytes go, nothing is read. What was refused
is read, too, and thrown away, so that the connection stays usable. It owns neither socket nor buffer.
"""

import socket
from collections import deque
from collections.abc import Sequence
from typing import Final

from kvstore.protocol.frames import Header
from kvstore.rpc.incoming import Incoming
from kvstore.rpc.outbox import TURN_BYTES, advance, first

DISCARD_BYTES: Final = 256 << 10


class Arriving:
    """See the module. At most one request at a time: `begin`, then `accept` or `refuse`, then bytes until `is_whole`; then `over`."""

    __slots__ = ("_destinations", "body", "header", "is_waiting", "left_bytes", "refusal")

    def __init__(self) -> None:
        self.header: Header | None = None
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

    def begin(self, header: Header, body: bytes) -> None:
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

    def take_from(self, incoming: Incoming) -> None:
        """What has come along with the message."""
        assert self._destinations is not None
        self.left_bytes -= incoming.move_into(self._destinations) if self._destinations else incoming.discard(self.left_bytes)

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
