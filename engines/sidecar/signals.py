"""What a sidecar answers on its HTTP port: health, metrics, diagnostics."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvstore.engines.sidecar.telling import Telling
from kvstore.protocol.errors import DeadlineExceeded
from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.metrics.metric import SIDECAR, Readings
from kvstore.telemetry.signals import add_signals
from kvstore.telemetry.tracing.config import spans_told

if TYPE_CHECKING:
    from kvstore.telemetry.tracing.spans import Tracing

HANGS_S: Final = 120.0
"""A thread that has not come round for so long hangs: engine and master have a minute each at most."""


def add_sidecar_signals(server: HttpServer, telling: Telling, tracing: "Tracing | None" = None) -> None:
    """It is ready while the scheduler knows the engine."""

    def alive() -> None:
        silent_s = time.monotonic() - telling.told_s
        if silent_s > HANGS_S:
            raise DeadlineExceeded(f"nothing was reported, or tried, for {silent_s:.0f} s")

    def unready() -> Sequence[str]:
        return (
            []
            if telling.is_in
            else [f"the scheduler does not know engine {telling.name}: it sleeps, or it, its metrics or the master does not answer"]
        )

    def read() -> Readings:
        return {
            "kvstore_sidecar_reporting": int(telling.is_in),
            "kvstore_sidecar_reports": telling.reports,
            "kvstore_sidecar_failures": telling.failures,
            "kvstore_sidecar_trace_spans": spans_told(tracing),
        }

    add_signals(server, SIDECAR, read, alive=alive, unready=unready)
