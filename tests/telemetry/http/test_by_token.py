"""Promises of by_token.py, by HTTP."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web

from kvstore.security.guard import Guard
from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.by_token import by_token
from kvstore.telemetry.http.server import HttpServer

TIMEOUT_S = 60.0
TOKENS = '[tenants]\nred = "tenants"\n[admins]\nboss = "operators"\n[nodes]\n"*" = "nodes"\n'


@pytest.fixture
def address(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    file = tmp_path / "tokens.toml"
    file.write_text(TOKENS)
    server = HttpServer("127.0.0.1:0", authorize=by_token(Guard(str(file) if request.param else "")))

    async def told(asked: web.Request) -> web.Response:
        return web.Response(text=server.access(asked).name)

    server.add("GET", "/", told, needs=Access.NONE)
    server.start()
    yield f"http://{server.address}/"
    server.close()


def access(address: str, authorization: str = "") -> str:
    request = urllib.request.Request(address, headers={"Authorization": authorization} if authorization else {})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode())


@pytest.mark.parametrize("address", [True], indirect=True)
def test_an_operators_token_may_do_all_and_nobody_else_anything_on_this_host_too(address: str) -> None:
    assert access(address, "Bearer operators") == access(address, "bearer  operators ") == "ADMIN"
    for other in ("", "Bearer wrong", "Bearer tenants", "Bearer nodes", "Bearer", "Basic operators"):
        assert access(address, other) == "NONE", other


@pytest.mark.parametrize("address", [False], indirect=True)
def test_without_credentials_this_host_may_do_all(address: str) -> None:
    assert access(address) == "ADMIN"
