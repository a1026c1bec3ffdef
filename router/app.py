"""The HTTP face of the router: OpenAI's paths, one request in, one answer or stream of events out. What happens between is relay.py.

Of one event loop; tokenising and hashing go to threads, as a long prompt would hold up everybody's streams.
"""

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from kvstore.client.instances.client import Placement, Refusal
from kvstore.kvcache.naming import Naming
from kvstore.protocol.errors import InvalidArgument, KVStoreError, typed
from kvstore.router.answers import Head, Problem, problem_of, refusal_problem
from kvstore.router.config import RouterSettings
from kvstore.router.counters import Counters
from kvstore.router.engines import Work
from kvstore.router.orders import Order, parse_chat, parse_completion, parse_json, parse_slo
from kvstore.router.relay import Answer, Relay, Whole
from kvstore.router.serving import hang_up
from kvstore.router.sse import done, event
from kvstore.router.tokenizing import Tokenizer
from kvstore.router.tracing import RequestTraces, fail, tell
from kvstore.scheduler.request import Slo

if TYPE_CHECKING:
    from kvstore.telemetry.tracing.spans import Tracing

DECISION_HEADER: Final = "x-kvstore-decision"
"""Where a request went and what was foreseen: JSON, for whoever wants to know."""
DECISION: Final = ("prefill", "decode", "prefix_blocks", "transfer_from", "transfer_blocks", "transfer_s", "queue_s", "prefill_s", "tbt_s")

log = logging.getLogger("kvstore.router")

Parse = Callable[[Mapping[str, Any]], Order]


