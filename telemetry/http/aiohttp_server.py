"""aiohttp on a daemon's HTTP port: limits on connections, an access check before each handler, one form of errors.

aiohttp takes any number of connections, and waits for a first request for ever: a peer that reaches the port would need no more to take all
descriptors of a daemon.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Final

from aiohttp import web

from kvstore.protocol.errors import GRPC_STATUS, KVStoreError, grpc_status, typed
from kvstore.rpc.keepalive import PEER_TIMEOUT_S, enable_keepalive
from kvstore.security.tls.https import HttpsCertificate
from kvstore.telemetry.http.access import AccessLevel, is_foreign
from kvstore.telemetry.http.listener import BACKLOG
from kvstore.telemetry.http.server import Handler, HttpServer

MAX_CONNECTIONS: Final = 512
FIRST_REQUEST_S: Final = 10.0
"""Time for the head of a first request; between requests it is aiohttp's own, 75 s."""

MAX_REQUESTS: Final = 128
"""Served at once, live streams of the console among them; those beyond are refused."""
MAX_BODY_BYTES: Final = 64 << 10
LOOK_S: Final = 10.0
"""Between looks at the files of its certificate."""
STATUS: Final = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
} | dict.fromkeys(("DATA_LOSS", "INTERNAL", "UNKNOWN"), 500)
"""Of HTTP, by the status of gRPC that an error of the tree has."""


class ConnectionFactory:
    """Makes the protocol of each connection of a runner that is set up. A stranger is one that has not been let in: there are half of
    `most` at most, and where there is no room the one that has been here longest goes. Of the server's loop."""

    def __init__(self, runner: web.AppRunner, *, most: int = MAX_CONNECTIONS) -> None:
        assert runner.server is not None
        self._server = runner.server
        self._most = most
        self._there: dict[asyncio.BaseProtocol, _HttpConnection] = {}
        """By aiohttp's own protocol; the one that has been here longest is the first."""

    def __call__(self) -> asyncio.Protocol:
        """A connection has been accepted."""
        strangers = [one for one in self._there.values() if not one.is_let_in]
        if strangers and (len(strangers) >= self._most // 2 or len(self._there) >= self._most):
            self._end(strangers[0])
        inner = self._server()
        made = _HttpConnection(inner, lambda: self._there.pop(inner, None))
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
                enable_keepalive(sock, PEER_TIMEOUT_S, limit_unacknowledged=True)

    def is_let_in(self, request: web.Request) -> None:
        """It is no stranger's."""
        made = self._there.get(request.protocol)
        if made is not None:
            made.is_let_in = True

    def _look(self, made: "_HttpConnection") -> None:
        if not made.has_asked:
            self._end(made)

    def _end(self, made: "_HttpConnection") -> None:
        self._there.pop(made.inner, None)
        made.end()


class _HttpConnection(asyncio.Protocol):
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


assert set(GRPC_STATUS.values()) == set(STATUS)

log = logging.getLogger("kvstore.telemetry")


async def serve(
    server: HttpServer, listener: socket.socket, ending: asyncio.Event, *, stop_s: float, https: HttpsCertificate | None = None
) -> None:
    """Answer who connects to `listener` by the server's routes until `ending`, then give requests under way `stop_s` to end."""
    guard = _AccessMiddleware(server)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard.guarded])
    for method, path, handler in server.routes:
        app.router.add_route(method, path, handler)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=stop_s, handle_signals=False)
    await runner.setup()
    guard.connections = ConnectionFactory(runner)
    serving = await asyncio.get_running_loop().create_server(
        guard.connections,
        sock=listener,
        backlog=BACKLOG,
        ssl=https.context if https is not None else None,
        ssl_handshake_timeout=FIRST_REQUEST_S if https is not None else None,
    )
    try:
        await (ending.wait() if https is None else _looking(https, ending))
    finally:
        serving.close()
        await runner.cleanup()


async def _looking(https: HttpsCertificate, ending: asyncio.Event) -> None:
    """Whether its files have changed, again and again until `ending`."""
    while not ending.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), LOOK_S)
        https.look()


class _AccessMiddleware:
    """Who may not is refused, and so is who comes when too many are served; errors have one form."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._requests = 0
        self.connections: ConnectionFactory | None = None

    @web.middleware
    async def guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        assert self.connections is not None
        self.connections.asks(request)
        if self._requests >= MAX_REQUESTS:
            return refusal(503, f"{MAX_REQUESTS} requests are being served, which is the most")
        self._requests += 1
        try:
            needs = self._server.needs.get(request.match_info.handler, AccessLevel.NONE)
            if needs > AccessLevel.NONE and is_foreign(request):
                return refusal(403, "this is not for pages of other sites")
            access = self._server.access_control.allowed(request)
            if access < needs:
                why = self._server.access_control.explain(request) or f"this needs a credential that may {needs.name.lower()}"
                return refusal(401, why, {"WWW-Authenticate": "Bearer"})
            if access > AccessLevel.NONE:
                self.connections.is_let_in(request)
            return await handler(request)
        except web.HTTPException as refused:
            allowed = {"Allow": refused.headers["Allow"]} if "Allow" in refused.headers else {}
            return refusal(refused.status, refused.text or refused.reason, allowed)
        except KVStoreError as error:
            return refusal(STATUS[grpc_status(error)], str(error))
        except Exception as error:
            log.exception("%s %s failed", request.method, request.path)
            return refusal(500, str(typed(error)))
        finally:
            self._requests -= 1


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    """Why a request is not answered."""
    return web.json_response({"error": message}, status=status, headers=headers)
