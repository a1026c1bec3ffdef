"""What serves a daemon's HTTP port once somebody connects: aiohttp, with limits, a guard before each handler and one form of errors."""

import asyncio
import contextlib
import logging
import socket
from typing import Final

from aiohttp import web

from kvstore.protocol.errors import GRPC_STATUS, KVStoreError, grpc_status, typed
from kvstore.security.tls.https import HttpsCertificate
from kvstore.telemetry.http.access import Access, is_foreign
from kvstore.telemetry.http.connections import FIRST_REQUEST_S, Connections
from kvstore.telemetry.http.listening import BACKLOG
from kvstore.telemetry.http.server import Handler, HttpServer

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
assert set(GRPC_STATUS.values()) == set(STATUS)

log = logging.getLogger("kvstore.telemetry")


async def serve(
    server: HttpServer, listener: socket.socket, ending: asyncio.Event, *, stop_s: float, https: HttpsCertificate | None = None
) -> None:
    """Answer who connects to `listener` by the server's routes until `ending`, then give requests under way `stop_s` to end."""
    guard = _Guard(server)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[guard.guarded])
    for method, path, handler in server.routes:
        app.router.add_route(method, path, handler)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=stop_s, handle_signals=False)
    await runner.setup()
    guard.connections = Connections(runner)
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


class _Guard:
    """Who may not is refused, and so is who comes when too many are served; errors have one form."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._requests = 0
        self.connections: Connections | None = None

    @web.middleware
    async def guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        assert self.connections is not None
        self.connections.asks(request)
        if self._requests >= MAX_REQUESTS:
            return refusal(503, f"{MAX_REQUESTS} requests are being served, which is the most")
        self._requests += 1
        try:
            needs = self._server.needs.get(request.match_info.handler, Access.NONE)
            if needs > Access.NONE and is_foreign(request):
                return refusal(403, "this is not for pages of other sites")
            access = self._server.access(request)
            if access < needs:
                why = self._server.explain(request) or f"this needs a credential that may {needs.name.lower()}"
                return refusal(401, why, {"WWW-Authenticate": "Bearer"})
            if access > Access.NONE:
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
