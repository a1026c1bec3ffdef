"""HTTP handlers of the router: OpenAI's paths. Responses of engines (proxy.py) are passed to the client unchanged.

Runs in one event loop.
"""

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from aiohttp import web

from kvstore.client.instances.client import Refusal, RequestPlacement
from kvstore.protocol.errors import KVStoreError, typed
from kvstore.router.answer_reader import done, event
from kvstore.router.config import RouterSettings
from kvstore.router.http_server import abort_connection
from kvstore.router.metrics import RouterCounters
from kvstore.router.openai_api import (
    OUTPUT_LIMITS,
    RESPONSES,
    ApiProblem,
    ApiRequest,
    parse_request,
    parse_slo,
    problem_of,
    refusal_problem,
)
from kvstore.router.proxy import ProxiedResponse, ResponseEngines, StreamingProxy
from kvstore.router.retention import parse_retention
from kvstore.router.tokenizer import PromptTokenizer, TokenizedPrompt
from kvstore.router.tracing import RequestTraces, fail, set_attribute
from kvstore.scheduler.request import Slo

if TYPE_CHECKING:
    from kvstore.telemetry.tracing.spans import Tracing

DECISION_HEADER: Final = "x-kvstore-decision"
"""The scheduler's decision and its estimates, as JSON."""
ROUTED_HEADER: Final = "x-kvstore-routed-by"
"""`prefix`; or `load; ` and the LoadReason; or `response`: sent to the engine that keeps the response."""
DECISION: Final = ("prefill", "decode", "prefix_blocks", "transfer_from", "transfer_blocks", "transfer_s", "queue_s", "prefill_s", "tbt_s")
SESSION_PATH: Final = "/kvstore/sessions/{session}"
RESPONSE_PATHS: Final = ("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel")

log = logging.getLogger("kvstore.router")

Handle = Callable[[web.Request, int], Awaitable[web.StreamResponse]]
EndSession = Callable[[str], int]
"""Ends a session of retention hints in the store; returns the number of its blocks. Blocks, and raises KVStoreErrors."""


