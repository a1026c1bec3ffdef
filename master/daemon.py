"""Entry point of kvstore-master: loads the settings, starts one master and serves until a signal.

Standard output has one JSON line when the master is ready:
    {"event": "ready", "listen": ..., "unix": ..., "control": ..., "http": ..., "console": ..., "pid": ..., "role": ...}
and one at each later change of its role or of the owner, whose address is "" for none:
    {"event": ROLE, "owner": HOST:PORT, "epoch": ...}
With several partitions this line has "partition", the number of the partition; the first line's "role" is that of
partition 0. A role is "owner", "following" or "cut off" (leadership/role_manager.py). Logs go to standard error.
Exit code 2: the settings are invalid; 1: the catalog cannot be followed."""

import logging
import os
import sys
from dataclasses import asdict
from typing import Any

import click

from kvstore.master.config import MasterSettings
from kvstore.master.master import Master
from kvstore.master.status import role_in
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.extras import DISTRIBUTION
from kvstore.protocol.settings import load_settings, options
from kvstore.rpc.daemon import announce, begin_logging, map_large_arrays, on_sighup, serve, stop_on_signals
from kvstore.rpc.descriptors import allow_many_descriptors
from kvstore.telemetry.logs import named, write_logs
from kvstore.telemetry.tracing.config import SECTION as TRACING
from kvstore.telemetry.tracing.config import TracingSettings

log = logging.getLogger("kvstore.master")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=DISTRIBUTION)
@options(MasterSettings)
def main(config: str | None, **flags: Any) -> None:
    """Run a master: it keeps the directory of blocks and the membership of nodes."""
    begin_logging()
    try:
        allow_many_descriptors()
        map_large_arrays()
        tracing = load_settings(TracingSettings, TRACING, flags={}, config=config)
        settings = load_settings(MasterSettings, "master", flags=flags, config=config)
        write_logs(settings.log_level, settings.log_format)
        master = Master(settings, tracing)
        try:
            places = master.start()
        except BaseException:
            master.close()
            raise
    except KVStoreError as error:
        click.echo(f"kvstore-master: error: {error}", err=True)
        sys.exit(2)
    came = stop_on_signals(master.reactor)
    on_sighup(lambda: master.reactor.call_soon(master.reread_files))
    if places.console:
        log.info("the console is at %s", places.console)
    announce("ready", {**asdict(places), "pid": os.getpid(), "role": role_in(master.partitions[0]).role})
    has_several = len(master.partitions) > 1
    master.on_role = lambda told: announce(
        told.role, {"owner": told.owner, "epoch": told.epoch} | ({"partition": told.partition} if has_several else {})
    )
    try:
        serve(master.reactor)
        why = " ".join(came) or str(master.failure)
        log.info("this master stops: %s", why, extra=named("daemon_stops", why=why))
    finally:
        master.close()
    if master.failure is not None:
        click.echo(f"kvstore-master: error: {master.failure}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
