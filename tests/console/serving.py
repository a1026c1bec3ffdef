"""A console on a free port of the loopback, of a simulated cluster or a real one, with a history that was there before."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from aiohttp import web

from kvstore.console.config import ConsoleSettings
from kvstore.console.source import ConsoleSource
from kvstore.console.watch import ClusterWatcher
from kvstore.console.web import add_console
from kvstore.telemetry.http.access import AccessLevel, LocalAccess
from kvstore.telemetry.http.server import HttpServer
from tests.console.simulated import Simulated


@dataclass(slots=True)
class Clock:
    """Time of its own, in seconds: goes on when told."""

    now_s: float = 100_000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, slots=True)
class Served:
    address: str
    watch: ClusterWatcher


class HeaderAccess(LocalAccess):
    """Access control that maps a request's Authorization header to an access level."""

    def __init__(self, accesses: Mapping[str, AccessLevel]) -> None:
        self._accesses = accesses

    def allowed(self, request: web.Request) -> AccessLevel:
        return self._accesses.get(request.headers.get("Authorization", ""), AccessLevel.NONE)


@contextlib.contextmanager
def served(source: ConsoleSource, watch: ClusterWatcher, *, access_control: LocalAccess | None = None) -> Iterator[Served]:
    server = HttpServer("127.0.0.1:0", access_control=access_control)
    try:
        add_console(server, watch)
        server.start()
        yield Served(f"http://{server.address}", watch)
    finally:
        watch.close()
        server.close()


@contextlib.contextmanager
def simulated(
    count: int, *, looks: int = 120, dead: tuple[int, ...] = (), step_s: float = 10.0
) -> Iterator[tuple[Served, Simulated, Clock]]:
    """`looks` looks at a simulated cluster have been taken, `step_s` apart; another comes with `look` of the watch."""
    clock = Clock()
    source = Simulated(count, clock, dead=dead)
    watch = ClusterWatcher(source, ConsoleSettings(interval_s=step_s), clock=clock, wall=lambda: clock() + 1_700_000_000)
    for _ in range(looks):
        watch.poll()
        clock.now_s += step_s
    with served(source, watch) as found:
        yield found, source, clock
