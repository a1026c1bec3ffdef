"""`/healthz` and `/readyz`: whether a daemon lives, and whether it serves, for whoever starts it, balances load or waits for it."""

from collections.abc import Callable, Sequence

from aiohttp import web

from kvstore.protocol.errors import KVStoreError
from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.server import HttpServer, asked

Alive = Callable[[], None]
"""Returns while the daemon lives, and raises a KVStoreError when its loop does not answer in time. Called in a thread."""
Unready = Callable[[], Sequence[str]]
"""Why the daemon does not serve, a line a reason; none where it does. May raise a KVStoreError, a reason too. Called in a thread."""


def add_health(server: HttpServer, alive: Alive, unready: Unready) -> None:
    """Answer 200 and `ok`, or 503 and what is wrong, a line each, without any credential."""

    def dead() -> Sequence[str]:
        alive()
        return ()

    async def healthz(_request: web.Request) -> web.Response:
        return await _answer(dead)

    async def readyz(_request: web.Request) -> web.Response:
        return await _answer(unready)

    server.add("GET", "/healthz", healthz, needs=Access.NONE)
    server.add("GET", "/readyz", readyz, needs=Access.NONE)


async def _answer(ask: Unready) -> web.Response:
    try:
        reasons = await asked(ask)
    except KVStoreError as error:
        reasons = [str(error)]
    return web.Response(status=503 if reasons else 200, text="".join(f"{reason}\n" for reason in reasons or ("ok",)))
