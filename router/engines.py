"""HTTP client of the router for engines. docs/router.md describes the requests.

An engine serves OpenAI's API. Of vLLM's extensions the router uses `/tokenize` and `kv_transfer_params`, in which the prefill engine names
its blocks to the decode engine; the router passes them on unread.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final

import aiohttp

from kvstore.client.instances.client import RequestPlacement
from kvstore.protocol.errors import DeadlineExceeded, InvalidArgument, KVStoreError, ProtocolError, Unavailable, Unreachable
from kvstore.router.answer_reader import SHOWN_CHARACTERS, AnswerReader, error_message
from kvstore.router.config import RouterSettings
from kvstore.router.openai_api import ApiRequest, decode_body, is_token, prefill_body, whole_body
from kvstore.router.tracing import step, trace_headers
from kvstore.rpc.keepalive import PEER_TIMEOUT_S, enable_keepalive
from kvstore.rpc.tracing import TraceSpan

TOKENIZE: Final = "/tokenize"
MAX_BUFFERED_BYTES: Final = 8 << 20
"""A response that is not streamed is buffered up to this size, so that a failure can be retried on another engine."""
END_S: Final = 1.0
"""Time for the end of a body after its last event; then the connection is closed instead of reused."""
CONNECTION_CHECK_S: Final = 0.5
"""Interval of checks whether a silent connection is still open."""
HEADERS: Final = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
"""No compression: the router parses the bytes and passes them on."""
PASSED_HEADERS: Final = ("Content-Type", "Content-Length", "Content-Encoding", "Retry-After", "X-Request-Id")
"""Headers of an engine's response that the client gets."""
REQUEST_ID_HEADER: Final = "x-kvstore-request-id"
"""The scheduler's request number, which engines with a sidecar use in their reports."""
EVENT_STREAM: Final = "text/event-stream"
RETRIED: Final = frozenset({408, 409, 425, 429})
"""Statuses below 500 for which a retry may succeed."""


@dataclass(frozen=True, slots=True)
class PrefillReply:
    """Result of a prefill."""

    params: Mapping[str, Any]
    """`kv_transfer_params` for the decode engine."""
    cached_tokens: int | None
    """Tokens of the prompt that were cached; None: not reported."""


class EngineFailed(Unavailable):
    """The engine responded with a status for which a retry may succeed. After the last attempt the client gets `answer`."""

    def __init__(self, address: str, answer: "EngineAnswer") -> None:
        super().__init__(f"the engine at {address} responded with status {answer.status}: {answer.error_message()}")
        self.answer = answer


class EngineRefused(Exception):
    """The engine refused the prefill with a status that a retry would get as well."""


class EngineAnswer:
    """A response that is being received from an engine. Iterate `chunks` once, then close it, which cancels the rest."""

    def __init__(self, response: aiohttp.ClientResponse, address: str) -> None:
        self._response = response
        self._address = address
        self._first = b""
        self._is_whole = False
        self.chunk_timeout_s: float | None = None
        """Timeout between two parts of a stream; None: no limit."""
        self.span: TraceSpan | None = None
        """Span of a traced request, ended by `close`."""
        self.status = response.status
        self.is_stream = response.content_type == EVENT_STREAM
        self.reader = AnswerReader(is_stream=self.is_stream)

    @property
    def headers(self) -> dict[str, str]:
        """Headers for the client."""
        return {name: self._response.headers[name] for name in PASSED_HEADERS if name in self._response.headers}

    def error_message(self) -> str:
        """Return the message of an error response."""
        try:
            return error_message(json.loads(self._first))
        except (ValueError, RecursionError):
            return error_message(self._first.decode(errors="replace"))

    def json(self) -> Mapping[str, Any]:
        """Parse a response that was received whole. Raises ProtocolError if it is not a JSON object."""
        try:
            value = json.loads(self._first)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ProtocolError(f"not a JSON object: {self._first[:SHOWN_CHARACTERS]!r}")
        return value

    async def begin(self) -> None:
        """Wait for the first bytes of a stream, or for the whole of another response, at most MAX_BUFFERED_BYTES.

        Raises Unavailable if the engine disconnected or dropped the request.
        """
        buffered = bytearray()
        with _Translated(self._address):
            while chunk := await _next_chunk(self._response):
                buffered += chunk
                if self.is_stream or len(buffered) >= MAX_BUFFERED_BYTES:
                    break
            else:
                self._is_whole = True
        self._first = bytes(buffered)
        self.reader.feed(self._first)
        if self.is_stream and not self._first:
            raise Unavailable(f"the engine at {self._address} ended its stream before the first event")
        if self.status == HTTPStatus.OK and self.reader.failure is not None:
            raise Unavailable(f"the engine at {self._address} failed: {self.reader.failure}")

    async def chunks(self) -> AsyncGenerator[bytes]:
        """Iterate over the bytes as they arrive. Raises Unavailable if the engine disconnects, DeadlineExceeded after the timeout."""
        if self._first:
            yield self._first
        while not (self._is_whole or self.reader.is_done):
            with _Translated(self._address):
                async with asyncio.timeout(self.chunk_timeout_s):
                    chunk = await _next_chunk(self._response)
            if not chunk:
                return
            if self.is_stream:
                self.reader.feed(chunk)
            yield chunk
        await self._end()

    async def _end(self) -> None:
        """Read the end of a body after its last event, so that the connection can be reused."""
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, ProtocolError):
            async with asyncio.timeout(END_S):
                while await _next_chunk(self._response):
                    pass

    def close(self) -> None:
        """End the response. The connection is closed unless the response was read to its end."""
        self._response.close()
        if self.span is not None:
            self.span.end()


