"""`/debug/threads` and `/debug/profile?seconds=N`, for operators: they show code and names, and a profile costs time."""

import threading
from typing import Final

from aiohttp import web

from kvstore.protocol.errors import Full, InvalidArgument
from kvstore.telemetry.debug.stacks import profile, stacks
from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.server import HttpServer, asked

DEFAULT_S: Final = 5.0
MAX_S: Final = 60.0


def add_debug(server: HttpServer) -> None:
    """One profile at a time."""
    profiling = threading.Lock()

    async def threads(_request: web.Request) -> web.Response:
        return web.Response(text=stacks())

    async def profiled(request: web.Request) -> web.Response:
        seconds = _seconds(request.query.get("seconds", str(DEFAULT_S)))

        def taken() -> str:
            """In its thread: it goes on when who asked hangs up."""
            if not profiling.acquire(blocking=False):
                raise Full("a profile is being taken already: one at a time")
            try:
                return profile(seconds)
            finally:
                profiling.release()

        return web.Response(text=await asked(taken))

    server.add("GET", "/debug/threads", threads, needs=Access.ADMIN)
    server.add("GET", "/debug/profile", profiled, needs=Access.ADMIN)


def _seconds(text: str) -> float:
    """Raises InvalidArgument."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MAX_S:
        raise InvalidArgument(f"seconds is {text[:40]!r}: a number above 0, {MAX_S:g} at most")
    return seconds
