"""HTTP routes of the console: the page's files, JSON documents, the stream of server-sent events, and operators' actions.

The page loads nothing from other sites, and the Content-Security-Policy forbids it. Actions are POSTs of JSON. A page of another site
cannot send them: the server refuses its Origin, and a form has another content type.
"""

import asyncio
import hashlib
import json
import threading
from dataclasses import asdict
from importlib.resources import files
from typing import Any, Final

from aiohttp import web

from kvstore.console.actions import ACTIONS
from kvstore.console.documents import CachedCalls, contents, host, slow_request
from kvstore.console.rates import FlowRates
from kvstore.console.watch import ClusterWatcher
from kvstore.protocol import control_pb2 as pb
from kvstore.protocol.errors import InvalidArgument
from kvstore.security.actor import CONSOLE
from kvstore.telemetry.http.access import AccessLevel
from kvstore.telemetry.http.server import HttpServer, run_in_thread

TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
SECURITY: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
MAX_NODES_ASKED: Final = 64
MAX_SEGMENTS: Final = 1000
MAX_DIGITS: Final = 20
"""Most digits of a number in a query."""


def add_console(server: HttpServer, watch: ClusterWatcher) -> None:
    """Add the console's routes for the cluster of `watch`. Call before `HttpServer.start`; the caller starts and closes the watcher."""
    page, api = _Page(), _Api(server, watch)
    server.add("GET", "/", page.index, needs=AccessLevel.NONE)
    server.add("GET", "/console/{name}", page.file, needs=AccessLevel.NONE)
    server.add("GET", "/api/access", api.access, needs=AccessLevel.NONE)
    server.add("GET", "/api/state", api.state, needs=AccessLevel.READ)
    server.add("GET", "/api/events", api.events, needs=AccessLevel.READ)
    server.add("GET", "/api/history", api.history, needs=AccessLevel.READ)
    server.add("GET", "/api/masters", api.masters, needs=AccessLevel.READ)
    server.add("GET", "/api/hosts", api.hosts, needs=AccessLevel.READ)
    server.add("GET", "/api/flows", api.flows, needs=AccessLevel.READ)
    server.add("GET", "/api/tenants", api.tenants, needs=AccessLevel.READ)
    server.add("GET", "/api/slow", api.slow, needs=AccessLevel.READ)
    server.add("GET", "/api/prefixes", api.prefixes, needs=AccessLevel.READ)
    server.add("POST", "/api/actions/{name}", api.act, needs=AccessLevel.ADMIN)


class _Page:
    """Serves the files of page/, which are read once."""

    def __init__(self) -> None:
        folder = files("kvstore.console") / "page"
        self._files = {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.name.rpartition(".")[2] in TYPES}
        self._tags = {name: f'"{hashlib.sha256(body).hexdigest()[:16]}"' for name, body in self._files.items()}

    async def index(self, request: web.Request) -> web.Response:
        return self._response(request, "index.html")

    async def file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._files:
            raise web.HTTPNotFound(text=f"the console has no file {name}")
        return self._response(request, name)

    def _response(self, request: web.Request, name: str) -> web.Response:
        headers = {**SECURITY, "ETag": self._tags[name]}
        if request.headers.get("If-None-Match") == self._tags[name]:
            return web.Response(status=304, headers=headers)
        return web.Response(body=self._files[name], content_type=TYPES[name.rpartition(".")[2]], charset="utf-8", headers=headers)


