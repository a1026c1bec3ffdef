"""Promises of opening.py: by default a free port of this host, for this host; with tokens for who shows one."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from kvstore.protocol.errors import ConfigError
from kvstore.rpc.address import Address, parse_address
from kvstore.security.tls.subjects import MASTER, Subject
from kvstore.telemetry.http.access import Access
from kvstore.telemetry.http.opening import HTTP_DEFAULT, open_http
from kvstore.telemetry.http.server import HttpServer
from tests.security.tls.certified import HOSTS, Cluster
from tests.telemetry.http.asking import Answer, ask


@dataclass(frozen=True)
class Settings:
    """Of a daemon."""

    http: str = HTTP_DEFAULT
    http_token_file: str = ""
    http_tls_cert: str = ""
    http_tls_key: str = ""


def answer(server: HttpServer | None, **headers: str) -> Answer:
    """To a question that only an operator may ask."""
    assert server is not None

    async def handler(_request: web.Request) -> web.Response:
        return web.Response(text="yes")

    server.add("GET", "/it", handler, needs=Access.ADMIN)
    server.start()
    try:
        return ask(server.address, "/it", headers=headers)
    finally:
        server.close()


def test_no_address_is_no_server() -> None:
    assert open_http(Settings(http="")) is None
    assert parse_address(HTTP_DEFAULT) == Address("127.0.0.1", 0)


def test_without_tokens_this_host_is_let_in() -> None:
    assert answer(open_http(Settings())).status == 200


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
    cert, key = Cluster(tmp_path).file(Subject(MASTER), hosts=HOSTS)
    server = open_http(Settings(http_tls_cert=str(cert), http_tls_key=str(key)))
    assert server is not None
    try:
        assert server.told() == f"https://{server.address}" == server.told("elsewhere")
    finally:
        server.close()
    with pytest.raises(ConfigError, match="go together"):
        open_http(Settings(http_tls_cert=str(cert)))
