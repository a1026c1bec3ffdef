"""Promises of routes.py: operators only, one profile at a time, within bounds."""

import threading

import pytest

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
