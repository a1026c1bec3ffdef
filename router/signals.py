"""What a router answers on its other HTTP port: health, metrics, diagnostics."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.client.instances.client import SchedulerClient
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError
from kvstore.router.counters import Counters
from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.metrics.metric import ROUTER, Reading, Readings
from kvstore.telemetry.signals import ALIVE_S, add_signals
from kvstore.telemetry.tracing.config import spans_told

if TYPE_CHECKING:
    from kvstore.telemetry.tracing.spans import Tracing

SAME = {
    "requests": "requests",
    "active": "active_requests",
    "completed": "completed",
    "failed": "failures",
    "hung_up": "hang_ups",
    "retries": "retries",
    "token_mismatches": "token_mismatches",
    "prompt_tokens": "prompt_tokens",
    "prefix_tokens": "prefix_tokens",
    "output_tokens": "output_tokens",
}
"""From the counters to the metrics' names, less `kvstore_router_`."""


def add_router_signals(
    server: HttpServer,
    counters: Counters,
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

    add_signals(server, ROUTER, lambda: readings(counters, spans_told(tracing)), alive=alive, unready=unready)


def readings(counters: Counters, trace_spans: Reading) -> Readings:
    return {f"kvstore_router_{metric}": getattr(counters, field) for field, metric in SAME.items()} | {
        "kvstore_router_rejections": {(reason,): count for reason, count in dict(counters.rejected).items()},
        "kvstore_router_routed_by_load": {(reason,): count for reason, count in dict(counters.routed_by_load).items()},
        "kvstore_router_request_duration_seconds": {(): counters.durations.counts()},
        "kvstore_router_time_to_first_token_seconds": {(): counters.first_tokens.counts()},
        "kvstore_router_trace_spans": trace_spans,
    }
