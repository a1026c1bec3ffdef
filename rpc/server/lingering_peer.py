"""The peer of a connection that this side has ended, until the peer closes its own end: by its own decision, or with its process.

A process of this host may be stopped in the middle of a copy into shared memory. That its connection is closed here says nothing of it;
that the kernel has closed its end does, for a process gives up its mappings before its descriptors.
"""

import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from kvstore.rpc.reactor import Reactor

MAX_READS: Final = 16
"""In one turn of the loop, of what the peer still sends: it is thrown away."""
READ_BYTES: Final = 1 << 16


class LingeringPeer:
    """See the module. It owns the socket. The reactor's loop is the only caller."""

    def __init__(self, reactor: Reactor, sock: socket.socket, on_gone: Callable[["LingeringPeer"], None]) -> None:
        """End the connection for sending. `on_gone` is called once, before this returns where the peer has closed its end already."""
        self._reactor = reactor
        self._sock = sock
        self._on_gone = on_gone
        self.is_awaited = False
        """Whether the peer has not closed its end yet."""
        with suppress(OSError):
            sock.shutdown(socket.SHUT_WR)
        if self._has_closed():
            self._end()
        else:
            reactor.register(sock.fileno(), lambda _events: self._on_ready())
            self.is_awaited = True

    def close(self) -> None:
        """Wait no more; `on_gone` is not called. A second close is a no-op."""
        if self.is_awaited:
            self.is_awaited = False
            self._reactor.unregister(self._sock.fileno())
        self._sock.close()

    def _on_ready(self) -> None:
        if self._has_closed():
            self._end()

    def _has_closed(self) -> bool:
        """Whether the peer has closed its end. What it has sent is read, as far as one turn allows."""
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
