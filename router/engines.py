"""The engines' side of the router: HTTP to the engines, and their answers on the way back. docs/router.md describes what is sent.

An engine serves OpenAI's API. Of vLLM's additions the router uses `/tokenize` and `kv_transfer_params`, by which the engine that computes
a prompt names its blocks to the engine that decodes; the router does not read them.
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
from kvstore.router.openai_api import ApiRequest, decode_body, is_token, prefill_body
from kvstore.router.tracing import step, trace_headers
from kvstore.rpc.keepalive import PEER_TIMEOUT_S, enable_keepalive
from kvstore.rpc.tracing import TraceSpan

TOKENIZE: Final = "/tokenize"
MAX_BUFFERED_BYTES: Final = 8 << 20
"""Of an answer that is no stream: it is held back until its end, or as far as this, so that a failure can be repaired elsewhere."""
END_S: Final = 1.0
"""For the end of a body whose last event has arrived; after that the connection is closed, and the next request opens another one."""
CONNECTION_CHECK_S: Final = 0.5
"""Between checks whether a connection that is silent is still open."""
HEADERS: Final = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
"""Nothing is compressed on the way from an engine: its bytes pass through."""
PASSED_HEADERS: Final = ("Content-Type", "Content-Length", "Content-Encoding", "Retry-After", "X-Request-Id")
"""Of an engine's answer, to the client."""
REQUEST_ID_HEADER: Final = "x-kvstore-request-id"
"""The scheduler's number of the request, which an engine that reports by itself names to the master."""
EVENT_STREAM: Final = "text/event-stream"
RETRIED: Final = frozenset({408, 409, 425, 429})
"""Statuses below 500 that another engine, or this one later, need not give."""


@dataclass(frozen=True, slots=True)
class PrefillReply:
    """What a prefill gives."""

    params: Mapping[str, Any]
    """`kv_transfer_params` for the engine that decodes."""
    cached_tokens: int | None
    """Of the prompt, not computed; None: the engine does not say."""


class EngineFailed(Unavailable):
    """The engine answered with a status that another attempt may not get. The client gets `answer` if no attempt is left."""

    def __init__(self, address: str, answer: "EngineAnswer") -> None:
        super().__init__(f"the engine at {address} answers {answer.status}: {answer.error_message()}")
        self.answer = answer


class EngineRefused(Exception):
    """The engine does not compute the prompt, by a status that another attempt would get too."""


class EngineAnswer:
    """An answer on its way from an engine. Iterate `chunks` once; close it, which cancels the rest."""

    def __init__(self, response: aiohttp.ClientResponse, address: str) -> None:
        self._response = response
        self._address = address
        self._first = b""
        self._is_whole = False
        self.chunk_timeout_s: float | None = None
        """Between two parts of a stream; None: no limit."""
        self.span: TraceSpan | None = None
        """Of a request that is traced: ended by `close`."""
        self.status = response.status
        self.is_stream = response.content_type == EVENT_STREAM
        self.reader = AnswerReader(is_stream=self.is_stream)

    @property
    def headers(self) -> dict[str, str]:
        """For the client."""
        return {name: self._response.headers[name] for name in PASSED_HEADERS if name in self._response.headers}

    def error_message(self) -> str:
        """The message of an error."""
        try:
            return error_message(json.loads(self._first))
        except (ValueError, RecursionError):
            return error_message(self._first.decode(errors="replace"))

    def json(self) -> Mapping[str, Any]:
        """Of an answer that came whole. Raises ProtocolError: it is no JSON object."""
        try:
            value = json.loads(self._first)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ProtocolError(f"no JSON object: {self._first[:SHOWN_CHARACTERS]!r}")
        return value

    async def begin(self) -> None:
        """Wait for the first bytes of a stream, or for all of another answer, or MAX_BUFFERED_BYTES of it.

        Raises Unavailable: the engine hung up, or dropped the request.
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
        """Iterate over the bytes as they arrive. Raises Unavailable, DeadlineExceeded: the engine hung up, or was silent too long."""
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
        """Read the end of a body after its last event: only then another request can use the connection."""
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, ProtocolError):
            async with asyncio.timeout(END_S):
                while await _next_chunk(self._response):
                    pass

    def close(self) -> None:
        """Hang up unless the answer is whole; only then another request can use the connection."""
        self._response.close()
        if self.span is not None:
            self.span.end()


class Engines:
    """Connections to all engines. Of one event loop; close it."""

    def __init__(self, settings: RouterSettings) -> None:
        """To be made within the event loop."""
        self._settings = settings
        connector, cookies = aiohttp.TCPConnector(limit=0, socket_factory=_socket), aiohttp.DummyCookieJar()
        # A name server's silence is time for a connection too. What comes after it has one deadline altogether, of each method: sock_read
        # would begin once all of a prompt is written, and anew with each byte.
        timeout = aiohttp.ClientTimeout(total=None, connect=settings.connect_timeout_s)
        self._http = aiohttp.ClientSession(connector=connector, cookie_jar=cookies, headers=HEADERS, auto_decompress=False, timeout=timeout)

    async def close(self) -> None:
        await self._http.close()

    async def tokenize(self, address: str, body: bytes, headers: Mapping[str, str]) -> list[int]:
        """The token ids of a prompt, by the engine's own tokenizer and template.

        Raises Unavailable: the engine cannot be reached, fails or answers otherwise; DeadlineExceeded; InvalidArgument: it refuses the
        prompt.
        """
        with step("tokenize"), _Translated(address):
            async with asyncio.timeout(self._settings.tokenize_timeout_s):
                answer = await self._begin(address, TOKENIZE, body, headers)
            answer.close()
            if answer.status != HTTPStatus.OK:
                raise InvalidArgument(f"the engine at {address} answers {answer.status} to {TOKENIZE}: {answer.error_message()}")
            return _tokens(answer.json())

    async def prefill(self, request: ApiRequest, placement: RequestPlacement) -> PrefillReply:
        """Have the prompt computed and its blocks stored.

        Raises Unavailable: the engine cannot be reached, or fails; DeadlineExceeded: first_token_timeout_s is over; EngineRefused: the
        engine does not take the request. Cancelled, it hangs up.
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
                raise EngineRefused(f"the engine answers {answer.status}: {answer.error_message()}")
            return _prefilled(answer)

    async def serve(self, request: ApiRequest, placement: RequestPlacement) -> EngineAnswer:
        """Have all of the answer made by one engine. When it returns, the answer has begun; what the engine refuses is an answer too.

        Raises Unavailable: the engine cannot be reached, or fails; DeadlineExceeded: first_token_timeout_s is over, or answer_timeout_s
        for an answer that is not streamed. Cancelled, it hangs up.
        """
        with step("serve", instance=placement.prefill, lasts=True) as span:
            headers = _headers(request, placement)
            return await self._answer(placement.prefill_address, request, request.body, headers, self._settings.first_token_timeout_s, span)

    async def decode(self, request: ApiRequest, placement: RequestPlacement, prefilled: PrefillReply) -> EngineAnswer:
        """Have the answer made by the engine that decodes, the first token included. As `serve`."""
        body = decode_body(request, {**prefilled.params, "request_id": placement.request_id})
        with step("decode", instance=placement.decode, lasts=True) as span:
            headers = _headers(request, placement)
            return await self._answer(placement.decode_address, request, body, headers, self._settings.next_token_timeout_s, span)

    async def ask(self, address: str, request: ApiRequest, *, path: str = "", method: str = "POST") -> EngineAnswer:
        """Send a request to the engine at `address`, which alone can answer it. `path`: instead of the request's. As `serve`."""
        timeout_s = self._settings.first_token_timeout_s
        with step("serve", lasts=True) as span:
            return await self._answer(address, request, request.body, request.headers, timeout_s, span, path=path, method=method)

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
        """An answer that has begun. Raises EngineFailed for a status that another attempt may not get. The caller limits the time."""
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
        """The head of the answer."""
        sent = {**headers, **trace_headers()}
        # A redirection is not followed: the master chose the engine.
        return await self._http.request(method, address.rstrip("/") + path, data=body, headers=sent, allow_redirects=False)


