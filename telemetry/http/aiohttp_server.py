"""aiohttp on a daemon's HTTP port: connection limits, an access check before each handler, uniform errors.

aiohttp alone accepts unlimited connections and waits forever for a first request, so any peer could exhaust the
daemon's descriptors.
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
"""Timeout of a connection's first request head; between requests aiohttp's own applies, 75 s."""

MAX_REQUESTS: Final = 128
"""Concurrent requests, including live streams of the console; further ones are refused."""
MAX_BODY_BYTES: Final = 64 << 10
CERTIFICATE_CHECK_S: Final = 10.0
"""Interval at which the certificate's files are checked for changes."""
STATUS: Final = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "FAILED_PRECONDITION": 409,
    "RESOURCE_EXHAUSTED": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
} | dict.fromkeys(("DATA_LOSS", "INTERNAL", "UNKNOWN"), 500)
"""HTTP status by the gRPC status of an error."""


class ConnectionFactory:
    """Creates the protocol of each accepted connection, and bounds their number. Runs in the server's loop.

    Unauthenticated connections may be half of `most`; beyond that, or if all are in use, the oldest unauthenticated one
    is closed.
    """

    def __init__(self, runner: web.AppRunner, *, most: int = MAX_CONNECTIONS) -> None:
        assert runner.server is not None
        self._server = runner.server
        self._most = most
        self._connections: dict[asyncio.BaseProtocol, _HttpConnection] = {}
        """By aiohttp's protocol, oldest first."""

    def __call__(self) -> asyncio.Protocol:
        """Accept a connection."""
        unauthenticated = [one for one in self._connections.values() if not one.is_authenticated]
        if unauthenticated and (len(unauthenticated) >= self._most // 2 or len(self._connections) >= self._most):
            self._end(unauthenticated[0])
        inner = self._server()
        made = _HttpConnection(inner, lambda: self._connections.pop(inner, None))
        if len(self._connections) >= self._most:
            made.end()
        else:
            self._connections[inner] = made
            asyncio.get_running_loop().call_later(FIRST_REQUEST_S, self._expire, made)
        return made

    def note_request(self, request: web.Request) -> None:
        """Mark the connection as having sent a request; it is closed if it reads nothing of the response for
        PEER_TIMEOUT_S."""
        made = self._connections.get(request.protocol)
        if made is not None and not made.has_asked:
            made.has_asked = True
            if (sock := request.get_extra_info("socket")) is not None:
                enable_keepalive(sock, PEER_TIMEOUT_S, limit_unacknowledged=True)

    def authenticate(self, request: web.Request) -> None:
        """Mark the connection as authenticated."""
        made = self._connections.get(request.protocol)
        if made is not None:
            made.is_authenticated = True

    def _expire(self, made: "_HttpConnection") -> None:
        if not made.has_asked:
            self._end(made)

    def _end(self, made: "_HttpConnection") -> None:
        self._connections.pop(made.inner, None)
        made.end()


class _HttpConnection(asyncio.Protocol):
    """Wraps aiohttp's protocol with the state of its connection. Failed TLS handshakes are not reported."""

    def __init__(self, inner: asyncio.Protocol, on_closed: Callable[[], object]) -> None:
        self.inner = inner
        self.has_asked = self.is_authenticated = False
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._is_over = False

    def end(self) -> None:
        """Abort the connection, now or once it is made."""
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
        self._on_closed()
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
    """Serve `listener` with the server's routes until `ending`, then allow `stop_s` for requests in progress."""
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
        await (ending.wait() if https is None else _reload_certificate(https, ending))
    finally:
        serving.close()
        await runner.cleanup()


async def _reload_certificate(https: HttpsCertificate, ending: asyncio.Event) -> None:
    """Check the certificate's files for changes, until `ending`."""
    while not ending.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ending.wait(), CERTIFICATE_CHECK_S)
        https.look()


class _AccessMiddleware:
    """Refuses requests without access, and those beyond MAX_REQUESTS; maps errors to responses."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._requests = 0
        self.connections: ConnectionFactory | None = None

    @web.middleware
    async def guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        assert self.connections is not None
        self.connections.note_request(request)
        if self._requests >= MAX_REQUESTS:
            return refusal(503, f"the limit of {MAX_REQUESTS} concurrent requests is reached: retry later")
        self._requests += 1
        try:
            needs = self._server.needs.get(request.match_info.handler, AccessLevel.NONE)
            if needs > AccessLevel.NONE and is_foreign(request):
                return refusal(403, "requests from pages of other sites are refused")
            access = self._server.access_control.allowed(request)
            if access < needs:
                why = self._server.access_control.explain(request) or f"this request needs a credential with {needs.name.lower()} access"
                return refusal(401, why, {"WWW-Authenticate": "Bearer"})
            if access > AccessLevel.NONE:
                self.connections.authenticate(request)
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
    """Error response."""
    return web.json_response({"error": message}, status=status, headers=headers)
