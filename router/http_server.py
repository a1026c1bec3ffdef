"""Server of an aiohttp application: serves a listening socket until SIGTERM or SIGINT, with limits on connections."""

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


def abort_connection(request: web.Request) -> None:
    """Close the connection at once, for a client that disconnected or does not read. The handler still returns its response."""
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
    """Serve until SIGTERM or SIGINT; then call `on_stop` with the signal's name, in a thread, and cancel handlers after `drain_s`.

    A handler whose client disconnects is cancelled. Connections without a request are closed after a while. The listener is closed.
    """
    factories: list[ConnectionFactory] = []

    @web.middleware
    async def admit(request: web.Request, handler: Handler) -> web.StreamResponse:
        factories[0].note_request(request)
        factories[0].authenticate(request)
        return await handler(request)

    app.middlewares.insert(0, admit)
    signals = asyncio.Queue[str]()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number.name)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=drain_s, handle_signals=False)
    await runner.setup()
    factories.append(ConnectionFactory(runner, most=max_connections))
    server = await asyncio.get_running_loop().create_server(factories[0], sock=listener, backlog=BACKLOG)
    try:
        on_ready()
        name = await signals.get()
        await asyncio.to_thread(on_stop, name)
    finally:
        server.close()
        await runner.cleanup()
