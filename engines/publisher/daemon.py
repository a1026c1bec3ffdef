"""kvstore-publisher: command line of the daemon that publishes the events of a tenant's blocks on all nodes, until a
signal.

Its HTTP port serves health, metrics and diagnostics. Standard output has one JSON line when it publishes: {"event":
"ready", "events": ..., "events_replay": ..., "http": ..., "pid": ...}. Logs go to standard error. Exit code 2: invalid
settings, or no master responds.
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
from kvstore.client.recorder import Recorder
from kvstore.client.sync import Client
from kvstore.engines.publisher.config import SECTION, PublisherSettings, check_settings, topic_of
from kvstore.kvcache.key_names import KVSTORE, VLLM, make_naming
from kvstore.protocol.errors import DeadlineExceeded, KVStoreError
from kvstore.protocol.extras import DISTRIBUTION, need
from kvstore.protocol.settings import load_settings, options
from kvstore.rpc.daemon import announce, begin_logging, end_on_signals, on_sighup
from kvstore.security.tls.config import tls_values
from kvstore.telemetry.http.server import HttpServer, open_http
from kvstore.telemetry.logs import stops, write_logs
from kvstore.telemetry.metrics.metric import PUBLISHER, Readings
from kvstore.telemetry.signals import add_signals

if TYPE_CHECKING:
    from kvstore.engines.publisher.index import EngineBlockIndex
    from kvstore.engines.publisher.sockets import EventPublisher

KEPT_BATCHES: Final = 10_000
"""Batches for replay, as many as vLLM's own publisher keeps."""
POLL_INTERVAL_S: Final = 0.1
"""Interval between polls of the nodes, which bounds the delay of an event."""
HANGS_S: Final = 120.0
"""A publisher that made no round for this long is hung: the longest interval is a minute, and nodes and masters have
deadlines of seconds."""


def add_publisher_signals(server: HttpServer, publishing: "EventPublisher", index: "EngineBlockIndex") -> None:
    """Add health, metrics, diagnostics, and the routes of the index. Ready: a master and all nodes that it lists
    respond."""

    def alive() -> None:
        silent_s = time.monotonic() - publishing.round_s
        if silent_s > HANGS_S:
            raise DeadlineExceeded(f"the nodes were not polled for {silent_s:.0f} s: see the log, and restart the publisher")

    def unready() -> Sequence[str]:
        return [f"{who} does not respond with its events" for who in publishing.recorder.unreachable]

    def add(server: HttpServer) -> None:
        from kvstore.engines.publisher.conductor import add_index  # imported at the first request: it loads aiohttp

        add_index(server, index)

    add_signals(server, PUBLISHER, lambda: readings(publishing, index), alive=alive, unready=unready)
    server.later(add)


def readings(publishing: "EventPublisher", index: "EngineBlockIndex") -> Readings:
    """Return all of PUBLISHER."""
    recorder = publishing.recorder
    return {
        "kvstore_publisher_nodes": len(recorder.nodes),
        "kvstore_publisher_batches": publishing.batches,
        "kvstore_publisher_stored_blocks": recorder.counts.stored,
        "kvstore_publisher_removed_blocks": recorder.counts.removed,
        "kvstore_publisher_lost_blocks": recorder.counts.lost,
        "kvstore_publisher_interruptions": recorder.counts.interruptions,
        "kvstore_publisher_registered": index.services,
    }


log = logging.getLogger("kvstore.publisher")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=DISTRIBUTION)
@options(PublisherSettings)
def main(config: str | None, **flags: Any) -> None:
    """Publish block events of all nodes as KV events over ZeroMQ, and answer other routers' queries for blocks."""
    begin_logging()
    try:
        for package in ("msgspec", "zmq"):
            need(package, "sidecar")
        settings = load_settings(PublisherSettings, SECTION, flags=flags, config=config)
        check_settings(settings)
        write_logs(settings.log_level, settings.log_format)
        _run(settings)
    except KVStoreError as error:
        click.echo(f"kvstore-publisher: error: {error}", err=True)
        sys.exit(2)


def _run(settings: PublisherSettings) -> None:
    # Imported here: optional libraries.
    from kvstore.engines.publisher.form import EventForm
    from kvstore.engines.publisher.index import EngineBlockIndex, StoreMedia
    from kvstore.engines.publisher.sockets import EventPublisher, PublishingSockets

    of_master = ClientSettings(master=settings.master, tenant=settings.tenant, token=settings.token, **tls_values(settings))
    with ExitStack() as opened:
        sockets = PublishingSockets(settings.events, settings.events_replay, topic=topic_of(settings), kept_batches=KEPT_BATCHES)
        opened.callback(sockets.close)
        http = open_http(settings)
        if http is not None:
            opened.callback(http.close)
        store = None
        if settings.model:
            naming = make_naming(
                VLLM if settings.namespace_id else KVSTORE,
                model=settings.model,
                dtype=settings.dtype,
                block_tokens=settings.block_tokens,
                namespace_id=settings.namespace_id,
            )
            store = StoreMedia(opened.enter_context(Client(settings=of_master)), naming, model=settings.model)
        index = EngineBlockIndex(store)
        opened.callback(index.close)
        recorder = opened.enter_context(Recorder(of_master, log.warning))
        form = EventForm(settings.form, index.tokens_of)
        publishing = EventPublisher(recorder, sockets, form, interval_s=POLL_INTERVAL_S)
        came = end_on_signals(publishing.stop)
        on_sighup(None)
        if http is not None:
            add_publisher_signals(http, publishing, index)
            http.start()
        address = http.advertised() if http is not None else ""
        announce("ready", {"events": sockets.endpoint, "events_replay": sockets.replay_endpoint, "http": address, "pid": os.getpid()})
        with stops(log, "publisher", came):
            publishing.run()


if __name__ == "__main__":
    main()
