"""Promises of engines.py, with engines on real sockets."""

import asyncio
import gzip
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from kvstore.client.instances.client import RequestPlacement
from kvstore.protocol.errors import DeadlineExceeded, InvalidArgument, KVStoreError, Unavailable
from kvstore.router import engines as module
from kvstore.router.answer_reader import done, event
from kvstore.router.config import RouterSettings
from kvstore.router.engines import MAX_BUFFERED_BYTES, EngineAnswer, EngineFailed, EngineRefused, Engines, PrefillReply
from kvstore.router.openai_api import ApiRequest
from kvstore.rpc.keepalive import PEER_TIMEOUT_S
from tests.router.scripted import (
    SETTINGS,
    Act,
    ScriptedEngine,
    answers,
    choice,
    completion,
    hangs_up,
    placement,
    run,
    says,
    streams,
    well,
)

FIRST = PrefillReply({"blocks": 3}, None)
STREAMED = completion(stream=True)
QUICK = replace(SETTINGS, first_token_timeout_s=0.5, next_token_timeout_s=0.5, answer_timeout_s=0.5, tokenize_timeout_s=0.5)


@asynccontextmanager
async def asked(address: str, settings: RouterSettings = QUICK) -> AsyncIterator[tuple[Engines, RequestPlacement]]:
    engines = Engines(settings)
    try:
        yield engines, placement(address, address)
    finally:
        await engines.close()


async def prefill(*script: Act, settings: RouterSettings = SETTINGS, **members: Any) -> tuple[PrefillReply, ScriptedEngine]:
    async with ScriptedEngine(*script) as engine, asked(engine.address, settings) as (engines, where):
        return await engines.prefill(completion(**members), where), engine


async def drained(answer: EngineAnswer) -> bytes:
    try:
        return b"".join([chunk async for chunk in answer.chunks()])
    finally:
        answer.close()


async def decode(*script: Act, request: ApiRequest = STREAMED) -> tuple[bytes, EngineAnswer]:
    async with ScriptedEngine(*script) as engine, asked(engine.address, SETTINGS) as (engines, where):
        answer = await engines.decode(request, where, FIRST)
        return await drained(answer), answer


