"""An aiohttp application as a daemon: from a listening socket until a signal. It knows no paths."""

import asyncio
import signal
import socket
from collections.abc import Callable

from aiohttp import web

from kvstore.telemetry.http.listening import BACKLOG


def hang_up(request: web.Request) -> None:
    """End the connection at once: for a client that is gone or takes nothing. The handler still returns its response."""
    if request.transport is not None:
        request.transport.abort()


async def serve(
    app: web.Application, listener: socket.socket, *, drain_s: float, on_ready: Callable[[], None], on_stop: Callable[[], None]
) -> None:
    """Serve until SIGTERM or SIGINT; then call `on_stop`, in a thread, and cancel what is not over within `drain_s`.

    A handler whose client hangs up is cancelled. The listener is closed.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=drain_s, handle_signals=False)
    await runner.setup()
    try:
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        on_ready()
        await stop.wait()
        await asyncio.to_thread(on_stop)
    finally:
        await runner.cleanup()
