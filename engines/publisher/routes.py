"""HTTP routes of the index for other routers: `/register`, `/unregister` and `/query` of Mooncake Conductor, in JSON and MessagePack."""

from collections.abc import Callable
from typing import Any, Final

import msgspec
from aiohttp import web

from kvstore.engines.publisher.index import Index
from kvstore.protocol.errors import InvalidArgument
from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.server import Handler, HttpServer, asked
from kvstore.telemetry.http.serving import refusal

MAX_BODY_BYTES: Final = 16 << 20
"""Of a query: a million token ids in JSON."""
MSGPACK: Final = ("application/msgpack", "application/x-msgpack")


def add_index(server: HttpServer, index: Index) -> None:
    """A registration has this process connect elsewhere, so that it needs more than a query."""
    for path, answer, needs in (
        ("/register", index.register, Access.ADMIN),
        ("/unregister", index.unregister, Access.ADMIN),
        ("/query", index.query, Access.READ),
    ):
        server.add("POST", path, _handler(answer), needs=needs)


def _handler(answer: Callable[[Any], dict[str, Any] | None]) -> Handler:
    """Answers in the format of the request."""

    async def handle(request: web.Request) -> web.StreamResponse:
        payload = await request.clone(client_max_size=MAX_BODY_BYTES).read()
        form = msgspec.msgpack if request.content_type in MSGPACK else msgspec.json
        found = await asked(lambda: answer(_decoded(payload, form.decode)))
        if found is None:
            return refusal(404, "no such service is registered")
        return web.Response(body=form.encode(found), content_type="application/json" if form is msgspec.json else MSGPACK[0])

    return handle


def _decoded(payload: bytes, decode: Callable[[bytes], Any]) -> Any:
    try:
        return decode(payload)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidArgument(f"the body is neither JSON nor, with Content-Type {MSGPACK[0]}, MessagePack: {error}") from None
