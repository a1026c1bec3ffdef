"""A server of the tests with one route."""

import contextlib
import threading
from collections.abc import Iterator

from aiohttp import web

from kvstore.telemetry.http.access import AccessLevel, LocalAccess
from kvstore.telemetry.http.server import Handler, HttpServer


class FixedAccess(LocalAccess):
    """Every request may do the same."""

    def __init__(self, has: AccessLevel) -> None:
        self._has = has

    def allowed(self, _request: web.Request) -> AccessLevel:
        return self._has


@contextlib.contextmanager
def running(server: HttpServer) -> Iterator[HttpServer]:
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def serving(handler: Handler, *, needs: AccessLevel = AccessLevel.READ, has: AccessLevel = AccessLevel.ADMIN) -> Iterator[HttpServer]:
    """With `handler` at /it."""
    server = HttpServer("127.0.0.1:0", access_control=FixedAccess(has))
    server.add("GET", "/it", handler, needs=needs)
    with running(server):
        yield server


async def fine(_request: web.Request) -> web.Response:
    return web.Response(text=threading.current_thread().name)
