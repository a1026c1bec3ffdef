"""Counters and call durations of a client, and both as metrics of its process.

Calls that may take microseconds are sampled: one in PERIOD is timed and counts for all since the last. Timing each
would cost over 2 % of a shared-memory read; counting down costs 40 ns. Other calls are all timed.
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
    """Counters since the client was created."""

    requests: int = 0
    """Calls, a batch counting once."""
    hits: int = 0
    """Blocks found by get, get_into, view and their batches."""
    misses: int = 0
    puts: int = 0
    """Blocks stored by this client."""
    already_present: int = 0
    """Puts whose block was already stored."""
    bytes_in: int = 0
    """Bytes of values read."""
    bytes_out: int = 0
    """Bytes of values stored."""
    engine_bytes: int = 0
    """Of both, bytes moved by the transfer engine, to or from other hosts."""
    stale_hints: int = 0
    """Reads sent to a node that no longer had the block."""
    retries: int = 0
    """Requests repeated: busy keys, unreachable nodes, stale locations, expired leases."""
    checksum_failures: int = 0
    """Values with a wrong checksum on arrival; never returned to the caller."""
    held_blocks: int = 0
    """Blocks held by lookups, once per lookup."""
    unheld_blocks: int = 0
    """Blocks found by lookups with a hold that could not be held."""
    lost_retention_hints: int = 0
    """Blocks whose retention hint, of a put or get, was not applied: the block or its node was gone."""
    hits_by_tier: Mapping[str, int] = field(default_factory=dict)


class ClientCounters:
    """Mutable form of ClientStats. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, int] = {}
        self._by_tier = dict.fromkeys(TIER_BITS.values(), 0)

    def add(self, **counts: int) -> None:
        """Increment counters by name."""
        with self._lock:
            for name, count in counts.items():
                self._values[name] = self._values.get(name, 0) + count

    def put_one(self, size_bytes: int) -> None:
        """Count a put of one block that was stored."""
        with self._lock:
            values = self._values
            values["requests"] = values.get("requests", 0) + 1
            values["puts"] = values.get("puts", 0) + 1
            values["bytes_out"] = values.get("bytes_out", 0) + size_bytes

    def read(self, tiers: Mapping[int, int], size_bytes: int, misses: int) -> None:
        """Count a get: blocks by tier bit, their total bytes, and misses."""
        with self._lock:
            values = self._values
            values["requests"] = values.get("requests", 0) + 1
            for bit, count in tiers.items():
                values["hits"] = values.get("hits", 0) + count
                self._by_tier[bit] = self._by_tier.get(bit, 0) + count
            values["bytes_in"] = values.get("bytes_in", 0) + size_bytes
            values["misses"] = values.get("misses", 0) + misses

    def read_one(self, tier: int, size_bytes: int) -> None:
        """`read` for one block that was found."""
        with self._lock:
            values = self._values
            values["requests"] = values.get("requests", 0) + 1
            values["hits"] = values.get("hits", 0) + 1
            values["bytes_in"] = values.get("bytes_in", 0) + size_bytes
            self._by_tier[tier] = self._by_tier.get(tier, 0) + 1

    def snapshot(self, calls: int = 0, hits: int = 0, size_bytes: int = 0, unheld: int = 0) -> ClientStats:
        """The counters, plus those of the local reader slots, given as arguments."""
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
"""A prime, so that a caller's repeating pattern of calls does not time the same call always."""


class Timings:
    """Durations of calls by method name. Thread-safe as Histogram."""

    def __init__(self) -> None:
        self.durations = Histograms()
        self.untimed = 0
        """Sampled calls until the next timed one. Callers decrement it, and call `sample` once it is below 0."""
        self._weight = 1

    def sample(self, name: str, call: Callable[[], T]) -> T:
        """Run and time a sampled call."""
        self.untimed = PERIOD  # the call itself decrements it first
        weight, self._weight = self._weight, PERIOD  # number of calls that this one stands for
        began_ns = time.monotonic_ns()
        try:
            return call()
        finally:
            self.durations[name].observe(time.monotonic_ns() - began_ns, weight)


def timed(method: F) -> F:
    """Decorator: time a client method under its name, whether it returns or raises."""
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
    """`timed` for a coroutine function."""
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
    "lost_retention_hints": "lost_retention_hints",
}
"""Metric name, without `kvstore_client_`, by field of ClientStats."""


class ClientMetrics:
    """Metrics of one client. Thread-safe; sends nothing, and costs nothing until read."""

    def __init__(self, stats: Callable[[], ClientStats], timings: Timings, tracing: "Tracing | None" = None) -> None:
        self._stats = stats
        self._timings = timings
        self._tracing = tracing

    def register(self, registry: "CollectorRegistry | None" = None) -> None:
        """Register this client with `registry` (None: prometheus_client's default), for the life of the process.

        Raises ValueError if another client is registered there: two clients of one process need a registry each.
        """
        from prometheus_client import REGISTRY

        from kvstore.telemetry.metrics.exposition import Collected
        from kvstore.telemetry.metrics.metric import CLIENT

        (REGISTRY if registry is None else registry).register(Collected(CLIENT, self.read))

    def read(self) -> "Readings":
        """Values of the metrics in docs/metrics.md, by name."""
        from kvstore.telemetry.tracing.config import span_counts

        stats = self._stats()
        return {
            **{f"kvstore_client_{metric}": getattr(stats, field) for field, metric in SAME.items()},
            "kvstore_client_hits": {(tier,): count for tier, count in stats.hits_by_tier.items()},
            "kvstore_client_trace_spans": span_counts(self._tracing),
            "kvstore_client_operation_duration_seconds": self._timings.durations.read(),
        }
