"""kvstore-publisher: settings in, the events of a tenant's blocks on all nodes out, until a signal.

Standard output carries one JSON line when it publishes: {"event": "ready", "events": ..., "events_replay": ..., "pid": ...}. Logs go to
standard error. Exit code 2: the settings cannot be met, or no master answers.
"""

import logging
import os
import signal
import sys
from typing import Any

import click

from kvstore.client.config import ClientSettings
from kvstore.client.tools.recorder import Recorder
from kvstore.engines.publisher.config import SECTION, PublisherSettings
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.extras import DISTRIBUTION
from kvstore.protocol.settings import load_settings, options
from kvstore.router.extra import need
from kvstore.rpc.daemon import begin_logging, on_hangup, say
from kvstore.security.tls.config import tls_of

log = logging.getLogger("kvstore.publisher")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=DISTRIBUTION)
@options(PublisherSettings)
def main(config: str | None, **flags: Any) -> None:
    """Publish what happens to the blocks of all nodes, in the form of vLLM's KV events, over ZeroMQ."""
    begin_logging()
    try:
        for package in ("msgspec", "zmq"):
            need(package, "sidecar")
        _run(load_settings(PublisherSettings, SECTION, flags=flags, config=config))
    except KVStoreError as error:
        click.echo(f"kvstore-publisher: error: {error}", err=True)
        sys.exit(2)


def _run(settings: PublisherSettings) -> None:
    # Here, since their libraries may be missing.
    from kvstore.engines.publisher.form import batch
    from kvstore.engines.publisher.sockets import PublishingSockets

    of_master = ClientSettings(master=settings.master, tenant=settings.tenant, token=settings.token, **tls_of(settings))
    is_ending = False

    def end(*_: object) -> None:
        nonlocal is_ending
        is_ending = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    on_hangup(None)
    sockets = PublishingSockets(settings.events, settings.events_replay, topic=settings.topic, kept_batches=settings.kept_batches)
    try:
        with Recorder(of_master, log.warning) as recorder:
            say("ready", {"events": sockets.endpoint, "events_replay": sockets.replay_endpoint, "pid": os.getpid()})
            while not is_ending:
                happened = recorder.poll()
                if happened and (found := batch(happened)) is not None:
                    sockets.publish(found)
                sockets.serve(settings.poll_interval_s)
    finally:
        sockets.close()


if __name__ == "__main__":
    main()
