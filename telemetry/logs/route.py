"""`/debug/log-level`: the levels of the loggers now, and, by a POST of {"level": LEVEL, "of": LOGGER}, others until the daemon ends."""

import json
import logging
from collections.abc import Callable
from typing import NamedTuple

from aiohttp import web

from kvstore.protocol.errors import InvalidArgument
from kvstore.security.actor import HTTP, Actor
from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.logs.events import named
from kvstore.telemetry.logs.writing import LEVELS, ROOT

log = logging.getLogger("kvstore.telemetry")


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

    server.add("GET", "/debug/log-level", told, needs=Access.ADMIN)
    server.add("POST", "/debug/log-level", change, needs=Access.ADMIN)


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
