"""Promises of serving.py: who may, how many at once, and the form of errors, over real sockets."""

import contextlib
import logging
import socket
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from kvstore.protocol.errors import DeadlineExceeded, Denied, InvalidArgument
from kvstore.rpc.address import parse_address
from kvstore.rpc.keepalive import PEER_TIMEOUT_S
from kvstore.security.tls.https import HttpsCertificate
from kvstore.security.tls.subjects import MASTER, CertificateSubject
from kvstore.telemetry.http import aiohttp_server as module
from kvstore.telemetry.http.access import AccessLevel, TokenAccess
from kvstore.telemetry.http.aiohttp_server import ConnectionFactory
from kvstore.telemetry.http.server import Handler, HttpServer, run_in_thread
from kvstore.testing.transfer.awaited import eventually
from tests.security.tls.certified import HOSTS, Cluster
from tests.telemetry.http.asking import TIMEOUT_S, Answer, ask
from tests.telemetry.http.served import fine, running, serving


def failing(error: Exception) -> Handler:
    async def handler(_request: web.Request) -> web.Response:
        raise error

    return handler


@pytest.mark.parametrize(("has", "status"), [(AccessLevel.NONE, 401), (AccessLevel.READ, 200), (AccessLevel.ADMIN, 200)])
def test_a_route_is_only_for_who_may(has: AccessLevel, status: int) -> None:
    with serving(fine, has=has) as server:
        assert ask(server.address, "/it").status == status


def test_public_routes_accept_foreign_pages() -> None:
    with serving(fine, needs=AccessLevel.NONE, has=AccessLevel.NONE) as server:
        assert ask(server.address, "/it", headers={"Origin": "http://evil.example"}).status == 200


@pytest.mark.promise("least-privilege")
def test_pages_of_other_sites_are_refused() -> None:
    with serving(fine) as server:
        answer = ask(server.address, "/it", headers={"Origin": "http://evil.example"})
    assert (answer.status, answer.json()) == (403, {"error": "requests from pages of other sites are refused"})


def test_credentials_allow_requests_by_host_name() -> None:
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
        await run_in_thread(lambda: end.wait(60))
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


@pytest.mark.promise("tls-everywhere")
def test_https_only_and_certificate_is_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CERTIFICATE_CHECK_S", 0.01)
    first, second = Cluster(tmp_path / "first"), Cluster(tmp_path / "second")
    cert, key = first.file(CertificateSubject(MASTER), hosts=HOSTS)
    server = HttpServer("127.0.0.1:0", https=HttpsCertificate(str(cert), str(key)))
    server.add("GET", "/it", fine, needs=AccessLevel.NONE)
    with running(server):
        assert is_answered(server, first)
        assert not is_answered(server, second)
        with pytest.raises(OSError, match=r"(?i)closed|reset"):
            ask(server.address, "/it")
        for file, other in zip((cert, key), second.file(CertificateSubject(MASTER), hosts=HOSTS), strict=True):
            other.replace(file)
        eventually(lambda: is_answered(server, second), "the new certificate is shown")


def is_answered(server: HttpServer, trusted: Cluster) -> bool:
    """Return whether a client that trusts only that authority gets a response."""
    trusting = ssl.create_default_context(cafile=str(trusted.folder / "ca.pem"))
    try:
        with urllib.request.urlopen(f"{server.advertised()}/it", timeout=60, context=trusting) as answered:
            return bool(answered.status == 200)
    except OSError:
        return False


async def health(_request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def long(_request: web.Request) -> web.Response:
    return web.Response(body=bytes(LONG_BYTES))


LONG_BYTES = 32 << 20
ASKED = b"GET /%b HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %b\r\n\r\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpServer]:
    """Six connections are the most; who shows a token of an operator is let in."""
    monkeypatch.setattr(module, "ConnectionFactory", lambda runner: ConnectionFactory(runner, most=6))
    made = HttpServer("127.0.0.1:0", access_control=TokenAccess(["ours"]))
    made.add("GET", "/mine", fine, needs=AccessLevel.ADMIN)
    made.add("GET", "/long", long, needs=AccessLevel.NONE)
    made.add("GET", "/health", health, needs=AccessLevel.NONE)
    with running(made):
        yield made


@contextlib.contextmanager
def connected(server: HttpServer, count: int) -> Iterator[list[socket.socket]]:
    address = parse_address(server.address)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection((address.host, address.port), TIMEOUT_S)) for _ in range(count)]


def answer(sock: socket.socket, path: bytes, token: bytes = b"") -> bytes:
    """First line of the response; b"" if the connection was closed."""
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


@pytest.mark.promise("peers-vanish")
def test_whoever_asks_for_nothing_is_hung_up_on_after_his_time(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(server, 1) as (asking,):
        assert answer(asking, b"health") == b"HTTP/1.1 200 OK"
        monkeypatch.setattr(module, "FIRST_REQUEST_S", 0.05)
        with connected(server, 1) as (silent,):
            assert ends(silent)
        assert answer(asking, b"health") == b"HTTP/1.1 200 OK"


@pytest.mark.promise("peers-vanish")
def test_oldest_unauthenticated_connection_is_closed(server: HttpServer) -> None:
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


def test_connections_over_the_limit_are_refused(server: HttpServer) -> None:
    with contextlib.ExitStack() as stack:
        operators = []
        for _ in range(6):
            operators += stack.enter_context(connected(server, 1))
            assert answer(operators[-1], b"mine", b"ours") == b"HTTP/1.1 200 OK"
        with connected(server, 1) as (late,):
            assert ends(late)
        for operator in operators:
            assert answer(operator, b"mine", b"ours") == b"HTTP/1.1 200 OK"


@pytest.mark.promise("peers-vanish")
def test_who_takes_nothing_of_an_answer_is_noticed(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    noticed: list[tuple[float, bool]] = []

    def notice(sock: socket.socket, timeout_s: float, *, limit_unacknowledged: bool) -> None:
        noticed.append((timeout_s, limit_unacknowledged))

    monkeypatch.setattr(module, "enable_keepalive", notice)
    with connected(server, 1) as (asking,):
        assert answer(asking, b"health") == answer(asking, b"health") == b"HTTP/1.1 200 OK"
    assert noticed == [(PEER_TIMEOUT_S, True)]
