"""Promises of server.py: a server in a thread of its own, over real sockets."""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web

from kvstore.protocol.errors import ConfigError, DeadlineExceeded, Denied, InvalidArgument
from kvstore.telemetry.http import server as module
from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.server import Handler, HttpServer, asked
from tests.telemetry.http.asking import Answer, ask


@contextlib.contextmanager
def serving(handler: Handler, *, needs: Access = Access.READ, has: Access = Access.ADMIN) -> Iterator[HttpServer]:
    """With `handler` at /it."""
    server = HttpServer("127.0.0.1:0", authorize=lambda _: has)
    server.add("GET", "/it", handler, needs=needs)
    server.start()
    try:
        yield server
    finally:
        server.close()


async def fine(_request: web.Request) -> web.Response:
    return web.Response(text=threading.current_thread().name)


def failing(error: Exception) -> Handler:
    async def handler(_request: web.Request) -> web.Response:
        raise error

    return handler


def test_handlers_run_in_a_thread_of_the_server() -> None:
    with serving(fine) as server:
        answer = ask(server.address, "/it")
    assert (answer.status, answer.text) == (200, "http")


def test_what_has_to_wait_waits_in_another_thread() -> None:
    async def handler(_request: web.Request) -> web.Response:
        name = await asked(lambda: threading.current_thread().name)
        return web.Response(text=name)

    with serving(handler) as server:
        assert ask(server.address, "/it").text not in ("http", threading.current_thread().name)


@pytest.mark.parametrize(("has", "status"), [(Access.NONE, 401), (Access.READ, 200), (Access.ADMIN, 200)])
def test_a_route_is_only_for_who_may(has: Access, status: int) -> None:
    with serving(fine, has=has) as server:
        assert ask(server.address, "/it").status == status


def test_what_needs_nothing_is_for_all_even_for_pages_of_other_sites() -> None:
    with serving(fine, needs=Access.NONE, has=Access.NONE) as server:
        assert ask(server.address, "/it", headers={"Origin": "http://evil.example"}).status == 200


def test_pages_of_other_sites_are_refused() -> None:
    with serving(fine) as server:
        answer = ask(server.address, "/it", headers={"Origin": "http://evil.example"})
    assert (answer.status, answer.json()) == (403, {"error": "this is not for pages of other sites"})


@pytest.mark.parametrize(
    ("error", "status"), [(InvalidArgument("no"), 400), (DeadlineExceeded("no"), 504), (Denied("no"), 403), (Exception("no"), 500)]
)
def test_errors_are_json_with_the_status_of_their_branch(error: Exception, status: int, caplog: pytest.LogCaptureFixture) -> None:
    with serving(failing(error)) as server, caplog.at_level(logging.CRITICAL):
        answer = ask(server.address, "/it")
    assert answer.status == status
    assert answer.json()["error"].endswith("no")


def test_what_is_not_there_is_refused_in_the_same_form() -> None:
    with serving(fine) as server:
        assert (ask(server.address, "/that").status, ask(server.address, "/that").json()) == (404, {"error": "404: Not Found"})
        answer = ask(server.address, "/it", method="POST")
        assert (answer.status, answer.headers["Allow"]) == (405, "GET")


def test_too_many_requests_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REQUESTS", 1)
    entered, end = threading.Event(), threading.Event()

    async def handler(_request: web.Request) -> web.Response:
        entered.set()
        await asked(lambda: end.wait(60))
        return web.Response(text="the end")

    with serving(handler) as server:
        answers: list[Answer] = []
        asking = threading.Thread(target=lambda: answers.append(ask(server.address, "/it")))
        asking.start()
        assert entered.wait(60)
        refused = ask(server.address, "/it")
        end.set()
        asking.join(60)
        assert (refused.status, [answer.text for answer in answers]) == (503, ["the end"])
        assert ask(server.address, "/it").status == 200


def test_closing_hangs_up_and_frees_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.05)
    entered = threading.Event()

    async def handler(_request: web.Request) -> web.Response:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    server = HttpServer("127.0.0.1:0", authorize=lambda _: Access.ADMIN)
    server.add("GET", "/it", handler, needs=Access.READ)
    server.start()
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.sendall(b"GET /it HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert entered.wait(60)
        server.close()
        assert connection.recv(1) == b""
    server.close()
    HttpServer(server.address).close()


def test_a_server_that_was_never_started_closes_too() -> None:
    server = HttpServer("127.0.0.1:0")
    with pytest.raises(ConfigError, match="already in use"):
        HttpServer(server.address)
    server.close()
    server.close()
    HttpServer(server.address).close()


def test_what_a_request_may_is_what_the_server_was_told() -> None:
    found: list[Access] = []

    async def handler(request: web.Request) -> web.Response:
        found.append(server.access(request))
        return web.Response()

    with serving(handler, has=Access.READ) as server:
        ask(server.address, "/it")
    assert found == [Access.READ]
