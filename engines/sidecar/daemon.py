"""kvstore-sidecar: command line of the daemon that reports one engine to the scheduler until a signal.

Its HTTP port serves health, metrics and diagnostics. Standard output has one JSON line after the first accepted report:
{"event": "ready", "name": ..., "http": ..., "pid": ...}. Logs go to standard error. Exit code 2: invalid settings.
"""

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final

import click

from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import SchedulerClient
from kvstore.engines.sidecar.config import SECTION, SidecarSettings, check_settings
from kvstore.kvcache.key_names import KVSTORE, VLLM, make_naming
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError
from kvstore.protocol.extras import DISTRIBUTION, need
from kvstore.protocol.settings import load_settings, options
from kvstore.rpc.daemon import announce, begin_logging, end_on_signals, on_sighup
from kvstore.security.tls.config import tls_values
from kvstore.telemetry.http.server import HttpServer, open_http
from kvstore.telemetry.logs import stops, write_logs
from kvstore.telemetry.metrics.metric import SIDECAR, Readings
from kvstore.telemetry.signals import add_signals
from kvstore.telemetry.tracing.config import SECTION as TRACING
from kvstore.telemetry.tracing.config import TracingSettings, open_tracing, span_counts

if TYPE_CHECKING:
    from kvstore.engines.sidecar.reporter import InstanceReporting
    from kvstore.telemetry.tracing.spans import Tracing


HANGS_S: Final = 120.0
"""A reporter that made no round for this long is hung: the engine's and the master's deadlines are a minute each at
most."""


def add_sidecar_signals(server: HttpServer, reporting: "InstanceReporting", tracing: "Tracing | None" = None) -> None:
    """Add health, readiness, metrics and diagnostics. Ready while the scheduler knows the engine."""

    def alive() -> None:
        silent_s = time.monotonic() - reporting.last_round_s
        if silent_s > HANGS_S:
            raise DeadlineExceeded(f"no report was tried for {silent_s:.0f} s: see the log, and restart the sidecar")

    def unready() -> Sequence[str]:
        return (
            []
            if reporting.is_registered
            else [f"the scheduler does not know engine {reporting.name}: it sleeps, or its metrics or the master do not respond"]
        )

    def read() -> Readings:
        return {
            "kvstore_sidecar_reporting": int(reporting.is_registered),
            "kvstore_sidecar_reports": reporting.reports,
            "kvstore_sidecar_failures": reporting.failures,
            "kvstore_sidecar_trace_spans": span_counts(tracing),
        }

    add_signals(server, SIDECAR, read, alive=alive, unready=unready)


log = logging.getLogger("kvstore.sidecar")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=DISTRIBUTION)
@options(SidecarSettings)
def main(config: str | None, **flags: Any) -> None:
    """Run beside an engine: reports its load and its own blocks to the master's scheduler."""
    begin_logging()
    try:
        for package in ("msgspec", "prometheus_client", "zmq"):
            need(package, "sidecar")
        settings = load_settings(SidecarSettings, SECTION, flags=flags, config=config)
        traces = load_settings(TracingSettings, TRACING, flags={}, config=config)
        check_settings(settings)
        write_logs(settings.log_level, settings.log_format)
        _run(settings, traces)
    except KVStoreError as error:
        click.echo(f"kvstore-sidecar: error: {error}", err=True)
        sys.exit(2)


def _run(settings: SidecarSettings, traces: TracingSettings) -> None:
    # Imported here: optional libraries.
    from kvstore.engines.kv_events.subscriber import Subscriber
    from kvstore.engines.sidecar import reporter
    from kvstore.engines.sidecar.blocks import EngineBlocks

    of_master = ClientSettings(
        master=settings.master,
        tenant=settings.tenant,
        token=settings.token,
        instance_token=settings.instance_token,
        deadline_s=settings.deadline_s,
        **tls_values(settings),
    )
    with ExitStack() as open_parts:
        tracing = open_tracing(traces, role="sidecar", instance=settings.name or settings.engine)
        if tracing is not None:
            open_parts.callback(tracing.close)
        client = open_parts.enter_context(SchedulerClient(of_master))
        blocks = subscriber = None
        if settings.events:
            naming = make_naming(
                VLLM if settings.namespace_id else KVSTORE,
                model=settings.model,
                dtype=settings.dtype,
                block_tokens=settings.block_tokens,
                namespace_id=settings.namespace_id,
            )
            blocks = EngineBlocks(naming, tenant=settings.tenant)
            subscriber = Subscriber(settings.events, settings.events_replay, replay_timeout_s=settings.deadline_s)
            open_parts.callback(subscriber.close)
        http = open_http(settings)
        facts = {"name": settings.name or settings.engine, "http": http.advertised() if http is not None else "", "pid": os.getpid()}
        reporting = reporter.InstanceReporting(
            settings, client, blocks, subscriber, on_first=lambda: announce("ready", facts), tracing=tracing
        )
        if http is not None:
            open_parts.callback(http.close)
            add_sidecar_signals(http, reporting, tracing)
            http.start()
        came = end_on_signals(reporting.stop)
        on_sighup(None)
        with stops(log, "sidecar", came):
            reporting.run()


if __name__ == "__main__":
    main()
