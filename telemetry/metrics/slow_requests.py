"""The slowest requests of the last minutes by tenant and operation. Sans-I/O; `now_ns` is monotonic and passed in.

A daemon compares each request's duration with `floor_ns` and calls `add` for slow ones only, so others cost one comparison.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

from kvstore.protocol.message import MAX_SLOW

MIN_SLOW_NS: Final = 1_000_000
"""Faster requests are never slow."""
MAX_KEPT: Final = 32
"""Requests of one window, each of another tenant or operation."""
WINDOW_NS: Final = 60_000_000_000
MAX_WINDOWS: Final = 10


@dataclass(frozen=True, slots=True)
class Slow:
    """`time_s` is Unix time of the answer."""

    tenant: str
    operation: str
    duration_ns: int
    time_s: float
    peer: str


class SlowRequests:
    """Of each tenant and operation the slowest in each window of a minute, for ten windows. Not thread-safe."""

    def __init__(self) -> None:
        self._windows: deque[dict[tuple[str, str], Slow]] = deque([{}], maxlen=MAX_WINDOWS)
        self._ends_ns = 0
        self.floor_ns = MIN_SLOW_NS
        """Only requests that took at least so long are to be added."""
        self.version = 1
        """Rises with each change of `slowest`."""

    def add(self, slow: Slow) -> None:
        """Keep the request if it is the slowest of its tenant and operation, and one of the MAX_KEPT slowest, in this window."""
        window, key = self._windows[-1], (slow.tenant, slow.operation)
        known = window.get(key)
        if known is not None and known.duration_ns >= slow.duration_ns:
            return
        if known is None and len(window) >= MAX_KEPT:
            fastest = min(window, key=lambda one: window[one].duration_ns)
            if window[fastest].duration_ns >= slow.duration_ns:
                return
            del window[fastest]
        window[key] = slow
        if len(window) >= MAX_KEPT:
            self.floor_ns = min(one.duration_ns for one in window.values())
        self.version += 1

    def run_due(self, now_ns: int) -> None:
        """Begin another window when this one is over."""
        if now_ns < self._ends_ns:
            return
        self._ends_ns = now_ns + WINDOW_NS
        self.floor_ns = MIN_SLOW_NS
        if self._windows[-1] or len(self._windows) > 1:
            if self._windows[0] and len(self._windows) == MAX_WINDOWS:
                self.version += 1
            self._windows.append({})

    def slowest(self) -> list[Slow]:
        """Of all windows, the slowest first, MAX_SLOW at most."""
        return sorted((slow for window in self._windows for slow in window.values()), key=lambda one: -one.duration_ns)[:MAX_SLOW]