def test_a_prefill_says_what_was_decided() -> None:
    prefilled, engine = run(prefill(temperature=0.5))
    assert prefilled == PrefillReply({"blocks": 3, "of": "engine"}, None)
    [body] = engine.bodies
    decode_address = body["kv_transfer_params"].pop("decode_address")
    assert decode_address.startswith("http://127.0.0.1:")
    assert body["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "request_id": 7,
        "prefix_blocks": 2,
    }
    assert (engine.headers[0]["X-Request-Id"], engine.headers[0]["Content-Type"]) == ("abc", "application/json")


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (answers(500, "out of memory"), EngineFailed, "the engine at .* responded with status 500: out of memory"),
        (answers(503, ""), EngineFailed, "the engine at .* responded with status 503: no message"),
        (answers(429, "later"), EngineFailed, "responded with status 429: later"),
        (says("<html>Bad Gateway</html>", 502), EngineFailed, "responded with status 502: <html>Bad Gateway</html>"),
        (says('{"detail": 1}', 422), EngineRefused, "the engine responded with status 422"),
        (answers(404, "no model"), EngineRefused, "the engine responded with status 404"),
        (hangs_up, Unavailable, "the engine at .* disconnected"),
        (says("<html>"), Unavailable, "sent a malformed response: not a JSON object: b'<html>'"),
        (says("[]"), Unavailable, "sent a malformed response: not a JSON object: b'\\[\\]'"),
        (says('{"choices": [{}], "kv_transfer_params": 1}'), Unavailable, "kv_transfer_params is not an object"),
        (says(json.dumps(choice([], "abort"))), Unavailable, "failed: it dropped the request: abort"),
    ],
)
def test_a_prefill_that_fails_says_if_another_may_do_better(act: Act, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        run(prefill(act))
    assert type(raised.value) is error


@pytest.mark.parametrize(
    ("act", "error"),
    [
        (answers(404, "Not Found"), InvalidArgument),
        (answers(503, "later"), EngineFailed),
        (says("{}"), Unavailable),
        (hangs_up, Unavailable),
    ],
)
async def test_an_engine_that_does_not_tokenise_is_an_error(act: Act, error: type[KVStoreError]) -> None:
    async with ScriptedEngine() as engine, asked(engine.address, SETTINGS) as (engines, _):
        engine.tokenizing.append(act)
        with pytest.raises(error):
            await engines.tokenize(engine.address, b'{"prompt": "ab"}', {})


@pytest.mark.promise("least-privilege")
async def test_an_engine_sends_a_prompt_nowhere_else() -> None:
    async with ScriptedEngine() as other, ScriptedEngine(moved_to(other.address)) as engine:
        async with asked(engine.address, SETTINGS) as (engines, where):
            with pytest.raises(EngineFailed, match="responded with status 307: elsewhere"):
                await engines.prefill(completion(), where)
        assert (len(engine.bodies), other.bodies) == (1, [])


def moved_to(address: str) -> Act:
    async def act(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": f"{address}v1/completions"}, text="elsewhere")

    return act


def pours(status: int = 200, **headers: str) -> Act:
    """Send data until the peer disconnects."""

    async def act(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        while True:
            await response.write(b" " * (1 << 20))

    return act


@pytest.mark.promise("least-privilege")
async def test_an_answer_without_an_end_is_not_held_back() -> None:
    async with ScriptedEngine(pours(), pours()) as engine, asked(engine.address, SETTINGS) as (engines, where):
        with pytest.raises(Unavailable, match="not a JSON object"):
            await engines.prefill(completion(), where)
        answer = await engines.serve(completion(), where)
        size = 0
        async for chunk in answer.chunks():
            size += len(chunk)
            if size > 2 * MAX_BUFFERED_BYTES:
                break
        answer.close()


@pytest.mark.parametrize("what", ["prefill", "tokenize", "whole", "first", "next"])
async def test_a_silent_engine_is_given_up_and_hears_of_it(what: str) -> None:
    settings = replace(SETTINGS, next_token_timeout_s=0.5) if what == "next" else QUICK
    async with ScriptedEngine() as engine, asked(engine.address, settings) as (engines, where):
        engine.tokenizing.append(engine.silent)
        engine.script.append(streams(event(choice([97])), then=engine.silent) if what == "next" else engine.silent)
        with pytest.raises(DeadlineExceeded, match="did not respond in time"):
            match what:
                case "prefill":
                    await engines.prefill(completion(), where)
                case "tokenize":
                    await engines.tokenize(engine.address, b"{}", {})
                case "whole":
                    await engines.serve(completion(), where)
                case _:
                    await drained(await engines.decode(STREAMED, where, FIRST))
        if engine.entered.is_set():  # a machine that stalls for longer than the deadline may not have begun
            await engine.cancelled.wait()


async def test_cancelling_and_closing_hang_up_on_the_engine() -> None:
    async with ScriptedEngine() as engine, asked(engine.address, SETTINGS) as (engines, where):
        engine.script += [engine.silent, streams(event(choice([97])), then=engine.silent)]
        asking = asyncio.create_task(engines.prefill(completion(), where))
        await engine.entered.wait()
        asking.cancel()
        await engine.cancelled.wait()
        engine.cancelled.clear()
        answer = await engines.decode(STREAMED, where, FIRST)
        assert await anext(answer.chunks()) == event(choice([97]))
        answer.close()
        await engine.cancelled.wait()


@pytest.mark.filterwarnings("ignore:Sending a large body")
def test_an_engine_that_does_not_take_a_prompt_is_given_up() -> None:
    """A stopped process: its kernel accepts connections, but it does not read."""

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def test(listener: socket.socket) -> None:
        long = completion(range(100_000, 400_000))  # more than two kernels keep
        async with asked(f"http://127.0.0.1:{listener.getsockname()[1]}") as (engines, where):
            before = open_files()
            with pytest.raises(DeadlineExceeded, match="did not respond in time"):
                await engines.prefill(long, where)
            with pytest.raises(DeadlineExceeded, match="did not respond in time"):
                await engines.serve(long, where)
            with pytest.raises(DeadlineExceeded, match="did not respond in time"):
                await engines.decode(long, where, FIRST)
            listener.close()  # what its kernel has taken is let go, and with it the connections
            while open_files() >= before:
                await asyncio.sleep(0.001)

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1448)  # as on Ethernet: with the loopback's, buffers are larger
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        run(test(listener))


async def test_engines_slow_head_does_not_extend_the_deadline() -> None:
    hung_up = asyncio.Event()

    async def drips(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while not writer.is_closing():
            writer.write(b"X: y\r\n")
            await asyncio.sleep(0.1)
        hung_up.set()

    engine = await asyncio.start_server(drips, "127.0.0.1", 0)
    async with engine, asked(f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}") as (engines, where):
        with pytest.raises(DeadlineExceeded, match="did not respond in time"):
            await engines.prefill(completion(), where)
        await hung_up.wait()


def test_engines_connection_detects_dead_host(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed = []

    def notice(sock: socket.socket, timeout_s: float, *, limit_unacknowledged: bool) -> None:
        noticed.append((sock.family, timeout_s, limit_unacknowledged))

    monkeypatch.setattr(module, "enable_keepalive", notice)
    run(prefill())
    assert noticed == [(socket.AF_INET, PEER_TIMEOUT_S, True)]


def chunked(*frames: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(frame), frame) for frame in frames)


@asynccontextmanager
async def raw_engine(*parts: bytes) -> AsyncIterator[str]:
    """Engine that responds with the head of a chunked body and these raw bytes, and leaves the connection open."""
    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        await reader.readexactly(int(length.partition(b":")[2]))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in parts:
            await asyncio.sleep(0.02)  # aiohttp reports malformed bytes that it reads together with the head
            writer.write(part)
        await reader.read()
        writer.close()
        await writer.wait_closed()
        over.set()

    engine = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with engine:
        yield f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
        await over.wait()


@pytest.mark.parametrize("parts", [(b"zz\r\n",), (chunked(event(choice([97]))), b"zz\r\n"), (chunked(event(choice([97]))) + b"zz\r\n",)])
async def test_engines_malformed_http_fails_before_the_deadline(parts: tuple[bytes, ...]) -> None:
    async with raw_engine(*parts) as address, asked(address, SETTINGS) as (engines, where):
        with pytest.raises(Unavailable, match="malformed HTTP"):
            await drained(await engines.decode(STREAMED, where, FIRST))


@pytest.mark.parametrize("then", [(), (b"zz\r\n",), (chunked(event(choice([98]))),)])
async def test_an_answer_is_whole_once_its_end_is_said(then: tuple[bytes, ...]) -> None:
    """After the last event the end of the body does not matter."""

    async with (
        raw_engine(chunked(event(choice([97]))), chunked(done()), *then) as address,
        asked(address, SETTINGS) as (engines, where),
    ):
        await drained(await engines.decode(STREAMED, where, FIRST))


async def test_the_end_of_an_answer_may_meet_a_connection_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a router whose loop was late found the end and the check's time in one iteration, and called it malformed."""
    monkeypatch.setattr("kvstore.router.engines.CONNECTION_CHECK_S", 0.1)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(chunked(event(choice([97]))))
        await asyncio.sleep(0.05)
        writer.write(chunked(done()) + b"0\r\n\r\n")
        time.sleep(0.1)  # noqa: ASYNC251 - the loop is late
        writer.close()

    async with (
        await asyncio.start_server(answer, "127.0.0.1", 0) as engine,
        asked(f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}", SETTINGS) as (engines, where),
    ):
        assert (await drained(await engines.decode(STREAMED, where, FIRST))).endswith(done())


async def test_engines_connection_is_reused_after_a_whole_stream() -> None:
    opened = []

    async def notes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        opened.append(request.transport)
        return await well(request, body)

    async with ScriptedEngine(notes, notes) as engine, asked(engine.address, SETTINGS) as (engines, where):
        for _ in range(2):
            assert (await drained(await engines.decode(STREAMED, where, FIRST))).endswith(done())
    assert len(set(opened)) == 1


@pytest.mark.promise("least-privilege")
def test_a_compressed_answer_passes_as_it_is() -> None:
    whole = gzip.compress(json.dumps(choice([97], "length")).encode())

    async def act(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=whole, headers={"Content-Encoding": "gzip"})

    passed, answer = run(decode(act, request=completion()))
    assert (passed, answer.headers["Content-Encoding"]) == (whole, "gzip")
