"""Counters of the router, and their export on its second HTTP port (health, metrics, diagnostics)."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from kvstore.client.instances.client import SchedulerClient
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError
from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.metrics.histogram import ANSWER_BOUNDS_S, Histogram
from kvstore.telemetry.metrics.metric import ROUTER, Reading, Readings
from kvstore.telemetry.signals import ALIVE_S, add_signals
from kvstore.telemetry.tracing.config import span_counts

if TYPE_CHECKING:
    from kvstore.telemetry.tracing.spans import Tracing

RENAMED: Final = {"active": "active_requests", "failed": "failures", "disconnects": "client_disconnects"}
"""Counter -> metric without `kvstore_router_`, where the names differ."""


@dataclass(slots=True)
class RouterCounters:
    """Counters since the start; `active` is a gauge of the requests being served."""

    active: int = 0
    requests: int = 0
    completed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """By the scheduler's reason; `busy` is the router's own limit."""
    failed: int = 0
    """Requests that failed because of an engine or the master."""
    disconnects: int = 0
    """Clients that disconnected before the end."""
    retries: int = 0
    routed_by_load: Counter[str] = field(default_factory=Counter)
    """By LoadReason."""
    token_mismatches: int = 0
    """Responses whose usage.prompt_tokens differed from /tokenize."""
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    """Prompt tokens that were cached, as engines report, or else as the scheduler expected."""
    output_tokens: int = 0
    durations: Histogram = field(default_factory=lambda: Histogram(ANSWER_BOUNDS_S))
    """Durations of accepted requests, failed ones included."""
    first_tokens: Histogram = field(default_factory=lambda: Histogram(ANSWER_BOUNDS_S))
    """Time from the request to the first part of a streamed response."""

    def counts(self) -> dict[str, int]:
        """Return the integer counters by name."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.type is int}

    def as_dict(self) -> dict[str, Any]:
        return self.counts() | {"rejected": dict(self.rejected), "routed_by_load": dict(self.routed_by_load)}


def add_router_signals(
    server: HttpServer,
    counters: RouterCounters,
    client: SchedulerClient,
    loop: asyncio.AbstractEventLoop,
    tracing: "Tracing | None" = None,
) -> None:
    """Add health and metrics of the router that runs in `loop`. It is ready while the scheduler responds and accepts its token."""

    def alive() -> None:
        answered = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        try:
            answered.result(ALIVE_S)
        except TimeoutError:
            raise DeadlineExceeded(f"the event loop did not respond within {ALIVE_S:g} s") from None

    def unready() -> Sequence[str]:
        try:
            client.check()
        except KVStoreError as error:
            return [f"no scheduler: {error}"]
        return []

    add_signals(server, ROUTER, lambda: readings(counters, span_counts(tracing)), alive=alive, unready=unready)


def readings(counters: RouterCounters, trace_spans: Reading) -> Readings:
    return {f"kvstore_router_{RENAMED.get(name, name)}": count for name, count in counters.counts().items()} | {
        "kvstore_router_rejections": {(reason,): count for reason, count in dict(counters.rejected).items()},
        "kvstore_router_routed_by_load": {(reason,): count for reason, count in dict(counters.routed_by_load).items()},
        "kvstore_router_request_duration_seconds": {(): counters.durations.counts()},
        "kvstore_router_time_to_first_token_seconds": {(): counters.first_tokens.counts()},
        "kvstore_router_trace_spans": trace_spans,
    }
