"""HTTP routes of every daemon: `/healthz`, `/readyz`, `/metrics`, `/debug/log-level`, `/debug/threads`,
`/debug/profile`."""

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
from kvstore.telemetry.http.server import HttpServer, run_in_thread
from kvstore.telemetry.logs import ROOT, named
from kvstore.telemetry.metrics.exposition import Read, exposed
from kvstore.telemetry.metrics.metric import Metric
from kvstore.telemetry.stacks import profile, stacks

Alive = Callable[[], None]
"""Liveness check: raises a KVStoreError if the daemon's loop does not respond in time. Called in a thread."""
Unready = Callable[[], Sequence[str]]
"""Reasons why the daemon is not ready, a line each; () if it is. A KVStoreError counts as a reason. Called in a
thread."""

log = logging.getLogger("kvstore.telemetry")

DEFAULT_S: Final = 5.0
MAX_S: Final = 60.0


def add_health(server: HttpServer, alive: Alive, unready: Unready) -> None:
    """Add health checks, without credentials: 200 and `ok`, or 503 and the reasons, a line each."""

    def liveness() -> Sequence[str]:
        alive()
        return ()

    async def healthz(_request: web.Request) -> web.Response:
        return await _answer(liveness)

    async def readyz(_request: web.Request) -> web.Response:
        return await _answer(unready)

    server.add("GET", "/healthz", healthz, needs=AccessLevel.NONE)
    server.add("GET", "/readyz", readyz, needs=AccessLevel.NONE)


async def _answer(ask: Unready) -> web.Response:
    try:
        reasons = await run_in_thread(ask)
    except KVStoreError as error:
        reasons = [str(error)]
    return web.Response(status=503 if reasons else 200, text="".join(f"{reason}\n" for reason in reasons or ("ok",)))


def add_metrics(server: HttpServer, metrics: Sequence[Metric], read: Read) -> None:
    """Add `/metrics`, with the values from `read`, which may call the daemon's loop."""

    async def handler(request: web.Request) -> web.Response:
        body, content_type = await run_in_thread(lambda: exposed(metrics, read, request.headers.get("Accept", "")))
        return web.Response(body=body, headers={"Content-Type": content_type})

    server.add("GET", "/metrics", handler, needs=AccessLevel.READ)


class LevelChange(NamedTuple):
    """Change of the level of logger `of`."""

    by: Actor
    of: str
    old: str
    new: str


Changed = Callable[[LevelChange], None]


def add_log_level(server: HttpServer, changed: Changed = lambda _change: None) -> None:
    """Add `/debug/log-level`, for operators. `changed` is called with each change, in the server's thread."""

    async def show(_request: web.Request) -> web.Response:
        return web.json_response(levels())

    async def change(request: web.Request) -> web.Response:
        of, level = _parse_change(await request.text())
        by, was = server.actor(request, HTTP), logging.getLevelName(logging.getLogger(of).getEffectiveLevel()).lower()
        logging.getLogger(of).setLevel(level.upper())
        log.warning("logger %s is at level %s, set by %s", of, level, by, extra=named("log_level", of=of, to=level, by=by))
        changed(LevelChange(by, of, was, level))
        return web.json_response(levels())

    server.add("GET", "/debug/log-level", show, needs=AccessLevel.ADMIN)
    server.add("POST", "/debug/log-level", change, needs=AccessLevel.ADMIN)


def levels() -> dict[str, str]:
    """Effective level of each logger of this project."""
    names = [name for name in logging.root.manager.loggerDict if name == ROOT or name.startswith(f"{ROOT}.")]
    return {name: logging.getLevelName(logging.getLogger(name).getEffectiveLevel()).lower() for name in sorted(names)}


def _parse_change(body: str) -> tuple[str, str]:
    """Raises InvalidArgument."""
    try:
        parsed = json.loads(body)
        of, level = parsed.get("of", ROOT), parsed["level"]
    except (ValueError, AttributeError, KeyError):
        raise InvalidArgument('the body must be {"level": LEVEL}, or {"level": LEVEL, "of": LOGGER}') from None
    if level not in LEVELS:
        raise InvalidArgument(f"there is no level {str(level)[:40]!r}; there are {', '.join(LEVELS)}")
    if of != ROOT and of not in levels():
        raise InvalidArgument(f"there is no logger {str(of)[:40]!r}; there are {', '.join(levels())}")
    return of, level


def add_debug(server: HttpServer) -> None:
    """Add stack dumps and the profiler; one profile at a time."""
    profiling = threading.Lock()

    async def threads(_request: web.Request) -> web.Response:
        return web.Response(text=stacks())

    async def profiled(request: web.Request) -> web.Response:
        seconds = _seconds(request.query.get("seconds", str(DEFAULT_S)))

        def taken() -> str:
            """Runs in its thread, to its end even if the client disconnects."""
            if not profiling.acquire(blocking=False):
                raise Full("a profile is in progress: retry after it")
            try:
                return profile(seconds)
            finally:
                profiling.release()

        return web.Response(text=await run_in_thread(taken))

    server.add("GET", "/debug/threads", threads, needs=AccessLevel.ADMIN)
    server.add("GET", "/debug/profile", profiled, needs=AccessLevel.ADMIN)


def _seconds(text: str) -> float:
    """Parse a duration. Raises InvalidArgument."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MAX_S:
        raise InvalidArgument(f"seconds is {text[:40]!r}: it must be a number above 0 and up to {MAX_S:g}")
    return seconds
