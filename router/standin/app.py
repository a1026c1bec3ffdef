"""The HTTP face of stand-in engines: the engine's side of docs/router.md, as far as the router uses it. Of one event loop.

It is no server for clients: it takes token ids only, and one sequence a request.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from kvstore.client.instances.reporter import Reporter
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.router.answers import problem_of
from kvstore.router.orders import parse_json
from kvstore.router.serving import hang_up
from kvstore.router.sse import done, event
from kvstore.router.standin.blocks import BlockStore
from kvstore.router.standin.decode import DecodeEngine, Joined
from kvstore.router.standin.prefill import PrefillEngine, load
from kvstore.router.standin.tokens import continuation, text_of

MAX_BODY_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request of the router."""

    tokens: list[int]
    max_tokens: int
    params: Mapping[str, Any]

    @property
    def request_id(self) -> int:
        return int(self.params.get("request_id", 0))


class PrefillApp:
    """Of a prefill engine. `web` is served by whoever made it."""

    def __init__(self, name: str, engine: PrefillEngine, reporter: Reporter) -> None:
        self._name = name
        self._engine = engine
        self._reporter = reporter
        self.web = _application(self._complete)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await _asked(request)
        prefilled = await self._engine.run(
            asked.tokens,
            prefix_blocks=int(asked.params.get("prefix_blocks", 0)),
            on_queued=lambda: self._reporter.saw(asked.request_id),
        )
        self._reporter.prefilled(input_tokens=len(asked.tokens), prefix_tokens=prefilled.prefix_tokens, duration_s=prefilled.duration_s)
        token = next(continuation(asked.tokens))
        usage = {
            "prompt_tokens": len(asked.tokens),
            "completion_tokens": 1,
            "total_tokens": len(asked.tokens) + 1,
            "prompt_tokens_details": {"cached_tokens": prefilled.prefix_tokens},
        }
        params = {"do_remote_prefill": True, "do_remote_decode": False, "prefill": self._name, "blocks": prefilled.blocks}
        answer = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "choices": [_choice([token], "length")]}
        return web.json_response({**answer, "usage": usage, "kv_transfer_params": params})


class DecodeApp:
    """Of a decode engine. `web` is served by whoever made it."""

    def __init__(self, engine: DecodeEngine, reporter: Reporter, blocks: BlockStore, namespace: Namespace) -> None:
        self._engine = engine
        self._reporter = reporter
        self._blocks = blocks
        self._namespace = namespace
        self.web = _application(self._complete)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = await _asked(request)
        keys = self._namespace.block_keys(asked.tokens)[: int(asked.params.get("blocks", 0))]
        if await load(self._blocks, keys) < len(keys):
            raise Unavailable("the blocks of the prompt are not in the store any more")
        sequence = self._engine.join(asked.tokens, asked.max_tokens)
        try:
            self._reporter.saw(asked.request_id)
            return await self._stream(request, sequence, asked.max_tokens)
        finally:
            self._engine.leave(sequence)

    async def _stream(self, request: web.Request, sequence: Joined, count: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        answer = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion"}
        try:
            await response.prepare(request)
            for left in reversed(range(count)):
                choice = _choice([await sequence.made.get()], None if left else "length")
                await response.write(event({**answer, "choices": [choice]}))
            await response.write(done())
        except ConnectionError:
            hang_up(request)
        return response


def _application(complete: Any) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_with_problems])
    app.add_routes([web.post("/v1/completions", complete)])
    return app


@web.middleware
async def _with_problems(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except KVStoreError as error:
        problem = problem_of(error)
        return web.json_response(problem.body(), status=problem.status)


async def _asked(request: web.Request) -> _Asked:
    """Raises InvalidArgument: not what the router sends."""
    body = parse_json(await request.read())
    tokens, max_tokens, params = body.get("prompt"), body.get("max_tokens"), body.get("kv_transfer_params")
    if not isinstance(tokens, list) or not tokens or not isinstance(max_tokens, int) or max_tokens < 1 or not isinstance(params, dict):
        raise InvalidArgument("a stand-in engine takes token ids, max_tokens and kv_transfer_params")
    return _Asked(tokens, max_tokens, params)


def _choice(tokens: Sequence[int], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text_of(tokens), "token_ids": list(tokens), "logprobs": None, "finish_reason": finish_reason}
