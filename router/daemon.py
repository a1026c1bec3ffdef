"""Entry point of kvstore-router, an HTTP proxy with OpenAI's API that runs until SIGTERM or SIGINT.

It prints one JSON line on standard output when it serves: {"event": "ready", "listen": ..., "http": ..., "pid": ...}. Logs go to standard
error. Exit status 2: invalid settings.
"""

import asyncio
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import click

from kvstore.client import Client
from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import SchedulerClient
from kvstore.kvcache.key_names import Naming, make_naming
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.extras import DISTRIBUTION
from kvstore.protocol.settings import load_settings, options
from kvstore.router.app import RouterApp
from kvstore.router.config import SECTION, RouterSettings, check_settings
from kvstore.router.engines import Engines
from kvstore.router.http_server import MAX_CONNECTIONS, serve
from kvstore.router.metrics import RouterCounters, add_router_signals
from kvstore.router.proxy import AsyncScheduler, StreamingProxy
from kvstore.router.tokenizer import PromptTokenizer
from kvstore.rpc.daemon import announce, begin_logging, on_sighup
from kvstore.rpc.descriptors import allow_many_descriptors
from kvstore.security.tls.config import tls_values
from kvstore.telemetry.http.listener import host_port, listening
from kvstore.telemetry.http.server import open_http
from kvstore.telemetry.logs import stops, write_logs
from kvstore.telemetry.tracing.config import SECTION as TRACING
from kvstore.telemetry.tracing.config import TracingSettings, open_tracing

THREADS: Final = 8
"""Concurrent requests to the scheduler, and concurrently hashed prompts."""

log = logging.getLogger("kvstore.router")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=DISTRIBUTION)
@options(RouterSettings)
def main(config: str | None, **flags: Any) -> None:
    """Run a router for requests in OpenAI's API, placed by the master's scheduler."""
    begin_logging()
    try:
        settings = load_settings(RouterSettings, SECTION, flags=flags, config=config)
        traces = load_settings(TracingSettings, TRACING, flags={}, config=config)
        check_settings(settings)
        write_logs(settings.log_level, settings.log_format)
        naming = make_naming(
            settings.naming,
            model=settings.model,
            dtype=settings.dtype,
            block_tokens=settings.block_tokens,
            namespace_id=settings.namespace_id,
        )
        allow_many_descriptors()
        on_sighup(None)
        asyncio.run(_run(settings, traces, naming))
    except KVStoreError as error:
        click.echo(f"kvstore-router: error: {error}", err=True)
        sys.exit(2)


async def _run(settings: RouterSettings, traces: TracingSettings, naming: Naming) -> None:
    of_master = ClientSettings(
        master=settings.master,
        tenant=settings.tenant,
        token=settings.token,
        deadline_s=settings.schedule_timeout_s,
        **tls_values(settings),
    )
    connection = SchedulerClient(of_master)  # first, because it may raise for the address
    listener = listening(settings.listen)
    tracing = open_tracing(traces, role="router", instance=host_port(listener))
    http = open_http(settings)
    facts = {"listen": host_port(listener), "http": http.advertised() if http is not None else "", "pid": os.getpid()}
    engines, counters, came = Engines(settings), RouterCounters(), list[str]()
    with (
        connection as client,
        Client(settings=of_master) as store,  # connects when it ends a session
        ThreadPoolExecutor(THREADS, "kvstore-router-schedule") as scheduling,
        ThreadPoolExecutor(THREADS, "kvstore-router-hash") as hashing,  # separate, so that a slow master does not delay it
    ):
        try:
            if http is not None:
                add_router_signals(http, counters, client, asyncio.get_running_loop(), tracing)
                http.start()
            scheduler = AsyncScheduler(client, scheduling, block_tokens=settings.block_tokens)
            proxy = StreamingProxy(scheduler, engines, settings, counters)
            tokenizer = PromptTokenizer(engines, naming, hashing, counters)
            end_session = store.end_session if settings.retention_from_requests else None
            app = RouterApp(proxy, tokenizer, settings, counters, tracing, end_session)
            with stops(log, "router", came):
                await serve(
                    app.web,
                    listener,
                    max_connections=max(MAX_CONNECTIONS, 2 * settings.max_requests),
                    drain_s=settings.drain_s,
                    on_ready=lambda: announce("ready", facts),
                    on_stop=came.append,
                )
        finally:
            if http is not None:
                await asyncio.to_thread(http.close)
            await engines.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)


if __name__ == "__main__":
    main()
