"""HTTP server of a daemon, in a thread and an event loop of its own.

Until the first connection it is only a listening socket: aiohttp and most routes' modules are a third of a daemon's
imports, nearly 0.2 s of processor time per start, and many servers are never used. Handlers run in the server's thread
and call the daemon's loop through `run_in_thread`. Routes are added before `start`, or by callbacks of `later`.
"""

import asyncio
import contextvars
import logging
import os
import select
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from kvstore.protocol.errors import Full
from kvstore.security.actor import Actor
from kvstore.security.tls.https import HttpsCertificate
from kvstore.telemetry.http.access import AccessLevel, LocalAccess, TokenFileAccess
from kvstore.telemetry.http.listener import host_port, listening, reached_at

if TYPE_CHECKING:
    from aiohttp import web

T = TypeVar("T")
Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]

STOP_S: Final = 1.0
"""Time for requests in progress when the daemon stops."""
MAX_THREAD_CALLS: Final = 128
"""Concurrent `run_in_thread` calls, including abandoned ones."""

log = logging.getLogger("kvstore.telemetry")


class HttpServer:
    """HTTP server of a daemon. `add`, `later`, `start` and `close` are for the daemon's thread; `add` also for
    callbacks of `later`."""

    def __init__(self, listen: str, *, access_control: LocalAccess | None = None, https: HttpsCertificate | None = None) -> None:
        """Bind the address; requests are served after `start`. `access_control` None: only this host has access. With
        `https`, only HTTPS is served.

        Raises ConfigError, InvalidArgument.
        """
        self._listener = listening(listen)
        self.address = host_port(self._listener)
        """HOST:PORT of the listener."""
        self._https = https
        self.access_control = access_control or LocalAccess()
        self._later: list[Callable[[HttpServer], None]] = []
        self.routes: list[tuple[str, str, Handler]] = []
        """(method, path, handler)."""
        self.needs: dict[Handler, AccessLevel] = {}
        self._ending = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def add(self, method: str, path: str, handler: Handler, *, needs: AccessLevel) -> None:
        """Serve `method` (GET, POST) on `path` with `handler`, for requests with at least `needs`. A handler has one
        level on all paths."""
        assert self.needs.get(handler, needs) is needs, f"{path} would change the access level of the handler's other paths"
        self.needs[handler] = needs
        self.routes.append((method, path, handler))

    def later(self, add: Callable[["HttpServer"], None]) -> None:
        """Call `add` on the first connection, in the server's thread, to add routes whose imports are deferred."""
        self._later.append(add)

    def actor(self, request: "web.Request", via: str) -> Actor:
        """Actor of a change, for the audit trail."""
        return Actor.of(self.access_control.identify(request), peer=request.remote or "", via=via)

    def advertised(self, host: str | None = None) -> str:
        """Address to advertise to others, who reach this machine at `host`: see `reached_at`. With https:// for an
        HTTPS port."""
        address = self.address if host is None else reached_at(self.address, host)
        return f"https://{address}" if address and self._https is not None else address

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening, close connections after STOP_S, end the thread. A second close is a no-op."""
        if self._is_closed:
            return
        self._is_closed = True
        os.eventfd_write(self._ending, 1)
        if self._thread.ident is not None:
            self._thread.join(2 * STOP_S)
        self._listener.close()
        if not self._thread.is_alive():
            os.close(self._ending)

    def _run(self) -> None:
        try:
            if self._await_connection():
                asyncio.run(self._serve())
        except Exception:
            log.exception("the HTTP server on %s failed and serves no more requests", self.address)
        finally:
            self._listener.close()

    def _await_connection(self) -> bool:
        """Wait for the first connection; False if the server is closed first."""
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        waiting.register(self._ending, select.POLLIN)
        return all(fd != self._ending for fd, _ in waiting.poll())

    async def _serve(self) -> None:
        from kvstore.telemetry.http.aiohttp_server import serve  # deferred, see the module docstring

        while self._later:
            self._later.pop(0)(self)
        ending = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._ending, ending.set)
        try:
            await serve(self, self._listener, ending, stop_s=STOP_S, https=self._https)
        finally:
            asyncio.get_running_loop().remove_reader(self._ending)


async def run_in_thread(function: Callable[[], T]) -> T:
    """Result of `function`, run in a new thread, where it may block on the daemon's loop. Raises what it raises; Full.

    Each call has its own thread, so that none (health checks least of all) waits behind one that hangs; threads do not
    delay the end of the process.
    """
    slots = _thread_slots
    if not slots.acquire(blocking=False):
        raise Full(f"the limit of {MAX_THREAD_CALLS} concurrent calls to the daemon is reached: retry later")
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # makes it uncancellable
    context = contextvars.copy_context()

    def call() -> None:
        try:
            deliver = partial(answer.set_result, context.run(function))
        except BaseException as error:
            deliver = partial(answer.set_exception, error)
        slots.release()
        deliver()

    try:
        threading.Thread(target=call, name="http-call", daemon=True).start()
    except RuntimeError as error:
        slots.release()
        raise Full(f"no thread is available for the request: {error}") from None
    return await asyncio.wrap_future(answer)


_thread_slots = threading.BoundedSemaphore(MAX_THREAD_CALLS)


class HttpSettings(Protocol):
    """Settings of a daemon's HTTP port."""

    @property
    def http(self) -> str: ...
    @property
    def http_token_file(self) -> str: ...
    @property
    def http_tls_cert(self) -> str: ...
    @property
    def http_tls_key(self) -> str: ...


def open_http(settings: HttpSettings) -> HttpServer | None:
    """HTTP server for these settings; None if they disable it. Raises ConfigError, InvalidArgument."""
    access_control = TokenFileAccess(settings.http_token_file) if settings.http_token_file else LocalAccess()
    https = HttpsCertificate.of(settings.http_tls_cert, settings.http_tls_key)
    return HttpServer(settings.http, access_control=access_control, https=https) if settings.http else None
