"""Where a browser finds the console of a cluster whose masters serve none: of several partitions each master knows its own only."""

from typing import TYPE_CHECKING, Final

from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.server import HttpServer

if TYPE_CHECKING:
    from aiohttp import web

TEXT: Final = (
    "The key space of this cluster has several partitions, and a master knows its own only. Its console asks all of them:\n\n"
    "    kvstore console --master HOST:PORT,HOST:PORT,...\n\n"
    "on any machine that reaches the masters; it prints the address.\n"
)


def add_pointer(server: HttpServer) -> None:
    """Tell it whoever asks for the page. For `HttpServer.later`."""
    from aiohttp import web  # once somebody connects, as all that serves is loaded

    async def pointer(_request: "web.Request") -> web.Response:
        return web.Response(status=404, text=TEXT)

    server.add("GET", "/", pointer, needs=Access.NONE)
