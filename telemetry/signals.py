"""What every daemon answers on its HTTP port, in one call: health, metrics, diagnostics."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.metrics.metric import Metric

if TYPE_CHECKING:
    from kvstore.telemetry.metrics.exposition import Read
    from kvstore.telemetry.routes import Changed, Unready

ALIVE_S: Final = 5.0
"""A daemon whose loop has not answered for so long hangs."""


def add_signals(
    server: HttpServer,
    metrics: Sequence[Metric],
    read: "Read",
    *,
    alive: Callable[[], None],
    unready: "Unready",
    level_changed: "Changed" = lambda _change: None,
) -> None:
    """`alive` raises a KVStoreError when the daemon's loop does not answer within ALIVE_S; `unready` tells why it does not serve, if it
    does not; `read` gives the `metrics`. All are called in threads, and are to be calls of the daemon's loop. `level_changed` gets each
    change of a logger's level, in the server's thread."""

    def add(server: HttpServer) -> None:
        from kvstore.telemetry.routes import add_debug, add_health, add_log_level, add_metrics

        add_health(server, alive, unready)
        add_metrics(server, metrics, read)
        add_debug(server)
        add_log_level(server, level_changed)

    server.later(add)
