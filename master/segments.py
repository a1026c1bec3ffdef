"""`/get_all_segments` of a master: the names of nodes that are alive, a line each, nothing without any.

Programs written for Mooncake ask its master's HTTP port for them, to learn whether the store has memory.
"""

from collections.abc import Callable, Sequence

from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.server import HttpServer, asked


def add_segments(server: HttpServer, nodes: Callable[[], Sequence[str]]) -> None:
    """`nodes` returns the names; it is called in a thread, and may be a call of the master's loop."""

    def add(server: HttpServer) -> None:
        from aiohttp import web

        async def handler(_request: web.Request) -> web.Response:
            return web.Response(text="".join(f"{name}\n" for name in await asked(nodes)))

        server.add("GET", "/get_all_segments", handler, needs=Access.READ)

    server.later(add)
