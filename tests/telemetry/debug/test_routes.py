"""Promises of routes.py: operators only, one profile at a time, within bounds."""

import asyncio
import socket
import threading

import pytest
from aiohttp import web

from kvstore.telemetry.debug import routes
from kvstore.telemetry.debug.routes import add_debug
from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.server import HttpServer
from tests.telemetry.http.asking import Answer, ask


@pytest.fixture
def server() -> HttpServer:
    return HttpServer("127.0.0.1:0")


def test_threads_and_profiles_are_texts(server: HttpServer) -> None:
    add_debug(server)
    server.start()
    try:
        assert "MainThread (" in ask(server.address, "/debug/threads").text
        assert "MainThread;" in ask(server.address, "/debug/profile?seconds=0.05").text
    finally:
        server.close()


def test_only_operators_see_them() -> None:
    server = HttpServer("127.0.0.1:0", authorize=lambda _: Access.READ)
    add_debug(server)
    server.start()
    try:
        assert [ask(server.address, path).status for path in ("/debug/threads", "/debug/profile")] == [401, 401]
    finally:
        server.close()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "61", "much"])
def test_seconds_out_of_bounds_are_refused(server: HttpServer, seconds: str) -> None:
    add_debug(server)
    server.start()
    try:
        answer = ask(server.address, f"/debug/profile?seconds={seconds}")
    finally:
        server.close()
    assert (answer.status, "above 0, 60 at most" in answer.text) == (400, True)


def test_a_second_profile_is_refused_while_one_is_taken(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, end = threading.Event(), threading.Event()

    def slowly(_seconds: float) -> str:
        entered.set()
        end.wait(60)
        return "done"

    monkeypatch.setattr(routes, "profile", slowly)
    add_debug(server)
    server.start()
    answers: list[Answer] = []
    asking = threading.Thread(target=lambda: answers.append(ask(server.address, "/debug/profile")))
    asking.start()
    try:
        assert entered.wait(60)
        assert ask(server.address, "/debug/profile").status == 503
        end.set()
        asking.join(60)
        assert [answer.text for answer in answers] == ["done"]
        assert ask(server.address, "/debug/profile").status == 200
    finally:
        end.set()
        server.close()


def test_a_profile_whose_client_has_hung_up_is_still_the_one(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, end = threading.Event(), threading.Event()

    def slowly(_seconds: float) -> str:
        entered.set()
        end.wait(60)
        return "done"

    monkeypatch.setattr(routes, "profile", slowly)
    hung_up = threading.Event()

    def add(server: HttpServer) -> None:
        add_debug(server)
        [(index, profiled)] = [(n, route[2]) for n, route in enumerate(server.routes) if route[1] == "/debug/profile"]

        async def noting(request: web.Request) -> web.StreamResponse:
            try:
                return await profiled(request)
            except asyncio.CancelledError:
                hung_up.set()
                raise

        server.needs[noting] = Access.ADMIN
        server.routes[index] = ("GET", "/debug/profile", noting)

    server.later(add)
    server.start()
    host, _, port = server.address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 60) as connection:
            connection.sendall(b"GET /debug/profile HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert entered.wait(60)
        assert hung_up.wait(60)
        assert ask(server.address, "/debug/profile").status == 503
    finally:
        end.set()
        server.close()
