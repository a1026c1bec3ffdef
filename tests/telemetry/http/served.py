"""A server of the tests with one route."""

import contextlib
import threading
from collections.abc import Iterator

from aiohttp import web

from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.server import Handler, HttpServer


@contextlib.contextmanager
def serving(handler: Handler, *, needs: Access = Access.READ, has: Access = Access.ADMIN) -> Iterator[HttpServer]:
    """With `handler` at /it."""
    server = HttpServer("127.0.0.1:0", authorize=lambda _: has)
    server.add("GET", "/it", handler, needs=needs)
    server.start()
    try:
        yield server
    finally:
        server.close()


async def fine(_request: web.Request) -> web.Response:
    return web.Response(text=threading.current_thread().name)
