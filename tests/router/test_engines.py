"""Promises of engines.py, with engines on real sockets."""

import asyncio
import dataclasses
import gzip
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from kvstore.client.instances.client import Placement
from kvstore.protocol.errors import DeadlineExceeded, InvalidArgument, KVStoreError, Unavailable, Unreachable
from kvstore.router import engines as module
from kvstore.router.answers import Piece
from kvstore.router.config import RouterSettings
from kvstore.router.engines import MAX_ANSWER_BYTES, DecodeStream, Engines, FirstToken
from kvstore.router.sse import done, event
from kvstore.rpc.vanishing import PEER_TIMEOUT_S
from kvstore.transfer.testing.waiting import PATIENCE_S
from tests.ports import free_ports
from tests.router.scripted import (
    PROMPT,
    SETTINGS,
    Act,
    ScriptedEngine,
    answers,
    choice,
    following,
    hangs_up,
    placement,
    run,
    says,
    streams,
    well,
    work,
)

HANDLE: Mapping[str, Any] = {"blocks": 3}
FIRST = FirstToken(Piece("a", 1, "length"), [97], HANDLE)
QUICK = dataclasses.replace(SETTINGS, first_token_timeout_s=0.5, next_token_timeout_s=0.5)


async def prefill(*script: Act, settings: RouterSettings = SETTINGS, **sampling: Any) -> tuple[FirstToken, ScriptedEngine]:
    async with ScriptedEngine(*script) as engine:
        engines = Engines(settings)
        try:
            return await engines.prefill(work(**sampling), placement(engine.address, "http://there")), engine
        finally:
            await engines.close()


async def decode(*script: Act, settings: RouterSettings = SETTINGS) -> tuple[list[Piece], ScriptedEngine]:
    async with ScriptedEngine(*script) as engine:
        engines = Engines(settings)
        try:
            stream = await engines.decode(work(), placement("http://there", engine.address), FIRST)
            try:
                return [piece async for piece in stream], engine
            finally:
                stream.close()
        finally:
            await engines.close()


def test_a_prefill_asks_for_one_token_and_says_what_was_decided() -> None:
    first, engine = run(prefill(temperature=0.5))
    token = following(PROMPT, 1)
    assert first == FirstToken(Piece(chr(token[0]), 1, "length"), token, {"blocks": 3, "of": "engine"})
    assert engine.bodies == [
        {
            "model": "m",
            "prompt": PROMPT,
            "max_tokens": 1,
            "stream": False,
            "temperature": 0.5,
            "return_token_ids": True,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "decode_address": "http://there",
                "request_id": 7,
                "prefix_blocks": 2,
            },
        }
    ]
    assert engine.headers[0]["X-Request-Id"] == "abc"


@pytest.mark.parametrize(
    ("usage", "cached"),
    [
        ({"prompt_tokens_details": {"cached_tokens": 8}}, 8),
        ({"prompt_tokens_details": {"cached_tokens": -8}}, None),
        ({"prompt_tokens_details": None}, None),
        ({}, None),
        (None, None),
    ],
)
def test_what_a_prefill_engine_says_that_it_did_not_compute_is_told(usage: Any, cached: int | None) -> None:
    first, _ = run(prefill(says(json.dumps({**choice([97]), "usage": usage}))))
    assert first.cached_tokens == cached


def test_a_decode_gets_the_prefills_handle_and_goes_on_after_its_token() -> None:
    pieces, engine = run(decode())
    tokens = following([*PROMPT, 97], 4)
    assert pieces == [Piece(chr(token), 1, None if index < 3 else "length") for index, token in enumerate(tokens)]
    [body] = engine.bodies
    assert (body["prompt"], body["max_tokens"], body["stream"]) == ([*PROMPT, 97], 4, True)
    assert body["kv_transfer_params"] == {"blocks": 3, "request_id": 7}


