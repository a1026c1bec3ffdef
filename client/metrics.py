"""A client's own metrics, for the registry of the program that it is part of. `prometheus_client` is loaded once they are wanted."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvstore.client.stats import ClientStats
from kvstore.client.timings import Timings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvstore.telemetry.metrics.metric import Readings
    from kvstore.telemetry.tracing.spans import Tracing

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
