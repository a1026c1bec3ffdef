"""Engines and a scheduler that do as a test says: real HTTP servers on real sockets, for faults that real engines show too rarely."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import islice
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.test_utils import TestServer
from multidict import CIMultiDict

from kvstore.client.instances.client import Placement, Refusal
from kvstore.router.config import RouterSettings
from kvstore.router.engines import Work
from kvstore.router.sse import done, event
from kvstore.router.standin.tokens import continuation, text_of
from kvstore.scheduler.request import Slo

T = TypeVar("T")
Act = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
SETTINGS = RouterSettings(model="m", block_tokens=4, retry_pause_s=0.001, connect_timeout_s=20.0)
PROMPT = list(b"one, two, three")


def run(test: Coroutine[Any, Any, T]) -> T:
    """The test's own event loop, with a limit."""

    async def limited() -> T:
        async with asyncio.timeout(20):
            return await test

    return asyncio.run(limited())


def choice(tokens: Sequence[int], finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text_of(tokens), "token_ids": list(tokens), "finish_reason": finish_reason}]}


def following(tokens: Sequence[int], count: int) -> list[int]:
    return list(islice(continuation(tokens), count))


async def well(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As a good engine of either kind does."""
    tokens = following(body["prompt"], body["max_tokens"])
    if not body["stream"]:
        return web.json_response({**choice(tokens, "length"), "kv_transfer_params": {"blocks": 3, "of": "engine"}})
    response = web.StreamResponse()
    await response.prepare(request)
    for left, token in zip(reversed(range(len(tokens))), tokens, strict=True):
        await response.write(event(choice([token], None if left else "length")))
    await response.write(done())
    return response


def answers(status: int, message: str) -> Act:
    async def act(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": message}}, status=status)

    return act


def says(text: str, status: int = 200) -> Act:
    """This body, whatever it means."""

    async def act(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text=text, status=status)

    return act


async def hangs_up(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def streams(*frames: bytes, then: Act | None = None) -> Act:
    """These events, and then the end, or what `then` does."""

    async def act(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for frame in frames:
            await response.write(frame)
        if then is not None:
            await then(request, body)
        return response

    return act


class ScriptedEngine:
    """An async context manager. Does what `script` says, one entry a request, and `well` after its end."""

    def __init__(self, *script: Act) -> None:
        self.script = deque(script)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[CIMultiDict[str]] = []
        self.cancelled = asyncio.Event()
        self.entered = asyncio.Event()
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([web.post("/v1/completions", self._complete)])
        self._server = TestServer(app)

    async def __aenter__(self) -> "ScriptedEngine":
        await self._server.start_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()

    @property
    def address(self) -> str:
        return str(self._server.make_url("/"))

    async def silent(self, _request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        """Nothing more, until the other side hangs up."""
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers.copy())
        act = self.script.popleft() if self.script else well
        return await act(request, body)


class ScriptedScheduler:
    """Gives these answers, the last one again and again. An error is raised."""

    def __init__(self, *script: Placement | Refusal | Exception) -> None:
        self._script = deque(script)
        self.asked: list[dict[str, Any]] = []

    async def schedule(self, keys: Sequence[bytes], *, input_tokens: int, output_tokens: int, slo: Slo) -> Placement | Refusal:
        self.asked.append({"keys": list(keys), "input_tokens": input_tokens, "output_tokens": output_tokens, "slo": slo})
        answer = self._script[0] if len(self._script) == 1 else self._script.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer


def placement(prefill: str, decode: str, *, request_id: int = 7, prefix_blocks: int = 2) -> Placement:
    return Placement(
        request_id=request_id,
        prefill="p",
        decode="d",
        prefill_address=prefill,
        decode_address=decode,
        prefix_blocks=prefix_blocks,
        transfer_from="",
        transfer_blocks=0,
        transfer_s=0.0,
        queue_s=0.25,
        prefill_s=0.5,
        tbt_s=0.01,
    )


def work(tokens: Sequence[int] = PROMPT, max_tokens: int = 5, **sampling: Any) -> Work:
    return Work(id="abc", model="m", tokens=list(tokens), keys=[], max_tokens=max_tokens, sampling=sampling)
