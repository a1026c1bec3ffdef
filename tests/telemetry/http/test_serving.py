"""Promises of serving.py: who may, how many at once, and the form of errors, over real sockets."""

import logging
import ssl
import threading
import urllib.request
from pathlib import Path

import pytest
from aiohttp import web

from kvstore.protocol.errors import DeadlineExceeded, Denied, InvalidArgument
from kvstore.security.tls.https import HttpsCertificate
from kvstore.security.tls.subjects import MASTER, Subject
from kvstore.telemetry.http import serving as module
from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.server import Handler, HttpServer, asked
from kvstore.transfer.testing.waiting import eventually
from tests.security.tls.certified import HOSTS, Cluster
from tests.telemetry.http.asking import Answer, ask
from tests.telemetry.http.served import fine, serving


def failing(error: Exception) -> Handler:
    async def handler(_request: web.Request) -> web.Response:
        raise error

    return handler


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


def test_who_shows_a_credential_may_ask_from_this_host_by_its_name() -> None:
    with serving(fine) as server:
        assert ask(server.address, "/it", headers={"Host": "node-1.example:9100"}).status == 200
        assert ask(server.address, "/it", headers={"Host": "[::1"}).status == 200


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


def test_with_a_certificate_nothing_but_https_is_spoken_and_another_one_is_shown_when_its_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    first, second = Cluster(tmp_path / "first"), Cluster(tmp_path / "second")
    cert, key = first.file(Subject(MASTER), hosts=HOSTS)
    server = HttpServer("127.0.0.1:0", https=HttpsCertificate(str(cert), str(key)))
    server.add("GET", "/it", fine, needs=Access.NONE)
    server.start()
    try:
        assert is_answered(server, first)
        assert not is_answered(server, second)
        with pytest.raises(OSError, match=r"(?i)closed|reset"):
            ask(server.address, "/it")
        for file, other in zip((cert, key), second.file(Subject(MASTER), hosts=HOSTS), strict=True):
            other.replace(file)
        eventually(lambda: is_answered(server, second), "the new certificate is shown")
    finally:
        server.close()


def is_answered(server: HttpServer, trusted: Cluster) -> bool:
    """Somebody who trusts that authority alone."""
    trusting = ssl.create_default_context(cafile=str(trusted.folder / "ca.pem"))
    try:
        with urllib.request.urlopen(f"{server.told()}/it", timeout=60, context=trusting) as answered:
            return bool(answered.status == 200)
    except OSError:
        return False
