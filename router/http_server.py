"""An aiohttp application as a daemon: from a listening socket until a signal. It knows no paths."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from kvstore.telemetry.http.aiohttp_server import ConnectionFactory
from kvstore.telemetry.http.listener import BACKLOG

MAX_CONNECTIONS: Final = 4096
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def hang_up(request: web.Request) -> None:
    """End the connection at once: for a client that is gone or takes nothing. The handler still returns its response."""
    if request.transport is not None:
        request.transport.abort()


async def serve(
    app: web.Application,
    listener: socket.socket,
    *,
    max_connections: int = MAX_CONNECTIONS,
    drain_s: float,
    on_ready: Callable[[], None],
    on_stop: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT; then call `on_stop` with its name, in a thread, and cancel what is not over within `drain_s`.

    A handler whose client hangs up is cancelled. A connection that asks for nothing is hung up on. The listener is closed.
    """
    there: list[ConnectionFactory] = []

    @web.middleware
    async def asked(request: web.Request, handler: Handler) -> web.StreamResponse:
        there[0].note_request(request)
        there[0].authenticate(request)
        return await handler(request)

    app.middlewares.insert(0, asked)
    came = asyncio.Queue[str]()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, came.put_nowait, number.name)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=drain_s, handle_signals=False)
    await runner.setup()
    there.append(ConnectionFactory(runner, most=max_connections))
    serving = await asyncio.get_running_loop().create_server(there[0], sock=listener, backlog=BACKLOG)
    try:
        on_ready()
        name = await came.get()
        await asyncio.to_thread(on_stop, name)
    finally:
        serving.close()
        await runner.cleanup()
