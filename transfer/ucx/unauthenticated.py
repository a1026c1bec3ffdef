"""Pending handshakes of a UCX listener, polled together, so that a slow peer does not delay others.

The kernel reports a socket once all bytes of its handshake have arrived (SO_RCVLOWAT): nothing is buffered here, and
the handshake is then read without blocking.
"""

import select
import socket
import time
from collections.abc import Callable
from typing import Final

from kvstore.protocol.errors import KVStoreError

GONE: Final = select.POLLHUP | select.POLLERR | select.POLLRDHUP


class UnauthenticatedEndpoints:
    """Accepted sockets of one listening socket, which its owner closes. `next` is for one thread at a time; `close`
    comes after its end.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        head_bytes: int,
        introduction_bytes: Callable[[bytes], int],
        max_pending: int,
        timeout_s: Callable[[], float],
    ) -> None:
        """`introduction_bytes` returns the length of an introduction from its first `head_bytes`, or raises a
        KVStoreError. A peer has `timeout_s` for it; beyond `max_pending` the oldest is closed.
        """
        self._listener = listener
        self._head_bytes = head_bytes
        self._introduction_bytes_of = introduction_bytes
        self._max_pending = max_pending
        self._timeout_s = timeout_s
        self._waiting: dict[int, tuple[socket.socket, str, float]] = {}
        """By descriptor, in order of arrival: socket, peer's address, time limit."""
        self._poller = select.poll()
        listener.setblocking(False)
        self._poller.register(listener.fileno(), select.POLLIN)

    def next(self, timeout_s: float) -> tuple[socket.socket, str] | None:
        """Return a socket with a complete introduction, and its peer's address; the caller owns it. None on timeout.
        Raises OSError: the listener is shut down, or out of descriptors.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            now_s = time.monotonic()
            for descriptor, (_sock, _name, until_s) in list(self._waiting.items()):
                if until_s <= now_s:
                    self._remove(descriptor).close()
            first_s = min((until_s for _, _, until_s in self._waiting.values()), default=end_s)
            for descriptor, events in self._poller.poll(max(min(first_s, end_s) - now_s, 0) * 1000):
                if descriptor == self._listener.fileno():
                    self._accept()
                elif descriptor in self._waiting and self._is_whole(descriptor, events):
                    name = self._waiting[descriptor][1]
                    sock = self._remove(descriptor)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
                    return sock, name
            if now_s >= end_s:
                return None

    def _accept(self) -> None:
        try:
            sock, peer = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer has disconnected
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, self._head_bytes)
        self._poller.register(sock.fileno(), select.POLLIN | select.POLLRDHUP)
        self._waiting[sock.fileno()] = sock, f"{peer[0]}:{peer[1]}", time.monotonic() + self._timeout_s()
        if len(self._waiting) > self._max_pending:
            self._remove(next(iter(self._waiting))).close()

    def _is_whole(self, descriptor: int, events: int) -> bool:
        sock = self._waiting[descriptor][0]
        try:
            head = sock.recv(self._head_bytes, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            if len(head) == self._head_bytes:
                introduction_bytes = self._introduction_bytes_of(head)
                if len(sock.recv(introduction_bytes, socket.MSG_PEEK | socket.MSG_DONTWAIT)) == introduction_bytes:
                    return True
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, introduction_bytes)
        except BlockingIOError:
            pass
        except (OSError, KVStoreError):
            events = GONE
        if events & GONE:
            self._remove(descriptor).close()
        return False

    def _remove(self, descriptor: int) -> socket.socket:
        self._poller.unregister(descriptor)
        return self._waiting.pop(descriptor)[0]

    def close(self) -> None:
        """Close the pending connections."""
        for descriptor in list(self._waiting):
            self._remove(descriptor).close()
