"""A daemon's HTTP server: aiohttp in a thread and a loop of its own, so that neither waits for the other.

Handlers run in its thread: what belongs to the daemon's loop they ask for there (`asked`). It knows no paths: routes are added before
`start`.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from aiohttp import web

from kvstore.protocol.errors import GRPC_STATUS, KVStoreError, grpc_status, typed
from kvstore.telemetry.http.access import Access, Authorize, is_foreign, this_host_only
from kvstore.telemetry.http.listening import BACKLOG, host_port, listening

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_REQUESTS: Final = 128
"""Served at once, live streams of the console among them; those beyond are refused."""
MAX_BODY_BYTES: Final = 64 << 10
STOP_S: Final = 1.0
"""For requests under way to end, once the daemon ends."""
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


class HttpServer:
    """See the module. `add`, `start` and `close` are for the daemon's thread."""

    def __init__(self, listen: str, *, authorize: Authorize = this_host_only) -> None:
        """Takes the address; nobody is answered before `start`. Raises ConfigError, InvalidArgument."""
        self._listener = listening(listen)
        self.address = host_port(self._listener)
        """HOST:PORT at which it listens."""
        self._authorize = authorize
        self._needs: dict[Handler, Access] = {}
        self._requests = 0
        self._app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guarded])
        self._loop = asyncio.new_event_loop()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def add(self, method: str, path: str, handler: Handler, *, needs: Access) -> None:
        """Answer `method` (GET, POST) on `path` by `handler`, for requests that have `needs` and up. Before `start`."""
        self._needs[handler] = needs
        self._app.router.add_route(method, path, handler)

    def access(self, request: web.Request) -> Access:
        """What the request may."""
        return self._authorize(request)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening, hang up on who is still there after STOP_S, end the thread. A second close is a no-op."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ending.set)
            self._thread.join(2 * STOP_S)
        elif not self._loop.is_closed():
            self._loop.close()
        self._listener.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        runner = web.AppRunner(self._app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_S, handle_signals=False)
        await runner.setup()
        try:
            await web.SockSite(runner, self._listener, backlog=BACKLOG).start()
            await self._ending.wait()
        finally:
            await runner.cleanup()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Who may not is refused, and so is who comes when too many are served; errors have one form."""
        if self._requests >= MAX_REQUESTS:
            return refusal(503, f"{MAX_REQUESTS} requests are being served, which is the most")
        self._requests += 1
        try:
            needs = self._needs.get(request.match_info.handler, Access.NONE)
            if needs > Access.NONE and is_foreign(request):
                return refusal(403, "this is not for pages of other sites")
            if self._authorize(request) < needs:
                return refusal(401, f"this needs a credential that may {needs.name.lower()}", {"WWW-Authenticate": "Bearer"})
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


async def asked(function: Callable[[], T]) -> T:
    """What `function` returns, called in a thread where it may block, as a call of a daemon's loop does. Raises what it raises."""
    return await asyncio.to_thread(function)


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": message}, status=status, headers=headers)