def test_tokens_are_counted_without_ids_too_and_other_events_are_passed_over() -> None:
    frames = [
        event({"choices": [{"index": 0, "text": "ab"}]}),
        event({"choices": [], "usage": {}}),
        event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}),
        done(),
    ]
    pieces, _ = run(decode(streams(*frames)))
    assert pieces == [Piece("ab", 1), Piece("", 0, "stop")]


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (answers(500, "out of memory"), Unavailable, "the engine at .* answers 500: out of memory"),
        (answers(503, ""), Unavailable, "the engine at .* answers 503: nothing more"),
        (answers(404, "no model"), Unavailable, "answers 404: no model"),
        (answers(429, "later"), Unavailable, "answers 429: later"),
        (says("<html>Bad Gateway</html>", 502), Unavailable, "answers 502: <html>Bad Gateway</html>"),
        (says('{"detail": 1}', 422), InvalidArgument, 'refuses the request: {"detail": 1}'),
        (answers(400, "temperature is too high"), InvalidArgument, "the engine refuses the request: temperature is too high"),
        (hangs_up, Unavailable, "the engine at .* hung up"),
        (says("<html>"), Unavailable, "does not answer as engines do: no JSON: '<html>'"),
        (says("[]"), Unavailable, "does not answer as engines do: no object: '\\[\\]'"),
        (says("{}"), Unavailable, "it has no list of choices"),
        (says('{"choices": [1]}'), Unavailable, "it has no list of choices"),
        (says('{"choices": []}'), Unavailable, "there is no choice in it"),
        (says('{"choices": [{}], "kv_transfer_params": 1}'), Unavailable, "its kv_transfer_params are no object"),
        (says('{"choices": [{"text": "a"}]}'), Unavailable, "it does not know return_token_ids"),
        (says('{"choices": [{"token_ids": [1]}]}'), Unavailable, "a choice has no text"),
        (says('{"choices": [{"text": "a", "token_ids": ["x"]}]}'), Unavailable, "token_ids are not integers"),
        (says('{"choices": [{"text": "a", "token_ids": [1], "finish_reason": 1}]}'), Unavailable, "a finish_reason is no text"),
        (says(json.dumps(choice([], "abort"))), Unavailable, "the engine gave the request up: abort"),
    ],
)
def test_a_prefill_that_fails_says_whether_another_engine_may_do_better(act: Act, error: type[KVStoreError], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        run(prefill(act))
    assert type(raised.value) is error


def test_an_engine_sends_a_prompt_nowhere_else() -> None:
    async def redirected() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with ScriptedEngine() as other, ScriptedEngine(moved_to(other.address)) as engine:
            engines = Engines(SETTINGS)
            try:
                with pytest.raises(Unavailable, match="answers 307: elsewhere"):
                    await engines.prefill(work(), placement(engine.address, "http://there"))
            finally:
                await engines.close()
            return engine.bodies, other.bodies

    asked, other = run(redirected())
    assert len(asked) == 1
    assert other == []


def moved_to(address: str) -> Act:
    async def act(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": f"{address}v1/completions"}, text="elsewhere")

    return act


def pours(status: int = 200, **headers: str) -> Act:
    """Says more and more, until the other side hangs up."""

    async def act(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        while True:
            await response.write(b" " * (1 << 20))

    return act


def test_an_answer_without_an_end_is_given_up() -> None:
    with pytest.raises(Unavailable, match=f"an answer of more than {MAX_ANSWER_BYTES} bytes"):
        run(prefill(pours()))
    with pytest.raises(Unavailable, match="answers 500: nothing more"):
        run(prefill(pours(500)))


def test_what_is_compressed_is_not_unpacked() -> None:
    async def act(_request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        whole = json.dumps({**choice(body["prompt"][:1], "length"), "kv_transfer_params": {}}).encode()
        return web.Response(body=gzip.compress(whole), headers={"Content-Encoding": "gzip"})

    with pytest.raises(Unavailable, match="no JSON"):
        run(prefill(act))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (streams(event(choice([97]))), "the stream ended before its end was said"),
        (streams(event(choice([97])), then=hangs_up), "hung up"),
        (streams(event({"error": {"message": "CUDA error"}}), done()), "the engine failed: CUDA error"),
        (streams(event({"error": "text"}), done()), "the engine failed: text"),
        (streams(b"data: {\n\n"), "no JSON: '{'"),
        (streams(event(choice([97])), event(choice([], "abort")), done()), "the engine gave the request up: abort"),
        (streams(event(choice([97])), event(choice([98], "error")), done()), "the engine gave the request up: error"),
        (streams(b"data: \xff\n\n"), "an event is not UTF-8"),
        (answers(500, "no room"), "answers 500: no room"),
    ],
)
def test_a_decode_that_fails_is_unavailable(act: Act, message: str) -> None:
    with pytest.raises(Unavailable, match=message):
        run(decode(act))


def test_an_engine_that_is_not_there_is_unreachable() -> None:
    async def ask(address: str) -> None:
        engines = Engines(SETTINGS)
        try:
            await engines.prefill(work(), placement(address, ""))
        finally:
            await engines.close()

    for address in (f"http://127.0.0.1:{free_ports(1)[0]}", "no URL", "ftp://127.0.0.1"):
        with pytest.raises(Unreachable, match="cannot be reached"):
            run(ask(address))


def test_a_silent_engine_is_given_up_and_hears_of_it() -> None:
    async def test(*, is_prefill: bool) -> None:
        async with ScriptedEngine() as engine:
            engine.script.append(engine.silent if is_prefill else streams(event(choice([97])), then=engine.silent))
            engines = Engines(QUICK)
            where = placement(engine.address, engine.address)
            try:
                with pytest.raises(DeadlineExceeded, match="takes too long"):
                    if is_prefill:
                        await engines.prefill(work(), where)
                    else:
                        await drained(await engines.decode(work(), where, FIRST))
                await engine.cancelled.wait()
            finally:
                await engines.close()

    run(test(is_prefill=True))
    run(test(is_prefill=False))


def test_an_engine_that_only_keeps_its_connection_alive_is_given_up() -> None:
    async def chatters(request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(event(choice([97])))
        while True:  # until the other side hangs up
            await response.write(b": still here\n\n" + event({"choices": []}))
            await asyncio.sleep(0.02)

    async def test(*, is_served: bool) -> None:
        async with ScriptedEngine(chatters) as engine:
            engines = Engines(QUICK)
            where = placement(engine.address, engine.address)
            try:
                with pytest.raises(DeadlineExceeded, match="takes too long"):
                    await drained(await (engines.serve(work(), where) if is_served else engines.decode(work(), where, FIRST)))
            finally:
                await engines.close()

    run(test(is_served=True))
    run(test(is_served=False))


async def drained(stream: DecodeStream) -> None:
    try:
        async for piece in stream:
            assert piece == Piece("a", 1)
    finally:
        stream.close()


def test_a_cancelled_prefill_and_a_closed_stream_are_heard_of_at_the_engine() -> None:
    async def test() -> None:
        async with ScriptedEngine() as engine:
            engine.script += [engine.silent, streams(event(choice([97])), then=engine.silent)]
            engines = Engines(SETTINGS)
            where = placement(engine.address, engine.address)
            asking = asyncio.create_task(engines.prefill(work(), where))
            await engine.entered.wait()
            asking.cancel()
            await engine.cancelled.wait()
            engine.cancelled.clear()
            stream = await engines.decode(work(), where, FIRST)
            async for _ in stream:
                break
            stream.close()
            await engine.cancelled.wait()
            await engines.close()

    run(test())


@asynccontextmanager
async def asked(address: str, settings: RouterSettings = QUICK) -> AsyncIterator[tuple[Engines, Placement]]:
    engines = Engines(settings)
    try:
        yield engines, placement(address, address)
    finally:
        await engines.close()


@pytest.mark.filterwarnings("ignore:Sending a large body")
def test_an_engine_that_does_not_take_a_prompt_is_given_up() -> None:
    """As one whose process is stopped: its kernel accepts, and nobody reads."""

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def test(listener: socket.socket) -> None:
        long = work(range(100_000, 400_000))  # more than two kernels keep
        async with asked(f"http://127.0.0.1:{listener.getsockname()[1]}") as (engines, where):
            before = open_files()
            with pytest.raises(DeadlineExceeded, match="takes too long"):
                await engines.prefill(long, where)
            with pytest.raises(DeadlineExceeded, match="takes too long"):
                await engines.serve(long, where)
            with pytest.raises(DeadlineExceeded, match="takes too long"):
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


def test_a_head_that_comes_in_drips_does_not_put_the_deadline_off() -> None:
    hung_up = asyncio.Event()

    async def drips(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while not writer.is_closing():
            writer.write(b"X: y\r\n")
            await asyncio.sleep(0.1)
        hung_up.set()

    async def test() -> None:
        engine = await asyncio.start_server(drips, "127.0.0.1", 0)
        async with engine, asked(f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}") as (engines, where):
            with pytest.raises(DeadlineExceeded, match="takes too long"):
                await engines.prefill(work(), where)
            await hung_up.wait()

    run(test())


def test_a_name_server_that_is_silent_is_an_engine_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()

    def looks_up(*_: Any, **__: Any) -> list[Any]:
        let_go.wait()
        return []

    async def test() -> None:
        monkeypatch.setattr(socket, "getaddrinfo", looks_up)
        try:
            async with asked("http://engine.example", dataclasses.replace(SETTINGS, connect_timeout_s=0.1)) as (engines, where):
                with pytest.raises(Unreachable, match="cannot be reached"):
                    await engines.prefill(work(), where)
        finally:
            let_go.set()

    run(test())


def test_a_connection_notices_when_the_host_of_its_engine_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    noticed = []

    def notice(sock: socket.socket, timeout_s: float, *, gives_up_unread: bool) -> None:
        noticed.append((sock.family, timeout_s, gives_up_unread))

    monkeypatch.setattr(module, "notice_vanished_host", notice)
    run(prefill())
    assert noticed == [(socket.AF_INET, PEER_TIMEOUT_S, True)]


def chunked(*frames: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(frame), frame) for frame in frames)


@asynccontextmanager
async def raw_engine(*parts: bytes) -> AsyncIterator[str]:
    """Answers with the head of a chunked body and these bytes, whatever they mean, and leaves the connection open."""
    over = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        [length] = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        await reader.readexactly(int(length.partition(b":")[2]))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for part in parts:
            await asyncio.sleep(0.02)  # or the head and what is malformed would be read as one, of which aiohttp tells
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
def test_an_answer_that_stops_being_http_is_given_up_long_before_its_deadline(parts: tuple[bytes, ...]) -> None:
    async def test() -> None:
        async with raw_engine(*parts) as address, asked(address, SETTINGS) as (engines, where):
            with pytest.raises(Unavailable, match="which is no HTTP"):
                await engines.prefill(work(), where)
        async with raw_engine(*parts) as address, asked(address, SETTINGS) as (engines, where):
            with pytest.raises(Unavailable, match="which is no HTTP"):
                await drained(await engines.decode(work(), where, FIRST))

    run(test())


@pytest.mark.parametrize("then", [(), (b"zz\r\n",), (chunked(event(choice([98]))),)])
def test_an_answer_is_whole_once_its_end_is_said(then: tuple[bytes, ...]) -> None:
    """Whatever becomes of the body, whose end does not come."""

    async def test() -> None:
        async with (
            raw_engine(chunked(event(choice([97]))), chunked(done()), *then) as address,
            asked(address, SETTINGS) as (engines, where),
        ):
            await drained(await engines.decode(work(), where, FIRST))

    run(test())


def test_an_answer_is_whole_though_its_connection_broke_before_its_end_was_read() -> None:
    async def test() -> None:
        async with (
            raw_engine(chunked(event(choice([97]))), chunked(done()) + b"zz\r\n") as address,
            asked(address, SETTINGS) as (engines, where),
        ):
            stream = await engines.decode(work(), where, FIRST)
            await stream.first()
            async with asyncio.timeout(PATIENCE_S):
                while (connection := stream._response.connection) is not None and not connection.closed:
                    await asyncio.sleep(0.001)
            assert [piece async for piece in stream] == []
            stream.close()

    run(test())


def test_a_stream_that_was_read_to_its_end_leaves_its_connection_for_the_next_one() -> None:
    opened = []

    async def notes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        opened.append(request.transport)
        return await well(request, body)

    async def test() -> None:
        async with ScriptedEngine(notes, notes) as engine, asked(engine.address, SETTINGS) as (engines, where):
            for _ in range(2):
                stream = await engines.decode(work(), where, FIRST)
                assert len([piece async for piece in stream]) == 4
                stream.close()
        assert len(set(opened)) == 1

    run(test())
