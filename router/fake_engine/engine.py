"""Entry point of the fake engine, a process that takes the time of a model on a GPU and computes nothing.

    python -m kvstore.router.fake_engine.engine --role prefill --node node-0 --master HOST:PORT --model llama3-8b --gpu A100-80G

It serves the router, reports to the master's scheduler, and puts and gets real blocks. It prints one JSON line on standard output when it
serves: {"event": "ready", "listen": ..., "name": ..., "pid": ...}. Exit status 2: invalid settings.
"""

import asyncio
import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import click

from kvstore.client.config import ClientSettings
from kvstore.client.instances.client import InstanceReport, InstanceRole, SchedulerClient
from kvstore.client.instances.reporter import Reporter
from kvstore.kvcache.models.named import find_model
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.settings import load_settings, options
from kvstore.router.fake_engine.blocks import BlockStore, PinnedNodeClient
from kvstore.router.fake_engine.compute import DecodeEngine, PrefillEngine
from kvstore.router.fake_engine.config import PREFILL, SECTION, FakeEngineSettings
from kvstore.router.http_server import serve
from kvstore.rpc.daemon import announce, begin_logging, on_sighup
from kvstore.scheduler.estimators.analytic import AnalyticModel, find_gpu
from kvstore.security.tls.config import tls_values
from kvstore.telemetry.http.listener import host_port, listening

if TYPE_CHECKING:
    from aiohttp import web

DTYPE: Final = "bfloat16"
"""Element type of the blocks' namespace."""
BLOCK_BYTES: Final = 4 << 10
"""Size of a fake block in the store."""
DRAIN_S: Final = 1.0
"""Time for running requests to end after SIGTERM."""

SCHEDULER_DEADLINE_S: Final = 2.0
"""For reports and for leaving: short, so that an engine ends soon while its master is unreachable."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options(FakeEngineSettings)
def main(config: str | None, **flags: Any) -> None:
    """Run a fake engine, to test the scheduler and the router without GPUs."""
    begin_logging()
    on_sighup(None)
    try:
        asyncio.run(FakeEngine(load_settings(FakeEngineSettings, SECTION, flags=flags, config=config)).run())
    except KVStoreError as error:
        click.echo(f"kvstore-fake-engine: error: {error}", err=True)
        sys.exit(2)


class FakeEngine:
    """A fake engine with its HTTP server, reporter and store client."""

    def __init__(self, settings: FakeEngineSettings) -> None:
        """Raises ConfigError for an unknown model or GPU, or a model that does not fit."""
        self._settings = settings
        self._times = AnalyticModel(find_model(settings.model), find_gpu(settings.gpu))
        self._namespace = Namespace(model=settings.model, dtype=DTYPE, block_tokens=settings.block_tokens)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises ConfigError if it cannot listen."""
        settings = self._settings
        listener = listening(settings.listen)
        listen = host_port(listener)
        name = settings.name or f"{settings.role}-{listen}"
        fixed = InstanceReport(
            name=name,
            role=InstanceRole.PREFILL if settings.role == PREFILL else InstanceRole.DECODE,
            address=f"http://{listen}",
            node=settings.node,
            capacity_tokens=self._times.cache_tokens,
        )
        of_master = ClientSettings(
            master=settings.master,
            tenant=settings.tenant,
            token=settings.token,
            instance_token=settings.instance_token,
            deadline_s=SCHEDULER_DEADLINE_S,
            **tls_values(settings),
        )
        facts = {"listen": listen, "name": name, "pid": os.getpid()}
        async with PinnedNodeClient(
            settings.master, settings.node, tenant=settings.tenant, token=settings.token, settings=of_master
        ) as client:
            blocks = BlockStore(client, self._namespace, BLOCK_BYTES)
            with SchedulerClient(of_master) as scheduler:
                app, reporter = (self._prefill if fixed.role is InstanceRole.PREFILL else self._decode)(fixed, blocks, scheduler)
                with reporter:
                    await serve(
                        app,
                        listener,
                        drain_s=DRAIN_S,
                        on_ready=lambda: announce("ready", facts),
                        on_stop=lambda _name: reporter.close(),
                    )

    def _prefill(self, fixed: InstanceReport, blocks: BlockStore, scheduler: SchedulerClient) -> "tuple[web.Application, Reporter]":
        from kvstore.router.fake_engine.app import PrefillApp

        engine = PrefillEngine(self._times, blocks, self._namespace, speedup=self._settings.speedup)
        reporter = Reporter(scheduler, lambda: replace(fixed, queue_s=engine.queue_s))
        return PrefillApp(fixed.name, engine, reporter).web, reporter

    def _decode(self, fixed: InstanceReport, blocks: BlockStore, scheduler: SchedulerClient) -> "tuple[web.Application, Reporter]":
        from kvstore.router.fake_engine.app import DecodeApp

        def on_step(batch: int, context_tokens: int, duration_s: float) -> None:
            reporter.decoded(batch=batch, context_tokens=context_tokens, duration_s=duration_s)

        engine = DecodeEngine(self._times, speedup=self._settings.speedup, capacity_tokens=self._times.cache_tokens, on_step=on_step)
        reporter = Reporter(scheduler, lambda: replace(fixed, batch=engine.batch, context_tokens=engine.context_tokens))
        return DecodeApp(engine, reporter, blocks, self._namespace).web, reporter


if __name__ == "__main__":
    main()
