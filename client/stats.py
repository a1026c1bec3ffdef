"""What a client has done since it was made: counters, how long its calls took, and both as metrics for the registry of its program.

Calls that may be over within microseconds are timed now and then: one in PERIOD, which stands for those since the one before. To time each
would cost more than 2 % of a read of shared memory; to count down costs 40 ns. All others are timed each.
"""

import functools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from kvstore.protocol.message import TIER_BITS
from kvstore.telemetry.metrics.histogram import Histograms

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvstore.telemetry.metrics.metric import Readings
    from kvstore.telemetry.tracing.spans import Tracing


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Counters since the client was made."""

    requests: int = 0
    """Operations called, a batch being one."""
    hits: int = 0
    """Blocks found by get, get_into, view and their batches."""
    misses: int = 0
    puts: int = 0
    """Blocks stored by this client."""
    already_present: int = 0
    """Puts that found their block stored."""
    bytes_in: int = 0
    """Bytes of values read."""
    bytes_out: int = 0
    """Bytes of values stored."""
    engine_bytes: int = 0
    """Of both, what the transfer engine moved: to or from other hosts."""
    stale_hints: int = 0
    """Reads that went to a node which no longer had the block."""
    retries: int = 0
    """Requests sent again: busy keys, unreachable nodes, stale hints, lapsed leases."""
    checksum_failures: int = 0
    """Values that arrived with another checksum than recorded; the caller never saw them."""
    held_blocks: int = 0
    """Blocks that lookups found and hold, each time that they did."""
    unheld_blocks: int = 0
    """Blocks that lookups found and were to hold, and that no hold was to be had for."""
    hits_by_tier: Mapping[str, int] = field(default_factory=dict)


class ClientCounters:
    """The live form of ClientStats. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, int] = {}
        self._by_tier = dict.fromkeys(TIER_BITS.values(), 0)

    def add(self, **counts: int) -> None:
        """Raise counters by name."""
        with self._lock:
            for name, count in counts.items():
                self._values[name] = self._values.get(name, 0) + count

    def put_one(self, size_bytes: int) -> None:
        """A put of a single block ended, which was stored."""
        with self._lock:
            values = self._values
            values["requests"] = values.get("requests", 0) + 1
            values["puts"] = values.get("puts", 0) + 1
            values["bytes_out"] = values.get("bytes_out", 0) + size_bytes

    def read(self, tiers: Mapping[int, int], size_bytes: int, misses: int) -> None:
        """A get ended: blocks read by the bit of the tier they came from, their bytes together, and blocks not found."""
        with self._lock:
            values = self._values
            values["requests"] = values.get("requests", 0) + 1
            for bit, count in tiers.items():
                values["hits"] = values.get("hits", 0) + count
                self._by_tier[bit] = self._by_tier.get(bit, 0) + count
            values["bytes_in"] = values.get("bytes_in", 0) + size_bytes
            values["misses"] = values.get("misses", 0) + misses

    def read_one(self, tier: int, size_bytes: int) -> None:
        """As `read`, of a single block that was found."""
        with self._lock:
            values = self._values
            values["requests"] = values.get("requests", 0) + 1
            values["hits"] = values.get("hits", 0) + 1
            values["bytes_in"] = values.get("bytes_in", 0) + size_bytes
            self._by_tier[tier] = self._by_tier.get(tier, 0) + 1

    def snapshot(self, calls: int = 0, hits: int = 0, size_bytes: int = 0, unheld: int = 0) -> ClientStats:
        """With what was read in shared memory, and what nodes of this host refused to hold there: it is counted there."""
        with self._lock:
            values: dict[str, Any] = dict(self._values)
            counted = {"requests": calls, "hits": hits, "bytes_in": size_bytes, "held_blocks": -unheld, "unheld_blocks": unheld}
            for name, more in counted.items():
                values[name] = values.get(name, 0) + more
            by_tier = {name: self._by_tier[bit] for name, bit in TIER_BITS.items()}
        by_tier["dram"] += hits
        return ClientStats(**values, hits_by_tier=by_tier)


T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

PERIOD: Final = 61
"""A prime: a caller that does the same few things in turn is not to have always the same one timed."""


class Timings:
    """Threads may share it: see Histogram."""

    def __init__(self) -> None:
        self.durations = Histograms()
        self.untimed = 0
        """Quick calls until the next that is timed. The caller counts it down, and has the call sampled once it is below 0."""
        self._weight = 1

    def sample(self, name: str, call: Callable[[], T]) -> T:
        """Make a quick call, once more from the beginning, and time it."""
        self.untimed = PERIOD  # which the call itself counts down first
        weight, self._weight = self._weight, PERIOD  # for how many calls this one stands
        began_ns = time.monotonic_ns()
        try:
            return call()
        finally:
            self.durations[name].observe(time.monotonic_ns() - began_ns, weight)


def timed(method: F) -> F:
    """A client's method that is timed under its name, whatever comes of it."""
    name = method.__name__

    @functools.wraps(method)
    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_ns = time.monotonic_ns()
        try:
            return method(self, *args, **kwargs)
        finally:
            self._timings.durations[name].record(time.monotonic_ns() - began_ns)

    return cast(F, measured)


def timed_async(method: F) -> F:
    """As `timed`, of a coroutine function."""
    name = method.__name__

    @functools.wraps(method)
    async def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        began_ns = time.monotonic_ns()
        try:
            return await method(self, *args, **kwargs)
        finally:
            self._timings.durations[name].record(time.monotonic_ns() - began_ns)

    return cast(F, measured)


SAME = {
    "requests": "requests",
    "misses": "misses",
    "puts": "puts",
    "already_present": "already_present",
    "bytes_in": "read_bytes",
    "bytes_out": "written_bytes",
    "engine_bytes": "engine_bytes",
    "stale_hints": "stale_hints",
    "retries": "retries",
    "checksum_failures": "checksum_failures",
    "held_blocks": "held_blocks",
    "unheld_blocks": "unheld_blocks",
}
"""From the fields of ClientStats to the metrics' names, less `kvstore_client_`."""


class ClientMetrics:
    """Of one client. Thread-safe; asks nobody, and costs the client nothing until it is read."""

    def __init__(self, stats: Callable[[], ClientStats], timings: Timings, tracing: "Tracing | None" = None) -> None:
        self._stats = stats
        self._timings = timings
        self._tracing = tracing

    def register(self, registry: "CollectorRegistry | None" = None) -> None:
        """Have `registry` (None: prometheus_client's default one) tell of this client from now on, after its end too. Raises ValueError
        when it tells of another client already: two of one process need a registry each, or one client."""
        from prometheus_client import REGISTRY

        from kvstore.telemetry.metrics.exposition import Collected
        from kvstore.telemetry.metrics.metric import CLIENT

        (REGISTRY if registry is None else registry).register(Collected(CLIENT, self.read))

    def read(self) -> "Readings":
        """The metrics of docs/metrics.md, by their names."""
        from kvstore.telemetry.tracing.config import spans_told

        stats = self._stats()
        return {
            **{f"kvstore_client_{metric}": getattr(stats, field) for field, metric in SAME.items()},
            "kvstore_client_hits": {(tier,): count for tier, count in stats.hits_by_tier.items()},
            "kvstore_client_trace_spans": spans_told(self._tracing),
            "kvstore_client_operation_duration_seconds": self._timings.durations.read(),
        }
