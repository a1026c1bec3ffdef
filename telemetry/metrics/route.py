"""`/metrics` of a daemon."""

from collections.abc import Sequence

from aiohttp import web

from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.server import HttpServer, asked
from kvstore.telemetry.metrics.exposition import Read, exposed
from kvstore.telemetry.metrics.metric import Metric


def add_metrics(server: HttpServer, metrics: Sequence[Metric], read: Read) -> None:
    """Answer with the metrics of the list as `read` gives them; it may be a call of the daemon's loop."""

    async def handler(request: web.Request) -> web.Response:
        body, content_type = await asked(lambda: exposed(metrics, read, request.headers.get("Accept", "")))
        return web.Response(body=body, headers={"Content-Type": content_type})

    server.add("GET", "/metrics", handler, needs=Access.READ)
