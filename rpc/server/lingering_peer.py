"""Wait for a peer to close its end of a connection that this side has shut down.

A local process may be stopped in the middle of a copy into shared memory, even after this side has closed the
connection. Once its end is closed it cannot write any more, because an exiting process unmaps its memory before it
closes its descriptors.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvstore.rpc.reactor import Reactor

MAX_READS: Final = 16
"""Reads in a round of the loop, of bytes that the peer still sends; they are discarded."""
READ_BYTES: Final = 1 << 16


class LingeringPeer:
    """Watches a shut-down connection until the peer closes its end.

    Owns the socket. Only the reactor's thread calls it.
    """

    def __init__(self, reactor: Reactor, sock: socket.socket, on_gone: Callable[["LingeringPeer"], None]) -> None:
        """Shut the connection down for sending. `on_gone` is called once, possibly before this returns."""
        self._reactor = reactor
        self._sock = sock
        self._on_gone = on_gone
        self.is_awaited = False
        """True until the peer has closed its end."""
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        if self._has_closed():
            self._end()
        else:
            reactor.register(sock.fileno(), lambda _events: self._on_ready())
            self.is_awaited = True

    def close(self) -> None:
        """Stop waiting; `on_gone` is not called. A second close is a no-op."""
        if self.is_awaited:
            self.is_awaited = False
            self._reactor.unregister(self._sock.fileno())
        self._sock.close()

    def _on_ready(self) -> None:
        if self._has_closed():
            self._end()

    def _has_closed(self) -> bool:
        """Return True if the peer has closed its end. Reads and discards up to MAX_READS buffers."""
        for _ in range(MAX_READS):
            try:
                if not self._sock.recv(READ_BYTES, socket.MSG_DONTWAIT):
                    return True
            except BlockingIOError:
                return False
            except OSError:
                return True
        return False

    def _end(self) -> None:
        self.close()
        self._on_gone(self)
