"""A daemon's HTTP server, in a thread and a loop of its own, so that neither waits for the other.

Until somebody connects it is a listening socket: what serves it (aiohttp, and the modules of most routes) is a third of what a daemon
would import, nearly 0.2 s of a processor for each start, and many are never asked. Handlers run in the server's thread: what belongs to the
daemon's loop they ask for there (`asked`). It knows no paths: routes are added before `start`, or by what `later` was given."""

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
"""For requests under way to end, once the daemon ends."""
MAX_ASKED: Final = 128
"""Questions to a daemon that wait for their answers at once, those that nobody waits for any more among them."""

log = logging.getLogger("kvstore.telemetry")


class HttpServer:
    """See the module. `add`, `later`, `start` and `close` are for the daemon's thread; `add` for what `later` calls too."""

    def __init__(self, listen: str, *, access_control: LocalAccess | None = None, https: HttpsCertificate | None = None) -> None:
        """Takes the address; nobody is answered before `start`. `access_control` decides what a request may do; None: only this host is
        let in. With `https` it speaks nothing else.

        Raises ConfigError, InvalidArgument.
        """
        self._listener = listening(listen)
        self.address = host_port(self._listener)
        """HOST:PORT at which it listens."""
        self._https = https
        self.access_control = access_control or LocalAccess()
        self._later: list[Callable[[HttpServer], None]] = []
        self.routes: list[tuple[str, str, Handler]] = []
        """Method, path and handler of each."""
        self.needs: dict[Handler, AccessLevel] = {}
        self._ending = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def add(self, method: str, path: str, handler: Handler, *, needs: AccessLevel) -> None:
        """Answer `method` (GET, POST) on `path` by `handler`, for requests that have `needs` and up: wherever it answers."""
        assert self.needs.get(handler, needs) is needs, f"{path} would change who may ask elsewhere what this answers"
        self.needs[handler] = needs
        self.routes.append((method, path, handler))

    def later(self, add: Callable[["HttpServer"], None]) -> None:
        """Have `add` add routes when the first connects, in the server's thread: so it imports what they need only then."""
        self._later.append(add)

    def actor(self, request: "web.Request", via: str) -> Actor:
        """Who asks for a change, for the audit trail."""
        return Actor.of(self.access_control.identify(request), peer=request.remote or "", via=via)

    def told(self, host: str | None = None) -> str:
        """The address as it is told to others, who may reach this machine at `host`: see `reached_at`. https:// goes before that of a port
        that speaks it."""
        address = self.address if host is None else reached_at(self.address, host)
        return f"https://{address}" if address and self._https is not None else address

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop listening, hang up on who is still there after STOP_S, end the thread. A second close is a no-op."""
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
            if self._somebody_connects():
                asyncio.run(self._serve())
        except Exception:
            log.exception("nobody is answered on %s any more", self.address)
        finally:
            self._listener.close()

    def _somebody_connects(self) -> bool:
        """Waits; False where the server is closed first."""
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        waiting.register(self._ending, select.POLLIN)
        return all(fd != self._ending for fd, _ in waiting.poll())

    async def _serve(self) -> None:
        from kvstore.telemetry.http.aiohttp_server import serve  # see the module

        while self._later:
            self._later.pop(0)(self)
        ending = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._ending, ending.set)
        try:
            await serve(self, self._listener, ending, stop_s=STOP_S, https=self._https)
        finally:
            asyncio.get_running_loop().remove_reader(self._ending)


async def asked(function: Callable[[], T]) -> T:
    """What `function` returns, called in a thread where it may block, as a call of a daemon's loop does. Raises what it raises; Full.

    Each has a thread of its own, so that none waits in line, health least of all, behind one whose answer does not come; and the process
    waits for none of them when it ends.
    """
    asking = _asking  # what is taken is given back there
    if not asking.acquire(blocking=False):
        raise Full(f"{MAX_ASKED} questions wait for their answers, which is the most")
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()  # it is not called off
    here = contextvars.copy_context()

    def ask() -> None:
        try:
            tell = partial(answer.set_result, here.run(function))
        except BaseException as error:
            tell = partial(answer.set_exception, error)
        asking.release()
        tell()

    try:
        threading.Thread(target=ask, name="http-asked", daemon=True).start()
    except RuntimeError as error:
        asking.release()
        raise Full(f"there is no thread to ask in: {error}") from None
    return await asyncio.wrap_future(answer)


_asking = threading.BoundedSemaphore(MAX_ASKED)


class HttpSettings(Protocol):
    """Of a daemon: those of its HTTP port."""

    @property
    def http(self) -> str: ...
    @property
    def http_token_file(self) -> str: ...
    @property
    def http_tls_cert(self) -> str: ...
    @property
    def http_tls_key(self) -> str: ...


def open_http(settings: HttpSettings) -> HttpServer | None:
    """The server of a daemon with these settings; None where they want none. Raises ConfigError, InvalidArgument."""
    access_control = TokenFileAccess(settings.http_token_file) if settings.http_token_file else LocalAccess()
    https = HttpsCertificate.of(settings.http_tls_cert, settings.http_tls_key)
    return HttpServer(settings.http, access_control=access_control, https=https) if settings.http else None
