"""Engines and a scheduler that do as a test says: real HTTP servers on real sockets, for faults that real engines show too rarely."""

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import islice
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.test_utils import TestServer
from multidict import CIMultiDict

from kvstore.client.instances.client import Refusal, RequestPlacement
from kvstore.router.answer_reader import done, event
from kvstore.router.config import RouterSettings
from kvstore.router.fake_engine.compute import continuation, text_of
from kvstore.router.openai_api import CHAT, COMPLETIONS, ApiRequest, parse_request
from kvstore.scheduler.request import Slo

T = TypeVar("T")
Act = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
SETTINGS = RouterSettings(model="m", block_tokens=4, retry_pause_s=0.001, connect_timeout_s=100.0, tokenize_timeout_s=100.0)
PROMPT = list(b"one, two, three")
TEXT = bytes(PROMPT).decode()
EVENTS = {"Content-Type": "text/event-stream"}


def run(test: Coroutine[Any, Any, T]) -> T:
    """The test's own event loop, with a limit."""

    async def limited() -> T:
        async with asyncio.timeout(120):
            return await test

    return asyncio.run(limited())


def choice(tokens: Sequence[int], finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text_of(tokens), "token_ids": list(tokens), "finish_reason": finish_reason}]}


def following(tokens: Sequence[int], count: int) -> list[int]:
    return list(islice(continuation(tokens), count))


def prompt_tokens(body: dict[str, Any]) -> list[int]:
    """Of an engine whose template is the JSON of messages and tools, and whose tokens are bytes."""
    if "messages" in body:
        return list(json.dumps([body["messages"], body.get("tools")]).encode())
    prompt = body["prompt"]
    return list(prompt.encode()) if isinstance(prompt, str) else prompt


def tokenized(tokens: Sequence[int]) -> dict[str, Any]:
    return {"count": len(tokens), "max_model_len": 4096, "tokens": list(tokens), "token_strs": None}


async def well(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As a good engine does."""
    prompt = prompt_tokens(body)
    if request.path == "/tokenize":
        return web.json_response(tokenized(prompt))
    tokens = following(prompt, body.get("max_tokens", 5))
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens), "total_tokens": len(prompt) + len(tokens)}
    if not body.get("stream"):
        handle = {"blocks": 3, "of": "engine"} if "kv_transfer_params" in body else None
        return web.json_response({**choice(tokens, "length"), "usage": usage, "kv_transfer_params": handle})
    response = web.StreamResponse(headers=EVENTS)
    await response.prepare(request)
    for left, token in zip(reversed(range(len(tokens))), tokens, strict=True):
        await response.write(event(choice([token], None if left else "length")))
    if (body.get("stream_options") or {}).get("include_usage"):
        await response.write(event({"choices": [], "usage": usage}))
    await response.write(done())
    return response


def answers(status: int, message: str) -> Act:
    async def act(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": message}}, status=status)

    return act


def says(text: str, status: int = 200, **headers: str) -> Act:
    """Respond with this raw body."""

    async def act(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(text=text, status=status, headers={name.replace("_", "-"): value for name, value in headers.items()})

    return act


async def hangs_up(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def streams(*frames: bytes, then: Act | None = None) -> Act:
    """These events, and then the end, or what `then` does."""

    async def act(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers=EVENTS)
        await response.prepare(request)
        for frame in frames:
            await response.write(frame)
        if then is not None:
            await then(request, body)
        return response

    return act


class ScriptedEngine:
    """An async context manager. Does what `script` says, one entry a request, and `well` after its end; of /tokenize `tokenizing`."""

    def __init__(self, *script: Act) -> None:
        self.script = deque(script)
        self.tokenizing = deque[Act]()
        self.paths: list[str] = []
        """These four: one entry a request, but for those to /tokenize."""
        self.raw: list[bytes] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[CIMultiDict[str]] = []
        self.tokenized: list[dict[str, Any]] = []
        """The bodies of those."""
        self.cancelled = asyncio.Event()
        self.entered = asyncio.Event()
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([web.route("*", "/{path:.*}", self._handle)])
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
        """Send nothing until the peer disconnects."""
        self.entered.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        if request.path == "/tokenize":
            self.tokenized.append(body)
            script = self.tokenizing
        else:
            self.paths.append(request.path)
            self.raw.append(raw)
            self.bodies.append(body)
            self.headers.append(request.headers.copy())
            script = self.script
        act = script.popleft() if script else well
        return await act(request, body)


class ScriptedScheduler:
    """Gives these answers, the last one again and again. An error is raised."""

    def __init__(self, *script: RequestPlacement | Refusal | Exception) -> None:
        self.script = deque(script)
        self.asked: list[dict[str, Any]] = []

    async def schedule(self, keys: Sequence[bytes], *, input_tokens: int, output_tokens: int, slo: Slo) -> RequestPlacement | Refusal:
        self.asked.append({"keys": list(keys), "input_tokens": input_tokens, "output_tokens": output_tokens, "slo": slo})
        answer = self.script[0] if len(self.script) == 1 else self.script.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer


def placement(prefill: str, decode: str, *, request_id: int = 7, prefix_blocks: int = 2) -> RequestPlacement:
    return RequestPlacement(
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


def completion(prompt: str | Sequence[int] | Sequence[str] = TEXT, **members: Any) -> ApiRequest:
    """A request to /v1/completions."""
    body = {"model": "m", "prompt": prompt if isinstance(prompt, str) else list(prompt), "max_tokens": 5, **members}
    return parse_request(COMPLETIONS, json.dumps(body).encode(), {"x-request-id": "abc"})


def chat(*messages: dict[str, Any], **members: Any) -> ApiRequest:
    """A request to /v1/chat/completions."""
    body = {"model": "m", "messages": messages or [{"role": "user", "content": "Hi"}], **members}
    return parse_request(CHAT, json.dumps(body).encode(), {"x-request-id": "abc"})
