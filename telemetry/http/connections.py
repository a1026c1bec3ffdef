"""Connections of an HTTP server: how many there are, and how long one may be there that asks for nothing.

aiohttp takes any number, and waits for a first request for ever: whoever reaches the port would need no more to take all descriptors of a
daemon. It knows no credentials: who is no stranger it is told.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from aiohttp import web

from kvstore.rpc.vanishing import PEER_TIMEOUT_S, notice_vanished_host

MAX_CONNECTIONS: Final = 512
FIRST_REQUEST_S: Final = 10.0
"""Time for the head of a first request; between requests it is aiohttp's own, 75 s."""


class Connections:
    """Makes the protocol of each connection of a runner that is set up. A stranger is one that has not been let in: there are half of
    `most` at most, and where there is no room the one that has been here longest goes. Of the server's loop."""

    def __init__(self, runner: web.AppRunner, *, most: int = MAX_CONNECTIONS) -> None:
        assert runner.server is not None
        self._server = runner.server
        self._most = most
        self._there: dict[asyncio.BaseProtocol, _Connection] = {}
        """By aiohttp's own protocol; the one that has been here longest is the first."""

    def __call__(self) -> asyncio.Protocol:
        """A connection has been accepted."""
        strangers = [one for one in self._there.values() if not one.is_let_in]
        if strangers and (len(strangers) >= self._most // 2 or len(self._there) >= self._most):
            self._end(strangers[0])
        inner = self._server()
        made = _Connection(inner, lambda: self._there.pop(inner, None))
        if len(self._there) >= self._most:
            made.end()
        else:
            self._there[inner] = made
            asyncio.get_running_loop().call_later(FIRST_REQUEST_S, self._look, made)
        return made

    def asks(self, request: web.Request) -> None:
        """It asks for something, and is hung up on if it takes nothing of the answer for PEER_TIMEOUT_S."""
        made = self._there.get(request.protocol)
        if made is not None and not made.has_asked:
            made.has_asked = True
            if (sock := request.get_extra_info("socket")) is not None:
                notice_vanished_host(sock, PEER_TIMEOUT_S, gives_up_unread=True)

    def is_let_in(self, request: web.Request) -> None:
        """It is no stranger's."""
        made = self._there.get(request.protocol)
        if made is not None:
            made.is_let_in = True

    def _look(self, made: "_Connection") -> None:
        if not made.has_asked:
            self._end(made)

    def _end(self, made: "_Connection") -> None:
        self._there.pop(made.inner, None)
        made.end()


class _Connection(asyncio.Protocol):
    """aiohttp's protocol, and what is known of its connection. Of one whose handshake of TLS fails nobody is told."""

    def __init__(self, inner: asyncio.Protocol, gone: Callable[[], object]) -> None:
        self.inner = inner
        self.has_asked = self.is_let_in = False
        self._gone = gone
        self._transport: asyncio.Transport | None = None
        self._is_over = False

    def end(self) -> None:
        """Hang up, at once or as soon as it is there."""
        self._is_over = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.inner.connection_made(transport)
        if self._is_over:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone()
        self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()
