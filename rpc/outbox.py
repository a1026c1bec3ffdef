"""What one non-blocking socket has still to send: buffers in order, sent as vectors without joining them.

It keeps the pins of what it sends: `on_sent` of each entry is called exactly once, when its last byte is the kernel's or the connection
is given up. It does not own the socket, and knows neither frames nor epoll.
"""

import socket
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

MAX_VECTORS: Final = 512
"""Buffers in one sendmsg or recvmsg; the kernel takes at most 1,024."""

TURN_BYTES: Final = 1 << 20
"""Sent or received by one connection before others have their turn, some 0.2 ms: a kernel's buffers hold tens of MiB, and a peer that reads
as fast as it is written to would never let go."""

OnSent = Callable[[], None]


@dataclass(frozen=True, slots=True)
class SendLimits:
    """What a peer that does not read may hold of ours, and for how long.

    `queued_bytes`: unsent bytes beyond which its requests wait. `timeout_s`: the time it has to take a message; then it is hung up on.
    """

    queued_bytes: int = 64 << 20
    timeout_s: float = 30.0


@dataclass(slots=True)
class _Entry:
    buffers: deque[memoryview]
    on_sent: OnSent | None
    fds: Sequence[int]
    since_ns: int


class Outbox:
    """See the module. Not thread-safe. `guarded` runs a callback and lets none of its exceptions out; `clock_ns` is asked only when
    something has to be queued."""

    def __init__(self, sock: socket.socket, guarded: Callable[[OnSent], None], clock_ns: Callable[[], int]) -> None:
        self._sock = sock
        self._guarded = guarded
        self._clock_ns = clock_ns
        self._entries: deque[_Entry] = deque()
        self.queued_bytes = 0
        self.queued_fds = 0
        """Descriptors that are open for the peer to take."""

    @property
    def oldest_ns(self) -> int | None:
        """Since when the message that is next has waited; None: none waits."""
        return self._entries[0].since_ns if self._entries else None

    def send(self, head: bytes, payload: Sequence[memoryview | bytes], on_sent: OnSent | None, fds: Sequence[int]) -> None:
        """Send now what the socket takes and queue the rest.

        Raises OSError when the connection is broken; the entry is queued then, for `abandon` to end it.
        """
        sent, size = 0, len(head) + sum(map(len, payload))
        if not self._entries and not fds and size <= TURN_BYTES:
            try:
                sent = self._sock.sendmsg([head, *payload[: MAX_VECTORS - 1]]) if payload else self._sock.send(head)
            except OSError:
                sent = 0  # full or broken: flush finds out again, with the entry in the queue
            if sent == size:
                if on_sent is not None:
                    self._guarded(on_sent)
                return
        buffers = deque(memoryview(part) for part in (head, *payload))
        advance(buffers, sent)
        self._entries.append(_Entry(buffers, on_sent, fds, self._clock_ns()))
        self.queued_bytes += sum(map(len, buffers))
        self.queued_fds += len(fds)
        if len(self._entries) == 1:
            self.flush()

    def send_now(self, data: bytes) -> int:
        """Send what the socket takes now and queue nothing: how many bytes it took. A broken connection takes none."""
        if self._entries:
            return 0
        try:
            return self._sock.send(data)
        except OSError:
            return 0

    def flush(self) -> None:
        """Send what the socket takes now, and no more than TURN_BYTES. Raises OSError when the connection is broken."""
        left_bytes = TURN_BYTES
        while self._entries and left_bytes:
            entry = self._entries[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", entry.fds))] if entry.fds else []
            try:
                sent = self._sock.sendmsg(first(entry.buffers, left_bytes), ancillary)
            except BlockingIOError:
                return
            self.queued_fds -= len(entry.fds)
            entry.fds = ()
            left_bytes -= sent
            self.queued_bytes -= sent
            advance(entry.buffers, sent)
            if not entry.buffers:
                self._entries.popleft()
                if entry.on_sent is not None:
                    self._guarded(entry.on_sent)

    def abandon(self) -> None:
        """The connection is gone: forget everything, and let go of what was pinned for it."""
        entries, self._entries = self._entries, deque()
        self.queued_bytes = self.queued_fds = 0
        for entry in entries:
            if entry.on_sent is not None:
                self._guarded(entry.on_sent)


def first(buffers: deque[memoryview], limit_bytes: int) -> list[memoryview]:
    """The vector's beginning: no more than `limit_bytes`, in no more parts than the kernel takes."""
    found = []
    for part in islice(buffers, MAX_VECTORS):
        found.append(part[:limit_bytes])
        limit_bytes -= len(found[-1])
        if not limit_bytes:
            break
    return found


def advance(buffers: deque[memoryview], size: int) -> None:
    """Drop the first `size` bytes of a vector, and empty buffers behind them."""
    while buffers and size >= len(buffers[0]):
        size -= len(buffers.popleft())
    if size:
        buffers[0] = buffers[0][size:]
