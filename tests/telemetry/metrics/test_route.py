"""Promises of route.py: /metrics is for who may read."""

import pytest

from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.server import HttpServer
from kvstore.telemetry.metrics.metric import Kind, Metric
from kvstore.telemetry.metrics.route import add_metrics
from tests.telemetry.http.asking import ask

BLOCKS = Metric("kvstore_x_blocks", Kind.GAUGE, "Blocks.")


@pytest.mark.parametrize("has", Access)
def test_who_may_read_gets_them(has: Access) -> None:
    server = HttpServer("127.0.0.1:0", authorize=lambda _: has)
    add_metrics(server, (BLOCKS,), lambda: {"kvstore_x_blocks": 7})
    server.start()
    try:
        answer = ask(server.address, "/metrics", headers={"Accept": "application/openmetrics-text"})
    finally:
        server.close()
    if has is Access.NONE:
        assert answer.status == 401
    else:
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        assert "kvstore_x_blocks 7.0\n" in answer.text