class RouterApp:
    """aiohttp application of the router (`web`), which the caller serves."""

    def __init__(
        self,
        proxy: StreamingProxy,
        tokenizer: PromptTokenizer,
        settings: RouterSettings,
        counters: RouterCounters,
        tracing: "Tracing | None" = None,
        end_session: EndSession | None = None,
    ) -> None:
        """`end_session`: None where clients may not end sessions."""
        self._proxy = proxy
        self._tokenizer = tokenizer
        self._settings = settings
        self._counters = counters
        self._slo = Slo(settings.ttft_slo_s or Slo().ttft_s, settings.tbt_slo_s or Slo().tbt_s)
        self._responses = ResponseEngines()
        self._started_s = int(time.time())
        self.web = web.Application(client_max_size=settings.max_body_bytes, middlewares=[RequestTraces(tracing).middleware, _with_problems])
        self.web.add_routes(
            [
                *(web.post(path, self._post) for path in OUTPUT_LIMITS),
                web.get(RESPONSE_PATHS[0], self._stored),
                web.post(RESPONSE_PATHS[1], self._stored),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/stats", self._stats),
            ]
        )
        if end_session is not None:
            self._end_session = end_session
            self.web.add_routes([web.delete(SESSION_PATH, self._session_over)])

    async def _models(self, _request: web.Request) -> web.Response:
        model = {"id": self._settings.model, "object": "model", "created": self._started_s, "owned_by": "kvstore"}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _stats(self, _request: web.Request) -> web.Response:
        return web.json_response(self._counters.as_dict())

    async def _session_over(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, self._end)

    async def _end(self, request: web.Request, _begun_ns: int) -> web.StreamResponse:
        session = request.match_info["session"]
        blocks = await asyncio.to_thread(self._end_session, session)
        return web.json_response({"session": session, "blocks": blocks})

    async def _post(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, self._answer)

    async def _stored(self, request: web.Request) -> web.StreamResponse:
        return await self._serve(request, self._answer_stored)

    async def _serve(self, request: web.Request, handle: Handle) -> web.StreamResponse:
        """Run `handle` as one of `max_requests`, with counters. Errors become responses."""
        counters = self._counters
        counters.requests += 1
        if counters.active >= self._settings.max_requests:
            counters.rejected["busy"] += 1
            message = f"the router serves {self._settings.max_requests} requests, its maximum (max_requests)"
            return _refused(ApiProblem(503, "service_unavailable_error", message, "busy", 1))
        counters.active += 1
        begun_ns = time.monotonic_ns()
        try:
            return await handle(request, begun_ns)
        except asyncio.CancelledError:
            counters.disconnects += 1
            raise
        except web.HTTPException:
            raise
        except Exception as error:
            return _refused(self._failed(error))
        finally:
            counters.active -= 1
            counters.durations.observe(time.monotonic_ns() - begun_ns, 1)

    async def _answer(self, request: web.Request, begun_ns: int) -> web.StreamResponse:
        parsed = await self._parsed(request)
        if isinstance(parsed, ApiProblem):
            return _refused(parsed)
        if parsed.previous_response_id is not None and (address := self._responses.get(parsed.previous_response_id)):
            return await self._passed(request, await self._proxy.ask(parsed, address), None, begun_ns)
        slo, prompt = parse_slo(request.headers, self._slo), await self._tokenizer.prompt(parsed)
        outcome = await self._proxy.begin(parsed, prompt, slo)
        if isinstance(outcome, Refusal):
            self._counters.rejected[outcome.reason.value] += 1
            return _refused(refusal_problem(outcome))
        return await self._passed(request, outcome, prompt, begun_ns)

    async def _answer_stored(self, request: web.Request, begun_ns: int) -> web.StreamResponse:
        """Forward a request for a stored response to the engine that keeps it."""
        response_id = request.match_info["response_id"]
        address = self._responses.get(response_id)
        if address is None:
            message = f"unknown response {response_id[:100]!r}: send the request to the router or engine that created it"
            return _refused(ApiProblem(404, "invalid_request_error", message))
        parsed = parse_request(RESPONSES, b"{}", request.headers)
        proxied = await self._proxy.ask(parsed, address, path=request.path_qs, method=request.method)
        return await self._passed(request, proxied, None, begun_ns)

    async def _parsed(self, request: web.Request) -> ApiRequest | ApiProblem:
        """Read and parse the request. Raises InvalidArgument if the body is not a JSON object, or a header malformed."""
        settings = self._settings
        try:
            async with asyncio.timeout(settings.client_timeout_s):
                body = await request.read()
        except TimeoutError:
            message = f"the body of the request did not arrive within {settings.client_timeout_s:g} s"
            return ApiProblem(408, "invalid_request_error", message)
        except web.HTTPRequestEntityTooLarge:
            message = f"the body of the request is longer than {settings.max_body_bytes} bytes: send less, or raise max_body_bytes"
            return ApiProblem(413, "invalid_request_error", message)
        except web.RequestPayloadError:
            return ApiProblem(400, "invalid_request_error", "the body of the request does not match its Content-Encoding")
        parsed = parse_request(request.path, body, request.headers)
        if parsed.model not in (None, settings.model):
            message = f"no model {parsed.model[:100]!r}: this router serves {settings.model!r}"
            return ApiProblem(404, "invalid_request_error", message, "model_not_found")
        hints = parse_retention(request.headers, settings.retention_ceiling) if settings.retention_from_requests else None
        return replace(parsed, headers={"x-request-id": uuid.uuid4().hex, **parsed.headers}, retention=hints)

    async def _passed(
        self, request: web.Request, proxied: ProxiedResponse, prompt: TokenizedPrompt | None, begun_ns: int
    ) -> web.StreamResponse:
        """Pass the engine's response to the client, with its status and bytes unchanged."""
        with contextlib.closing(proxied.answer):
            headers = proxied.answer.headers | {ROUTED_HEADER: "response" if prompt is None else _routed_by(prompt)}
            if proxied.placement is not None:
                headers[DECISION_HEADER] = _decision(proxied.placement)
                self._tokenizer.learn(proxied.placement.prefill_address)
                set_attribute("kvstore.prefix_blocks", proxied.placement.prefix_blocks)
            response = web.StreamResponse(status=proxied.answer.status, headers=headers)
            try:
                await response.prepare(request)
                await self._send_all(response, proxied, begun_ns)
                self._count(proxied, prompt)
            except ConnectionError:
                self._counters.disconnects += 1
                abort_connection(request)
            except Exception as error:
                await self._break_off(response, request, proxied, error)
        return response

    async def _send_all(self, response: web.StreamResponse, proxied: ProxiedResponse, begun_ns: int) -> None:
        """Send all chunks. Raises ConnectionError if the client disconnected, other errors if the engine failed."""
        answer, is_first = proxied.answer, True
        async for chunk in answer.chunks():
            if answer.reader.response_id is not None:  # before the client can refer to it
                self._responses.add(answer.reader.response_id, proxied.address)
            await self._send(response, chunk)
            if is_first and answer.is_stream:
                self._counters.first_tokens.observe(time.monotonic_ns() - begun_ns, 1)
            is_first = False

    async def _break_off(self, response: web.StreamResponse, request: web.Request, proxied: ProxiedResponse, error: Exception) -> None:
        """Report an engine's failure after the first byte: as an event of a stream; other responses are cut off."""
        fail(typed(error))
        problem = self._failed(error)
        if not proxied.answer.is_stream:
            abort_connection(request)
            return
        with contextlib.suppress(ConnectionError):
            await self._send(response, b"\n\n" + event(problem.body()) + done())

    async def _send(self, response: web.StreamResponse, frame: bytes) -> None:
        """Send a frame. Raises ConnectionError if the client disconnected or does not read."""
        try:
            async with asyncio.timeout(self._settings.client_timeout_s):
                await response.write(frame)
        except TimeoutError:
            raise ConnectionResetError(f"the client has read nothing for {self._settings.client_timeout_s:g} s") from None

    def _count(self, proxied: ProxiedResponse, prompt: TokenizedPrompt | None) -> None:
        """Count a complete response."""
        reader, counters = proxied.answer.reader, self._counters
        status = proxied.answer.status
        if status != HTTPStatus.OK or reader.failure is not None:
            counters.failed += status == HTTPStatus.OK or status >= HTTPStatus.INTERNAL_SERVER_ERROR
            return
        counters.completed += 1
        counters.output_tokens += reader.output_tokens()
        if prompt is not None:
            set_attribute("kvstore.prompt_tokens", prompt.tokens)
            self._tokenizer.verify(prompt, reader.prompt_tokens)
            counters.prompt_tokens += prompt.tokens if reader.prompt_tokens is None else reader.prompt_tokens
        if proxied.placement is not None:
            expected = proxied.placement.prefix_blocks * self._settings.block_tokens
            cached = reader.cached_tokens if proxied.prefill_cached_tokens is None else proxied.prefill_cached_tokens
            counters.prefix_tokens += expected if cached is None else cached

    def _failed(self, error: Exception) -> ApiProblem:
        """Count a failure and return the client's error for it."""
        if not isinstance(error, KVStoreError):
            log.error("a request failed because of a bug in the router", exc_info=error)
        problem = problem_of(typed(error))
        self._counters.failed += problem.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return problem


@web.middleware
async def _with_problems(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Convert aiohttp's own errors to OpenAI's form."""
    try:
        return await handler(request)
    except web.HTTPException as refused:
        kind = "invalid_request_error" if refused.status < 500 else "api_error"
        response = _refused(ApiProblem(refused.status, kind, refused.text or refused.reason))
        if "Allow" in refused.headers:
            response.headers["Allow"] = refused.headers["Allow"]
        return response


def _refused(problem: ApiProblem) -> web.Response:
    return web.json_response(problem.body(), status=problem.status, headers=problem.headers())


def _decision(placement: RequestPlacement) -> str:
    return json.dumps({name: getattr(placement, name) for name in DECISION})


def _routed_by(prompt: TokenizedPrompt) -> str:
    return "prefix" if prompt.load_reason is None else f"load; {prompt.load_reason}"
