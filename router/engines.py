"""The engines' side of the router: requests to them, and what they answer. docs/router.md describes the members.

An engine speaks OpenAI's /v1/completions with vLLM's additions: `return_token_ids`, and `kv_transfer_params`, by which the prefill engine
tells the decode engine where the blocks are. The router adds `request_id` to both, as the engine has to report it to the master, and reads
nothing of what the prefill engine says there.
"""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import aiohttp

from kvstore.client.instances.client import Placement
from kvstore.protocol.errors import DeadlineExceeded, InvalidArgument, KVStoreError, ProtocolError, Unavailable, Unreachable
from kvstore.router.answers import Piece
from kvstore.router.config import RouterSettings
from kvstore.router.sse import DONE, EventParser
from kvstore.router.tracing import step, trace_headers
from kvstore.rpc.tracing import Span
from kvstore.rpc.vanishing import PEER_TIMEOUT_S, notice_vanished_host

PATH: Final = "/v1/completions"
SHOWN_CHARACTERS: Final = 300
"""Of what an engine says went wrong."""
MAX_ANSWER_BYTES: Final = 8 << 20
"""Of an answer that is no stream. The longest part is a handle's list of blocks: a few bytes each, of a prompt of a million tokens."""
MAX_REFUSAL_BYTES: Final = 64 << 10
"""Of what an engine says went wrong, no more is read."""
LOOK_S: Final = 0.5
"""Between looks whether a connection is still there that nothing comes by."""
END_S: Final = 1.0
"""Time for the end of a body whose last event has come; then the connection is closed, and the next request opens another one."""
HEADERS: Final = {"Accept-Encoding": "identity"}
"""What is compressed could come to any number of bytes; it is not unpacked."""
FAILED: Final = ("abort", "error")
"""What engines give for a finish_reason where they drop a request: no answer ends so."""
RETRIED: Final = frozenset({404, 408, 409, 425, 429})
"""Statuses below 500 that another engine, or this one later, need not give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One request, as engines take it."""

    id: str
    model: str
    tokens: list[int]
    keys: list[bytes]
    """Of the full blocks of `tokens`."""
    max_tokens: int
    sampling: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What a prefill gives."""

    piece: Piece
    token_ids: list[int]
    handle: Mapping[str, Any]
    """For the decode engine."""
    cached_tokens: int | None = None
    """Of the prompt, not computed; None: the engine does not say."""


class DecodeStream:
    """An answer on its way from an engine. Iterate once; close it, which cancels what has not come."""

    def __init__(self, response: aiohttp.ClientResponse, address: str, piece_timeout_s: float, span: Span | None) -> None:
        """`span`, of a request that is traced, is ended by `close`."""
        self._span = span
        self._piece_timeout_s = piece_timeout_s
        self._response = response
        self._address = address
        self._pieces = self._read()

    async def first(self) -> Piece:
        """Wait for the first piece, which iterating does not give again. Raises as that does."""
        try:
            return await anext(self._pieces)
        except StopAsyncIteration:
            raise Unavailable(f"the engine at {self._address} ended its answer before the first token") from None

    def __aiter__(self) -> AsyncIterator[Piece]:
        """Raises Unavailable, DeadlineExceeded: the engine failed, hung up early, or took too long for a piece, whatever else it sent."""
        return self._pieces

    async def _read(self) -> AsyncGenerator[Piece]:
        parser = EventParser()
        now_s = asyncio.get_running_loop().time
        with _Translated(self._address):
            until_s = now_s() + self._piece_timeout_s
            while chunk := await self._chunk(until_s):
                for data in parser.feed(chunk):
                    if data == DONE:
                        await self._end()
                        return
                    piece = _piece(_object(data))
                    if piece is not None:
                        yield piece
                        until_s = now_s() + self._piece_timeout_s
            raise ProtocolError("the stream ended before its end was said")

    async def _chunk(self, until_s: float) -> bytes:
        """b"": it has ended. Comments and events without text, which keep a connection alive, do not put the deadline off."""
        async with asyncio.timeout_at(until_s):
            return await _arrived(self._response)

    async def _end(self) -> None:
        """The answer is whole. Only a body that is read to its end leaves a connection for others; one that goes on, or breaks, is no
        matter."""
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, ProtocolError):
            async with asyncio.timeout(END_S):
                while await _arrived(self._response):
                    pass

    def close(self) -> None:
        self._response.close()
        if self._span is not None:
            self._span.end()


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

    async def prefill(self, work: Work, placement: Placement) -> FirstToken:
        """Have the prompt computed, its blocks stored, and one token made.

        Raises Unavailable: the engine cannot be reached, or fails; DeadlineExceeded: first_token_timeout_s is over; InvalidArgument: it
        says that the request is wrong. Cancelled, it hangs up.
        """
        params = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "decode_address": placement.decode_address,
            "request_id": placement.request_id,
            "prefix_blocks": placement.prefix_blocks,
        }
        body = {**_body(work, work.tokens, 1, params), "stream": False}
        with step("prefill", instance=placement.prefill), _Translated(placement.prefill_address):
            async with asyncio.timeout(self._settings.first_token_timeout_s):
                async with await self._post(placement.prefill_address, body, work.id) as response:
                    answer, is_whole = await _read(response, MAX_ANSWER_BYTES)
            if not is_whole:
                raise ProtocolError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
            return _first_token(_object(answer))

    async def serve(self, work: Work, placement: Placement) -> DecodeStream:
        """Have all of the answer made by an engine that prefills and decodes. When it returns, the engine has accepted.

        Raises as `prefill`. Each piece has first_token_timeout_s: the engine may compute somebody's prompt between any two.
        """
        params = {"request_id": placement.request_id, "prefix_blocks": placement.prefix_blocks}
        body = {**_body(work, work.tokens, work.max_tokens, params), "stream": True}
        with step("serve", instance=placement.prefill, lasts=True) as span, _Translated(placement.prefill_address):
            timeout_s = self._settings.first_token_timeout_s
            async with asyncio.timeout(timeout_s):
                response = await self._post(placement.prefill_address, body, work.id)
            return DecodeStream(response, placement.prefill_address, timeout_s, span)

    async def decode(self, work: Work, placement: Placement, first: FirstToken) -> DecodeStream:
        """Have the tokens after the first one made. When it returns, the engine has accepted. Raises as `prefill`."""
        params = {**first.handle, "request_id": placement.request_id}
        tokens = work.tokens + first.token_ids
        body = {**_body(work, tokens, work.max_tokens - len(first.token_ids), params), "stream": True}
        with step("decode", instance=placement.decode, lasts=True) as span, _Translated(placement.decode_address):
            timeout_s = self._settings.next_token_timeout_s
            async with asyncio.timeout(timeout_s):
                response = await self._post(placement.decode_address, body, work.id)
            return DecodeStream(response, placement.decode_address, timeout_s, span)

    async def _post(self, address: str, body: Mapping[str, Any], request_id: str) -> aiohttp.ClientResponse:
        """The answer's head, once the engine has accepted. The caller limits the time."""
        headers = {"X-Request-Id": request_id, **trace_headers()}
        # Nowhere else: a prompt goes where the master said.
        response = await self._http.post(address.rstrip("/") + PATH, json=body, headers=headers, allow_redirects=False)
        if response.status == 200:
            return response
        async with response:
            said = _said((await _read(response, MAX_REFUSAL_BYTES))[0])
        if 400 <= response.status < 500 and response.status not in RETRIED:
            raise InvalidArgument(f"the engine refuses the request: {said}")
        raise Unavailable(f"the engine at {address} answers {response.status}: {said}")


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
    request is scheduled anew."""
    family, kind, protocol, *_ = info
    made = socket.socket(family, kind, protocol)
    notice_vanished_host(made, PEER_TIMEOUT_S, gives_up_unread=True)
    return made


def _body(work: Work, tokens: list[int], max_tokens: int, params: Mapping[str, Any]) -> dict[str, Any]:
    members = {"model": work.model, "prompt": tokens, "max_tokens": max_tokens, "return_token_ids": True}
    return {**work.sampling, **members, "kv_transfer_params": params}


async def _arrived(response: aiohttp.ClientResponse) -> bytes:
    """What of the body has come since; b"": it has ended. Of a connection that it closes itself, as what comes is no HTTP, aiohttp tells
    nobody who waits."""
    while True:
        try:
            async with asyncio.timeout(LOOK_S):
                return await response.content.readany()
        except TimeoutError:
            if response.connection is not None and not response.connection.closed:
                continue
        except RuntimeError:  # of a connection that was closed before
            pass
        raise ProtocolError("its connection ended within the answer, which is no HTTP")


async def _read(response: aiohttp.ClientResponse, most_bytes: int) -> tuple[str, bool]:
    """The beginning of what it says, and whether that is all."""
    got = bytearray()
    while chunk := await _arrived(response):
        got += chunk
        if len(got) > most_bytes:
            return got[:most_bytes].decode(errors="replace"), False
    return got.decode(errors="replace"), True


def _object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError(f"no JSON: {text[:SHOWN_CHARACTERS]!r}") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"no object: {text[:SHOWN_CHARACTERS]!r}")
    return value


def _first_token(answer: Mapping[str, Any]) -> FirstToken:
    choice, handle = _choice(answer), answer.get("kv_transfer_params") or {}
    if choice is None or not isinstance(handle, dict):
        raise ProtocolError("there is no choice in it, or its kv_transfer_params are no object")
    token_ids = _token_ids(choice)
    if token_ids is None:
        raise ProtocolError("it does not know return_token_ids, so that nobody could go on from its first token")
    return FirstToken(Piece(_text(choice), len(token_ids), _finish_reason(choice)), token_ids, handle, _cached_tokens(answer))


def _cached_tokens(answer: Mapping[str, Any]) -> int | None:
    try:
        found = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    except (LookupError, TypeError):
        return None
    return found if isinstance(found, int) and found >= 0 else None


def _piece(answer: Mapping[str, Any]) -> Piece | None:
    """None for an event that is no part of the text."""
    if "error" in answer:
        raise Unavailable(f"the engine failed: {_said(json.dumps(answer))}")
    choice = _choice(answer)
    if choice is None:
        return None
    text, token_ids = _text(choice), _token_ids(choice)
    return Piece(text, (1 if text else 0) if token_ids is None else len(token_ids), _finish_reason(choice))


def _choice(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ProtocolError("it has no list of choices")
    return choices[0] if choices else None


def _text(choice: Mapping[str, Any]) -> str:
    text = choice.get("text")
    if not isinstance(text, str):
        raise ProtocolError("a choice has no text")
    return text


def _finish_reason(choice: Mapping[str, Any]) -> str | None:
    reason = choice.get("finish_reason")
    if reason is not None and not isinstance(reason, str):
        raise ProtocolError("a finish_reason is no text")
    if reason in FAILED:
        raise Unavailable(f"the engine gave the request up: {reason}")
    return reason


def _token_ids(choice: Mapping[str, Any]) -> list[int] | None:
    token_ids = choice.get("token_ids")
    if token_ids is not None and not (isinstance(token_ids, list) and all(isinstance(token, int) for token in token_ids)):
        raise ProtocolError("token_ids are not integers")
    return token_ids


def _said(text: str) -> str:
    """The message of an error in OpenAI's form, or what else there is."""
    try:
        error = json.loads(text)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, RecursionError, LookupError, TypeError):
        message = text
    return str(message).strip()[:SHOWN_CHARACTERS] or "nothing more"
