"""What a publisher answers on its HTTP port: health, metrics, diagnostics."""

import time
from collections.abc import Sequence
from typing import Final

from kvstore.engines.publisher.index import Index
from kvstore.engines.publisher.publishing import Publishing
from kvstore.protocol.errors import DeadlineExceeded
from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.metrics.metric import PUBLISHER, Readings
from kvstore.telemetry.signals import add_signals

HANGS_S: Final = 120.0
"""A thread that has not come round for so long hangs: a minute is the longest interval, and nodes and masters have seconds each."""


def add_publisher_signals(server: HttpServer, publishing: Publishing, index: Index) -> None:
    """Add health, metrics, diagnostics, and the routes of the index. Ready: a master and every node that it names can be asked."""

    def alive() -> None:
        silent_s = time.monotonic() - publishing.round_s
        if silent_s > HANGS_S:
            raise DeadlineExceeded(f"the nodes have not been asked for {silent_s:.0f} s")

    def unready() -> Sequence[str]:
        return [f"{who} cannot be asked what happened" for who in publishing.recorder.unheard]

    def add(server: HttpServer) -> None:
        from kvstore.engines.publisher.routes import add_index  # not before someone asks: it loads aiohttp

        add_index(server, index)

    add_signals(server, PUBLISHER, lambda: readings(publishing, index), alive=alive, unready=unready)
    server.later(add)


def readings(publishing: Publishing, index: Index) -> Readings:
    """All of PUBLISHER."""
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