class Engines:
    """HTTP connections to all engines. For one event loop; the caller closes it."""

    def __init__(self, settings: RouterSettings) -> None:
        """Must be called within the event loop."""
        self._settings = settings
        connector, cookies = aiohttp.TCPConnector(limit=0, socket_factory=_socket), aiohttp.DummyCookieJar()
        # `connect` includes name resolution. The rest of a request has a single deadline, set by each method: aiohttp's sock_read would
        # start only after the prompt is written, and restart with each byte.
        timeout = aiohttp.ClientTimeout(total=None, connect=settings.connect_timeout_s)
        self._http = aiohttp.ClientSession(connector=connector, cookie_jar=cookies, headers=HEADERS, auto_decompress=False, timeout=timeout)

    async def close(self) -> None:
        await self._http.close()

    async def tokenize(self, address: str, body: bytes, headers: Mapping[str, str]) -> list[int]:
        """Return the token ids of a prompt by the engine's own tokenizer and chat template.

        Raises Unavailable if the engine is unreachable, fails or sends a malformed response, DeadlineExceeded, and InvalidArgument if it
        refuses the prompt.
        """
        with step("tokenize"), _Translated(address):
            async with asyncio.timeout(self._settings.tokenize_timeout_s):
                answer = await self._begin(address, TOKENIZE, body, headers)
            answer.close()
            if answer.status != HTTPStatus.OK:
                raise InvalidArgument(f"the engine at {address} responded to {TOKENIZE} with {answer.status}: {answer.error_message()}")
            return _tokens(answer.json())

    async def prefill(self, request: ApiRequest, placement: RequestPlacement) -> PrefillReply:
        """Let the prefill engine compute the prompt and store its blocks.

        Raises Unavailable if the engine is unreachable or fails, DeadlineExceeded after first_token_timeout_s, EngineRefused if the engine
        refuses the request. Cancellation closes the connection.
        """
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "decode_address": placement.decode_address,
            "request_id": placement.request_id,
            "prefix_blocks": placement.prefix_blocks,
        }
        body, headers = prefill_body(request, params), _headers(request, placement)
        with step("prefill", instance=placement.prefill), _Translated(placement.prefill_address):
            async with asyncio.timeout(self._settings.first_token_timeout_s):
                answer = await self._begin(placement.prefill_address, request.path, body, headers)
            answer.close()
            if answer.status != HTTPStatus.OK:
                raise EngineRefused(f"the engine responded with status {answer.status}: {answer.error_message()}")
            return _prefilled(answer)

    async def serve(self, request: ApiRequest, placement: RequestPlacement) -> EngineAnswer:
        """Send the whole request to one engine, and return when its response has begun. A refusal is a response too.

        Raises Unavailable if the engine is unreachable or fails, DeadlineExceeded after first_token_timeout_s (answer_timeout_s for a
        response that is not streamed). Cancellation closes the connection.
        """
        with step("serve", instance=placement.prefill, lasts=True) as span:
            body, headers = whole_body(request), _headers(request, placement)
            return await self._answer(placement.prefill_address, request, body, headers, self._settings.first_token_timeout_s, span)

    async def decode(self, request: ApiRequest, placement: RequestPlacement, prefilled: PrefillReply) -> EngineAnswer:
        """Send the request to the decode engine, which also produces the first token. As `serve`."""
        body = decode_body(request, {**prefilled.params, "request_id": placement.request_id})
        with step("decode", instance=placement.decode, lasts=True) as span:
            headers = _headers(request, placement)
            return await self._answer(placement.decode_address, request, body, headers, self._settings.next_token_timeout_s, span)

    async def ask(self, address: str, request: ApiRequest, *, path: str = "", method: str = "POST") -> EngineAnswer:
        """Send a request to the engine at `address`, the only one that can serve it. `path` replaces the request's. As `serve`."""
        timeout_s = self._settings.first_token_timeout_s
        with step("serve", lasts=True) as span:
            return await self._answer(address, request, whole_body(request), request.headers, timeout_s, span, path=path, method=method)

    async def _answer(
        self,
        address: str,
        request: ApiRequest,
        body: bytes,
        headers: Mapping[str, str],
        chunk_timeout_s: float,
        span: TraceSpan | None,
        *,
        path: str = "",
        method: str = "POST",
    ) -> EngineAnswer:
        settings = self._settings
        with _Translated(address):
            async with asyncio.timeout(settings.first_token_timeout_s if request.is_streamed else settings.answer_timeout_s):
                answer = await self._begin(address, path or request.path, body, headers, method=method)
        answer.chunk_timeout_s, answer.span = chunk_timeout_s, span
        return answer

    async def _begin(self, address: str, path: str, body: bytes, headers: Mapping[str, str], *, method: str = "POST") -> EngineAnswer:
        """Return a response that has begun. Raises EngineFailed for a status that may be retried. The caller sets a timeout."""
        with _Translated(address):
            answer = EngineAnswer(await self._request(method, address, path, body, headers), address)
        try:
            await answer.begin()
            if not _is_final(answer.status):
                raise EngineFailed(address, answer)
        except BaseException:
            answer.close()
            raise
        return answer

    async def _request(self, method: str, address: str, path: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Send the request and return the head of the response."""
        sent = {**headers, **trace_headers()}
        # Redirections are not followed: the master chose the engine.
        return await self._http.request(method, address.rstrip("/") + path, data=body, headers=sent, allow_redirects=False)


class _Translated:
    """Context that translates errors of aiohttp and of malformed responses to KVStoreErrors."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        match error:
            case ProtocolError():
                raise Unavailable(f"the engine at {self._address} sent a malformed response: {error}") from None
            case None | KVStoreError():
                return
            case aiohttp.ConnectionTimeoutError() | aiohttp.ClientConnectorError() | aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError():
                raise Unreachable(f"the engine at {self._address} cannot be reached: {error}") from None
            case TimeoutError():  # includes aiohttp's SocketTimeoutError
                raise DeadlineExceeded(f"the engine at {self._address} did not respond in time") from None
            case aiohttp.ClientError() | OSError():
                raise Unavailable(f"the engine at {self._address} disconnected: {error}") from None


def _socket(info: tuple[Any, ...]) -> socket.socket:
    """Create a socket with keepalive, which breaks when the engine's host is dead or its process does not read, so that the request is
    scheduled again."""
    family, kind, protocol, *_ = info
    made = socket.socket(family, kind, protocol)
    enable_keepalive(made, PEER_TIMEOUT_S, limit_unacknowledged=True)
    return made


def _headers(request: ApiRequest, placement: RequestPlacement) -> dict[str, str]:
    return {**request.headers, REQUEST_ID_HEADER: str(placement.request_id)}


async def _next_chunk(response: aiohttp.ClientResponse) -> bytes:
    """Return the bytes received since the last call; b"" at the end of the body. Raises ProtocolError if the connection ended early.

    aiohttp does not wake the reader of a connection that it closes itself, for example after malformed HTTP: hence the periodic checks.
    """
    while True:
        try:
            async with asyncio.timeout(CONNECTION_CHECK_S):
                return await response.content.readany()
        except TimeoutError:
            # A response that ended at this moment has its rest in the buffer, and no connection any more.
            if response.content.is_eof() or (response.connection is not None and not response.connection.closed):
                continue
        except RuntimeError:  # the connection was closed before the call
            pass
        raise ProtocolError("the connection ended within the response: malformed HTTP")


def _prefilled(answer: EngineAnswer) -> PrefillReply:
    """Parse the response to a prefill. Raises ProtocolError."""
    params = answer.json().get("kv_transfer_params") or {}
    if not isinstance(params, dict):
        raise ProtocolError("kv_transfer_params is not an object")
    return PrefillReply(params, answer.reader.cached_tokens)


def _tokens(answer: Mapping[str, Any]) -> list[int]:
    """Parse the response to /tokenize. Raises ProtocolError."""
    tokens = answer.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(is_token(token) for token in tokens):
        raise ProtocolError(f"the response to {TOKENIZE} has no list of token ids")
    return tokens


def _is_final(status: int) -> bool:
    """Return whether a retry is useless: success, or an error of the client."""
    if status in RETRIED:
        return False
    return 200 <= status < 300 or 400 <= status < 500
