"""Routes of every daemon's HTTP port: `/healthz`, `/readyz`, `/metrics`, `/debug/log-level`, `/debug/threads`, `/debug/profile`."""

import json
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from aiohttp import web

from kvstore.protocol.errors import Full, InvalidArgument, KVStoreError
from kvstore.protocol.shared_settings import LEVELS
from kvstore.security.actor import HTTP, Actor
from kvstore.telemetry.http.access import AccessLevel
from kvstore.telemetry.http.server import HttpServer, asked
from kvstore.telemetry.logs import ROOT, named
from kvstore.telemetry.metrics.exposition import Read, exposed
from kvstore.telemetry.metrics.metric import Metric
from kvstore.telemetry.stacks import profile, stacks

Alive = Callable[[], None]
"""Returns while the daemon lives, and raises a KVStoreError when its loop does not answer in time. Called in a thread."""
Unready = Callable[[], Sequence[str]]
"""Why the daemon does not serve, a line a reason; none where it does. May raise a KVStoreError, a reason too. Called in a thread."""

log = logging.getLogger("kvstore.telemetry")

DEFAULT_S: Final = 5.0
MAX_S: Final = 60.0


def add_health(server: HttpServer, alive: Alive, unready: Unready) -> None:
    """Answer 200 and `ok`, or 503 and what is wrong, a line each, without any credential."""

    def dead() -> Sequence[str]:
        alive()
        return ()

    async def healthz(_request: web.Request) -> web.Response:
        return await _answer(dead)

    async def readyz(_request: web.Request) -> web.Response:
        return await _answer(unready)

    server.add("GET", "/healthz", healthz, needs=AccessLevel.NONE)
    server.add("GET", "/readyz", readyz, needs=AccessLevel.NONE)


async def _answer(ask: Unready) -> web.Response:
    try:
        reasons = await asked(ask)
    except KVStoreError as error:
        reasons = [str(error)]
    return web.Response(status=503 if reasons else 200, text="".join(f"{reason}\n" for reason in reasons or ("ok",)))


def add_metrics(server: HttpServer, metrics: Sequence[Metric], read: Read) -> None:
    """Answer with the metrics of the list as `read` gives them; it may be a call of the daemon's loop."""

    async def handler(request: web.Request) -> web.Response:
        body, content_type = await asked(lambda: exposed(metrics, read, request.headers.get("Accept", "")))
        return web.Response(body=body, headers={"Content-Type": content_type})

    server.add("GET", "/metrics", handler, needs=AccessLevel.READ)


class LevelChange(NamedTuple):
    """The level of logger `of` became another one."""

    by: Actor
    of: str
    old: str
    new: str


Changed = Callable[[LevelChange], None]


def add_log_level(server: HttpServer, changed: Changed = lambda _change: None) -> None:
    """For operators. `changed` is called with each change, in the server's thread."""

    async def told(_request: web.Request) -> web.Response:
        return web.json_response(levels())

    async def change(request: web.Request) -> web.Response:
        of, level = _wanted(await request.text())
        by, was = server.actor(request, HTTP), logging.getLevelName(logging.getLogger(of).getEffectiveLevel()).lower()
        logging.getLogger(of).setLevel(level.upper())
        log.warning("logger %s is at level %s, set by %s", of, level, by, extra=named("log_level", of=of, to=level, by=by))
        changed(LevelChange(by, of, was, level))
        return web.json_response(levels())

    server.add("GET", "/debug/log-level", told, needs=AccessLevel.ADMIN)
    server.add("POST", "/debug/log-level", change, needs=AccessLevel.ADMIN)


def levels() -> dict[str, str]:
    """Of each of our loggers, what it takes now."""
    names = [name for name in logging.root.manager.loggerDict if name == ROOT or name.startswith(f"{ROOT}.")]
    return {name: logging.getLevelName(logging.getLogger(name).getEffectiveLevel()).lower() for name in sorted(names)}


def _wanted(body: str) -> tuple[str, str]:
    """Raises InvalidArgument."""
    try:
        asked = json.loads(body)
        of, level = asked.get("of", ROOT), asked["level"]
    except (ValueError, AttributeError, KeyError):
        raise InvalidArgument('write {"level": LEVEL}, or {"level": LEVEL, "of": LOGGER}') from None
    if level not in LEVELS:
        raise InvalidArgument(f"there is no level {str(level)[:40]!r}; there are {', '.join(LEVELS)}")
    if of != ROOT and of not in levels():
        raise InvalidArgument(f"there is no logger {str(of)[:40]!r}; there are {', '.join(levels())}")
    return of, level


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

    server.add("GET", "/debug/threads", threads, needs=AccessLevel.ADMIN)
    server.add("GET", "/debug/profile", profiled, needs=AccessLevel.ADMIN)


def _seconds(text: str) -> float:
    """Raises InvalidArgument."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MAX_S:
        raise InvalidArgument(f"seconds is {text[:40]!r}: a number above 0, {MAX_S:g} at most")
    return seconds
