"""Promises of signals.py: what every daemon answers."""

from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.metrics.metric import Kind, Metric
from kvstore.telemetry.signals import add_signals
from tests.telemetry.http.asking import ask


def test_health_and_metrics_are_there() -> None:
    server = HttpServer("127.0.0.1:0")
    blocks = Metric("kvstore_x_blocks", Kind.GAUGE, "Blocks.")
    add_signals(server, (blocks,), lambda: {"kvstore_x_blocks": 7}, alive=lambda: None, unready=lambda: ["no"])
    server.start()
    try:
        assert [ask(server.address, path).status for path in ("/healthz", "/readyz", "/metrics", "/debug/threads")] == [200, 503, 200, 200]
    finally:
        server.close()
