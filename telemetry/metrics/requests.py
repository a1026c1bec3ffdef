"""Request metrics of a server: durations by kind, refusals by reason, and the slowest requests of the last minutes.

A daemon compares each duration with `floor_ns` and calls `add` only for slow requests, so that others cost one
comparison.
"""

import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.message import MAX_SLOW
from kvstore.protocol.messages import MESSAGES, NO_REQUESTS
from kvstore.rpc.tracing import ObservedPeer
from kvstore.telemetry.metrics.histogram import Histogram, HistogramSnapshot

_CAPITAL: Final = re.compile(r"(?<=[a-z])(?=[A-Z])")

MIN_SLOW_NS: Final = 1_000_000
"""Minimum duration of a slow request."""
MAX_KEPT: Final = 32
"""Slow requests kept per window, each of another tenant or operation."""
WINDOW_NS: Final = 60_000_000_000
MAX_WINDOWS: Final = 10


def in_words(name: str) -> str:
    """A label value in snake case: `MatchPrefix` as `match_prefix`."""
    return _CAPITAL.sub("_", name).lower()


OPERATIONS: Final = {number: in_words(message.__name__) for number, message in MESSAGES.items() if number not in NO_REQUESTS}
"""Operation names of all daemons' requests, by message type."""


ROTATE_S: Final = 1.0
"""Interval at which the owner of a `RequestMetrics` calls `rotate`."""
KEPT_ROTATIONS: Final = 60
"""Rotations over which the slowest request of each kind is kept: a minute."""


class RequestMetrics:
    """An `rpc.tracing.Observer`. Written only by the daemon's loop."""

    def __init__(self, *, wall_s: Callable[[], float] = time.time) -> None:
        self._wall_s = wall_s
        self.slowest: Final = SlowRequests()
        self.slow_ns = self.slowest.floor_ns
        self._histograms: dict[int, Histogram] = {}
        self.answered: Final = _Recorders(self._histograms)
        self._refused: dict[str, int] = {}
        self._rotations: deque[dict[int, int]] = deque(maxlen=KEPT_ROTATIONS - 1)
        """Slowest request of each past rotation, in ns by message type."""

    def slow(self, peer: ObservedPeer, kind: int, elapsed_ns: int) -> None:
        """Keep a slow request, with the tenant of the peer's context."""
        if kind in OPERATIONS:
            tenant = getattr(peer.context, "tenant", "")
            self.slowest.add(SlowRequest(tenant, OPERATIONS[kind], elapsed_ns, self._wall_s(), peer.peer()))
            self.slow_ns = self.slowest.floor_ns

    def rotate(self) -> None:
        """Start a new rotation and drop the oldest. Between rotations the logs grow by 36 bytes per request."""
        self.slowest.run_due(time.monotonic_ns())
        self.slow_ns = self.slowest.floor_ns
        self._rotations.append({kind: histogram.slowest_ns() for kind, histogram in self._histograms.items()})
        for histogram in self._histograms.values():
            histogram.forget_slowest()

    def counters(self) -> dict[str, int]:
        """Counters for the status: per operation `request_NAME_count`, `request_NAME_us` (total) and
        `request_NAME_slowest_us`."""
        found: dict[str, int] = {}
        for kind, histogram in self._histograms.items():
            name, counts = f"request_{OPERATIONS[kind]}", histogram.counts()
            found[f"{name}_count"] = sum(counts.counts)
            found[f"{name}_us"] = round(counts.sum_s * 1e6)
            found[f"{name}_slowest_us"] = max(histogram.slowest_ns(), *(window.get(kind, 0) for window in self._rotations), 0) // 1000
        return found

    def refused(self, error: KVStoreError) -> None:
        """Count an error reply."""
        name = in_words(type(error).__name__)
        self._refused[name] = self._refused.get(name, 0) + 1

    def durations(self) -> dict[tuple[str, ...], HistogramSnapshot]:
        """Histograms by operation."""
        return {(OPERATIONS[kind],): histogram.counts() for kind, histogram in list(self._histograms.items())}

    def refusals(self) -> dict[tuple[str, ...], float]:
        """Counts by error name."""
        return {(name,): count for name, count in list(self._refused.items())}


class _Recorders(dict[int, Callable[[int], None]]):
    """By message type, the function that records a duration: an append to a log, nothing else."""

    def __init__(self, histograms: dict[int, Histogram]) -> None:
        super().__init__()
        self._histograms = histograms

    def __missing__(self, kind: int) -> Callable[[int], None]:
        if kind not in OPERATIONS:
            return _ignore
        histogram = self._histograms[kind] = Histogram()
        recorder = self[kind] = histogram.log.append
        return recorder


def _ignore(_elapsed_ns: int) -> None:
    """For messages that are not requests."""


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """One slow request. `time_s` is the Unix time of the reply."""

    tenant: str
    operation: str
    duration_ns: int
    time_s: float
    peer: str


class SlowRequests:
    """Slowest request of each tenant and operation, in each of the last ten one-minute windows. Not thread-safe."""

    def __init__(self) -> None:
        self._windows: deque[dict[tuple[str, str], SlowRequest]] = deque([{}], maxlen=MAX_WINDOWS)
        self._ends_ns = 0
        self.floor_ns = MIN_SLOW_NS
        """Minimum duration of requests to add."""
        self.version = 1
        """Incremented with each change of `slowest`."""

    def add(self, slow: SlowRequest) -> None:
        """Keep the request if it is the slowest of its tenant and operation, and among the MAX_KEPT slowest, in this
        window."""
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
        """Begin another window if the current one is over."""
        if now_ns < self._ends_ns:
            return
        self._ends_ns = now_ns + WINDOW_NS
        self.floor_ns = MIN_SLOW_NS
        if self._windows[-1] or len(self._windows) > 1:
            if self._windows[0] and len(self._windows) == MAX_WINDOWS:
                self.version += 1
            self._windows.append({})

    def slowest(self) -> list[SlowRequest]:
        """Requests of all windows, slowest first, at most MAX_SLOW."""
        return sorted((slow for window in self._windows for slow in window.values()), key=lambda one: -one.duration_ns)[:MAX_SLOW]


def slow_messages(slowest: SlowRequests, at: str = "") -> list[pb.SlowRequest]:
    """As messages, slowest first. `at` names the daemon; "" if the receiver knows it."""
    return [
        pb.SlowRequest(
            tenant=one.tenant, operation=one.operation, duration_us=one.duration_ns // 1000, time_s=one.time_s, at=at, peer=one.peer
        )
        for one in slowest.slowest()
    ]