class _Translated:
    """Inside, what aiohttp and a malformed answer raise become errors of the tree."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        match error:
            case ProtocolError():
                raise Unavailable(f"the engine at {self._address} does not answer as engines do: {error}") from None
            case None | KVStoreError():
                return
            case aiohttp.ConnectionTimeoutError() | aiohttp.ClientConnectorError() | aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError():
                raise Unreachable(f"the engine at {self._address} cannot be reached: {error}") from None
            case TimeoutError():  # aiohttp's SocketTimeoutError is one
                raise DeadlineExceeded(f"the engine at {self._address} takes too long") from None
            case aiohttp.ClientError() | OSError():
                raise Unavailable(f"the engine at {self._address} hung up: {error}") from None


def _socket(info: tuple[Any, ...]) -> socket.socket:
    """Of a connection to an engine: it breaks when the engine's host is gone, or when its process is stopped and takes nothing, so that the
    request is scheduled again."""
    family, kind, protocol, *_ = info
    made = socket.socket(family, kind, protocol)
    enable_keepalive(made, PEER_TIMEOUT_S, limit_unacknowledged=True)
    return made


def _headers(request: ApiRequest, placement: RequestPlacement) -> dict[str, str]:
    return {**request.headers, REQUEST_ID_HEADER: str(placement.request_id)}


async def _next_chunk(response: aiohttp.ClientResponse) -> bytes:
    """The bytes that have arrived since; b"": the body has ended. aiohttp wakes no reader of a connection that it closes itself, as for
    bytes that are no HTTP: hence the checks."""
    while True:
        try:
            async with asyncio.timeout(CONNECTION_CHECK_S):
                return await response.content.readany()
        except TimeoutError:
            if response.connection is not None and not response.connection.closed:
                continue
        except RuntimeError:  # of a connection that was closed before
            pass
        raise ProtocolError("its connection ended within the answer, which is no HTTP")


def _prefilled(answer: EngineAnswer) -> PrefillReply:
    """Raises ProtocolError."""
    params = answer.json().get("kv_transfer_params") or {}
    if not isinstance(params, dict):
        raise ProtocolError("its kv_transfer_params are no object")
    return PrefillReply(params, answer.reader.cached_tokens)


def _tokens(answer: Mapping[str, Any]) -> list[int]:
    """Of the answer to /tokenize. Raises ProtocolError."""
    tokens = answer.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(is_token(token) for token in tokens):
        raise ProtocolError(f"{TOKENIZE} gives no list of token ids")
    return tokens


def _is_final(status: int) -> bool:
    """Whether another attempt would get the same: an answer, or a refusal that is the client's to mend."""
    if status in RETRIED:
        return False
    return 200 <= status < 300 or 400 <= status < 500
