"""Promises of connections.py, over real sockets and a server of the tests."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from kvstore.rpc.address import parse_address
from kvstore.rpc.vanishing import PEER_TIMEOUT_S
from kvstore.telemetry.http import connections as module
from kvstore.telemetry.http import serving as serving_module
from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.connections import Connections
from kvstore.telemetry.http.server import HttpServer
from tests.telemetry.http.asking import TIMEOUT_S, ask
from tests.telemetry.http.served import fine


async def health(_request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def long(_request: web.Request) -> web.Response:
    return web.Response(body=bytes(LONG_BYTES))


LONG_BYTES = 32 << 20
ASKED = b"GET /%b HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Token: %b\r\n\r\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    """Six connections are the most; who shows a token of an operator is let in."""
    monkeypatch.setattr(serving_module, "Connections", lambda runner: Connections(runner, most=6))

    def authorize(request: web.Request) -> Access:
        return Access.ADMIN if request.headers.get("X-Token") == "ours" else Access.NONE

    made = HttpServer("127.0.0.1:0", authorize=authorize)
    made.add("GET", "/mine", fine, needs=Access.ADMIN)
    made.add("GET", "/long", long, needs=Access.NONE)
    made.add("GET", "/health", health, needs=Access.NONE)
    made.start()
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def connected(server: HttpServer, count: int) -> Iterator[list[socket.socket]]:
    address = parse_address(server.address)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((address.host, address.port), TIMEOUT_S)) for _ in range(count)]


def answer(sock: socket.socket, path: bytes, token: bytes = b"") -> bytes:
    """The first line of what is answered; b"" where it is hung up on."""
    try:
        sock.sendall(ASKED % (path, token))
        return sock.recv(65_536).partition(b"\r\n")[0]
    except ConnectionError:
        return b""


def ends(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


def test_whoever_asks_for_nothing_is_hung_up_on_after_his_time(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(server, 1) as (asking,):
        assert answer(asking, b"health") == b"HTTP/1.1 200 OK"
        monkeypatch.setattr(module, "FIRST_REQUEST_S", 0.05)
        with connected(server, 1) as (silent,):
            assert ends(silent)
        assert answer(asking, b"health") == b"HTTP/1.1 200 OK"


def test_of_too_many_strangers_the_one_who_has_been_here_longest_is_hung_up_on_and_nobody_who_was_let_in(server: HttpServer) -> None:
    with connected(server, 1) as (operator,):
        assert answer(operator, b"mine", b"ours") == b"HTTP/1.1 200 OK"
        with connected(server, 1) as (first,):
            assert answer(first, b"mine") == b"HTTP/1.1 401 Unauthorized"
            with connected(server, 4) as others:
                assert ends(first)
                assert ends(others[0])
                assert answer(others[-1], b"health") == b"HTTP/1.1 200 OK"
                assert answer(operator, b"mine", b"ours") == b"HTTP/1.1 200 OK"
        assert ask(server.address, "/health").status == 200


def test_where_no_connection_is_left_but_those_of_who_was_let_in_another_one_is_refused(server: HttpServer) -> None:
    with contextlib.ExitStack() as stack:
        operators = []
        for _ in range(6):
            operators += stack.enter_context(connected(server, 1))
            assert answer(operators[-1], b"mine", b"ours") == b"HTTP/1.1 200 OK"
        with connected(server, 1) as (late,):
            assert ends(late)
        for operator in operators:
            assert answer(operator, b"mine", b"ours") == b"HTTP/1.1 200 OK"


def test_who_takes_nothing_of_an_answer_is_noticed(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    noticed: list[tuple[float, bool]] = []

    def notice(sock: socket.socket, timeout_s: float, *, gives_up_unread: bool) -> None:
        noticed.append((timeout_s, gives_up_unread))

    monkeypatch.setattr(module, "notice_vanished_host", notice)
    with connected(server, 1) as (asking,):
        assert answer(asking, b"health") == answer(asking, b"health") == b"HTTP/1.1 200 OK"
    assert noticed == [(PEER_TIMEOUT_S, True)]


def test_an_answer_that_is_taken_slowly_comes_whole(server: HttpServer) -> None:
    with connected(server, 1) as (sock,):
        sock.sendall(ASKED % (b"long", b""))
        head, _, body = sock.recv(65_536).partition(b"\r\n\r\n")
        size = len(body)
        while size < LONG_BYTES:
            size += len(sock.recv(1 << 20))
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert size == LONG_BYTES


def test_a_request_whose_connection_has_gone_meanwhile_is_nobodys() -> None:
    inner = asyncio.Protocol()
    runner: Any = SimpleNamespace(server=lambda: inner)
    request: Any = SimpleNamespace(protocol=inner, get_extra_info=lambda name: None)

    async def test() -> None:
        connections = Connections(runner)
        connections.asks(request)
        connections.is_let_in(request)
        made: Any = connections()
        connections.asks(request)
        connections._look(made)
        assert inner in connections._there, "it has asked"
        made.connection_lost(None)
        assert not connections._there

    asyncio.run(test())