class RouterApp:
    """The handlers. `web` is served by whoever made it."""

    def __init__(
        self,
        relay: Relay,
        tokenizer: Tokenizer,
        naming: Naming,
        settings: RouterSettings,
        counters: Counters,
        threads: Executor,
        tracing: "Tracing | None" = None,
    ) -> None:
        self._relay = relay
        self._tokenizer = tokenizer
        self._settings = settings
        self._counters = counters
        self._threads = threads
        self._naming = naming
        self._slo = Slo(settings.ttft_slo_s or Slo().ttft_s, settings.tbt_slo_s or Slo().tbt_s)
        self._started_s = int(time.time())
        self.web = web.Application(client_max_size=settings.max_body_bytes, middlewares=[RequestTraces(tracing).middleware, _with_problems])
        self.web.add_routes(
            [
                web.post("/v1/completions", self._completion),
                web.post("/v1/chat/completions", self._chat),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/stats", self._stats),
            ]
        )

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, parse_completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, parse_chat)

    async def _models(self, _request: web.Request) -> web.Response:
        model = {"id": self._settings.model, "object": "model", "created": self._started_s, "owned_by": "kvstore"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _stats(self, _request: web.Request) -> web.Response:
        return web.json_response(self._counters.as_dict())

    async def _serve(self, request: web.Request, parse: Parse) -> web.StreamResponse:
        """One place for one request: it is free again when this ends, however it ends."""
        counters = self._counters
        counters.requests += 1
        if counters.active >= self._settings.max_requests:
            counters.rejected["busy"] += 1
            message = f"{self._settings.max_requests} requests are being served, which is the most"
            return _refused(Problem(503, "service_unavailable_error", message, "busy", 1))
        counters.active += 1
        begun_ns = time.monotonic_ns()
        try:
            return await self._answer(request, parse, begun_ns)
        except asyncio.CancelledError:
            counters.hung_up += 1
            raise
        except web.HTTPException:
            raise
        except Exception as error:
            return _refused(self._failed(error))
        finally:
            counters.active -= 1
            counters.durations.observe(time.monotonic_ns() - begun_ns, 1)

    async def _answer(self, request: web.Request, parse: Parse, begun_ns: int) -> web.StreamResponse:
        asked = await self._asked(request, parse)
        if isinstance(asked, Problem):
            return _refused(asked)
        order, work, slo = asked
        outcome = await (self._relay.begin(work, slo) if order.stream else self._relay.complete(work, slo))
        if isinstance(outcome, Refusal):
            self._counters.rejected[outcome.reason.value] += 1
            return _refused(refusal_problem(outcome))
        tell("kvstore.prompt_tokens", len(work.tokens))
        tell("kvstore.prefix_blocks", outcome.placement.prefix_blocks)
        self._counters.prompt_tokens += len(work.tokens)
        foreseen = outcome.placement.prefix_blocks * self._settings.block_tokens
        self._counters.prefix_tokens += foreseen if outcome.cached_tokens is None else outcome.cached_tokens
        head = _head(order, work)
        if isinstance(outcome, Whole):
            self._completed(sum(piece.tokens for piece in outcome.pieces))
            return web.json_response(head.whole(outcome.pieces), headers={DECISION_HEADER: _decision(outcome.placement)})
        with contextlib.closing(outcome):
            return await self._stream(request, order, head, outcome, begun_ns)

    async def _asked(self, request: web.Request, parse: Parse) -> tuple[Order, Work, Slo] | Problem:
        """What the client wants, within the limits. Raises InvalidArgument."""
        settings = self._settings
        try:
            async with asyncio.timeout(settings.client_timeout_s):
                body = await request.read()
        except TimeoutError:
            message = f"the body of the request did not come within {settings.client_timeout_s:g} s"
            return Problem(408, "invalid_request_error", message)
        except web.RequestPayloadError:
            return Problem(400, "invalid_request_error", "the body of the request is not encoded as its headers say")
        order, slo = parse(parse_json(body)), parse_slo(request.headers, self._slo)
        if order.model != settings.model:
            message = f"there is no model {order.model[:100]!r} here; there is {settings.model!r}"
            return Problem(404, "invalid_request_error", message, "model_not_found")
        work = await asyncio.get_running_loop().run_in_executor(self._threads, self._prepare, order)
        if len(work.tokens) > settings.max_prompt_tokens:
            message = f"the prompt has {len(work.tokens)} tokens, above the limit of {settings.max_prompt_tokens}"
            return Problem(413, "invalid_request_error", message, "context_length_exceeded")
        return order, work, slo

    def _prepare(self, order: Order) -> Work:
        """In a thread. Raises InvalidArgument."""
        settings = self._settings
        tokens = self._tokenizer.encode(order.prompt) if isinstance(order.prompt, str) else order.prompt
        if not tokens:
            raise InvalidArgument("the prompt is empty")
        max_tokens = order.max_tokens or settings.default_output_tokens
        if max_tokens > settings.max_output_tokens:
            raise InvalidArgument(f"max_tokens is {max_tokens}, above the limit of {settings.max_output_tokens}")
        # A prompt that is too long is refused anyway.
        keys = self._naming.block_keys(tokens) if len(tokens) <= settings.max_prompt_tokens else []
        work_id = uuid.uuid4().hex
        return Work(id=work_id, model=order.model, tokens=tokens, keys=keys, max_tokens=max_tokens, sampling=order.sampling)

    async def _stream(self, request: web.Request, order: Order, head: Head, answer: Answer, begun_ns: int) -> web.StreamResponse:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", DECISION_HEADER: _decision(answer.placement)}
        response = web.StreamResponse(headers=headers)
        try:
            await response.prepare(request)
            await self._send_events(response, order, head, answer, begun_ns)
        except ConnectionError:
            self._counters.hung_up += 1
            hang_up(request)
        return response

    async def _send_events(self, response: web.StreamResponse, order: Order, head: Head, answer: Answer, begun_ns: int) -> None:
        """After the first byte a failure can only be an event. Raises ConnectionError: the client is gone."""
        tokens, is_first = 0, True
        try:
            if opening := head.opening():
                await self._send(response, event(opening))
            async for piece in answer.pieces():
                tokens += piece.tokens
                await self._send(response, event(head.part(piece)))
                if is_first:
                    self._counters.first_tokens.observe(time.monotonic_ns() - begun_ns, 1)
                    is_first = False
            if order.include_usage:
                await self._send(response, event(head.last(tokens)))
            self._completed(tokens)
        except ConnectionError:
            raise
        except Exception as error:
            fail(typed(error))
            await self._send(response, event(self._failed(error).body()))
        await self._send(response, done())

    async def _send(self, response: web.StreamResponse, frame: bytes) -> None:
        """Raises ConnectionError: the client is gone, or takes nothing any more."""
        try:
            async with asyncio.timeout(self._settings.client_timeout_s):
                await response.write(frame)
        except TimeoutError:
            raise ConnectionResetError("the client takes nothing") from None

    def _failed(self, error: Exception) -> Problem:
        """What the client is told of it."""
        if not isinstance(error, KVStoreError):
            log.error("a request failed by a mistake of this program", exc_info=error)
        problem = problem_of(typed(error))
        self._counters.failed += problem.status >= 500
        return problem

    def _completed(self, tokens: int) -> None:
        self._counters.completed += 1
        self._counters.output_tokens += tokens


@web.middleware
async def _with_problems(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """What aiohttp refuses by itself, in the form of all other errors."""
    try:
        return await handler(request)
    except web.HTTPException as refused:
        kind = "invalid_request_error" if refused.status < 500 else "api_error"
        response = _refused(Problem(refused.status, kind, refused.text or refused.reason))
        if "Allow" in refused.headers:
            response.headers["Allow"] = refused.headers["Allow"]
        return response


def _refused(problem: Problem) -> web.Response:
    return web.json_response(problem.body(), status=problem.status, headers=problem.headers())


def _head(order: Order, work: Work) -> Head:
    kind = "chatcmpl" if order.is_chat else "cmpl"
    return Head(id=f"{kind}-{work.id}", model=work.model, created=int(time.time()), is_chat=order.is_chat, prompt_tokens=len(work.tokens))


def _decision(placement: Placement) -> str:
    return json.dumps({name: getattr(placement, name) for name in DECISION})
