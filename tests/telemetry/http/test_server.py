"""telemetry/http/server.py: a server in its own thread, over real sockets, that imports its modules on the first
connection."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from kvstore.protocol.errors import ConfigError, Full
from kvstore.security.identity import Identity, IdentityKind
from kvstore.security.tls.https import HttpsCertificate
from kvstore.security.tls.subjects import MASTER, CertificateSubject
from kvstore.telemetry.http import server as module
from kvstore.telemetry.http.access import AccessLevel, LocalAccess
from kvstore.telemetry.http.server import HttpServer, open_http, run_in_thread
from kvstore.testing.transfer.awaited import PATIENCE_S
from tests.security.tls.certified import HOSTS, Cluster
from tests.telemetry.http.asking import Answer, ask
from tests.telemetry.http.served import fine, running, serving


def test_what_has_to_wait_waits_in_another_thread() -> None:
    async def handler(_request: web.Request) -> web.Response:
        name = await run_in_thread(lambda: threading.current_thread().name)
        return web.Response(text=name)

    with serving(handler) as server:
        assert ask(server.address, "/it").text not in ("http", threading.current_thread().name)


def test_hanging_calls_block_others_only_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 50
    monkeypatch.setattr(module, "_thread_slots", threading.BoundedSemaphore(most))
    end = threading.Event()

    async def test() -> None:
        waiting = [asyncio.create_task(run_in_thread(end.wait)) for _ in range(most - 1)]
        await asyncio.sleep(0)
        assert await run_in_thread(lambda: "well") == "well"
        waiting += [asyncio.create_task(run_in_thread(end.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Full, match="concurrent calls to the daemon"):
            await run_in_thread(lambda: "well")
        waiting.pop(0).cancel()
        with pytest.raises(Full):  # its thread is still there
            await run_in_thread(lambda: "well")
        end.set()
        with contextlib.suppress(Full):
            await asyncio.gather(*waiting)

    asyncio.run(asyncio.wait_for(test(), PATIENCE_S))


def test_what_waits_for_ever_does_not_keep_the_process() -> None:
    program = (
        "import threading, socket\n"
        "from kvstore.telemetry.http.access import AccessLevel\n"
        "from kvstore.telemetry.http.server import HttpServer, run_in_thread\n"
        "entered = threading.Event()\n"
        "def wait():\n"
        "    entered.set()\n"
        "    threading.Event().wait()\n"
        "async def handler(request):\n"
        "    await run_in_thread(wait)\n"
        "server = HttpServer('127.0.0.1:0')\n"
        "server.add('GET', '/it', handler, needs=AccessLevel.NONE)\n"
        "server.start()\n"
        "host, port = server.address.split(':')\n"
        "connection = socket.create_connection((host, int(port)))\n"
        "connection.sendall(b'GET /it HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\n\\r\\n')\n"
        "entered.wait()\n"
        "server.close()\n"
        "print('closed')\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True).stdout == "closed\n"


def test_closing_hangs_up_and_frees_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.05)
    entered = threading.Event()

    async def handler(_request: web.Request) -> web.Response:
        entered.set()
        await asyncio.Event().wait()
        raise AssertionError

    server = HttpServer("127.0.0.1:0")
    server.add("GET", "/it", handler, needs=AccessLevel.READ)
    server.start()
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.sendall(b"GET /it HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert entered.wait(60)
        server.close()
        assert connection.recv(1) == b""
    server.close()
    HttpServer(server.address).close()


def test_what_serves_is_loaded_once_somebody_connects() -> None:
    """By daemons too: it is a third of what they would import."""
    program = (
        "import sys, urllib.request\n"
        "import kvstore.store.daemon, kvstore.master.daemon\n"
        "from kvstore.telemetry.signals import add_signals\n"
        "from kvstore.telemetry.http.server import HttpServer\n"
        "server = HttpServer('127.0.0.1:0')\n"
        "add_signals(server, (), dict, alive=lambda: None, unready=lambda: [])\n"
        "server.start()\n"
        "before = {'aiohttp', 'prometheus_client'} & set(sys.modules)\n"
        "assert not before, before\n"
        "print(urllib.request.urlopen(f'http://{server.address}/readyz', timeout=60).read().decode())\n"
        "server.close()\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True).stdout == "ok\n\n"


def test_routes_may_be_added_when_the_first_connects_and_once() -> None:
    added: list[str] = []

    def add(server: HttpServer) -> None:
        added.append(threading.current_thread().name)
        server.add("GET", "/that", fine, needs=AccessLevel.NONE)

    server = HttpServer("127.0.0.1:0")
    server.later(add)
    with running(server):
        assert not added
        assert [ask(server.address, "/that").status for _ in range(2)] == [200, 200]
    assert added == ["http"]


def test_what_does_not_end_in_time_keeps_nobody_who_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_S", 0.05)
    entered, end = threading.Event(), threading.Event()

    def add(_server: HttpServer) -> None:
        entered.set()
        end.wait(60)

    server = HttpServer("127.0.0.1:0")
    server.later(add)
    server.start()
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 60):
        assert entered.wait(60)
        server.close()
        end.set()


def test_what_is_told_of_its_address_says_what_it_speaks(tmp_path: Path) -> None:
    cert, key = Cluster(tmp_path).file(CertificateSubject(MASTER), hosts=HOSTS)
    for https, scheme in ((None, ""), (HttpsCertificate(str(cert), str(key)), "https://")):
        server = HttpServer("0.0.0.0:0", https=https)
        port = server.address.rpartition(":")[2]
        assert server.advertised() == f"{scheme}0.0.0.0:{port}"
        assert (server.advertised("there"), server.advertised("")) == (f"{scheme}there:{port}", "")
        server.close()


def test_who_asks_for_a_change_is_known_by_identity_and_address() -> None:
    class Alice(LocalAccess):
        def identify(self, _request: web.Request) -> Identity:
            return Identity(IdentityKind.OPERATOR, name="alice")

    server = HttpServer("127.0.0.1:0", access_control=Alice())

    async def who(request: web.Request) -> web.Response:
        return web.Response(text=str(server.actor(request, "http")))

    server.add("GET", "/it", who, needs=AccessLevel.NONE)
    with running(server):
        assert ask(server.address, "/it").text == "operator alice from 127.0.0.1"


@dataclass(frozen=True)
class Settings:
    """Of a daemon."""

    http: str = "127.0.0.1:0"
    http_token_file: str = ""
    http_tls_cert: str = ""
    http_tls_key: str = ""


def answer(server: HttpServer | None, **headers: str) -> Answer:
    """To a question that only an operator may ask."""
    assert server is not None

    async def handler(_request: web.Request) -> web.Response:
        return web.Response(text="yes")

    server.add("GET", "/it", handler, needs=AccessLevel.ADMIN)
    with running(server):
        return ask(server.address, "/it", headers=headers)


def test_with_tokens_who_shows_one_is_let_in_and_nobody_else(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("another\nsecret\n\n")
    assert answer(open_http(Settings(http_token_file=str(file)))).status == 401
    for wrong in ("Bearer wrong", "Bearer ", "Basic secret"):
        assert answer(open_http(Settings(http_token_file=str(file))), Authorization=wrong).status == 401
    assert answer(open_http(Settings(http_token_file=str(file))), Authorization="Bearer secret").status == 200


def test_a_file_that_is_no_good_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        open_http(Settings(http_token_file=str(tmp_path / "none")))
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(ConfigError, match="has no token"):
        open_http(Settings(http_token_file=str(tmp_path / "empty")))


def test_with_a_certificate_it_speaks_https_and_says_so(tmp_path: Path) -> None:
    cert, key = Cluster(tmp_path).file(CertificateSubject(MASTER), hosts=HOSTS)
    server = open_http(Settings(http_tls_cert=str(cert), http_tls_key=str(key)))
    assert server is not None
    try:
        assert server.advertised() == f"https://{server.address}" == server.advertised("elsewhere")
    finally:
        server.close()
    with pytest.raises(ConfigError, match="go together"):
        open_http(Settings(http_tls_cert=str(cert)))