class _Api:
    """Handlers of /api/."""

    def __init__(self, server: HttpServer, watch: ClusterWatcher) -> None:
        self._server, self._watch = server, watch
        self._contents = CachedCalls(watch.settings.contents_ttl_s)
        self._topologies = CachedCalls(watch.settings.topologies_ttl_s)
        self._masters = CachedCalls(watch.settings.masters_ttl_s)
        self._tenants = CachedCalls(watch.settings.contents_ttl_s)
        self._slow = CachedCalls(watch.settings.masters_ttl_s)
        self._flows = FlowRates()
        self._flows_lock = threading.Lock()

    async def access(self, request: web.Request) -> web.Response:
        """Access level of the request: none, read or admin."""
        return _json({"access": self._server.access_control.allowed(request).name.lower()})

    async def state(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._watch.state(), content_type="application/json", headers=SECURITY)

    async def history(self, request: web.Request) -> web.Response:
        samples = _number(request, "samples", most=100_000)
        return _json(await run_in_thread(lambda: self._watch.history(request.query.get("node", ""), samples)))

    async def masters(self, _request: web.Request) -> web.Response:
        """The known masters."""
        source = self._watch.source
        return _json(await run_in_thread(lambda: self._masters.get("", lambda: [asdict(one) for one in source.masters()])))

    async def hosts(self, request: web.Request) -> web.Response:
        """The hosts of the nodes in the query."""
        names = _nodes(request)
        return _json(await run_in_thread(lambda: [host(one) for one in self._topologies_of(names)[1]]))

    async def flows(self, request: web.Request) -> web.Response:
        """Traffic of the NICs of the nodes in the query."""
        names = _nodes(request)

        def found() -> list[dict[str, Any]]:
            at_s, topologies = self._topologies_of(names)
            with self._flows_lock:
                return self._flows.of(topologies, at_s)

        return _json(await run_in_thread(found))

    def _topologies_of(self, names: list[str]) -> tuple[float, list[pb.NodeTopology]]:
        """Cached topologies of these nodes, and the time of their request."""

        def request() -> tuple[float, dict[str, pb.NodeTopology]]:
            found = self._watch.source.topologies()
            return self._watch.clock(), {one.name: one for one in found}

        at_s, by_name = self._topologies.get("", request)
        return at_s, [by_name[name] for name in names if name in by_name]

    async def tenants(self, _request: web.Request) -> web.Response:
        """The most used limit of each tenant."""
        return _json(await run_in_thread(lambda: self._tenants.get("", self._watch.tenants)))

    async def slow(self, _request: web.Request) -> web.Response:
        """The slowest requests of the last minutes by tenant and operation."""
        source = self._watch.source
        return _json(await run_in_thread(lambda: self._slow.get("", lambda: [slow_request(one) for one in source.slow_requests()])))

    async def prefixes(self, request: web.Request) -> web.Response:
        """Namespaces with their sizes, and the largest or hottest prefixes of one of them."""
        query = request.query
        segments = _number(request, "segments", most=MAX_SEGMENTS)
        by = query.get("by", "bytes")
        if by not in ("bytes", "reads"):
            raise InvalidArgument(f"by is {by!r}: it must be bytes or reads")
        parameters = pb.ContentsRequest(
            tenant=query.get("tenant", ""), namespace=query.get("namespace", ""), max_segments=segments, hottest=by == "reads"
        )
        key = parameters.SerializeToString()
        return _json(await run_in_thread(lambda: self._contents.get(key, lambda: contents(self._watch.source.contents(parameters)))))

    async def act(self, request: web.Request) -> web.Response:
        """Perform an operator's action, and respond when it is done."""
        action = ACTIONS.get(request.match_info["name"])
        if action is None:
            raise web.HTTPNotFound(text=f"no action {request.match_info['name']!r}: use one of {', '.join(ACTIONS)}")
        if request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="the arguments of an action must be JSON (Content-Type: application/json)")
        try:
            arguments = json.loads(await request.text())
        except (ValueError, LookupError, RecursionError) as error:  # LookupError: unknown charset; RecursionError: nested too deep
            raise InvalidArgument(f"the body is not JSON: {error}") from None
        act, by = action(arguments), self._server.actor(request, CONSOLE)
        return _json({"text": await run_in_thread(lambda: act(self._watch.source, by))})

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream server-sent events: `state` now and after each poll, and `happened` for each event."""
        after = _number(request, "after", most=1 << 53)
        polled, loop = asyncio.Event(), asyncio.get_running_loop()
        polled.set()

        def notify() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(polled.set)

        stream = web.StreamResponse(headers={**SECURITY, "Content-Type": "text/event-stream", "Cache-Control": "no-store"})
        await stream.prepare(request)
        stop = self._watch.listen(notify)
        try:
            while True:
                await polled.wait()
                polled.clear()
                for event in self._watch.events(after):
                    await stream.write(_sent("happened", json.dumps(event).encode()))
                    after = event["number"]
                await stream.write(_sent("state", self._watch.state()))
        except ConnectionError:
            return stream
        finally:
            stop()


def _nodes(request: web.Request) -> list[str]:
    """Node names of the query. Raises InvalidArgument."""
    names: list[str] = request.query.getall("node", [])
    if not 1 <= len(names) <= MAX_NODES_ASKED:
        raise InvalidArgument(f"the query names {len(names)} nodes: name 1 to {MAX_NODES_ASKED}")
    return names


def _sent(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _json(value: Any) -> web.Response:
    return web.json_response(value, headers=SECURITY, dumps=_compact)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _number(request: web.Request, name: str, *, most: int) -> int:
    """A whole number of the query; 0 if absent. Raises InvalidArgument."""
    text = request.query.get(name, "0")
    if not text.isascii() or not text.isdigit() or len(text) > MAX_DIGITS or int(text) > most:
        raise InvalidArgument(f"{name} is {text[:MAX_DIGITS]!r}: it must be a whole number up to {most}")
    return int(text)
