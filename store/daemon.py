"""kvstore-node: settings in, one node out, until a signal; then it has `drain_s` to write to NVMe what only memory holds.

Standard output carries three JSON lines for whoever started it: {"event": "serving", ...} when it listens, {"event": "ready", ...} when
the master knows it and clients can put and get, {"event": "warm", ...} when all of its DRAM has been touched as well: until then first
writes are slower. `stop_s` in them is how long a signal may take to end it. Logs go to standard error. Exit code 2: the settings cannot be
met, or the master refuses the node, as where a live one has its name.
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
    # Of torch, where it is used: the node has threads of its own that encode and decode, each one value at a time. More of them, which
    # spin while they wait for one another, take the processor from the loop: 10 times slower on two busy cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    done: set[str] = set()
    told: set[str] = set()

    def is_done(part: str) -> None:
        """The master is met again after each lost link: each line is said once, in its order."""
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
    places = node.start()
    came = stop_on_signals(node.reactor, node.end)
    on_sighup(node.reread_certificates)
    facts = {
        "name": places.name,
        "listen": places.tcp,
        "unix": places.unix,
        "http": places.http,
        "pid": os.getpid(),
        "stop_s": settings.drain_s + SHUTDOWN_TIMEOUT_S,
    }
    announce("serving", facts)
    node.prefault(lambda: is_done("memory"))
    try:
        serve(node.reactor)
        why = " ".join(came) or node.refusal
        log.info("this node stops: %s", why, extra=named("daemon_stops", why=why))
    finally:
        node.close()
    if node.refusal:
        click.echo(f"kvstore-node: error: {node.refusal}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
