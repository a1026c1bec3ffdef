"""A collector of traces for tests: takes OTLP over HTTP on a free port of the loopback, and keeps each span that came."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Came:
    """A span as the collector has it. `parent_id` is "" for the root of a trace."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, str | int]
    error: str
    duration_ns: int
    links: tuple[str, ...] = ()
    """Ids of the spans that it is for, beside its parent."""


class Collector:
    """Thread-safe."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[Came] = []
        self._news = threading.Condition()

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._news:
            self._spans += spans_of(request)
            self._news.notify_all()

    def spans(self, *names: str, deadline_s: float = 60) -> dict[str, Came]:
        """The newest span of each name, once all of these have come."""
        with self._news:
            assert self._news.wait_for(lambda: set(names) <= {span.name for span in self._spans}, deadline_s), self._spans
            return {span.name: span for span in self._spans}

    def named(self, name: str, count: int, deadline_s: float = 60) -> list[Came]:
        """All spans of that name, once so many have come."""
        with self._news:
            assert self._news.wait_for(lambda: sum(span.name == name for span in self._spans) >= count, deadline_s), self._spans
            return [span for span in self._spans if span.name == name]

    def part_of(self, span_id: str, name: str, deadline_s: float = 60) -> Came:
        """The span of that name whose parent that one is, once it has come."""
        found: list[Came] = []

        def has_come() -> bool:
            found[:] = [span for span in self._spans if (span.parent_id, span.name) == (span_id, name)]
            return bool(found)

        with self._news:
            assert self._news.wait_for(has_come, deadline_s), self._spans
        return found[0]

    def span(self, span_id: str, deadline_s: float = 60) -> Came:
        """The one with that id, once it has come."""
        with self._news:
            assert self._news.wait_for(lambda: any(span.span_id == span_id for span in self._spans), deadline_s), self._spans
            return next(span for span in self._spans if span.span_id == span_id)

    def all(self) -> list[Came]:
        with self._news:
            return list(self._spans)


def spans_of(request: ExportTraceServiceRequest) -> Iterator[Came]:
    for resource in request.resource_spans:
        about = {entry.key: entry.value.string_value for entry in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Came(
                    about["service.name"],
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    {entry.key: entry.value.string_value or entry.value.int_value for entry in span.attributes},
                    span.status.message,
                    span.end_time_unix_nano - span.start_time_unix_nano,
                    tuple(link.span_id.hex() for link in span.links),
                )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens, in a thread and a loop of its own."""
    collector, loop, listens = Collector(), asyncio.new_event_loop(), threading.Event()
    ending = asyncio.Event()

    async def export(request: web.Request) -> web.Response:
        collector.take(await request.read())
        return web.Response()

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/traces", export)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        collector.endpoint = f"http://{host}:{port}/v1/traces"
        listens.set()
        await ending.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert listens.wait(60)
        yield collector
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join()
        loop.close()
