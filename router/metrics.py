"""Counts of a router's work, and its other HTTP port, which serves health, metrics and diagnostics."""

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

RENAMED: Final = {"active": "active_requests", "failed": "failures", "hung_up": "client_disconnects"}
"""Metrics, less `kvstore_router_`, of the counters that have another name."""


@dataclass(slots=True)
class RouterCounters:
    """Counts since the start, but `active`, which is what is being served now."""

    active: int = 0
    requests: int = 0
    completed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """By the scheduler's reason; `busy` is the router's own limit."""
    failed: int = 0
    """For want of an engine or a master, or by their failure."""
    hung_up: int = 0
    """By clients, before the end."""
    retries: int = 0
    routed_by_load: Counter[str] = field(default_factory=Counter)
    """By why the prompt was not tokenised exactly."""
    token_mismatches: int = 0
    """Answers whose usage.prompt_tokens was not what /tokenize gave."""
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    """Of these, not computed: as engines say, or else as was foreseen."""
    output_tokens: int = 0
    durations: Histogram = field(default_factory=lambda: Histogram(ANSWER_BOUNDS_S))
    """Of requests that were taken on, to whichever end."""
    first_tokens: Histogram = field(default_factory=lambda: Histogram(ANSWER_BOUNDS_S))
    """Of streamed answers, from the request to their first part."""

    def counts(self) -> dict[str, int]:
        """The plain numbers, by name."""
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
    """Of the router whose requests `loop` serves. It is ready while the scheduler answers and takes its token."""

    def alive() -> None:
        answered = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        try:
            answered.result(ALIVE_S)
        except TimeoutError:
            raise DeadlineExceeded(f"the event loop did not answer within {ALIVE_S:g} s") from None

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
