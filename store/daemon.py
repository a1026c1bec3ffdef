"""kvstore-node: runs one node from its settings until a signal, then drains memory to NVMe for up to `drain_s`.

Standard output has three JSON lines for the parent process:
- {"event": "serving", ...}: it listens. `stop_s` is the time that a stop may take.
- {"event": "ready", ...}: the master has its inventory; clients can put and get.
- {"event": "warm", ...}: all DRAM has been touched. First writes are slower before.

Logs go to standard error. Exit code 2: the settings are invalid, or the master refuses the node, as for the name of a
live node.
"""

import logging
import os
import sys
from typing import Any

import click

from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.extras import DISTRIBUTION
from kvstore.protocol.settings import load_settings, options
from kvstore.rpc.daemon import announce, begin_logging, map_large_arrays, on_sighup, serve, stop_on_signals
from kvstore.rpc.descriptors import allow_many_descriptors
from kvstore.store.config import NodeSettings
from kvstore.store.node import Node
from kvstore.store.storage import SHUTDOWN_TIMEOUT_S
from kvstore.telemetry.logs import named, write_logs
from kvstore.telemetry.tracing.config import SECTION as TRACING
from kvstore.telemetry.tracing.config import TracingSettings
from kvstore.transfer.config import SECTION, TransferSettings

log = logging.getLogger("kvstore.store")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=DISTRIBUTION)
@options(NodeSettings)
def main(config: str | None, **flags: Any) -> None:
    """Run a storage node: it keeps blocks across GPU HBM, DRAM and NVMe and serves them to clients."""
    begin_logging()
    # For torch: the node encodes and decodes in its own threads. OpenMP threads would spin while they wait for one another and
    # take the processor from the loop: 10 times slower on two busy cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    done: set[str] = set()
    told: set[str] = set()

    def is_done(part: str) -> None:
        """Print each line once, in order: the master is synced again after each lost link."""
        done.add(part)
        for event, needed in (("ready", {"master"}), ("warm", {"master", "memory"})):
            if needed <= done and event not in told:
                told.add(event)
                announce(event, facts)

    try:
        allow_many_descriptors()
        map_large_arrays()
        transfer = load_settings(TransferSettings, SECTION, flags={}, config=config)
        tracing = load_settings(TracingSettings, TRACING, flags={}, config=config)
        settings = load_settings(NodeSettings, "node", flags=flags, config=config)
        write_logs(settings.log_level, settings.log_format)
        node = Node(
            settings,
            transfer,
            tracing,
            on_synced=lambda: is_done("master"),
        )
    except KVStoreError as error:
        click.echo(f"kvstore-node: error: {error}", err=True)
        sys.exit(2)
    addresses = node.start()
    signals = stop_on_signals(node.reactor, node.end)
    on_sighup(node.reread_certificates)
    facts = {
        "name": addresses.name,
        "listen": addresses.tcp,
        "unix": addresses.unix,
        "http": addresses.http,
        "pid": os.getpid(),
        "stop_s": settings.drain_s + SHUTDOWN_TIMEOUT_S,
    }
    announce("serving", facts)
    node.prefault(lambda: is_done("memory"))
    try:
        serve(node.reactor)
        why = " ".join(signals) or node.refusal
        log.info("node stops: %s", why, extra=named("daemon_stops", why=why))
    finally:
        node.close()
    if node.refusal:
        click.echo(f"kvstore-node: error: {node.refusal}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
