"""The reactor of a simulated process: the product's interface, rounds as events of the world, timers by the process's own clock."""

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from kvstore.protocol.errors import Closed
from kvstore.rpc.busy_poll import BusyPoll
from kvstore.rpc.reactor import READABLE, Reactor, Timer
from tests.simulation.network import Network
from tests.simulation.world import MS, S

T = TypeVar("T")
MAX_ROUND_DELAY_NS = MS // 4
"""A round begins so long after what caused it, at most: the order between processes so varies with the seed."""


def _ignored() -> None:
    """A cancelled timer stays among the world's events until it is due."""


class SimReactor(Reactor):
    """Reactor of the process that creates it. Every exception of a callback becomes a finding."""

    def __init__(self, network: Network, *, busy_poll: BusyPoll | None = None) -> None:
        self._network = network
        self._world = network.world
        self.process = self._world.here
        self._ahead_ns = self.process.monotonic_ns() - self._world.now_ns
        self._callbacks: dict[int, tuple[Callable[[int], None], int]] = {}
        self._ready: dict[int, None] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._due: deque[Timer] = deque()
        self._is_scheduled = False
        self._stopping = False
        self._closed = False
        self.after_events: list[Callable[[], None]] = []

    def now_ns(self) -> int:
        return self._world.now_ns + self._ahead_ns

    def register(self, fd: int, callback: Callable[[int], None], events: int = READABLE) -> None:
        self._callbacks[fd] = callback, events
        self._network.files[fd].watcher = self.poke
        self.poke(fd)

    def modify(self, fd: int, events: int) -> None:
        self._callbacks[fd] = self._callbacks[fd][0], events
        self.poke(fd)

    def unregister(self, fd: int) -> None:
        self._callbacks.pop(fd, None)
        self._ready.pop(fd, None)

    def poke(self, fd: int) -> None:
        """Something may have become of it."""
        if fd in self._callbacks and fd not in self._ready:
            self._ready[fd] = None
            self._schedule()

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> Timer:
        timer = Timer(when_ns, callback, _ignored)
        self.process.at(when_ns - self._ahead_ns, partial(self._fire, timer))
        return timer

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        return self.call_at(self.now_ns() + int(delay_s * S), callback)

    def every(self, interval_s: float, callback: Callable[[], None]) -> None:
        """Call back at each interval with one timer that is re-armed, since ticks are most events of an idle world."""
        interval_ns, process, world = int(interval_s * S), self.process, self._world

        def again() -> None:
            timer.callback = again
            process.at(world.now_ns + interval_ns, fire)
            callback()

        timer = self.call_later(interval_s, again)
        fire = partial(self._fire, timer)

    def call_soon(self, callback: Callable[[], None]) -> None:
        if not self._closed:
            self._calls.append(callback)
            self._schedule()

    def call(self, function: Callable[[], T], *, deadline_s: float) -> T:
        """In the loop's stead: one thing at a time runs in a process."""
        if self._closed:
            raise Closed("the reactor is closed")
        try:
            return function()
        finally:
            self._schedule()

    def run_once(self, timeout_s: float) -> None:
        """Rounds come by themselves; a thread that serves the loop waits for them."""
        self._world.sleep(timeout_s)

    def guarded(self, callback: Callable[..., object], *args: Any) -> None:
        try:
            callback(*args)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._world.finding("a callback failed", f"{self.process.name}: {type(error).__name__}: {error}", error)

    def stop(self) -> None:
        self._stopping = True

    def close(self) -> None:
        self._closed = True

    def _fire(self, timer: Timer) -> None:
        if timer.callback is not None:
            self._due.append(timer)
            if not self._is_scheduled:
                self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled and not self._closed:
            self._is_scheduled = True
            world = self._world
            begin_ns = world.now_ns + int(world.random() * MAX_ROUND_DELAY_NS)
            heapq.heappush(world.queue, (begin_ns, world.next_serial(), self.process, self._round))

    def _round(self) -> None:
        """As Reactor.run_once: descriptors, calls handed over, timers, then `after_events`. Nothing goes on after a callback that fails:
        that is a finding, with which the run is over."""
        self._is_scheduled = False
        if self._closed:
            return
        try:
            if self._ready:
                self._serve_ready()
            if calls := self._calls:
                for _ in range(len(calls)):
                    calls.popleft()()
            if due := self._due:
                for _ in range(len(due)):
                    timer = due.popleft()
                    callback, timer.callback = timer.callback, None
                    if callback is not None:
                        callback()
            for call in self.after_events:
                call()
        except Exception as error:
            self._failed(error)

    def _serve_ready(self) -> None:
        files, callbacks = self._network.files, self._callbacks
        ready, self._ready = self._ready, {}
        for fd in ready:
            known = callbacks.get(fd)
            if known is not None and (events := files[fd].ready() & known[1]):
                known[0](events)
                known = callbacks.get(fd)
                if known is not None and files[fd].ready() & known[1]:
                    self.poke(fd)
