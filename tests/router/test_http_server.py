"""Promises of http_server.py, with this process's signals and real sockets."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from aiohttp import web

from kvstore.router.http_server import abort_connection, serve
from kvstore.telemetry.http import aiohttp_server as http_serving
from kvstore.telemetry.http.listener import listening


class Waiting:
    """Application whose handler waits for an event."""

    def __init__(self) -> None:
        self.entered, self.end, self.cancelled, self.ready = (asyncio.Event() for _ in range(4))
        self.stopped_by = ""
        self.app = web.Application()
        self.app.add_routes([web.get("/", self._handle), web.get("/hang-up", self._hang_up)])
        self.listener = listening("127.0.0.1:0")

    async def _handle(self, _request: web.Request) -> web.Response:
        self.entered.set()
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return web.Response(text="the end")

    async def _hang_up(self, request: web.Request) -> web.Response:
        abort_connection(request)
        return web.Response(text="never read")

    def stop(self, name: str) -> None:
        self.stopped_by = name

    async def ask(self, path: str = "/") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.listener.getsockname())
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        return reader, writer


@asynccontextmanager
async def served(drain_s: float = 10.0, max_connections: int = 100) -> AsyncIterator[tuple[Waiting, "asyncio.Task[None]"]]:
    waiting = Waiting()
    serving = asyncio.create_task(
        serve(
            waiting.app,
            waiting.listener,
            max_connections=max_connections,
            drain_s=drain_s,
            on_ready=waiting.ready.set,
            on_stop=waiting.stop,
        )
    )
    await waiting.ready.wait()
    yield waiting, serving
    if not serving.done():
        os.kill(os.getpid(), signal.SIGTERM)
    await serving


async def test_a_handler_whose_client_hangs_up_is_cancelled() -> None:
    async with served() as (waiting, _):
        _reader, writer = await waiting.ask()
        await waiting.entered.wait()
        writer.close()
        await writer.wait_closed()
        await waiting.cancelled.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_server_drains_after_a_signal_without_new_clients(number: signal.Signals) -> None:
    async with served() as (waiting, serving):
        reader, writer = await waiting.ask()
        await waiting.entered.wait()
        os.kill(os.getpid(), number)
        while True:
            try:
                (await asyncio.open_connection(*waiting.listener.getsockname()))[1].close()
            except OSError:
                break
            await asyncio.sleep(0.001)
        assert waiting.stopped_by == number.name
        assert not serving.done()
        waiting.end.set()
        assert (await reader.read()).endswith(b"the end")
        writer.close()
        await serving


@pytest.mark.promise("peers-vanish")
async def test_a_connection_that_asks_for_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served() as (waiting, _):
        asking, writer = await waiting.ask()
        await waiting.entered.wait()
        monkeypatch.setattr(http_serving, "FIRST_REQUEST_S", 0.05)
        silent, other = await asyncio.open_connection(*waiting.listener.getsockname())
        with suppress(ConnectionResetError):
            assert await silent.read() == b""
        other.close()
        waiting.end.set()
        assert (await asking.read()).endswith(b"the end")
        writer.close()


async def test_server_at_connection_limit_keeps_active_clients() -> None:
    async with served(max_connections=2) as (waiting, _):
        asking, writer = await waiting.ask()
        await waiting.entered.wait()
        first, one = await asyncio.open_connection(*waiting.listener.getsockname())
        _, two = await asyncio.open_connection(*waiting.listener.getsockname())
        with suppress(ConnectionResetError):
            assert await first.read() == b""
        waiting.end.set()
        assert (await asking.read()).endswith(b"the end")
        for each in (writer, one, two):
            each.close()
