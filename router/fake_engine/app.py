"""HTTP handlers of fake engines: the part of docs/router.md that the router uses. Runs in one event loop.

They serve completions of one sequence. A prompt is a list of token ids, or a text of which each byte is a token.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from kvstore.client.instances.reporter import Reporter
from kvstore.kvcache.namespace import Namespace
from kvstore.protocol.errors import InvalidArgument, KVStoreError, Unavailable
from kvstore.router.answer_reader import done, event
from kvstore.router.fake_engine.blocks import BlockStore
from kvstore.router.fake_engine.compute import DecodeEngine, DecodingSequence, PrefillEngine, continuation, load, text_of
from kvstore.router.http_server import abort_connection
from kvstore.router.openai_api import COMPLETIONS, parse_json, problem_of

MAX_BODY_BYTES: Final = 64 << 20
DEFAULT_MAX_TOKENS: Final = 16
"""vLLM's default for completions."""
REFUSED: Final = "a fake engine takes one prompt (a text or token ids), max_tokens and kv_transfer_params"


@dataclass(frozen=True, slots=True)
class _EngineRequest:
    """Parsed request of the router."""

    tokens: list[int]
    max_tokens: int
    is_streamed: bool
    params: Mapping[str, Any]

    @property
    def request_id(self) -> int:
        return int(self.params.get("request_id", 0))


class PrefillApp:
    """aiohttp application of a prefill engine (`web`), which the caller serves."""

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
        usage = {**_usage(asked, 1), "prompt_tokens_details": {"cached_tokens": prefilled.prefix_tokens}}
        params = {"do_remote_prefill": True, "do_remote_decode": False, "prefill": self._name, "blocks": prefilled.blocks}
        return web.json_response({**_head(), "choices": [_choice([token], "length")], "usage": usage, "kv_transfer_params": params})


class DecodeApp:
    """aiohttp application of a decode engine (`web`), which the caller serves."""

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
            raise Unavailable("blocks of the prompt were evicted from the store")
        sequence = self._engine.join(asked.tokens, asked.max_tokens)
        try:
            self._reporter.saw(asked.request_id)
            return await (self._stream(request, sequence, asked) if asked.is_streamed else self._whole(sequence, asked))
        finally:
            self._engine.leave(sequence)

    async def _whole(self, sequence: DecodingSequence, asked: _EngineRequest) -> web.StreamResponse:
        made = [await sequence.made.get() for _ in range(asked.max_tokens)]
        return web.json_response({**_head(), "choices": [_choice(made, "length")], "usage": _usage(asked, len(made))})

    async def _stream(self, request: web.Request, sequence: DecodingSequence, asked: _EngineRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        head = _head()
        try:
            await response.prepare(request)
            for left in reversed(range(asked.max_tokens)):
                choice = _choice([await sequence.made.get()], None if left else "length")
                await response.write(event({**head, "choices": [choice]}))
            await response.write(done())
        except ConnectionError:
            abort_connection(request)
        return response


def _application(complete: Any) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_with_problems])
    app.add_routes([web.post(COMPLETIONS, complete), web.post("/tokenize", _tokenize)])
    return app


@web.middleware
async def _with_problems(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except KVStoreError as error:
        problem = problem_of(error)
        return web.json_response(problem.body(), status=problem.status)


async def _tokenize(request: web.Request) -> web.StreamResponse:
    """Handle /tokenize. Raises InvalidArgument if there is no single prompt."""
    tokens = _tokens(parse_json(await request.read()).get("prompt"))
    return web.json_response({"count": len(tokens), "tokens": tokens})


async def _asked(request: web.Request) -> _EngineRequest:
    """Parse the request. Raises InvalidArgument for one that the router would not send."""
    body = parse_json(await request.read())
    max_tokens, params = body.get("max_tokens", DEFAULT_MAX_TOKENS), body.get("kv_transfer_params")
    if not isinstance(max_tokens, int) or max_tokens < 1 or not isinstance(params, dict):
        raise InvalidArgument(REFUSED)
    return _EngineRequest(_tokens(body.get("prompt")), max_tokens, bool(body.get("stream")), params)


def _tokens(prompt: Any) -> list[int]:
    """Token ids of a prompt; those of a text are its bytes."""
    if isinstance(prompt, str):
        prompt = list(prompt.encode(errors="replace"))
    if not isinstance(prompt, list) or not prompt or not all(isinstance(token, int) for token in prompt):
        raise InvalidArgument(REFUSED)
    return prompt


def _head() -> dict[str, Any]:
    return {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion"}


def _usage(asked: _EngineRequest, completion_tokens: int) -> dict[str, Any]:
    prompt_tokens = len(asked.tokens)
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": prompt_tokens + completion_tokens}


def _choice(tokens: Sequence[int], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text_of(tokens), "token_ids": list(tokens), "logprobs": None, "finish_reason": finish_reason}
