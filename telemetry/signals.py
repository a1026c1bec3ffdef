"""Standard routes of every daemon's HTTP port, added in one call: health, metrics, diagnostics."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.metrics.metric import Metric

if TYPE_CHECKING:
    from kvstore.telemetry.metrics.exposition import Read
    from kvstore.telemetry.routes import Changed, Unready

ALIVE_S: Final = 5.0
"""Response time of a daemon's loop beyond which it counts as hung."""


def add_signals(
    server: HttpServer,
    metrics: Sequence[Metric],
    read: "Read",
    *,
    alive: Callable[[], None],
    unready: "Unready",
    level_changed: "Changed" = lambda _change: None,
) -> None:
    """Add health, metrics, debug and log-level routes, on the first connection.

    `alive` raises a KVStoreError if the daemon's loop does not respond within ALIVE_S; `unready` returns why it is not
    ready; `read` returns the `metrics`. All run in threads and may call the daemon's loop. `level_changed` receives
    each change of a logger's level, in the server's thread.
    """

    def add(server: HttpServer) -> None:
        from kvstore.telemetry.routes import add_debug, add_health, add_log_level, add_metrics

        add_health(server, alive, unready)
        add_metrics(server, metrics, read)
        add_debug(server)
        add_log_level(server, level_changed)

    server.later(add)
