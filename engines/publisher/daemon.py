"""kvstore-publisher: settings in, the events of a tenant's blocks on all nodes out, until a signal.

Standard output carries one JSON line when it publishes: {"event": "ready", "events": ..., "events_replay": ..., "http": ...,
"pid": ...}. Logs go to standard error. Exit code 2: the settings cannot be met, or no master answers.
"""

import logging
import os
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from kvstore.client.config import ClientSettings
from kvstore.client.sync import Client
from kvstore.client.tools.recorder import Recorder
from kvstore.engines.publisher.config import SECTION, PublisherSettings, check_settings, topic_of
from kvstore.kvcache.naming import make_naming
from kvstore.protocol.errors import KVStoreError
from kvstore.protocol.extras import DISTRIBUTION, need
from kvstore.protocol.settings import load_settings, options
from kvstore.rpc.daemon import begin_logging, end_on_signals, on_hangup, say
from kvstore.security.tls.config import tls_of
from kvstore.telemetry.http.server import open_http
from kvstore.telemetry.logs import stops, write_logs

if TYPE_CHECKING:
    from kvstore.engines.publisher.store_media import StoreMedia

log = logging.getLogger("kvstore.publisher")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=DISTRIBUTION)
@options(PublisherSettings)
def main(config: str | None, **flags: Any) -> None:
    """Publish what happens to the blocks of all nodes, as KV events over ZeroMQ, and answer other routers' queries for blocks."""
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
    # Here, since their libraries may be missing.
    from kvstore.engines.publisher.form import EventForm
    from kvstore.engines.publisher.index import Index
    from kvstore.engines.publisher.publishing import Publishing
    from kvstore.engines.publisher.signals import add_publisher_signals
    from kvstore.engines.publisher.sockets import PublishingSockets

    of_master = ClientSettings(master=settings.master, tenant=settings.tenant, token=settings.token, **tls_of(settings))
    with ExitStack() as opened:
        sockets = PublishingSockets(settings.events, settings.events_replay, topic=topic_of(settings), kept_batches=settings.kept_batches)
        opened.callback(sockets.close)
        http = open_http(settings)
        if http is not None:
            opened.callback(http.close)
        index = Index(_store_media(settings, of_master, opened) if settings.model else None)
        opened.callback(index.close)
        recorder = opened.enter_context(Recorder(of_master, log.warning))
        form = EventForm(settings.form, index.tokens_of)
        publishing = Publishing(recorder, sockets, form, interval_s=settings.poll_interval_s)
        came = end_on_signals(publishing.stop)
        on_hangup(None)
        if http is not None:
            add_publisher_signals(http, publishing, index)
            http.start()
        address = http.told() if http is not None else ""
        say("ready", {"events": sockets.endpoint, "events_replay": sockets.replay_endpoint, "http": address, "pid": os.getpid()})
        with stops(log, "publisher", came):
            publishing.run()


def _store_media(settings: PublisherSettings, of_master: ClientSettings, opened: ExitStack) -> "StoreMedia":
    from kvstore.engines.publisher.store_media import StoreMedia

    naming = make_naming(
        settings.naming,
        model=settings.model,
        dtype=settings.dtype,
        block_tokens=settings.block_tokens,
        namespace_id=settings.namespace_id,
    )
    client = Client(settings.master, tenant=settings.tenant, token=settings.token, settings=of_master)
    opened.callback(client.close)
    return StoreMedia(client, naming, model=settings.model)


if __name__ == "__main__":
    main()
